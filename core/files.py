"""Replaces files as a whole."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[TextIO]:
    """Give a new file that takes the place of another one at the end of the block.

    If the block raises, what was there stays. So it does after a crash, if the block has made the system write the
    file to the disk.

    Args:
        path: The file to replace, which need not exist.
        mode: Who may read and write it, less what the process's umask takes away.

    Raises:
        OSError: The folder cannot be written to.
    """
    # A name that nobody can guess, and a file that was not there: others may have links in the folder.
    new = path.with_name(f"{path.name[:100]}.{secrets.token_hex(4)}.new")
    number = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            yield file
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
