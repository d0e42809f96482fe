"""The file in which an engine keeps what programs did, from one start to the next."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from weft.core.errors import HistoryError
from weft.core.files import replacing
from weft.core.locks import fork_safe
from weft.core.log import get_logger
from weft.core.policies.history import History, ProgramEnd
from weft.core.prediction import ExecutionGraphs

_MOST_BYTES: Final = 1 << 26


class HistoryFile:
    """A history in memory, and its file. Any thread may use it.

    A file that is damaged, or of a newer version, is set aside with a warning, and a new history begins. The file is
    replaced as a whole, so a crash leaves the old one or the new one. Only its user may read it. Of two engines that
    share a file, the last one to write wins.

    Args:
        path: The file. It is created if it does not exist.

    Raises:
        HistoryError: The file cannot be read, set aside or written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).expanduser().absolute()  # because the application may change its working directory
        self._lock = fork_safe(threading.Lock())
        self._has_warned = False
        self._saved_graphs = 0
        try:
            self._history = self._read()
            self._is_saved = False
            self._write()
        except OSError as error:
            raise HistoryError(
                f"the history {self._path} cannot be kept: {error.strerror or error}. Name a file in a folder that "
                "this user may read and write."
            ) from None

    @property
    def graphs(self) -> ExecutionGraphs:
        """The execution graphs. What they learn is in the file after the next `save`."""
        return self._history.graphs

    def to_json(self) -> str:
        """The history as text, without the execution graphs, which schedulers do not read."""
        with self._lock:
            return self._history.to_json(with_graphs=False)

    def add(self, model: str, ends: Iterable[ProgramEnd]) -> None:
        """Programs have ended. They are in the file after the next `save`."""
        with self._lock:
            for end in ends:
                self._history[model].add(end)
                self._is_saved = False

    def save(self) -> None:
        """Write the file if the history has changed. Errors are logged, the first one as a warning."""
        with self._lock:
            try:
                self._write()
            except OSError as error:
                log = get_logger()
                (log.debug if self._has_warned else log.warning)(
                    "the history of programs cannot be written, and is kept in memory until it can",
                    path=str(self._path),
                    reason=error.strerror or str(error),
                )
                self._has_warned = True

    def _read(self) -> History:
        try:
            with self._path.open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
        except FileNotFoundError:
            return History()
        try:
            if len(data) > _MOST_BYTES:
                raise HistoryError(f"it has more than {_MOST_BYTES} bytes")
            return History.from_json(data)
        except HistoryError as error:
            aside = self._path.with_name(f"{self._path.name}.set-aside")
            self._path.replace(aside)
            get_logger().warning(
                "a history of programs cannot be used, and a new one begins", kept_as=str(aside), reason=str(error)
            )
            return History()

    def _write(self) -> None:
        learned = self.graphs.learned
        if self._is_saved and learned == self._saved_graphs:
            return
        with replacing(self._path, 0o600) as file:
            file.write(self._history.to_json())
            file.flush()
            os.fsync(file.fileno())
        self._is_saved, self._saved_graphs = True, learned
