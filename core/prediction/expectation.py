"""What is left of a running program, expected over what its execution graph knows."""

from __future__ import annotations

import math
from typing import Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from weft.core.prediction.execution_graph import ExecutionGraph, Node


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
