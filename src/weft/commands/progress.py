"""Progress bars on standard error. They import rich when they are made, so that `weft --help` stays quick.

Whether standard error is a terminal is asked of the file itself: rich takes any file for one where FORCE_COLOR is set.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, Self

from weft.engine.models.weights import DOWNLOAD_BYTES, ProgressCallback, Stage

if TYPE_CHECKING:
    from rich.progress import TaskID

_STAGE_LABELS: dict[Stage, str] = {
    "wait": "waiting for another process",
    "download": "downloading",
    "extract": "unpacking",
    "convert": "converting",
    "save": "saving",
}


@contextmanager
def model_progress() -> Iterator[ProgressCallback]:
    """A bar for each stage of preparing the embedded model. Gives the callback that `embedded_model` takes."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:28}"),
        BarColumn(),
        TextColumn("{task.fields[amount]:>12}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[Stage, TaskID] = {}

        def finish() -> None:
            for task in tasks.values():
                bars.update(task, total=1.0, completed=1.0)

        def report(stage: Stage, fraction: float | None, /) -> None:
            if stage not in tasks:
                finish()
                tasks[stage] = bars.add_task(_STAGE_LABELS[stage], total=None, amount="")
            if fraction is not None:
                amount = f"{fraction * DOWNLOAD_BYTES / 1e6:.0f} / {DOWNLOAD_BYTES / 1e6:.0f} MB"
                bars.update(tasks[stage], total=1.0, completed=fraction, amount=amount)

        yield report
        finish()


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
