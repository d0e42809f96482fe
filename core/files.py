"""Writes files as a whole."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from weft.core.errors import TraceError, WeftError


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


@contextmanager
def writing(path: Path, other: str = "file") -> Iterator[None]:
    """Turn an `OSError` of the block into a `WeftError` that says which file cannot be written, and what to choose."""
    try:
        yield
    except OSError as error:
        raise WeftError(f"{path} cannot be written: {error.strerror or error}. Choose another {other}.") from None


def write_whole(lines: Iterable[str], path: Path) -> None:
    """Write lines to a file. If anything goes wrong meanwhile, what was there stays.

    A pipe or a device is written to directly.

    Args:
        lines: the lines, with their ends. They are written as they come, so that a long file is never held.
        path: the file. If it is a link, the file that it leads to is replaced.

    Raises:
        TraceError: the file cannot be written. What the lines raise passes through.
    """
    try:
        target = path.resolve()
        if target.exists() and not target.is_file():
            with target.open("w", encoding="utf-8") as file:
                file.writelines(lines)
            return
        with replacing(target) as file:
            file.writelines(lines)
            if target.exists():
                os.fchmod(file.fileno(), target.stat().st_mode & 0o777)
    except (OSError, RuntimeError) as error:  # RuntimeError: a link that leads to itself
        reason = (error.strerror or error) if isinstance(error, OSError) else error
        raise TraceError(f"{path} cannot be written: {reason}. Choose another file.") from None
