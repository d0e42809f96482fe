"""Progress bars on standard error. They import rich when they are made, so that `weft --help` stays quick.

Whether standard error is a terminal is asked of the file itself: rich takes any file for one where FORCE_COLOR is set.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Self

from weft.engine.models.weights import ProgressCallback, Stage

_STAGE_LABELS: dict[Stage, str] = {
    "wait": "waiting for another process",
    "download": "downloading",
    "extract": "unpacking",
    "convert": "converting",
    "save": "saving",
}


class Bars:
    """Progress bars on standard error, used as `with`. They are not shown where standard error is no terminal.

    Args:
        what, total: The first bar, as for `begin`.
        unit: Whether a bar shows a share, a number of things, or bytes.
        stays: Whether the bars are still there after the block.
    """

    def __init__(
        self,
        what: str = "",
        total: float = 0,
        unit: Literal["share", "count", "bytes"] = "share",
        *,
        stays: bool = False,
    ) -> None:
        from rich import progress
        from rich.console import Console

        units = {
            "share": progress.TaskProgressColumn,
            "count": progress.MofNCompleteColumn,
            "bytes": progress.DownloadColumn,
        }
        console = Console(stderr=True)
        self._bars = progress.Progress(
            progress.TextColumn("{task.description:18}"),
            progress.BarColumn(),
            units[unit](),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
            console=console,
            transient=not stays,
            disable=not console.file.isatty(),
        )
        self._task = self._bars.add_task(what, total=total, visible=bool(what))

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, what: str, total: float, done: int = 0) -> None:
        """Begin another bar for a part of the work, of which some was done in an earlier session."""
        self._task = self._bars.add_task(what, total=total, completed=done)

    def advance(self, count: float = 1) -> None:
        """Count more of the part that was begun last."""
        self._bars.advance(self._task, count)

    def set(self, done: float) -> None:
        """Show how much is done of the part that was begun last."""
        self._bars.update(self._task, completed=done)


@contextmanager
def model_progress() -> Iterator[ProgressCallback]:
    """A bar or a line for each stage of preparing the embedded model. Gives the callback of `embedded_model`."""
    shown: Stage | None = None
    with Bars(stays=True) as bars:

        def report(stage: Stage, fraction: float | None, /) -> None:
            nonlocal shown
            if stage != shown:
                bars.set(1.0)
                bars.begin(_STAGE_LABELS[stage], 1.0)
                if not sys.stderr.isatty():  # nor are the bars shown, and a log is to say what takes so long
                    sys.stderr.write(f"{_STAGE_LABELS[stage]}\n")
                shown = stage
            if fraction is not None:
                bars.set(fraction)

        yield report
        bars.set(1.0)
