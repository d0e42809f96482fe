"""Every policy gives the results that it gave when the table was last written.

The table has all policies with and without the gate, under all KV policies, with and without host memory. A change that
is to keep all results, such as a quicker data structure, leaves it as it is. After a change of a rule, and for a new
policy or KV policy, write it again:

    .venv/bin/python tests/core/sim/test_digests.py
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from weft.core.kv_cache.policies import KV_POLICIES, KvPolicyConfig
from weft.core.policies import SIMULATED_POLICIES, PolicyConfig
from weft.core.routing import BalancerConfig, StealingConfig
from weft.core.sim import SimResult, SimSettings, StepTime, simulate
from weft.core.trace.format import TraceCall, TraceProgram
from weft.core.trace.workloads import generate, poisson

TABLE: Final = Path(__file__).with_name("digests.txt")
REMEDY: Final = "write the table again, which takes minutes: .venv/bin/python tests/core/sim/test_digests.py"
# A KV cache for few of the programs, and host memory for some more, so that every rule has something to do.
BASE: Final = SimSettings(batch_size=4, kv_tokens=8192, chunk_tokens=1024, step_time=StepTime(copy_token_s=2e-5))
HOST_TOKENS: Final = 4096
MOST_CALLS: Final = 9
COLUMNS: Final = ("none", *KV_POLICIES, *(f"{name}+host" for name in KV_POLICIES))
ENGINES: Final[dict[str, dict[str, Any]]] = {
    "blocks": {"block_tokens": 16},
    "swap": {"preemption": "swap"},
    "closed": {"concurrency": 6},
    "oracle": {"knows_pauses": True},
    "replicas": {"replicas": 3, "balancer": BalancerConfig("adaptive_locality"), "stealing": StealingConfig()},
}


def programs() -> list[TraceProgram]:
    """The first calls of programs, as far as the KV cache holds two of them; half of the programs have no name."""
    arrivals = poisson(random.Random("arrivals"), 4.0)
    made = [*generate("tools", 5, arrivals, random.Random(1)), *generate("mixed", 3, arrivals, random.Random(2))]
    made = [
        replace(each, program=f"p{number}", name=each.name if number % 2 else None) for number, each in enumerate(made)
    ]
    return [replace(each, calls=calls) for each in made if (calls := tuple(_first_calls(each)))]


def _first_calls(program: TraceProgram) -> Iterator[TraceCall]:
    for call in program.calls[:MOST_CALLS]:
        if call.prompt_tokens + call.output_tokens > BASE.kv_tokens / 2:
            return
        yield call


def settings_of(policy: str, column: str) -> SimSettings:
    """The engine of a row and a column of the table; a row is a policy, with `+gate` behind the gate."""
    name, _, gate = policy.partition("+")
    kv_policy, _, host = column.partition("+")
    quanta: dict[str, Any] = {"quanta_s": (2.0,)} if name == "rr" else {}
    return replace(
        BASE,
        policy=PolicyConfig(name, gate=bool(gate), **quanta),
        kv_policy=None if kv_policy == "none" else KvPolicyConfig(kv_policy),
        host_kv_tokens=HOST_TOKENS if host else 0,
    )


def digest(result: SimResult) -> str:
    """Eight hexadecimal digits of all times, to a nanosecond, and of all counts."""
    times = [(name, *(round(value, 9) for value in row)) for name, row in result.programs.items()]
    return hashlib.sha256(repr((times, result.counts)).encode()).hexdigest()[:8]


def row(policy: str) -> dict[str, str]:
    """The digests of a policy by column."""
    made = programs()
    found = {column: digest(simulate(made, settings_of(policy, column))) for column in COLUMNS}
    base = settings_of(policy, "next-use+host")
    return found | {name: digest(simulate(made, replace(base, **engine))) for name, engine in ENGINES.items()}


def read() -> dict[str, dict[str, str]]:
    """The table: the digests by row and column."""
    heading, *lines = TABLE.read_text(encoding="utf-8").splitlines()
    return {line.split()[0]: dict(zip(heading.split()[1:], line.split()[1:], strict=True)) for line in lines}


ROWS: Final = tuple(name + gate for name in SIMULATED_POLICIES for gate in ("", "+gate"))


@pytest.mark.parametrize("policy", ROWS)
def test_results_are_the_same_to_the_digit(policy: str) -> None:
    """All times and counts of a policy, under every KV policy, are those of the table. So nothing is random either."""
    expected = read().get(policy)
    assert expected is not None, f"The table lacks the row {policy}; {REMEDY}"
    found = row(policy)
    new = found.keys() - expected.keys()
    assert not new, f"The table lacks the columns {', '.join(sorted(new))}; {REMEDY}"
    changed = {column for column, value in found.items() if value != expected[column]}
    assert not changed, (
        f"Programs under {policy} are served differently with {', '.join(sorted(changed))}. "
        f"If you have changed a rule on purpose, {REMEDY}"
    )


def test_the_table_has_no_other_rows() -> None:
    """A policy that is gone leaves the table, too, and most columns differ from each other."""
    table = read()
    assert tuple(table) == ROWS
    assert len(set(table["auto+gate"].values())) > len(COLUMNS) // 2


if __name__ == "__main__":
    rows = {policy: row(policy) for policy in ROWS}
    columns = list(rows[ROWS[0]])
    lines = [
        f"{'policy':22}" + " ".join(f"{column:16}" for column in columns),
        *(f"{name:22}" + " ".join(f"{found[column]:16}" for column in columns) for name, found in rows.items()),
    ]
    TABLE.write_text("".join(f"{line.rstrip()}\n" for line in lines), encoding="utf-8")
