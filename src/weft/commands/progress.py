"""Progress bars on standard error. They import rich when they are made, so that `weft --help` stays quick.

Whether standard error is a terminal is asked of the file itself: rich takes any file for one where FORCE_COLOR is set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from weft.engine.models.progress import ProgressCallback, Stage
from weft.engine.models.weights import DOWNLOAD_BYTES

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID

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


@contextmanager
def progress_bar(what: str, total: float) -> Iterator[Callable[[float], object]]:
    """A bar. Gives a callback that takes how much of `total` is done."""
    with _bar(what, total) as (bars, task):
        yield lambda done: bars.update(task, completed=done)


@contextmanager
def simulations_progress(what: str, count: int) -> Iterator[Callable[[], object]]:
    """A bar over several simulations. Gives a callback for each that has ended."""
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with _bar(what, count, *columns) as (bars, task):
        yield lambda: bars.advance(task)


@contextmanager
def file_progress(what: str, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """A bar for files that are read. Gives a callback that takes how many more bytes."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with _bar(what, total_bytes, *columns) as (bars, task):
        yield lambda count: bars.advance(task, count)


@contextmanager
def _bar(what: str, total: float, *columns: ProgressColumn) -> Iterator[tuple[Progress, TaskID]]:
    """A bar, which disappears at its end. It is not shown where standard error is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.file.isatty()) as bars:
        yield bars, bars.add_task(what, total=total)


class BenchProgress:
    """A bar with an estimate of the time left for each part of a benchmark, used as `with`.

    Shows nothing where standard error is no terminal.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (TextColumn("{task.description:18}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"))
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self._progress = Progress(*columns, *times, console=console, disable=not console.file.isatty())
        self._task = self._progress.add_task("", visible=False)

    def __enter__(self) -> BenchProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """Begin a part of `total` steps, of which `done` were made in an earlier session."""
        self._task = self._progress.add_task(what, total=total, completed=done)

    def advance(self) -> None:
        """Count one more step of the part that was begun last."""
        self._progress.advance(self._task)
