"""The memory that this host has free for this process: a container may have less than the machine."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple


class _Files(NamedTuple):
    """Where a version of cgroups says what a group may use and does use."""

    most: str
    used: str
    cache: str  # the line of memory.stat with the used bytes that are given back on demand


_V2: Final = _Files("memory.max", "memory.current", "inactive_file")
_V1: Final = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_bytes(root: Path = Path("/")) -> int:
    """The bytes that are free: of the machine, and of each cgroup that limits this process."""
    return max(0, min([_left_in_machine(root), *_left_in_groups(root)]))


def _left_in_machine(root: Path) -> int:
    with suppress(OSError, ValueError, KeyError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        return int(dict(line.split(":", 1) for line in lines)["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # not Linux: all that there is


def _left_in_groups(root: Path) -> list[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return []
    left = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files, base = (_V1, "sys/fs/cgroup/memory") if controllers else (_V2, "sys/fs/cgroup")
        group = Path(path.lstrip("/"))
        for each in (group, *group.parents):  # a limit of a group above counts as well; not all are visible here
            with suppress(OSError, ValueError):  # "max": it has no limit
                left.append(_left_in(root / base / each, files))
    return left


def _left_in(group: Path, files: _Files) -> int:
    most, used = int((group / files.most).read_text()), int((group / files.used).read_text())
    stat = dict(line.split(maxsplit=1) for line in (group / "memory.stat").read_text().splitlines())
    return most - used + int(stat.get(files.cache, 0))
