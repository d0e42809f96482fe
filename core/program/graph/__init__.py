"""The graph of a program's calls: what it is made of, the DAG itself, its JSON, and how people see it."""

from weft.core.program.graph.dag import ProgramGraph as ProgramGraph
from weft.core.program.graph.nodes import CallNode as CallNode
from weft.core.program.graph.nodes import CallState as CallState
from weft.core.program.graph.nodes import CriticalPath as CriticalPath
from weft.core.program.graph.nodes import Edge as Edge
from weft.core.program.graph.nodes import FoldedCalls as FoldedCalls
from weft.core.program.graph.nodes import Interception as Interception
