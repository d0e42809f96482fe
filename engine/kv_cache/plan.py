"""What the scheduler tells the workers to copy in one step, and what they report. Both travel between processes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SwapBatch:
    """Blocks to copy: `blocks[i]` goes to `slots[i]`, or comes from there."""

    blocks: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SwapPlan:
    """What the workers copy in one step: first out, before anything is written, then in, before the model runs."""

    out: SwapBatch = field(default_factory=SwapBatch)
    loads: list[SwapBatch] = field(default_factory=list)  # one for each call that starts or resumes
    fetch: SwapBatch = field(default_factory=SwapBatch)  # for calls that are expected; no call of the step reads them
    number: int = 0  # plans are numbered from 1 on

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to copy."""
        return not (self.out.slots or self.loads or self.fetch.slots)


@dataclass(slots=True)
class Executed:
    """How a plan went. What is not named here was copied."""

    number: int
    lost: tuple[int, ...] = ()  # slots that were to be written, and hold nothing valid
    unread: tuple[int, ...] = ()  # slots that could not be read

    def together(self, other: Executed) -> Executed:
        """Of two workers that carried out the same plan."""
        lost, unread = {*self.lost, *other.lost}, {*self.unread, *other.unread}
        return Executed(max(self.number, other.number), tuple(lost), tuple(unread))
