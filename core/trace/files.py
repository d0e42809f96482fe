"""Writes a file whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from weft.core.errors import TraceError
from weft.core.files import replacing


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
