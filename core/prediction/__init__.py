"""Predictors of what comes next: times of tools, lengths of outputs, reuse of contexts, and execution graphs.

Scheduling policies, KV policies and the forecasts of an engine use them. How long an engine takes for a token follows
from `weft.core.policies.steps`.
"""

from weft.core.prediction.execution_graph import Cost as Cost
from weft.core.prediction.execution_graph import ExecutionGraph as ExecutionGraph
from weft.core.prediction.execution_graph import Node as Node
from weft.core.prediction.foresight import ExecutionGraphs as ExecutionGraphs
from weft.core.prediction.foresight import ForecastRow as ForecastRow
from weft.core.prediction.reuse import OutputLengths as OutputLengths
from weft.core.prediction.reuse import Reuse as Reuse
from weft.core.prediction.reuse import ReusedPart as ReusedPart
from weft.core.prediction.samples import KnownPause as KnownPause
from weft.core.prediction.samples import KnownTime as KnownTime
from weft.core.prediction.samples import Samples as Samples
from weft.core.prediction.samples import TimeEstimate as TimeEstimate
from weft.core.prediction.static_graph import StaticGraph as StaticGraph
from weft.core.prediction.static_graph import read_static_graph as read_static_graph
from weft.core.prediction.template import Estimate as Estimate
from weft.core.prediction.template import Forecast as Forecast
from weft.core.prediction.template import Remaining as Remaining
from weft.core.prediction.template import Successor as Successor
from weft.core.prediction.template import Tier as Tier
from weft.core.prediction.times import ReturnTimes as ReturnTimes
from weft.core.prediction.times import ToolTimes as ToolTimes
from weft.core.prediction.times import Waits as Waits
from weft.core.prediction.times import WaitsByLevel as WaitsByLevel
