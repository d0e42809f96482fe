"""`weft bench` on real vLLM, by its command: what it writes, that it repeats, and that it goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from background import Done, script

OPTIONS = (
    "chat --programs 10 --scale 0.03 --rates 3 --closed --rounds 2 --seed 5 --baselines stock-fcfs,atlas,stock-again "
    "--batch-size 2 --kv-tokens 600"
)
LOADS = ("3", "closed")

# A session, and one that was stopped before its last round.
SESSIONS = script(f"""
import shutil, subprocess, sys
from pathlib import Path

bench = [sys.executable, "-m", "weft", "bench", *"{OPTIONS}".split(), "--out"]
subprocess.run([*bench, "results"], check=True)
shutil.copytree("results", "again")
journal = Path("again/rounds.jsonl")
journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:-1]))
sys.exit(subprocess.run([*bench, "again"]).returncode)
""")

pytestmark = [pytest.mark.engine, pytest.mark.background.with_args(SESSIONS)]


def bench(out: Path, options: str = OPTIONS) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, since vLLM is to run its engines there."""
    command = [sys.executable, "-m", "weft", "bench", *options.split(), "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


@pytest.fixture
def out(done: Done) -> Path:
    """The folder of a session that has ended."""
    assert [line for line in done.printed().splitlines() if "report" in line] == [
        "results/report.md",
        "again/report.md",
    ]
    return done.folder / "results"


def results(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


def steps(run: dict[str, Any]) -> tuple[Any, ...]:
    """What of a run must be the same every time: all that is counted in steps and tokens."""
    counts = {key: value for key, value in run["counts"].items() if not key.endswith("_s")}
    programs = [{key: value for key, value in each.items() if key != "seconds"} for each in run["programs"]]
    return run["steps"], counts, programs


def test_what_it_writes(out: Path) -> None:
    """Machine, versions, settings and every program of every run; a page with its pictures."""
    found = results(out)
    assert found["machine"]["torch"]
    assert (found["settings"]["seed"], found["settings"]["kv_tokens"]) == (5, 576)
    assert [(each["load"], each["number"]) for each in found["rounds"]] == [(n, k) for n in LOADS for k in (0, 1)]
    for each in found["rounds"]:
        assert list(each["runs"]) == ["stock-fcfs", "atlas", "stock-again"]
        for run in each["runs"].values():
            assert {program["program"] for program in run["programs"]} == {f"p{n}" for n in range(10)}
            assert all(program["steps"] >= program["unloaded_steps"] > 0 for program in run["programs"])
            assert run["counts"]["computed_tokens"] >= sum(program["tokens"] for program in run["programs"])
            assert 0 < run["counts"]["cached_tokens"] < run["counts"]["prompt_tokens"]
    page = (out / "report.md").read_text()
    for picture in ("latency", "tail", "distribution", "makespan", "simulated"):
        assert f"({picture}.svg)" in page
        assert (out / f"{picture}.svg").read_text().startswith("<?xml")
    assert "## A closed batch" in page
    assert page.count("| srpt, simulated |") == len(LOADS)


def test_the_rivals_play_the_same_programs(out: Path) -> None:
    """The same tokens for all; the same engine twice takes the same steps; ATLAS takes others, and preempts."""
    first = results(out)["rounds"][1]["runs"]
    assert first["atlas"]["counts"]["preemptions"] > first["stock-fcfs"]["counts"]["preemptions"] == 0
    assert steps(first["stock-fcfs"]) == steps(first["stock-again"])
    assert steps(first["stock-fcfs"])[2] != steps(first["atlas"])[2]
    tokens = [{each["program"]: each["tokens"] for each in run["programs"]} for run in first.values()]
    assert tokens[0] == tokens[1] == tokens[2]


def test_the_simulator_agrees(out: Path) -> None:
    """On steps, of every baseline and load; blocks and the order inside one step are what it does not know."""
    for each in results(out)["simulated"]:
        if each["baseline"] != "srpt":
            assert abs(each["steps_off"]) < 0.15, each


def test_it_goes_on_where_it_was_stopped(out: Path) -> None:
    """What is there is not played again, and what was lost comes out the same to the digit, on engines that have not
    played what came before."""
    again = out.with_name("again")
    lines, lines_again = ((each / "rounds.jsonl").read_text().splitlines() for each in (out, again))
    assert lines_again[:-1] == lines[:-1]
    before, after = (
        [steps(run) for each in results(e)["rounds"] for run in each["runs"].values()] for e in (out, again)
    )
    assert after == before


def test_other_settings_are_refused(out: Path) -> None:
    """With what differs and what to do, and without starting an engine."""
    done = bench(out, OPTIONS.replace("--seed 5", "--seed 6"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "seed: 5 there, 6 now" in done.stderr
    assert "Choose another --out" in done.stderr
    assert "Traceback" not in done.stderr
