"""Rates as multiples of what an engine can serve, in `weft trace` and `weft sim`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.core.sim import SimSettings, capacity
from weft.core.sim.study.load import with_load
from weft.core.trace.format import TraceCall, TraceProgram, read
from weft.core.trace.workloads import poisson

WeftCommand = Callable[..., tuple[int, str, str]]


def test_a_load_is_a_multiple_of_the_measured_capacity(weft: WeftCommand, tmp_path: Path) -> None:
    """Twice the load brings the same programs twice as fast, at the rate that is that part of the capacity. Stretching
    the arrivals of another trace to this load gives the same rate again."""
    traces = {load: tmp_path / f"{load}.jsonl" for load in (0.5, 1.0)}
    for load, path in traces.items():
        assert weft("trace", "tools", "--out", path, "--programs", 200, "--batch-size", 8, "--load", load)[0] == 0
    slow, fast = (read(path) for path in traces.values())
    assert [each.arrival_s for each in slow] == pytest.approx([2 * each.arrival_s for each in fast])
    engine = SimSettings(batch_size=8)
    most = capacity(slow, engine, tools=False)
    arrivals = poisson(random.Random("arrivals 0"), most)
    assert [each.arrival_s for each in fast] == pytest.approx([next(arrivals) for _ in fast])
    stretched = with_load(fast, 0.5, engine)
    assert len(stretched) / stretched[-1].arrival_s == pytest.approx(0.5 * most, rel=0.01)


def test_the_simulator_stretches_arrivals_to_a_load(weft: WeftCommand, tmp_path: Path) -> None:
    """Two programs of four units arrive a unit apart. One slot serves one in four units, so at half of its capacity the
    second arrives eight units after the first, and does not wait."""
    trace = tmp_path / "trace.jsonl"
    calls = [{"id": "a", "output_tokens": 4}]
    rows = [{"program": name, "arrival_s": at, "calls": calls} for name, at in (("A", 3.0), ("B", 4.0))]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = weft("sim", trace, "--unit-steps", "--json", "--batch-size", 1, "--load", 0.5)
    assert code == 0
    found = json.loads(out)
    assert [row["arrival"] for row in found["programs"].values()] == [0, 8]
    assert found["total_wait"] == 0


def test_programs_that_all_arrive_at_once_get_arrivals() -> None:
    """Recordings without times get a Poisson process of the load's rate, another one for another seed."""
    programs = [TraceProgram(f"p{number}", (TraceCall("a", (), 4),), arrival_s=7.0) for number in range(400)]
    engine = SimSettings(batch_size=8)
    found = with_load(programs, 0.5, engine)
    arrivals_s = [each.arrival_s for each in found]
    assert arrivals_s == sorted(set(arrivals_s))
    assert arrivals_s[0] == 0
    assert 399 / arrivals_s[-1] == pytest.approx(0.5 * capacity(programs, engine, tools=False))
    assert found == with_load(programs, 0.5, engine, seed=0)
    assert found != with_load(programs, 0.5, engine, seed=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--load", 0), "such as 0.8, not 0.0"),
        (("--load", "nan"), "such as 0.8, not nan"),
        (("--load", -1), "such as 0.8, not -1.0"),
        (("--load", 0.8, "--rate", 2), "give one of them"),
        (("--load", 0.8, "--batch-size", 0), "batch_size must be at least 1"),
        (("--batch-size", 8), "give --load too"),
    ],
)
def test_a_wrong_load(weft: WeftCommand, tmp_path: Path, options: tuple[object, ...], message: str) -> None:
    """A wrong load gives one line on standard error, and no trace."""
    code, out, err = weft("trace", "chat", "--out", tmp_path / "out.jsonl", *options)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()
