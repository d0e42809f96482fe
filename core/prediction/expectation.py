"""What a program has left, solved from the execution graph of its name (SAGA eq. 9).

Let m[s, t] be the expected number of calls of node t that follow a call of node s, w[t] the cost of a call of node t,
and R[s] what is left after a call of node s. Then

    R[s] = Σ_t m[s, t] (w[t] + R[t])

SAGA sums the nodes that have not been executed. In a graph with loops, R is the expectation of that sum. The equation
has a solution, because each program that was counted has ended. The second moment assumes that either all threads that
may follow a call follow, or none. With q for the chance that any follows, B[s] = Σ_t m[s, t] / q threads follow, and

    E[R²][s] = Σ_t m[s, t] B[s] E[(w[t] + R[t])²]

This is exact for a chain, and too large if the threads are independent.
"""

from __future__ import annotations

import math
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from weft.core.prediction.execution_graph import ExecutionGraph, Node
from weft.core.prediction.remaining import Estimate, Left, Remaining

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
    """Solve x = weights x + constant.

    Args:
        weights: For n nodes, of shape (n, n).
        constant: Of shape (n, columns).

    Returns:
        x, of the shape of `constant`; None if there is no finite solution without negative values.
    """
    try:
        found = np.linalg.solve(np.eye(len(weights)) - weights, constant)
    except np.linalg.LinAlgError:
        return None
    if not np.isfinite(found).all() or (found < -1e-6 * (1 + np.abs(found).max())).any():
        return None
    return cast("npt.NDArray[np.float64]", np.maximum(0.0, found))


def _remaining(mean: npt.NDArray[np.float64], variance: npt.NDArray[np.float64]) -> Remaining:
    return Remaining(*(Estimate(float(m), math.sqrt(float(v))) for m, v in zip(mean, variance, strict=True)))
