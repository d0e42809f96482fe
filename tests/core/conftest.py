"""Hypothesis settings for the tests of core."""

from __future__ import annotations

from hypothesis import settings

# No deadline: the time of an example depends on the load of the machine.
settings.register_profile("core", deadline=None)
settings.load_profile("core")
