"""What the workers copy in a step, between which blocks and slots, and how that went."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.core.errors import SwapError


@dataclass(slots=True)
class SwapBatch:
    """Blocks to copy: `blocks[i]` goes to `slots[i]`, or comes from there."""

    blocks: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    def add(self, block: int, slot: int) -> None:
        """Copy one more."""
        self.blocks.append(block)
        self.slots.append(slot)

    def split(self, slots: int) -> tuple[SwapBatch, SwapBatch]:
        """What concerns the worker's own slots, which are numbered from 0 to `slots` - 1, and what those of others."""
        own, others = SwapBatch(), SwapBatch()
        for block, slot in zip(self.blocks, self.slots, strict=True):
            (own if slot < slots else others).add(block, slot)
        return own, others


@dataclass(slots=True)
class SwapPlan:
    """What the workers copy with one step: first out, before anything is written, then in, before the model runs.

    `spill` and `fetch` are copied beside the step and those after it, each in the order of the plans, and both at once.
    No step uses what they write, or overwrites what they read, before their report is there, or else its plan says that
    it waits for them.
    """

    out: SwapBatch = field(default_factory=SwapBatch)
    loads: list[SwapBatch] = field(default_factory=list)  # one for each call that starts or resumes
    spill: SwapBatch = field(default_factory=SwapBatch)  # out, ahead of need
    fetch: SwapBatch = field(default_factory=SwapBatch)  # in, for calls that wait or are expected
    waits_for: int = 0  # the step begins when the copies beside steps of the plans up to this one have ended
    number: int = 0  # plans are numbered from 1 on
    generations: dict[int, int] = field(default_factory=dict)  # by slot of another replica: see `shared.Found`

    @property
    def batches_in(self) -> list[SwapBatch]:
        """What is copied in before the model runs: one batch for all loads. They stay apart if two of them name the
        same slot, as calls with a common prefix do, because the kernel refuses a batch that names a slot twice."""
        blocks = [block for part in self.loads for block in part.blocks]
        slots = [slot for part in self.loads for slot in part.slots]
        if len(set(slots)) < len(slots) or len(set(blocks)) < len(blocks):
            return self.loads
        return [SwapBatch(blocks, slots)] if slots else []

    @property
    def written_slots(self) -> set[int]:
        """The slots that it writes."""
        return {*self.out.slots, *self.spill.slots}

    @property
    def read_slots(self) -> set[int]:
        return {slot for batch in (*self.loads, self.fetch) for slot in batch.slots}

    def check_integrity(self) -> None:
        """Raise SwapError unless each block and each slot is written once, by one copy. For tests."""
        named = [("out", self.out), ("spill", self.spill), ("fetch", self.fetch)]
        for what, batch in [*named, *(("a load", load) for load in self.loads)]:
            if len(batch.blocks) != len(batch.slots):
                raise SwapError(f"{what} has {len(batch.blocks)} blocks for {len(batch.slots)} slots")
            if len(set(batch.slots)) < len(batch.slots) or len(set(batch.blocks)) < len(batch.blocks):
                raise SwapError(f"{what} names a block or a slot twice: {batch}")
        written = [block for batch in (*self.loads, self.fetch) for block in batch.blocks]
        if len(set(written)) < len(written):
            raise SwapError(f"two copies of one plan write to the same block: {self}")
        if not set(self.out.slots).isdisjoint(self.spill.slots):
            raise SwapError(f"two copies of one plan write to the same slot: {self}")
        if not self.read_slots.isdisjoint(self.spill.slots):
            raise SwapError(f"a plan reads what is copied out beside its step: {self}")


@dataclass(slots=True)
class Executed:
    """How a plan went, or what it copied beside steps. What is not named here was copied."""

    number: int
    lost: tuple[int, ...] = ()  # slots that were to be written, and hold nothing valid
    unread: tuple[int, ...] = ()  # slots that could not be read
    refused: tuple[int, ...] = ()  # slots that were not read, because the kernel refused; they hold what they did

    def together(self, other: Executed) -> Executed:
        """Of two workers that carried out the same plan."""
        pairs = (self.lost, other.lost), (self.unread, other.unread), (self.refused, other.refused)
        return Executed(max(self.number, other.number), *(tuple({*one, *two}) for one, two in pairs))
