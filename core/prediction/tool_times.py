"""How long tools take, by their names."""

from __future__ import annotations

from typing import Final

from weft.core.prediction.names import SamplesByName
from weft.core.prediction.samples import Samples

MOST_LETTERS: Final = 128  # of a name; longer names count as one if they begin alike


class ToolTimes:
    """The latest 256 times of each tool, of at most 1024 tools, and of all tools together."""

    def __init__(self) -> None:
        self._all = Samples()
        self._tools = SamplesByName(self._all)

    def __len__(self) -> int:
        """The number of tools that are known by name."""
        return len(self._tools)

    def observe(self, tool: str | None, took_s: float) -> None:
        """A tool has returned after `took_s` seconds. A tool without a name counts only in the times of all tools."""
        self._all.observe(took_s)
        if tool:
            self._tools.observe(tool[:MOST_LETTERS], took_s)

    def of(self, tool: str | None) -> Samples:
        """What is known of a tool: its own times, or those of all tools together if there are none."""
        own = self._tools.get(tool[:MOST_LETTERS]) if tool else None
        return self._all if own is None else own

    def most_seen(self, count: int) -> list[tuple[str, Samples]]:
        """The tools with the most samples, at most `count` of them."""
        return [(str(name), samples) for name, samples in self._tools.most_seen(count)]


def pause_name(tool: str | None, program_name: str) -> str:
    """What the pause after a call is known by: its tool, or the program between whose calls it lies."""
    return (tool or f"after {program_name}")[:MOST_LETTERS]
