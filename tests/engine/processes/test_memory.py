"""What is free: the machine's memory, and what a container may have of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weft.engine.processes.memory import free_bytes


def _group(folder: Path, most: str, used: int, cache: int, *, v1: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(f"{most}\n")
    (folder / ("memory.usage_in_bytes" if v1 else "memory.current")).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{'total_' if v1 else ''}inactive_file {cache}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 1,024,000 bytes free. The process is in the group /box/job."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:  2000 kB\nMemFree:  10 kB\nMemAvailable:  1000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/box/job\n")
    return tmp_path


def test_without_a_limit_the_machine_counts(root: Path) -> None:
    """Neither a group without a limit nor one that cannot be seen changes anything."""
    assert free_bytes(root) == 1_024_000
    _group(root / "sys/fs/cgroup/box/job", "max", 10, 0)
    assert free_bytes(root) == 1_024_000


def test_a_container_has_what_its_limit_leaves(root: Path) -> None:
    """Files that are cached are given back, so they count as free."""
    _group(root / "sys/fs/cgroup/box/job", "500", 400, 150)
    assert free_bytes(root) == 250


def test_a_limit_of_a_group_above_counts(root: Path) -> None:
    """A pod may have a limit for all of its containers, and a full one leaves nothing."""
    _group(root / "sys/fs/cgroup/box/job", "500", 100, 0)
    _group(root / "sys/fs/cgroup/box", "600", 500, 20)
    assert free_bytes(root) == 120
    _group(root / "sys/fs/cgroup", "600", 700, 0)
    assert free_bytes(root) == 0


def test_the_older_cgroups_have_other_names(root: Path) -> None:
    """A container sees its own group as the root."""
    (root / "proc/self/cgroup").write_text("4:cpu,cpuacct:/docker/1\n9:memory:/docker/1\n0::/\n")
    _group(root / "sys/fs/cgroup/memory", "900", 800, 50, v1=True)
    assert free_bytes(root) == 150


def test_another_system_has_no_groups(tmp_path: Path) -> None:
    """There, what the machine has counts."""
    assert free_bytes(tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
