"""What the scheduler tells the workers to copy in one step. Plans travel between processes."""

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
    loads: list[SwapBatch] = field(default_factory=list)  # one for each call that resumes
