"""What a policy that learns knows of each class of programs, as rows for people.

`Policy.classes` makes the rows. The process table and `weft doctor --history` show them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum


class Branch(StrEnum):
    """How the programs of a class are ranked, and why."""

    QUEUES = "atlas"  # by ATLAS's queues, because too few programs of the class have ended
    ALL = "all programs"  # by the Gittins index of all programs together, because too few of the class have ended
    ALIKE = "first come"  # in order of arrival, because they need about the same work
    VARIED = "least attained"  # by attained service, because their work varies by orders of magnitude
    INDEX = "gittins"  # by the Gittins index of the class


@dataclass(frozen=True, slots=True)
class ClassRow:
    """A class of programs: those of one tenant and name."""

    tenant: str | None
    name: str  # "" for programs whose client sent no name
    ended: int  # programs that have ended so far
    live: int  # programs that have not
    median_tokens: float  # of a program's work; nan: unknown
    p95_tokens: float  # the 95th percentile; nan: unknown
    branch: Branch
    held: int = 0  # programs that the gate holds back


def together(rows: Iterable[ClassRow]) -> list[ClassRow]:
    """Merge the rows of several schedulers into one row for each tenant and name.

    The numbers of programs are added up. The other fields are from the scheduler where most programs have ended.
    Classes with held programs come first, then those with live programs, then those where most have ended.
    """
    by_key: dict[tuple[str | None, str], ClassRow] = {}
    for row in rows:
        other = by_key.setdefault((row.tenant, row.name), row)
        if other is not row:
            by_key[row.tenant, row.name] = replace(
                max(other, row, key=lambda each: each.ended),
                ended=other.ended + row.ended,
                live=other.live + row.live,
                held=other.held + row.held,
            )
    return sorted(by_key.values(), key=lambda row: (-row.held, -row.live, -row.ended, row.name, row.tenant or ""))


def known(tokens: float) -> str:
    """A number of tokens as text; "" for nan, which means unknown."""
    return "" if math.isnan(tokens) else f"{tokens:.0f}"
