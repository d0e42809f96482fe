"""Settings of the tests of core."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says more about what else this machine is doing.
settings.register_profile("core", deadline=None)
settings.load_profile("core")
