"""The disk of a simulated life: real files, and writes that fail while it is out of order."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import fuzz_history

from weft.core.errors import HistoryError
from weft.core.policies.history import History

FAULTS: Final = {"full": errno.ENOSPC, "short": errno.ENOSPC, "broken": errno.EIO, "read-only": errno.EROFS}


class Disk:
    """Takes the place of the module `os` where Weft writes files.

    Attributes:
        fault: A key of `FAULTS` while it is out of order. A "short" one writes half of what it gets before it is full.
            An "unsynced" one takes all of it, and says only when it is to be kept that it cannot.
    """

    def __init__(self) -> None:
        self.fault = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _check(self) -> None:
        if self.fault in FAULTS:
            raise OSError(FAULTS[self.fault], os.strerror(FAULTS[self.fault]))

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        if self.fault == "read-only":
            self._check()
        return os.open(path, flags, mode)

    def write(self, file: int, data: bytes) -> int:
        if self.fault == "short" and len(data) > 1:
            self.fault = "full"
            return os.write(file, data[: len(data) // 2])
        self._check()
        return os.write(file, data)

    def fdopen(self, file: int, mode: str, encoding: str) -> Any:
        opened = os.fdopen(file, mode, encoding=encoding)
        write = opened.write

        def checked(text: str) -> int:
            if self.fault == "short":
                self.fault = "full"
                write(text[: len(text) // 2])
            self._check()
            return write(text)

        opened.write = checked  # type: ignore[method-assign]
        return opened

    def fsync(self, file: int) -> None:
        self._check()
        if self.fault == "unsynced":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.fsync(file)


class HistoryOfEarlier:
    """A history file that an earlier engine left: none, a good one, or one that is damaged.

    Args:
        path: Where.
        rng: Chooses.
    """

    def __init__(self, path: Path, rng: random.Random) -> None:
        self.path, self.content = path, None
        if rng.random() < 0.6:
            self.content = fuzz_history.changed(rng.randbytes(rng.choice([0, 0, 3, 30])))
            if rng.random() < 0.3:
                self.content = self.content[: rng.randrange(len(self.content))]
            path.write_bytes(self.content)
        self.programs = 0
        try:
            self.programs = _programs(History.from_json(self.content)) if self.content is not None else 0
            self._is_good = True
        except HistoryError:
            self._is_good = False

    def problems(self, learned: int, known: str, *, is_saved: bool) -> Iterator[str]:
        """What is wrong with the file after an engine's end.

        Args:
            learned: Programs that the engine has learned from.
            known: The engine's history in memory.
            is_saved: All of it should be in the file.
        """
        aside = self.path.with_name(f"{self.path.name}.set-aside")
        if (aside.read_bytes() if aside.exists() else None) != (None if self._is_good else self.content):
            yield "a history that cannot be used was not kept"
        left = [each.name for each in self.path.parent.iterdir() if each.name.endswith(".new")]
        if left:
            yield f"{left} are left of histories that were not written"
        found = _programs(History.from_json(self.path.read_bytes())) if self.path.exists() else 0
        if is_saved and found != self.programs + learned:
            yield f"the history has {found} programs, after {self.programs} of earlier engines and {learned} of this"
        if is_saved and self.path.read_text() != known:
            yield "the history in the file is not the one in memory"


def _programs(history: History) -> int:
    return sum(row.ended for row in history.graphs.rows())
