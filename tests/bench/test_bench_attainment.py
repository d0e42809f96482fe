"""The share of programs in time on the engine, by hand."""

from __future__ import annotations

from dataclasses import replace

from bench_data import measurement, outcome

from weft.bench.results.measures import InTime, Spread, in_time
from weft.bench.results.records import Round


def test_programs_within_one_and_a_half_times_their_time_alone_are_in_time() -> None:
    """Alone each takes 10 steps. 15 steps are in time and 16 are not. Two rounds have 1 of 2 and 2 of 2 in time."""
    rounds = [
        Round("1", number, 100, 0, {"base": measurement(outcome(15, 1, 1), outcome(last, 1, 1))})
        for number, last in enumerate((16, 10))
    ]
    assert in_time(rounds, "1", "base") == {"all": InTime(4, 0.75, Spread(0.75, 0.5, 1.0))}


def test_names_and_tenants_have_shares_of_their_own() -> None:
    """A tenant that has no program in a round does not count there."""
    slow = outcome(40, 1, 1)._replace(kind="heavy", tenant="a")
    fast = outcome(10, 1, 1)._replace(kind="light", tenant="b")
    rounds = [
        Round("1", 0, 100, 0, {"base": measurement(slow, fast)}),
        Round("1", 1, 100, 0, {"base": measurement(slow)}),
    ]
    found = in_time([*rounds, replace(rounds[1], load="2")], "1", "base")
    assert {group: (each.programs, each.share) for group, each in found.items()} == {
        "all": (3, 1 / 3),
        "heavy": (2, 0.0),
        "light": (1, 1.0),
        "tenant a": (2, 0.0),
        "tenant b": (1, 1.0),
    }
    assert found["light"].rounds == (1.0, 1.0, 1.0)
