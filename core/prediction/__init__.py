"""What comes next: times of tools, lengths of outputs, and whether a prefix is used again.

How long the engine takes for a token follows from `weft.core.policies.step_costs`.
"""

from __future__ import annotations

from weft.core.prediction.estimate import KnownPause, KnownTime, TimeEstimate
from weft.core.prediction.output_lengths import OutputLengths
from weft.core.prediction.reuse import Reuse
from weft.core.prediction.samples import Samples
from weft.core.prediction.tool_times import ToolTimes
from weft.core.prediction.waits import Waits, WaitsByLevel

__all__ = [
    "KnownPause",
    "KnownTime",
    "OutputLengths",
    "Reuse",
    "Samples",
    "TimeEstimate",
    "ToolTimes",
    "Waits",
    "WaitsByLevel",
]
