"""Programs from calls with times: what a call came after, how long after, and how much of its prompt is old.

Where a log has spans within spans, a call comes after the calls of what ended before it in the span that both are in.
Spans that overlap are branches.
"""

from __future__ import annotations

import heapq
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from weft.core.errors import TraceError
from weft.core.trace.format import TraceCall, TraceProgram, ordered
from weft.core.trace.importers.contract import LeftOut
from weft.core.trace.prefixes import common_prefix

_SLACK_S: Final = 1e-3  # by which times of one process may be wrong
_REDACTED: Final = "redacted-by-litellm"


def shared_tokens(prompt: int, cached: int, before: tuple[int, int] | None) -> int:
    """Return how many first tokens of a prompt the call before has had, where only the lengths are known.

    A prompt that is not shorter than the one before is taken to continue it. Of another one, only what a cache has
    found is taken to be old.

    Args:
        cached: the tokens that the prefix cache of the engine found.
        before: the lengths of the prompt and the output of the agent's call before, if there was one.
    """
    if before is None:
        return min(cached, prompt)
    return min(prompt, sum(before), prompt if prompt >= before[0] else cached)


class Texts:
    """What is kept of a prompt's messages: a hash and a length of each, and whose result the last one is."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self._hashes, self._ends = array("q"), array("q")
        self._by_model = [message.get("role") in ("assistant", "model") for message in messages]
        end = 0
        for message in messages:
            kept = {key: value for key, value in message.items() if key not in ("cache_control", "id")}
            shown = json.dumps(kept, sort_keys=True)
            end += len(shown)
            self._hashes.append(hash(shown))
            self._ends.append(end)
        self.tool = _tool_of(messages)

    def shared(self, before: Texts, prompt: int, lengths: tuple[int, int]) -> int:
        """Return how many first tokens of this prompt are those of another and its output. Characters tell it.

        Args:
            before: the texts of the other prompt.
            prompt: the tokens of this one.
            lengths: the tokens of the other prompt and its output.
        """
        same = common_prefix(self._hashes, before._hashes)
        shared = prompt * (self._ends[same - 1] if same else 0) // self._ends[-1]
        if same == len(before._hashes):
            shared = min(shared, lengths[0])
            if same < len(self._hashes) and self._by_model[same]:
                shared = sum(lengths)
        return min(shared, prompt, sum(lengths))


def texts_of(value: object) -> Texts | None:
    """Return what is kept of messages, which may be JSON in a text, or None if there are none or the log hides them."""
    if isinstance(value, str):
        if _REDACTED in value:
            return None
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return Texts([{"role": "user", "content": value}]) if value else None
    if isinstance(value, dict):
        value = value.get("messages")
    if not isinstance(value, list) or not value or not all(isinstance(each, dict) for each in value):
        return None
    try:
        return None if _REDACTED in json.dumps(value[-1]) else Texts(value)
    except RecursionError:
        return None


def _tool_of(messages: list[dict[str, Any]]) -> str | None:
    """Who wrote the last message: the name of a tool, or "human"."""
    last = messages[-1]
    if last.get("role") == "user":
        return "human"
    if last.get("role") != "tool":
        return None
    for message in reversed(messages):
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            name = function.get("name") if isinstance(function, dict) else None
            if isinstance(name, str) and name and call.get("id") == last.get("tool_call_id"):
                return name
    name = last.get("name")
    return name if isinstance(name, str) and name else "tool"


@dataclass(slots=True)
class LoggedSpan:
    """Something of a program that took time."""

    where: str
    span_id: str
    parent_id: str | None
    begin_s: float  # since 1970
    end_s: float
    is_call: bool = False  # whether it says that it is a call of a model
    lengths: tuple[int, int] | None = None  # the tokens of its prompt and its output
    cached: int = 0  # the tokens that a prefix cache had
    tool: str | None = None  # the tool that it is the run of
    agent: str | None = None  # the agent that it is the run of
    texts: Texts | None = None
    children: list[LoggedSpan] = field(default_factory=list)
    has_call: bool = False  # whether a span below it says that it is a call
    has_lengths: bool = False  # whether a span below it has lengths


def program_of(
    program_id: str, spans: list[LoggedSpan], name: str | None = None, tenant: str | None = None
) -> Iterator[TraceProgram | LeftOut]:
    """Yield the program of spans that belong together, if there is a call among them, and what was left out.

    Args:
        spans: its spans in any order. One whose parent is not among them is a root.
        name: its name. By default it is that of the agent that all of it is in.

    Raises:
        TraceError: spans are inside one another in a circle, or too deep.
    """
    tree = _Tree(spans)
    try:
        calls = tree.calls()
    except RecursionError:
        raise TraceError(f"{spans[0].where}: spans are nested too deeply; expected some levels at most.") from None
    if calls:
        yield TraceProgram(program_id, calls, tree.start_s, name or tree.name, tenant)
    if tree.left_out:
        yield LeftOut(tree.left_out)


@dataclass(slots=True, eq=False)
class _Placed:
    """A call that was given its place."""

    number: int
    span: LoggedSpan
    agent: LoggedSpan | None
    first: _Placed | None
    parents: tuple[_Placed, ...]
    tools: tuple[str, ...]


@dataclass(slots=True)
class _Before:
    """What was over: the last calls, and the tools that ran after them."""

    calls: tuple[_Placed, ...] = ()
    tools: tuple[str, ...] = ()


class _Tree:
    def __init__(self, spans: list[LoggedSpan]) -> None:
        self.left_out = 0
        by_id: dict[str, LoggedSpan] = {}
        for span in spans:
            if by_id.setdefault(span.span_id, span) is not span:  # it was sent twice
                self.left_out += span.is_call
        self._roots: list[LoggedSpan] = []
        for span in by_id.values():
            parent = by_id.get(span.parent_id or "")
            (self._roots if parent is None else parent.children).append(span)
        found = list(self._roots)
        for span in found:
            found += span.children
        if len(found) < len(by_id):
            raise TraceError(f"{spans[0].where}: spans are in one another in a circle; expected one that is in none.")
        for span in reversed(found):
            span.children.sort(key=lambda each: (each.begin_s, each.end_s))
            span.has_call = any(each.has_call or (each.is_call and each.lengths) for each in span.children)
            span.has_lengths = any(each.has_lengths or each.lengths for each in span.children)
        self._roots.sort(key=lambda each: (each.begin_s, each.end_s))
        self._placed: list[_Placed] = []
        self._whole = _whole(self._roots)
        self.name = self._whole.agent if self._whole is not None else None
        self.start_s = 0.0

    def calls(self) -> tuple[TraceCall, ...]:
        self._inside(self._roots, _Before(), None)
        if not self._placed:
            return ()
        self.start_s = min(each.span.begin_s for each in self._placed)
        return ordered(map(self._call, self._placed), self._placed[0].span.where)

    def _inside(self, spans: list[LoggedSpan], before: _Before, agent: LoggedSpan | None) -> _Before:
        """Place what is in a span, and return what is over when all of it is."""
        running: list[tuple[float, int, LoggedSpan, _Before]] = []  # by their ends
        last: list[tuple[LoggedSpan, _Before]] = []  # what is over, and nothing that is over began after it
        latest_s = 0.0  # the latest beginning of what is over
        for number, span in enumerate([*spans, None]):
            while running and (span is None or running[0][0] <= span.begin_s + _SLACK_S):
                _, _, over, what = heapq.heappop(running)
                latest_s = max(latest_s, over.begin_s)
                last = [each for each in last if each[0].end_s > latest_s + _SLACK_S]
                last.append((over, what))
            if span is not None:
                placed = self._place(span, _joined([each for _, each in last]) if last else before, agent)
                if placed is not None:
                    heapq.heappush(running, (span.end_s, number, span, placed))
        return _joined([each for _, each in last]) if last else before

    def _place(self, span: LoggedSpan, before: _Before, agent: LoggedSpan | None) -> _Before | None:
        """Place a span, and return what is over when it ends, or None if nothing of it counts."""
        if span.lengths is not None and (not span.has_call if span.is_call else not span.has_lengths):
            first = _own(before.calls, agent)
            parents = dict.fromkeys([*([first] if first is not None else []), *before.calls])
            placed = _Placed(len(self._placed), span, agent, first, tuple(parents), before.tools)
            self._placed.append(placed)
            return _Before((placed,))
        self.left_out += span.is_call and not span.has_lengths
        after = self._inside(span.children, before, span if span.agent is not None else agent)
        if after is before:
            return _Before(before.calls, (span.tool,)) if span.tool is not None else None
        return after

    def _call(self, placed: _Placed) -> TraceCall:
        span, first = placed.span, placed.first
        prompt, output = span.lengths or (0, 0)
        parents = tuple(f"c{each.number}" for each in placed.parents)
        gap_s = span.begin_s - max((each.span.end_s for each in placed.parents), default=self.start_s)
        before = first.span if first is not None else placed.parents[0].span if placed.parents else None
        lengths = (before.lengths[0], max(1, before.lengths[1])) if before is not None and before.lengths else None
        if span.texts is not None and before is not None and before.texts is not None and lengths is not None:
            shared = span.texts.shared(before.texts, prompt, lengths)
        elif first is None and placed.parents:  # the first call of a sub-agent
            shared = 0
        else:
            shared = shared_tokens(prompt, span.cached, lengths)
        told = span.texts.tool if span.texts is not None else None
        return TraceCall(
            call_id=f"c{placed.number}",
            parents=parents,
            output_tokens=max(1, output),
            prompt_tokens=prompt,
            gap_s=max(0.0, round(gap_s, 6)),
            tool=(", ".join(placed.tools) or told) if parents else None,
            shared_prefix_tokens=shared,
            at_s=max(0.0, round(span.begin_s - self.start_s, 6)),
            agent=placed.agent.agent if placed.agent is not None and placed.agent is not self._whole else None,
        )


def _whole(roots: list[LoggedSpan]) -> LoggedSpan | None:
    """The agent that all calls are in, which is the program itself."""
    inside = roots
    while True:
        inside = [span for span in inside if span.has_lengths or span.lengths is not None]
        if len(inside) != 1 or inside[0].agent is not None:
            return inside[0] if len(inside) == 1 else None
        inside = inside[0].children


def _joined(parts: list[_Before]) -> _Before:
    calls = dict.fromkeys(call for part in parts for call in part.calls)
    return _Before(tuple(calls), tuple(dict.fromkeys(tool for part in parts for tool in part.tools)))


def _own(calls: tuple[_Placed, ...], agent: LoggedSpan | None) -> _Placed | None:
    """The last call of an agent that is among these calls, or before one of them."""
    own = [call for call in calls if call.agent is agent]
    if own:
        return max(own, key=lambda call: call.span.end_s)
    call = calls[0] if calls else None
    while call is not None and call.agent is not agent:
        call = call.first or (call.parents[0] if call.parents else None)
    return call
