"""Static graphs: the nodes that a user has drawn in LangGraph or in AutoGen's GraphFlow (SAGA §3.3, hints).

`@weft.program(graph=…)` takes one. Forecasts rest on it until enough programs have ended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from weft.core.errors import ArgumentTypeError
from weft.core.prediction.execution_graph import MOST_LETTERS, MOST_NODES, ExecutionGraph, Node, Succession, Tally

_MOST_TARGETS: Final = 64  # of a node
_ENDS: Final = ("__end__",)
_STARTS: Final = ("__start__",)


@dataclass(frozen=True, slots=True)
class Targets:
    """What may follow a node."""

    always: tuple[str, ...] = ()  # all of these, at the same time
    one_of: tuple[str, ...] = ()  # one of these; "" is the end


@dataclass(frozen=True, slots=True)
class StaticGraph:
    """Nodes by name, and what may follow each. It says what can happen, not how often."""

    nodes: Mapping[str, Targets] = field(default_factory=dict)

    def without(self, names: Collection[str]) -> StaticGraph:
        """The graph without these nodes, which make no calls. What follows such a node follows the nodes before it."""
        nodes = dict(self.nodes)
        for name in names:
            gone = nodes.pop(name, None)
            if gone is not None:
                nodes = {each: _bypass(targets, name, gone) for each, targets in nodes.items()}
        return StaticGraph(nodes)

    def counts(self, cost: Tally | None) -> ExecutionGraph:
        """The graph as counts, in which the targets of a choice are equally likely.

        Args:
            cost: What a call costs, whichever node makes it; None: unknown.
        """
        made = ExecutionGraph()
        for name in self.nodes:
            tally = made.nodes[Node(name)] = Tally(visits=1.0)
            if cost is not None and cost.visits:
                tally.sums = [each / cost.visits for each in cost.sums]
                tally.squares = [each / cost.visits for each in cost.squares]
        for name, targets in self.nodes.items():
            tally, choices = made.nodes[Node(name)], targets.one_of
            for each in targets.always:  # they begin at the same time, so each is as likely to be first
                edge = tally.edges.setdefault(Node(each), Succession())
                edge.first += 1 / len(targets.always)
                edge.share += 1 / self._joining(name, each)
            for each in choices:
                chance = 1 / len(choices)
                if each:
                    edge = tally.edges.setdefault(Node(each), Succession())
                    edge.share += chance
                    edge.first += 0.0 if targets.always else chance
                elif not targets.always:
                    tally.ends += chance
            if not targets.always and not choices:
                tally.ends = 1.0
            made.edges += len(tally.edges)
        return made

    def _joining(self, name: str, target: str) -> int:
        """How many nodes of the fork that a node belongs to lead to a target; at least 1."""
        forks = (targets.always for targets in self.nodes.values() if name in targets.always)
        joining = (sum(target in self.nodes[each].always for each in fork if each in self.nodes) for fork in forks)
        return max([1, *joining])


def read_static_graph(graph: Any) -> StaticGraph:
    """The static graph of a framework's object.

    Args:
        graph: A compiled LangGraph graph (anything whose `get_graph()` has nodes and edges), or the `DiGraph` of
            AutoGen's GraphFlow. Tool nodes are left out, because they make no calls.

    Raises:
        ArgumentTypeError: It is neither, or has more than 255 nodes.
    """
    if isinstance(graph, StaticGraph):
        return graph
    found = None
    if callable(getattr(graph, "get_graph", None)):
        found = _langgraph(graph.get_graph())
    elif isinstance(getattr(graph, "nodes", None), Mapping):
        found = _digraph(graph.nodes)
    if found is None or len(found.nodes) >= MOST_NODES:
        raise ArgumentTypeError(
            "@program",
            "graph",
            graph,
            f"a compiled LangGraph graph or an AutoGen DiGraph of less than {MOST_NODES} nodes",
        )
    return found


def _langgraph(drawn: Any) -> StaticGraph:
    """Nodes by id with `name` and `data`, and edges with `source`, `target` and `conditional`."""
    names = {key: str(node.name)[:MOST_LETTERS] for key, node in drawn.nodes.items()}
    always: dict[str, list[str]] = {name: [] for name in names.values()}
    one_of: dict[str, list[str]] = {name: [] for name in names.values()}
    for edge in drawn.edges:
        target = "" if edge.target in _ENDS else names[edge.target]
        if edge.conditional:
            one_of[names[edge.source]].append(target)
        elif target:
            always[names[edge.source]].append(target)
    tools = [names[key] for key, node in drawn.nodes.items() if hasattr(node.data, "tools_by_name")]
    graph = StaticGraph({name: _targets(always[name], one_of[name]) for name in always})
    return graph.without([*_STARTS, *_ENDS, *tools])


def _digraph(nodes: Mapping[str, Any]) -> StaticGraph:
    """AutoGen: nodes by name, each with edges that have a `target` and perhaps a condition."""
    found = {}
    for name, node in nodes.items():
        always: list[str] = []
        one_of: list[str] = []
        for edge in node.edges:
            is_conditional = edge.condition is not None or edge.condition_function is not None
            (one_of if is_conditional else always).append(edge.target[:MOST_LETTERS])
        found[name[:MOST_LETTERS]] = _targets(always, one_of)
    return StaticGraph(found)


def _targets(always: list[str], one_of: list[str]) -> Targets:
    return Targets(tuple(dict.fromkeys(always))[:_MOST_TARGETS], tuple(dict.fromkeys(one_of))[:_MOST_TARGETS])


def _bypass(targets: Targets, name: str, gone: Targets) -> Targets:
    """What follows a node once the node `name` is gone, which was followed by `gone`."""
    always, one_of = list(targets.always), list(targets.one_of)
    if name in always:
        always.remove(name)
        always += [each for each in gone.always if each != name]
        one_of += [each for each in gone.one_of if each != name]
    if name in one_of:
        one_of.remove(name)
        one_of += [each for each in (*gone.always, *gone.one_of) if each != name] or [""]
    return _targets(always, one_of)
