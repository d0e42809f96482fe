"""What an engine does while it starts: a line on standard error if that is a terminal, or a line in a notebook."""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from weft.engine.processes.logs import last_line

if TYPE_CHECKING:
    from rich.console import Console

_DETAIL_CHARS: Final = 60


class StartProgress:
    """Shows one line during a `with` block: the stage, the time so far, and the last line of vLLM's log.

    Where standard error is neither a terminal nor a notebook's, nothing is shown.

    Attributes:
        log: The file of vLLM's log, once there is one.
    """

    def __init__(self) -> None:
        from rich.console import Console

        self.log: Path | None = None
        self._began_s = time.monotonic()
        self._line: _TerminalLine | _NotebookLine | None = None
        console = Console(stderr=True)
        if console.is_jupyter:
            self._line = _NotebookLine()
        elif console.file.isatty():  # `is_terminal` is true of any file where FORCE_COLOR is set
            self._line = _TerminalLine(console, self._detail)

    def stage(self, what: str) -> None:
        """A stage begins."""
        if self._line is not None:
            self._line.show(what)

    def ready(self, model: str, host_kv_gib: float) -> None:
        """The engine has started. Lines that stay say so, where the log is, and how much host memory it has."""
        if self._line is not None:
            where = f"; vLLM's log is {self.log}" if self.log is not None else ""
            self._line.leave(
                f"weft: {model} was ready after {time.monotonic() - self._began_s:.0f} s{where}\n"
                f"weft: {host_memory(host_kv_gib)}"
            )

    def _detail(self) -> str:
        return last_line(self.log)[:_DETAIL_CHARS] if self.log is not None else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._line is not None:
            self._line.close()


def host_memory(gib: float) -> str:
    """How much host memory a worker has for KV, and how to change that."""
    if not gib:
        return "no host memory for KV (swap=weft.SwapConfig(space_gib=...) or --host-kv-gib gives some)"
    amount = f"{gib:.1f} GiB" if gib >= 1 else f"{gib * 1024:.0f} MiB"
    return (
        f"{amount} of host memory for KV in each worker (swap=weft.SwapConfig(space_gib=...) or --host-kv-gib changes "
        "it; swap=None or --host-kv-gib 0: none)"
    )


class _TerminalLine:
    """A line with a spinner, which rich draws on a thread of its own and removes at the end."""

    def __init__(self, console: Console, detail: Any) -> None:
        from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
        from rich.text import Text

        class Detail(ProgressColumn):
            max_refresh = 0.5  # seconds

            def render(self, task: Task) -> Text:
                return Text(detail(), style="dim", overflow="ellipsis", no_wrap=True)

        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), Detail()
        self._console = console
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task("", total=None)
        self._bar.start()

    def show(self, what: str) -> None:
        self._bar.update(self._task, description=what)

    def leave(self, line: str) -> None:
        self.close()
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()


class _NotebookLine:
    """A line below the cell, which is replaced."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, what: str) -> None:
        self.leave(f"{what} ...")

    def leave(self, line: str) -> None:
        data = {"text/plain": line}
        if self._handle is None:
            self._handle = import_module("IPython.display").display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def close(self) -> None:
        """Leave the last line, which says how far a start came that failed."""
