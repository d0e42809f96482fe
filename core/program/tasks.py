"""The tasks of the event loop in which runs begin."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, NamedTuple


class RunningTask(NamedTuple):
    """A task, which this does not keep."""

    reference: weakref.ref[asyncio.Task[Any]]  # of one task there is one, also after the task is gone

    @property
    def is_over(self) -> bool:
        """Whether the task has ended."""
        task = self.reference()
        return task is None or task.done()


def running_task() -> RunningTask | None:
    """The task that runs the caller's code; None: no event loop runs here."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return None
    return RunningTask(weakref.ref(task)) if task is not None else None
