"""The switches of the ablations: each turns off what its name says, and nothing else."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from host_programs import call, end, harness, prompt_of, start_tool

from weft.core.sim import SimSettings

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from bench_kv_host import fetch_nothing
from bench_kv_policies import Setting, engine
from bench_saga_sim import ALL, MECHANISMS, VARIANTS, cluster

BASE = SimSettings(batch_size=16, kv_tokens=65_536, replicas=4)
# By mechanism, the settings that it consists of. What spills is a part of the KV policy, as in SAGA's two rules.
PARTS: dict[str, set[str]] = {
    "WA-LRU": {"kv_policy"},
    "TTL": {"kv_policy"},
    "host memory": {"host_kv_tokens", "fetches_ahead"},  # nothing to fetch ahead is left
    "fetch ahead": {"fetches_ahead"},
    "affinity": {"balancer"},
    "stealing": {"stealing"},
    "fair shares": {"policy"},
}


def changed(one: Any, other: Any) -> set[str]:
    """The names of the settings in which two engines differ."""
    return {each.name for each in fields(one) if getattr(one, each.name) != getattr(other, each.name)}


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_without_a_mechanism_only_its_own_settings_change(mechanism: str) -> None:
    """So the row "without fetch ahead" still has host memory, from which calls load what they need."""
    without = cluster(VARIANTS[f"without {mechanism}"], BASE)
    assert changed(cluster(ALL, BASE), without) == PARTS[mechanism]
    assert (without.host_kv_tokens > 0) == (mechanism != "host memory")


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.startswith("only ")])
def test_a_mechanism_alone_changes_only_its_own_settings(variant: str) -> None:
    """Compared with vLLM. Host memory needs a KV policy that spills."""
    names = variant.removeprefix("only ").split(" and ")
    found = changed(cluster(frozenset(), BASE), cluster(VARIANTS[variant], BASE))
    assert found == set.union(*(PARTS[name] for name in names if name != "host memory"), set()) | (
        {"host_kv_tokens", "kv_policy"} if "host memory" in names else set()
    )


@pytest.mark.parametrize(
    ("more", "parts"),
    [("+host", {"host_kv_tokens"}), ("+host+late", {"host_kv_tokens", "fetches_ahead"}), ("+oracle", {"knows_pauses"})],
)
def test_a_suffix_of_a_kv_policy_changes_only_its_own_settings(more: str, parts: set[str]) -> None:
    """ "+late" keeps host memory, and turns off only what is fetched ahead."""
    setting = Setting("tools", 65_536, 3.0)
    assert changed(engine(setting, "fcfs", "next-use"), engine(setting, "fcfs", f"next-use{more}")) == parts


@pytest.mark.engine
@pytest.mark.parametrize("fetches", [True, False])
def test_host_memory_without_fetching_ahead_loads_when_the_call_runs(tmp_path: Path, fetches: bool) -> None:
    """`bench_kv_host.py` has a row for it. Its switch once set an attribute that nothing called any more."""
    h = harness(tmp_path)
    if not fetches:
        fetch_nothing(h.scheduler._kv_order._fetches)
    call(h, "a1", prompt_of(1, 64), "a")
    start_tool(h, "a", "search")
    call(h, "b1", prompt_of(2, 170), "b")
    end(h, "b")
    h.settle()
    assert call(h, "a2", [*prompt_of(1, 64), 7, 8, 9], "a") == 64
    counts = h.scheduler._swap.counts
    assert (counts.fetched_tokens > 0, counts.loaded_tokens > 0) == (fetches, not fetches)
