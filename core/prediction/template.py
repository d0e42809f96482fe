"""Templates: the next nodes and the work left that a name's execution graph lets expect (SAGA §3.2 and §3.3)."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from weft.core.prediction.execution_graph import ANY, ExecutionGraph, Node
from weft.core.prediction.static_graph import StaticGraph

COLD_PROGRAMS: Final = 30  # SAGA §3.3: the first 30 tasks of a type are served as plain requests
_MOST_WEIGHT: Final = 512  # programs in the counts at which the counts are halved
_TRUST: Final = 4.0  # visits that the estimate of the coarser node is worth
_SEEN: Final = 3.0  # visits from which on a node's counts are used instead of the static graph


class Tier(StrEnum):
    """What forecasts of a program name rest on (SAGA §3.3)."""

    HINTS = "hints"  # a static graph that the user handed over, until 30 programs have ended
    INFERRED = "inferred"  # what 30 programs or more did
    COLD = "cold"  # nothing: no forecast is made


class Successor(NamedTuple):
    """A call that may come next."""

    node: Node
    chance: float
    pause_s: float  # the expected time until it arrives: tools, humans, the program's code; nan: unknown


class Forecast(NamedTuple):
    """What a thread does next."""

    successors: tuple[Successor, ...]  # the likeliest first; of equal chances, in the order of their nodes
    end: float  # the chance that no call follows

    @property
    def likeliest(self) -> Node | None:
        """The likeliest next node; None: the end."""
        first = self.successors[0] if self.successors else None
        return first.node if first is not None and first.chance > self.end else None


class _Fit(NamedTuple):
    """The counts at one time, from fine to coarse: by node and depth, by node, and of all nodes together."""

    graphs: tuple[ExecutionGraph, ...]
    left: tuple[dict[Node, Left], ...]
    after_any: dict[Node | None, float]  # the chances of the nodes that follow any call


class Template:
    """What is known of the programs of one name.

    The counts of a node at its depth are weighed against those of the node at any depth, and these against the counts
    of all calls. With n visits, the finer counts have the weight n / (n + 4).
    """

    def __init__(self) -> None:
        self.ended = 0  # programs that have ended, also those that the counts no longer hold
        self.graph = ExecutionGraph()
        self.hint: StaticGraph | None = None
        self._weight = 0.0  # programs in the counts
        self._fit: tuple[int, _Fit] | None = None  # with the number of programs that had ended
        self._hinted: tuple[int, ExecutionGraph, dict[Node, Left]] | None = None

    @property
    def tier(self) -> Tier:
        """What forecasts rest on."""
        if self.ended >= COLD_PROGRAMS:
            return Tier.INFERRED
        return Tier.COLD if self.hint is None else Tier.HINTS

    @property
    def weight(self) -> float:
        """The programs that the counts hold."""
        return self._weight

    def learn(self, counts: ExecutionGraph) -> None:
        """A program has ended. `counts` are what it did."""
        if not counts.nodes:
            return
        self.graph.add(counts)
        self.ended += 1
        self._weight += 1
        if self._weight >= _MOST_WEIGHT:
            self.graph, self._weight = self.graph.halved(), self._weight / 2

    def restore(self, graph: ExecutionGraph, ended: int, weight: float) -> None:
        """Take over what an earlier run has learned."""
        self.graph, self.ended, self._weight = graph, ended, weight
        self._fit = self._hinted = None

    def use_hint(self, hint: StaticGraph) -> None:
        """The user has handed over the static graph of the programs."""
        if hint != self.hint:
            self.hint, self._hinted = hint, None

    # -- forecasts

    def forecast(self, node: Node) -> Forecast | None:
        """What follows a call of this node; None: nothing is known."""
        if self.tier is Tier.COLD:
            return None
        if self.tier is Tier.HINTS and not self._has_seen(node):
            return self._hinted_forecast(node)
        fit = self._fitted()
        chances = dict(fit.after_any)
        for graph, each in ((fit.graphs[1], node.any_depth), (fit.graphs[0], node)):
            finer = graph.chances(each)
            if finer:
                weight = _weight(graph, each)
                chances = {target: (1 - weight) * chance for target, chance in chances.items()}
                for target, chance in finer.items():
                    any_depth = target.any_depth if target is not None else None
                    chances[any_depth] = chances.get(any_depth, 0.0) + weight * chance
        end = chances.pop(None, 0.0)
        if not chances and not end:
            return None
        means = fit.graphs[1].nodes
        found = [
            Successor(each, chance, means[each].mean.pause_s) for each, chance in chances.items() if each is not None
        ]
        return Forecast(tuple(sorted(found, key=lambda each: (-each.chance, each.node))), end)

    def left(self, node: Node) -> Left | None:
        """What is left of a thread at a node; None: nothing is known."""
        if self.tier is Tier.COLD:
            return None
        if self.tier is Tier.HINTS and not self._has_seen(node):
            return self._hint_fit()[1].get(Node(node.label))
        fit, left = self._fitted(), None
        for graph, lefts, each in reversed(list(zip(fit.graphs, fit.left, (node, node.any_depth, ANY), strict=True))):
            finer = lefts.get(each)
            if finer is not None and left is not None:
                weight = _weight(graph, each)
                left = Left(left.after.toward(finer.after, weight), left.with_call.toward(finer.with_call, weight))
            else:
                left = finer or left
        return left

    def _has_seen(self, node: Node) -> bool:
        any_depth = self._fitted().graphs[1].nodes.get(node.any_depth)
        return any_depth is not None and any_depth.visits >= _SEEN

    def _fitted(self) -> _Fit:
        """The fit, made again when a sixteenth more programs have ended."""
        if self._fit is None or self.ended > self._fit[0] + self._fit[0] // 16:
            from weft.core.prediction.template import left_by_node

            any_depth = self.graph.lumped(lambda node: node.any_depth)
            fine = ExecutionGraph()
            fine.add(self.graph)  # a copy, because the graph goes on changing
            graphs = (fine, any_depth, _one_node(any_depth))
            self._fit = self.ended, _Fit(graphs, tuple(map(left_by_node, graphs)), _after_any(any_depth))
        return self._fit[1]

    def _hint_fit(self) -> tuple[ExecutionGraph, dict[Node, Left]]:
        if self._hinted is None or self._hinted[0] != self.ended:
            from weft.core.prediction.template import left_by_node

            hint = self.hint or StaticGraph()
            labels = {node.label for node in self.graph}
            if self.ended >= _SEEN:  # nodes that make no call, such as those that only route
                hint = hint.without([name for name in hint.nodes if name not in labels])
            graph = hint.counts(_one_node(self.graph).nodes.get(ANY))
            self._hinted = self.ended, graph, left_by_node(graph) if self.ended else {}
        return self._hinted[1], self._hinted[2]

    def _hinted_forecast(self, node: Node) -> Forecast | None:
        chances = self._hint_fit()[0].chances(Node(node.label))
        end = chances.pop(None, 0.0)
        if not chances and not end:
            return None
        found = (Successor(each, chance, float("nan")) for each, chance in chances.items() if each is not None)
        return Forecast(tuple(sorted(found, key=lambda each: (-each.chance, each.node))), end)


def _one_node(graph: ExecutionGraph) -> ExecutionGraph:
    return graph.lumped(lambda _node: ANY)


def _after_any(graph: ExecutionGraph) -> dict[Node | None, float]:
    visits, found = sum(tally.visits for tally in graph.nodes.values()), dict[Node | None, float]()
    for node, tally in graph.nodes.items():
        for target, chance in graph.chances(node).items():
            found[target] = found.get(target, 0.0) + chance * tally.visits / visits
    return found


def _weight(graph: ExecutionGraph, node: Node) -> float:
    visits = graph.nodes[node].visits
    return visits / (visits + _TRUST)


# -- what is left of a running program, expected over what its execution graph knows


class Estimate(NamedTuple):
    """A mean and a standard deviation."""

    mean: float
    spread: float  # the standard deviation

    def plus(self, other: Estimate) -> Estimate:
        """The sum of two quantities. Their deviations add up, as if the quantities were fully correlated."""
        return Estimate(self.mean + other.mean, self.spread + other.spread)

    def toward(self, other: Estimate, weight: float) -> Estimate:
        """This estimate, moved towards another one; weight 1: the other one."""
        mean = self.mean + weight * (other.mean - self.mean)
        return Estimate(mean, self.spread + weight * (other.spread - self.spread))


class Remaining(NamedTuple):
    """What is left of a program, or of a thread of it."""

    calls: Estimate
    service_s: Estimate  # seconds on the model executor
    output_tokens: Estimate
    prefill_tokens: Estimate  # prompt tokens to compute

    def plus(self, other: Remaining) -> Remaining:
        """The sum over two threads."""
        return Remaining(*(mine.plus(theirs) for mine, theirs in zip(self, other, strict=True)))

    def toward(self, other: Remaining, weight: float) -> Remaining:
        """Each estimate, moved towards another one."""
        return Remaining(*(mine.toward(theirs, weight) for mine, theirs in zip(self, other, strict=True)))


class Left(NamedTuple):
    """What is left of a thread at a node."""

    after: Remaining  # after a call of the node
    with_call: Remaining  # with that call included


_COLUMNS: Final = len(Remaining._fields)  # the number of calls, then the costs without the pause


def left_by_node(graph: ExecutionGraph) -> dict[Node, Left]:
    """What is left at each node of a graph. Empty: the graph has no programs, or its counts lead to no end."""
    nodes = [node for node, tally in graph.nodes.items() if tally.visits > 0]
    if not nodes:
        return {}
    place = {node: number for number, node in enumerate(nodes)}
    follow, spread = np.zeros((len(nodes), len(nodes))), np.ones(len(nodes))
    cost, variance = np.ones((len(nodes), _COLUMNS)), np.zeros((len(nodes), _COLUMNS))
    for row, node in enumerate(nodes):
        tally = graph.nodes[node]
        for target, edge in tally.edges.items():
            if target in place:
                follow[row, place[target]] = edge.share / tally.visits
        goes_on = 1 - tally.ends / tally.visits
        spread[row] = follow[row].sum() / goes_on if goes_on > 0 else 1.0
        for column in range(_COLUMNS - 1):
            mean = tally.sums[column] / tally.visits
            cost[row, column + 1] = mean
            variance[row, column + 1] = max(0.0, tally.squares[column] / tally.visits - mean * mean)
    after = _solve(follow, follow @ cost)
    if after is None:
        return {}
    second = None
    for weights in (follow * spread[:, None], follow):  # the second choice if forks outweigh joins
        second = _solve(weights, weights @ (variance + cost * cost + 2 * cost * after))
        if second is not None:
            break
    beyond = np.zeros_like(after) if second is None else np.maximum(0.0, second - after * after)
    return {
        node: Left(_remaining(after[row], beyond[row]), _remaining(cost[row] + after[row], variance[row] + beyond[row]))
        for row, node in enumerate(nodes)
    }


def _solve(weights: npt.NDArray[np.float64], constant: npt.NDArray[np.float64]) -> npt.NDArray[np.float64] | None:
    """Solve x = weights x + constant; None if there is no finite solution without negative values."""
    try:
        found = np.linalg.solve(np.eye(len(weights)) - weights, constant)
    except np.linalg.LinAlgError:
        return None
    if not np.isfinite(found).all() or (found < -1e-6 * (1 + np.abs(found).max())).any():
        return None
    return cast("npt.NDArray[np.float64]", np.maximum(0.0, found))


def _remaining(mean: npt.NDArray[np.float64], variance: npt.NDArray[np.float64]) -> Remaining:
    return Remaining(*(Estimate(float(m), math.sqrt(float(v))) for m, v in zip(mean, variance, strict=True)))
