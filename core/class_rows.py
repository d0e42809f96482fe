"""What a policy knows of classes of programs, for people."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum


class Branch(StrEnum):
    """What ranks the programs of a class."""

    QUEUES = "atlas"  # ATLAS's queues, because too few programs have ended
    ALL = "all programs"  # the index of all programs together, likewise
    ALIKE = "first come"  # they need like work
    VARIED = "least attained"  # their work varies much
    INDEX = "gittins"


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
    """The classes of several schedulers. Numbers are added up; the rest is from the one where most have ended."""
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
    """A number of tokens, "" if it is unknown."""
    return "" if math.isnan(tokens) else f"{tokens:.0f}"
