"""What several tests of programs use."""

from __future__ import annotations

import pytest
from named_runs import Runs

from weft.core.testing import FakeClock, RecordingBackend


@pytest.fixture
def backend() -> RecordingBackend:
    return RecordingBackend(FakeClock())


@pytest.fixture
def runs() -> Runs:
    return Runs()
