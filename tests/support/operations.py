"""Counts the operations of a piece of work, so that a test can assert how a cost grows without measuring time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_operations(work: Callable[[], object]) -> int:
    """Return how many bytecode instructions `work` executes on this thread, in all functions that it calls.

    Loops inside functions written in C count as one instruction.
    """
    count = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        # Python 3.13 traces the opcodes of a frame only if its trace function was set before.
        frame.f_trace, frame.f_trace_lines, frame.f_trace_opcodes = trace, False, True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces opcodes only if a frame wants it before settrace
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def growth(work: Callable[[int], object], small: int = 100, factor: int = 8) -> float:
    """Return the operations per unit of `work(small * factor)`, relative to those of `work(small)`.

    It is about 1 if the cost grows linearly, and near `factor` if it grows with the square.
    """
    few, many = count_operations(lambda: work(small)), count_operations(lambda: work(small * factor))
    return many / few / factor
