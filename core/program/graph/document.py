"""The graph of a program as a line of JSON. `ProgramGraph.to_json` describes the format."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from weft.core.accounts import MOST_WAITS, Account
from weft.core.errors import TraceError
from weft.core.process_rows import MOST_EARLIER_ENGINES
from weft.core.program.graph.nodes import CallNode, CallState, Edge, FoldedCalls

if TYPE_CHECKING:
    from weft.core.program.graph.dag import ProgramGraph

FORMAT: Final = "weft.graph"
VERSION: Final = 1
_SUMS: Final = tuple(each.name for each in fields(Account) if each.name != "waits")


def write(graph: ProgramGraph) -> str:
    """Return the graph as one line of JSON."""
    program: dict[str, Any] = {"program_id": graph.program_id, "session_id": graph.session_id, "name": graph.name}
    if graph.parent_program_id is not None:
        program["parent_program_id"] = graph.parent_program_id
    if graph.folded.calls:
        sums = _sums(graph.folded.account)
        program["folded"] = {"calls": graph.folded.calls, "path_s": graph.folded.path_s, **sums}
    calls = [
        {
            "call_id": node.call_id,
            "thread_id": node.thread_id,
            "label": node.label,
            "state": node.state,
            "parents": [{"call_id": edge.parent, "exact": edge.exact} for edge in node.parents],
            "tools": node.tools,
            "arrival_s": node.arrival_s,
            "completion_s": node.completion_s,
            **_sums(node.account),
            **({"folded_s": node.folded_s} if node.folded_s else {}),
            **({"engine_id": node.engine_id} if node.engine_id is not None else {}),
            **({"earlier_engine_ids": node.earlier_engine_ids} if node.earlier_engine_ids else {}),
            **({"waits": node.account.waits} if node.account.waits else {}),
        }
        for node in graph.calls
    ]
    return json.dumps({"format": FORMAT, "version": VERSION, "program": program, "calls": calls})


def read(text: str, kind: type[ProgramGraph]) -> ProgramGraph:
    """Return the graph that `write` wrote as `text`.

    Raises:
        TraceError: the text is not such a graph.
    """
    try:
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError("it is JSON, but no object")
        if "calls" in data and "format" not in data:
            raise ValueError("it looks like a trace, which `weft sim` and `weft trace export` read")
        if (data["format"], data["version"]) != (FORMAT, VERSION):
            raise ValueError(f"format {data['format']!r}, version {data['version']!r}")
        graph = kind(
            **{key: _typed(data["program"][key], str) for key in ("program_id", "session_id", "name")},
            parent_program_id=_typed(data["program"].get("parent_program_id"), str, type(None)),
        )
        for call in data["calls"]:
            node = _node(call)
            if node.call_id in graph or any(edge.parent not in graph for edge in node.parents):
                raise ValueError(f"call {node.call_id} is there twice or before its parents")
            graph.open(node)
        graph.folded = _folded(data["program"].get("folded"))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        detail = " ".join(f"{type(error).__name__}: {error}".split())
        raise TraceError(
            f"not a graph that `program.graph.to_json()` wrote ({detail:.200}). Give the text of one."
        ) from None
    return graph


def _node(data: dict[str, Any]) -> CallNode:
    times = {key: _typed(data[key], float, int, type(None)) for key in ("arrival_s", "completion_s")}
    earlier = _typed(data.get("earlier_engine_ids", []), list)
    return CallNode(
        **{key: _typed(data[key], str) for key in ("call_id", "thread_id", "label")},
        parents=tuple(Edge(_typed(each["call_id"], str), _typed(each["exact"], bool)) for each in data["parents"]),
        tools=tuple(_typed(tool, str) for tool in data["tools"]),
        state=CallState(data["state"]),
        **times,
        account=_account(data),
        folded_s=_typed(data.get("folded_s", 0.0), float, int),
        engine_id=_typed(data.get("engine_id"), str, type(None)),
        earlier_engine_ids=tuple(_typed(each, str) for each in earlier[:MOST_EARLIER_ENGINES]),
    )


def _folded(data: dict[str, Any] | None) -> FoldedCalls:
    if data is None:
        return FoldedCalls()
    return FoldedCalls(_typed(data["calls"], int), _typed(data["path_s"], float, int), _account(data))


def _account(data: dict[str, Any]) -> Account:
    pairs = data.get("waits", [])[:MOST_WAITS]
    waits = tuple((_typed(start_s, float, int), _typed(length_s, float, int)) for start_s, length_s in pairs)
    return Account(**{name: _typed(data[name], float, int) for name in _SUMS}, waits=waits)


def _sums(account: Account) -> dict[str, Any]:
    return {name: getattr(account, name) for name in _SUMS}


def _typed(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds or (isinstance(value, float) and not math.isfinite(value)):
        raise TypeError(f"{value!r:.80} is not of type {kinds[0].__name__}")
    return value
