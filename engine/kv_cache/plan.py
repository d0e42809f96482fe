"""What the scheduler tells the workers to copy in one step, and what they report. Both travel between processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.core.errors import SwapError


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

    @property
    def batches_in(self) -> list[SwapBatch]:
        """What is copied in: one batch for all loads and the fetch. They stay apart if two of them name the same slot,
        as calls with a common prefix do, because the kernel refuses a batch that names a slot or a block twice."""
        parts = [*self.loads, self.fetch] if self.fetch.slots else self.loads
        blocks = [block for part in parts for block in part.blocks]
        slots = [slot for part in parts for slot in part.slots]
        if len(set(slots)) < len(slots) or len(set(blocks)) < len(blocks):
            return parts
        return [SwapBatch(blocks, slots)] if slots else []

    def check_integrity(self) -> None:
        """Raise SwapError unless each block and each slot is written once, by one copy. For tests."""
        for what, batch in [("out", self.out), ("fetch", self.fetch), *(("a load", load) for load in self.loads)]:
            if len(batch.blocks) != len(batch.slots):
                raise SwapError(f"{what} has {len(batch.blocks)} blocks for {len(batch.slots)} slots")
            if len(set(batch.slots)) < len(batch.slots) or len(set(batch.blocks)) < len(batch.blocks):
                raise SwapError(f"{what} names a block or a slot twice: {batch}")
        written = [block for batch in (*self.loads, self.fetch) for block in batch.blocks]
        if len(set(written)) < len(written):
            raise SwapError(f"two copies of one plan write to the same block: {self}")


@dataclass(slots=True)
class Executed:
    """How a plan went. What is not named here was copied."""

    number: int
    lost: tuple[int, ...] = ()  # slots that were to be written, and hold nothing valid
    unread: tuple[int, ...] = ()  # slots that could not be read
    refused: tuple[
        int, ...
    ] = ()  # slots that were not read, because the kernel refused the call; they hold what they did

    def together(self, other: Executed) -> Executed:
        """Of two workers that carried out the same plan."""
        pairs = (self.lost, other.lost), (self.unread, other.unread), (self.refused, other.refused)
        return Executed(max(self.number, other.number), *(tuple({*one, *two}) for one, two in pairs))
