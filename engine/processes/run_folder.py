"""The folder of one engine's unix sockets, of which vLLM leaves the files behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

VARIABLE: Final = "VLLM_RPC_BASE_PATH"  # vLLM's variable for the folder of its sockets
_PREFIX: Final = "weft-run-"
_MOST_BYTES: Final = 107 - len("/") - 36  # of the folder's path: a socket's may have 107, and vLLM's names are UUIDs
_OWN_BYTES: Final = len(f"/{_PREFIX}12345678")


class RunFolder:
    """A new folder for the sockets of one engine, in the temporary folder, until `remove`.

    The folder is locked while its process runs. So the next engine of any process of this user can tell the folders
    that were left by processes that were killed, and removes them. A number of a process would not do, because
    containers that share a temporary folder number their processes by themselves.

    Attributes:
        path: The folder. Nobody else can read it, and its path is short enough for unix sockets.

    Raises:
        OSError: There is no temporary folder that this user can write to.
    """

    def __init__(self) -> None:
        parent = _parent()
        _remove_left(parent)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            # Another engine that starts now may take the folder for one that was left, before it is locked.
            with suppress(FileNotFoundError):
                self._lock: int | None = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                with suppress(OSError):  # a file system without locks: nobody removes the folder but this process
                    fcntl.flock(self._lock, fcntl.LOCK_EX)
                if self.path.exists():
                    return
                os.close(self._lock)

    def remove(self) -> None:
        """Remove the folder with all that is in it. May be called more than once."""
        lock, self._lock = self._lock, None
        if lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(lock)


def _parent() -> Path:
    """The folder that the user has named, or else the system's, unless its path is too long for sockets below it."""
    usual = Path(os.environ.get(VARIABLE) or tempfile.gettempdir())
    if usual.name.startswith(_PREFIX):  # this process was started while another one started an engine
        usual = usual.parent
    is_short = len(os.fsencode(usual)) + _OWN_BYTES <= _MOST_BYTES
    return usual if is_short else Path("/tmp")  # noqa: S108  the folder in it has an unguessable name


def _remove_left(parent: Path) -> None:
    """Remove the folders of this user's processes that were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is in use, or has just gone
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
