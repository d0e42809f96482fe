"""One thread for each test engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from unittest import mock

# Two threads that are bound to a core each wait for each other many times a step. While a background command has one of
# the cores, such an engine is many times slower than an engine with one thread.
ONE_THREAD: Final = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


@contextmanager
def one_thread() -> Iterator[None]:
    """Engines that start inside compute with one thread."""
    with mock.patch.dict(os.environ, ONE_THREAD):
        yield
