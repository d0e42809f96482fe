"""Execution graphs as JSON: the part `graphs` of a history (`weft.core.policies.history`).

::

    {"version": 1, "names": [{"name": "chat", "ended": 812, "weight": 300.5, "nodes": [
        [label, [tools], depth, visits, starts, ends, [sums of costs], [sums of squares],
         [[place, first, share], ...]], ...]}]}

The names used last come first. `place` is the position of the edge's target among the nodes. Costs are in the order of
the fields of `weft.core.prediction.Cost`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, TypeGuard

from weft.core.prediction.execution_graph import MOST_LETTERS, Cost, ExecutionGraph, Node, Succession, Tally
from weft.core.prediction.foresight import MOST_LETTERS as MOST_NAME_LETTERS
from weft.core.prediction.foresight import MOST_NAMES, Templates

VERSION: Final = 1
MOST_BYTES: Final = 1 << 24
_MOST: Final = 1e30  # the largest number in a file: a sum of squares
_COSTS: Final = len(Cost._fields)


def encode_graphs(templates: Templates) -> dict[str, Any]:
    """The templates as JSON data. Names beyond 16 MiB of text are left out, those used longest ago first."""
    names, size = [], 0
    for name, template in reversed(list(templates)):
        if template.ended:
            nodes = _nodes(template.graph)
            weight = max(round(template.weight, 6), 1e-6)  # 0 would be no weight, and the file could not be read
            row = {"name": name, "ended": template.ended, "weight": weight, "nodes": nodes}
            size += len(json.dumps(row))
            if size > MOST_BYTES:
                break
            names.append(row)
    return {"version": VERSION, "names": names}


def decode_graphs(data: object, templates: Templates) -> None:
    """Read what `encode_graphs` wrote into empty templates. ValueError says what is wrong with damaged data, or data of
    a newer version of Weft."""
    if not isinstance(data, Mapping) or data.get("version") != VERSION:
        version = data.get("version") if isinstance(data, Mapping) else data
        raise ValueError(f"the version of its execution graphs is {version!r:.40}, and this Weft reads {VERSION}")
    rows = data.get("names")
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError("it has no list of execution graphs")
    for row in reversed(rows[:MOST_NAMES]):
        name = row.get("name")
        try:
            if not _is_text(name, MOST_NAME_LETTERS):
                raise ValueError("the name")
            ended, weight = _count(row["ended"]), _number(row["weight"])
            if ended == 0 or not 0 < weight <= ended:
                raise ValueError("the number of programs")
            templates.restore(name, _graph(row["nodes"]), ended, weight)
        except (LookupError, TypeError, ValueError, AssertionError) as error:
            raise ValueError(f"the execution graph of {name!r:.40} is damaged: {error!s:.200}") from None


def _nodes(graph: ExecutionGraph) -> list[Any]:
    places = {node: place for place, node in enumerate(graph.nodes)}

    def short(values: list[float]) -> list[float]:
        return [round(value, 9) for value in values]

    return [
        [
            *(node.label, node.tools, node.depth),
            *short([tally.visits, tally.starts, tally.ends]),
            *(short(tally.sums), short(tally.squares)),
            [[places[target], *short([edge.first, edge.share])] for target, edge in tally.edges.items()],
        ]
        for node, tally in graph.nodes.items()
    ]


def _graph(rows: list[Any]) -> ExecutionGraph:
    graph, nodes = ExecutionGraph(), []
    for label, tools, depth, visits, starts, ends, sums, squares, _ in rows:
        if not all(_is_text(each, MOST_LETTERS) for each in (label, *tools)):
            raise ValueError("a label or a tool")
        node = Node(label, tuple(tools), _count(depth))
        if node in graph.nodes or len(sums) != _COSTS or len(squares) != _COSTS:
            raise ValueError("a node that is there twice, or its costs")
        counts = _number(visits), _number(starts), _number(ends)
        graph.nodes[node] = Tally(*counts, [_number(each) for each in sums], [_number(each) for each in squares])
        nodes.append(node)
    for node, row in zip(nodes, rows, strict=True):
        for place, first, share in row[-1]:
            graph.nodes[node].edges[nodes[_count(place)]] = Succession(_number(first), _number(share))
        graph.edges += len(row[-1])
    graph.check_integrity()
    return graph


def _number(value: object) -> float:
    # A whole number may be too large for a float, and NaN is not in any range.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST:
        raise ValueError(f"{value!r:.40} is no count")
    return float(value)


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= 10**12:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def _is_text(value: object, letters: int) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) <= letters
