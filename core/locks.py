"""Locks that a forked child finds free."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, Final, TypeVar

_Lock = TypeVar("_Lock", bound="threading.Lock | threading.RLock")

_locks: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def fork_safe(lock: _Lock) -> _Lock:
    """Make a lock free in every forked child, and return it.

    Only the thread that forks goes on in the child. A lock that another thread held at that moment would never be
    released there. The data that the lock protects may be half changed in the child.
    """
    _locks.add(lock)
    return lock


def _free_all() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # noqa: SLF001  as the standard library does with its own locks


os.register_at_fork(after_in_child=_free_all)
