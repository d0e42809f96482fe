"""`weft bench` on real vLLM, by its command: the files that it writes, that results repeat, and that it resumes.

`tests/support/bench_commands.py` runs one complete session, and one whose journal has lost its last round.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from background import CommandResult
from bench_commands import bench_commands, printed

LOADS = ("3", "closed")

pytestmark = [pytest.mark.engine, pytest.mark.slow, bench_commands]


@pytest.fixture
def out(command_result: CommandResult) -> Path:
    """The folder of the complete session."""
    for name, folder in (("bench", "results"), ("again", "again")):
        lines = printed(command_result, name).splitlines()
        assert [line for line in lines if "report" in line] == [f"{folder}/report.md"]
    return command_result.folder / "results"


def results(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


def repeatable(measurement: dict[str, Any]) -> tuple[Any, ...]:
    """The part of a measurement that must be the same each time: everything that is counted in steps and tokens."""
    counts = {key: value for key, value in measurement["counts"].items() if not key.endswith("_s")}
    programs = [{key: value for key, value in each.items() if key != "seconds"} for each in measurement["programs"]]
    return measurement["steps"], counts, programs


def test_the_files_of_a_session(out: Path) -> None:
    """The results have the machine, versions, settings and every program of every measurement; the report has plots."""
    found = results(out)
    assert found["machine"]["torch"]
    assert (found["settings"]["seed"], found["settings"]["kv_tokens"]) == (5, 576)
    assert [(each["load"], each["number"]) for each in found["rounds"]] == [(n, k) for n in LOADS for k in (0, 1)]
    for each in found["rounds"]:
        assert list(each["measurements"]) == ["stock-fcfs", "atlas", "stock-again", "atlas+next-use", "stock-plain"]
        for name, measurement in each["measurements"].items():
            assert {program["program"] for program in measurement["programs"]} == {f"p{n}" for n in range(10)}
            assert all(program["steps"] >= program["unloaded_steps"] > 0 for program in measurement["programs"])
            counts = measurement["counts"]
            assert counts["computed_tokens"] >= sum(program["tokens"] for program in measurement["programs"])
            assert 0 <= counts["cached_tokens"] < counts["prompt_tokens"]
            assert (counts["cached_tokens"] == 0) == (name == "stock-plain")
    page = (out / "report.md").read_text()
    for plot in ("latency", "tail", "distribution", "breakdown", "makespan", "simulated"):
        assert f"({plot}.svg)" in page
        assert (out / f"{plot}.svg").read_text().startswith("<?xml")
    assert "## A closed batch" in page
    assert page.count("| time of a call in the engine |") == page.count("| within 1.5 times the time alone |") == 2
    assert list(found["in_time"]["3"]) == list(found["rounds"][0]["measurements"])
    assert page.count("| srpt, simulated |") == len(LOADS)


def test_the_baselines_serve_the_same_programs(out: Path) -> None:
    """All baselines give the same tokens. Two engines of one baseline take the same steps. ATLAS takes other steps, and
    preempts."""
    first = results(out)["rounds"][1]["measurements"]
    assert first["atlas"]["counts"]["preemptions"] > first["stock-fcfs"]["counts"]["preemptions"] == 0
    assert repeatable(first["stock-fcfs"]) == repeatable(first["stock-again"])
    assert repeatable(first["stock-fcfs"])[2] != repeatable(first["atlas"])[2]
    tokens = [{each["program"]: each["tokens"] for each in found["programs"]} for found in first.values()]
    assert all(each == tokens[0] for each in tokens)


def test_tokens_that_a_program_computes_again_are_counted(out: Path) -> None:
    """What an earlier call of the same program had computed counts, whatever the scheduler. A KV policy that knows when
    contexts are used next computes fewer of them again."""
    counts = {}
    for each in results(out)["rounds"]:
        for name, measurement in each["measurements"].items():
            found = counts.setdefault(name, {"recomputed_tokens": 0, "computed_tokens": 0})
            for key in found:
                found[key] += measurement["counts"][key]
    again = {name: found["recomputed_tokens"] for name, found in counts.items()}
    assert again["stock-fcfs"] > 0
    assert again["atlas+next-use"] < again["atlas"] < counts["atlas"]["computed_tokens"]


def test_the_simulator_agrees(out: Path) -> None:
    """Its steps are close to those of every baseline and load, although it knows neither blocks nor the order inside a
    step."""
    for each in results(out)["simulated"]:
        if each["baseline"] != "srpt":
            assert abs(each["steps_error"]) < 0.15, each


def test_a_session_resumes(out: Path) -> None:
    """Finished rounds are not replayed again. A lost round has exactly the same result, on engines that have not
    replayed the rounds before it."""
    again = out.with_name("again")
    lines, lines_again = ((each / "rounds.jsonl").read_text().splitlines() for each in (out, again))
    assert lines_again[:-1] == lines[:-1]
    before, after = (
        [repeatable(found) for each in results(folder)["rounds"] for found in each["measurements"].values()]
        for folder in (out, again)
    )
    assert after == before


def test_other_settings_are_refused(out: Path) -> None:
    """The error shows the difference and what to do. No engine is started."""
    code, error = json.loads(out.with_name("refused.json").read_text())
    assert (code, out.with_name("refused.txt").read_text()) == (1, "")
    assert "seed: 5 there, 6 now" in error
    assert "Choose another --out" in error
    assert "Traceback" not in error
