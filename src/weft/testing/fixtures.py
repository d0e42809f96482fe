"""Fixtures for pytest. Put `pytest_plugins = ["weft.testing.fixtures"]` into the top `conftest.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from weft.testing import FakeClock, ScriptedEngine, ScriptedServer


@pytest.fixture
def fake_clock() -> FakeClock:
    """A clock that stands still until the test advances it."""
    return FakeClock()


@pytest.fixture
def scripted_engine() -> Iterator[Callable[..., ScriptedEngine]]:
    """Makes engines that answer from a script; arguments as for `weft.testing.ScriptedEngine`. Shuts them down."""
    with ExitStack() as engines:

        def make(replies: Any, **options: Any) -> ScriptedEngine:
            return engines.enter_context(ScriptedEngine(replies, **options))

        yield make


@pytest.fixture
def scripted_server() -> Iterator[Callable[..., ScriptedServer]]:
    """Makes servers that answer from a script; arguments as for `weft.testing.ScriptedServer`. Shuts them down."""
    with ExitStack() as servers:

        def make(replies: Any, *arguments: str) -> ScriptedServer:
            return servers.enter_context(ScriptedServer(replies, *arguments))

        yield make
