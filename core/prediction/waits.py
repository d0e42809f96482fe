"""How long calls wait in an engine's queue, and how often the next one gets its turn."""

from __future__ import annotations

import math
from typing import Final

_SHARE: Final = 0.05  # of the latest call in the averages


class Waits:
    """Averages over the latest calls, in seconds."""

    def __init__(self) -> None:
        self.wait_s = 0.0
        self.turn_s = 0.0  # from the start of one call to that of the next, while calls wait
        self._began_s = -math.inf

    def observe(self, now_s: float, waited_s: float) -> None:
        """A call starts to run, and has waited for so long."""
        self.wait_s += _SHARE * (waited_s - self.wait_s)
        self.turn_s += _SHARE * (min(now_s - self._began_s, waited_s) - self.turn_s)
        self._began_s = now_s
