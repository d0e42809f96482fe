"""How the calls of a soak ended."""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from weft.core.errors import WeftError

_KEPT_FAILURES: Final = 20


@dataclass(slots=True)
class Ending:
    """How one call ended, as far as its maker knows better than the exception says."""

    outcome: str = "result"


@dataclass
class Tally:
    """Counts the calls that were begun, and how they ended.

    Attributes:
        begun: Calls by kind of client.
        ended: The same, of calls that have ended.
        outcomes: Ended calls by outcome: "result", "left", "cancelled", or the class of a typed error.
        failures: The first calls that ended in none of these ways, as tracebacks.
        failed: How many there were.
    """

    begun: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    failed: int = 0

    @contextmanager
    def call(self, kind: str) -> Iterator[Ending]:
        """Count a call. The block makes it; a typed error ends the block and is not raised."""
        ending = Ending()
        self.begun[kind] += 1
        try:
            yield ending
        except WeftError as error:
            ending.outcome = type(error).__name__
        except asyncio.CancelledError:
            ending.outcome = "cancelled"
            raise
        except Exception:
            ending.outcome = "untyped error"
            self.fail(kind, traceback.format_exc())
        finally:
            self.ended[kind] += 1
            self.outcomes[ending.outcome] += 1

    def fail(self, kind: str, what: str) -> None:
        """Note something that must not happen."""
        self.failed += 1
        if len(self.failures) < _KEPT_FAILURES:
            self.failures.append(f"{kind}: {what}")

    @property
    def open_calls(self) -> int:
        """Calls that were begun and have not ended."""
        return self.begun.total() - self.ended.total()
