"""`benchmarks/bench_kv_policies.py`, on few programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from background import CommandResult

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_kv_policies.py"
SETTINGS = ("--programs", "20", "--seeds", "0", "--only", "tools, KV 65,536, load 3", "--out", "kv.json")


@pytest.mark.background(str(BENCHMARK), *SETTINGS)
def test_each_combination_is_compared_with_stock_fcfs(command_result: CommandResult) -> None:
    """A small setting gives a row for each combination, in which stock FCFS is 1 and host memory saves computation."""
    command_result.printed()
    out = command_result.folder / "kv.json"
    rows = {(row["policy"], row["kv_policy"]): row for row in json.loads(out.read_text())["rows"][:24]}
    assert len(rows) == 3 * 8
    stock = rows["fcfs", "stock"]
    assert stock["completion"] == [1.0]
    assert rows["fcfs", "next-use+host"]["again_percent"] < stock["again_percent"]
    assert out.with_suffix(".svg").exists()
