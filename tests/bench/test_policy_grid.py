"""`benchmarks/bench_policy_grid.py`, on few programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from background import CommandResult

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_policy_grid.py"
SETTINGS = (
    "--programs",
    "40",
    "--seeds",
    "0",
    "--only",
    "chat, KV 65,536, load 2",
    "--policies",
    "learned+gate,srpt+gate",
)


def run(out: Path, *options: str) -> str:
    command = [sys.executable, str(BENCHMARK), *SETTINGS, *options, "--out", str(out)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.background(str(BENCHMARK), *SETTINGS, "--cells", "--out", "grid.jsonl")
def test_the_grid_is_played_once_and_continued(command_result: CommandResult) -> None:
    """A small grid prints its summary and writes figures and a plot. A second run plays only what is missing, and a
    line that was cut off is played again."""
    first, out = command_result.printed(), command_result.folder / "grid.jsonl"
    assert "learned+gate" in first
    summary = json.loads(out.with_suffix(".json").read_text())
    assert [row["policy"] for row in summary["summary"]] == ["learned+gate", "srpt+gate"]
    assert 0 < summary["summary"][0]["to_best"] <= summary["summary"][0]["worst"]
    assert out.with_suffix(".svg").exists()
    lines = out.read_text().splitlines()
    assert len(lines) == 1 + 5 + 2  # the rate, the baselines and the two policies
    out.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])
    assert run(out, "--cells") == first
    assert "drifting" in run(out, "--policies", "learned+gate", "--names", "shuffled,unique,drifting,removed")
