"""`weft advise`: a table, sentences, a picture and JSON from traces and logs, and one-line errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from weft.commands.simulate.advise import what_to_do
from weft.core.sim.study.advice import GATE, WEFT, WEFT_HOST, Way

WeftCommand = Callable[..., tuple[int, str, str]]


@pytest.fixture
def trace(weft: WeftCommand, tmp_path: Path) -> Path:
    """Twelve programs with tools."""
    path = tmp_path / "trace.jsonl"
    assert weft("trace", "tools", "--programs", 12, "--out", path)[0] == 0
    return path


SMALL = ("--kv-tokens", 32_768, "--batch-size", 8, "--host-kv-gib", 8)


def test_advice_for_an_engine_under_load(weft: WeftCommand, trace: Path) -> None:
    """The table has each way to serve, and the sentences say what to do and where the step times are from."""
    code, out, err = weft("advise", trace, "--load", 1.1, *SMALL)
    assert (code, err) == (0, "")
    for name in ("stock vLLM", "a plain gate", "Weft", "stock vLLM + 8 GiB host", "Weft + 8 GiB host"):
        assert name in out
    lines = out.splitlines()
    assert any(
        line.startswith("With this traffic on an engine of this size, Weft's default with 8 GiB") for line in lines
    )
    assert any(line.startswith("Without host memory, Weft's default would change the mean by ") for line in lines)
    assert sum(line.startswith("Advice: ") for line in lines) == 1
    assert lines[-1].startswith("All of this is simulated. The step times are made up: they resemble")


def test_no_gain_is_called_so(weft: WeftCommand, tmp_path: Path) -> None:
    """Programs that never meet on the engine gain nothing from any way to serve."""
    path = tmp_path / "trace.jsonl"
    rows = [
        {"program": f"p{n}", "arrival_s": 1000.0 * n, "calls": [{"id": "a", "prompt_tokens": 100, "output_tokens": 9}]}
        for n in range(5)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, err = weft("advise", path, *SMALL)
    assert (code, err) == (0, "")
    assert "Weft's default with 8 GiB of host memory would bring no gain" in out
    assert "Advice: stay with vLLM as it is" in out


def test_advice_as_json_and_as_a_picture(weft: WeftCommand, trace: Path, tmp_path: Path) -> None:
    """JSON has the figures of the table. The picture has a bar for each way but stock vLLM."""
    picture = tmp_path / "out.svg"
    code, out, err = weft("advise", trace, "--load", 1.1, *SMALL, "--json", "--plot", picture, "--seed", 3)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["programs"], len(found["ways"])) == (12, 5)
    assert found["ways"][0]["mean_change"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    for each in found["ways"]:
        assert each["mean_change"]["low"] <= each["mean_change"]["value"] <= each["mean_change"]["high"]
    assert found["best"] in [each["way"]["name"] for each in found["ways"]]
    ET.parse(picture)  # noqa: S314
    names = re.findall("<!-- (.*) -->", picture.read_text())  # matplotlib draws letters, and says in comments which
    assert [name for name in names if "host" in name or name in {"Weft", "a plain gate"}] == [
        "Weft + 8 GiB host",
        "stock vLLM + 8 GiB host",
        "Weft",
        "a plain gate",
    ]
    again = json.loads(weft("advise", trace, "--load", 1.1, *SMALL, "--json", "--seed", 3)[1])
    assert again == found


@pytest.mark.parametrize(
    ("way", "command"),
    [
        (Way(WEFT), "weft serve MODEL --host-kv-gib 0"),
        (Way(WEFT_HOST, 8), "weft serve MODEL --host-kv-gib 8"),
        (Way(GATE), "weft serve MODEL --policy priority --gate --host-kv-gib 0"),
    ],
)
def test_the_command_serves_as_it_was_simulated(way: Way, command: str) -> None:
    """`weft serve` takes host memory by itself, so a way without it says so."""
    assert what_to_do(way) == command


def test_advice_from_logs_of_another_tool(weft: WeftCommand, tmp_path: Path) -> None:
    """Rows of Mooncake are read as `weft trace import` reads them. What the KV cache cannot hold is left out, aloud."""
    log = tmp_path / "log.jsonl"
    rows = [{"timestamp": 100 * n, "input_length": 600, "output_length": 20, "hash_ids": [0, 10 + n]} for n in range(6)]
    rows.append({"timestamp": 900, "input_length": 99_999, "output_length": 5, "hash_ids": list(range(100, 296))})
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, err = weft("advise", log, *SMALL)
    assert (code, err) == (0, "left out by the caps: 1 program\n")
    assert out.splitlines()[0].strip() == "6 programs, 6 calls"


def test_advice_with_a_profile(weft: WeftCommand, trace: Path, tmp_path: Path) -> None:
    """The last sentence says where the step times are from."""
    from weft.core.sim import StepTime
    from weft.core.sim.study.engine_profile import EngineProfile

    profile = EngineProfile("measured on the moon", StepTime(1e-3, 1e-5, 1e-4, 1e-8, 1e-6), 32_768, 1 << 17, 8)
    profile.write(tmp_path / "engine.json")
    code, out, err = weft("advise", trace, "--engine", tmp_path / "engine.json", "--host-kv-gib", 8)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "All of this is simulated. The step times are measured on the moon."


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--load", 1, "--concurrency", 2), "--load and --concurrency both say when programs arrive"),
        (("--plot", "out.png"), "out.png cannot be drawn: name an .svg file."),
        (("--engine", "none"), "none is no profile of an engine"),
    ],
)
def test_wrong_options_are_one_line(weft: WeftCommand, trace: Path, options: tuple[object, ...], message: str) -> None:
    """Nothing is simulated, and nothing is drawn."""
    code, out, err = weft("advise", trace, *options)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {message}")


def test_files_that_are_no_logs(weft: WeftCommand, tmp_path: Path) -> None:
    """The error is that of `weft trace import`."""
    (tmp_path / "log.txt").write_text("hello")
    code, _, err = weft("advise", tmp_path / "log.txt")
    assert code == 1
    assert "is in no known format" in err
    assert "cannot be read" in weft("advise", tmp_path / "none.jsonl")[2]
