"""SLO attainment on the engine: which share of the programs ends within 1.5 times the time that it takes alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from weft.bench.measures import Spread
from weft.bench.records import Outcome, Round

SLO: Final = 1.5  # times the steps that a program takes alone, its tools included (SAGA §9.1)
ALL: Final = "all"


class InTime(NamedTuple):
    """The programs of a group that are in time."""

    programs: int  # over all rounds
    share: float  # of them
    rounds: Spread  # the shares of the rounds that have programs of the group


def in_time(rounds: Sequence[Round], load: str, baseline: str) -> dict[str, InTime]:
    """The programs in time under one baseline, over the rounds of one load.

    Returns:
        By group: all programs; then those of each name and of each tenant, where there are several.
    """
    found: dict[str, list[list[bool]]] = {}
    for each in rounds:
        if each.load == load:
            groups: dict[str, list[bool]] = {}
            for program in each.measurements[baseline].programs:
                for group in _groups(program):
                    groups.setdefault(group, []).append(program.steps <= SLO * program.unloaded_steps)
            for group, programs in groups.items():
                found.setdefault(group, []).append(programs)
    return {group: _of(shares) for group, shares in sorted(found.items(), key=_order) if _differs(group, found)}


def _groups(program: Outcome) -> list[str]:
    groups = [ALL]
    if program.kind:
        groups.append(program.kind)
    if program.tenant:
        groups.append(f"tenant {program.tenant}")
    return groups


def _order(group: tuple[str, object]) -> tuple[bool, bool, str]:
    return group[0] != ALL, group[0].startswith("tenant "), group[0]


def _differs(group: str, found: dict[str, list[list[bool]]]) -> bool:
    """Whether a group is all programs, or only some of them."""
    return group == ALL or sum(map(len, found[group])) < sum(map(len, found[ALL]))


def _of(rounds: list[list[bool]]) -> InTime:
    programs = [each for round_ in rounds for each in round_]
    return InTime(
        len(programs), sum(programs) / len(programs), Spread.of([sum(round_) / len(round_) for round_ in rounds])
    )
