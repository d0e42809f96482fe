"""Predictors of what comes next: times of tools, lengths of outputs, reuse of contexts, and execution graphs.

Scheduling policies, KV policies and the forecasts of an engine use them. How long an engine takes for a token follows
from `weft.core.policies.steps`.
"""

from __future__ import annotations

from weft.core.prediction.execution_graph import Cost, ExecutionGraph, Node
from weft.core.prediction.expectation import Estimate, Remaining
from weft.core.prediction.foresight import ExecutionGraphs, ForecastRow
from weft.core.prediction.output_lengths import OutputLengths
from weft.core.prediction.reuse import Reuse, ReusedPart
from weft.core.prediction.samples import KnownPause, KnownTime, Samples, TimeEstimate
from weft.core.prediction.static_graph import StaticGraph, read_static_graph
from weft.core.prediction.template import Forecast, Successor, Tier
from weft.core.prediction.times import ReturnTimes, ToolTimes, Waits, WaitsByLevel

__all__ = [
    "Cost",
    "Estimate",
    "ExecutionGraph",
    "ExecutionGraphs",
    "Forecast",
    "ForecastRow",
    "KnownPause",
    "KnownTime",
    "Node",
    "OutputLengths",
    "Remaining",
    "ReturnTimes",
    "Reuse",
    "ReusedPart",
    "Samples",
    "StaticGraph",
    "Successor",
    "Tier",
    "TimeEstimate",
    "ToolTimes",
    "Waits",
    "WaitsByLevel",
    "read_static_graph",
]
