"""The dynamic DAG of a program's calls as it unfolds (Autellix §4.2.1).

It has calls with parents and service, threads, forks, joins, interceptions and the critical path (eq. 2). Times are
seconds of the engine's monotonic clock, passed in by the caller; durations are seconds.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from weft.core.accounts import Account
from weft.core.ids import CallId, EngineId, ProgramId, SessionId, ThreadId
from weft.core.program.graph import document, flowchart, picture
from weft.core.program.graph.nodes import CallNode, CallState, CriticalPath, Edge, FoldedCalls, Interception
from weft.core.tables import Table

KEEP_CALLS: Final = 20_000  # beyond which the older half is folded


_edge = functools.lru_cache(4096)(Edge)  # a call is a parent of many calls in a wide program


class ProgramGraph:
    """The DAG of one program. Only one thread at a time may write to it; any thread may read meanwhile.

    A program of more than 20,000 calls has the 10,000 newest calls at least, and those that may still become parents.
    The sums over the others are in `folded`. A reader that looks up calls several times takes a `copy` first.

    A terminal shows a table of the calls, `print(program.graph)` too, and a notebook a picture.
    """

    def __init__(
        self, program_id: ProgramId, session_id: SessionId, name: str, parent_program_id: ProgramId | None = None
    ) -> None:
        self.program_id = program_id
        self.session_id = session_id
        self.name = name
        self.parent_program_id = parent_program_id  # of the program inside one of whose runs this program runs
        self._calls: dict[CallId, CallNode] = {}  # in the order in which they started, so parents come first
        self._limit = KEEP_CALLS
        self.folded = FoldedCalls()
        self._edges: tuple[tuple[CallId, ...], tuple[Edge, ...]] = ((), ())  # parents and edges of the latest call

    # -- writing

    def edges(self, parents: tuple[CallId, ...], inexact: tuple[CallId, ...]) -> tuple[Edge, ...]:
        """The edges of a call. Calls that share a tuple of parents share a tuple of edges."""
        if parents is not self._edges[0]:
            guesses = set(inexact)
            self._edges = parents, tuple(_edge(parent, parent not in guesses) for parent in parents)
        return self._edges[1]

    def open(self, node: CallNode) -> None:
        """Add a call that starts. Its parents must have been opened before."""
        self._calls[node.call_id] = node

    def arrive(self, call_id: CallId, now_s: float) -> None:
        """Note that a call reaches an engine. A call that was not opened changes nothing."""
        if call_id in self._calls:
            self._calls[call_id] = replace(self._calls[call_id], state=CallState.RUNNING, arrival_s=now_s)

    def leave(
        self,
        call_id: CallId,
        now_s: float,
        account: Account,
        state: CallState,
        *,
        engine_id: EngineId | None = None,
        earlier_engine_ids: tuple[EngineId, ...] = (),
    ) -> None:
        """Note that a call leaves the engine, or that the engine refuses it. An unknown call changes nothing."""
        if call_id in self._calls:
            left_s = None if self[call_id].arrival_s is None else now_s
            node = self[call_id]
            self._calls[call_id] = replace(
                node,
                state=state,
                completion_s=left_s,
                account=account,
                engine_id=engine_id or node.engine_id,
                earlier_engine_ids=earlier_engine_ids,
            )

    def settle(self, call_id: CallId, account: Account) -> None:
        """Replace the account of a call that has left. An unknown call changes nothing."""
        if call_id in self._calls:
            self._calls[call_id] = replace(self[call_id], account=account)

    def fold(self, stays: Callable[[CallId], bool]) -> None:
        """Replace the oldest calls by their sums, once there are many calls. Edges from them are left out.

        Args:
            stays: whether a call may still become a parent. Such calls are not folded, nor are running ones.
        """
        if len(self._calls) <= self._limit:
            return
        longest = self._longest()
        old = list(self._calls.values())[: len(self._calls) - KEEP_CALLS // 2]
        gone = {node.call_id for node in old if node.state is not CallState.RUNNING and not stays(node.call_id)}
        accounts = (node.account for node in old if node.call_id in gone)
        chains_s = {call_id: longest[call_id][0] for call_id in gone if call_id in longest}
        path_s = max(chains_s.values(), default=0.0)
        self.folded = FoldedCalls(
            self.folded.calls + len(gone), max(self.folded.path_s, path_s), sum(accounts, self.folded.account)
        )
        # Readers on other threads go on with the former dictionary.
        rest: dict[CallId, CallNode] = {}
        parents: dict[int, tuple[tuple[Edge, ...], float]] = {}  # by the identity of a tuple, which calls may share
        for call_id, node in self._calls.items():
            if call_id in gone:
                continue
            key = id(node.parents)
            if key not in parents:
                before_s = (chains_s[edge.parent] for edge in node.parents if edge.parent in chains_s)
                edges = tuple(edge for edge in node.parents if edge.parent not in gone)
                parents[key] = edges, max(before_s, default=0.0)
            edges, folded_s = parents[key]
            if len(edges) < len(node.parents):
                node = replace(node, parents=edges, folded_s=max(node.folded_s, folded_s))  # noqa: PLW2901  the new node
            rest[call_id] = node
        self._calls = rest
        self._limit = max(KEEP_CALLS, 2 * len(rest))

    def _longest(self) -> dict[CallId, tuple[float, CallId | None]]:
        """For each call that has left: the service of the longest chain that ends with it, and the call before it.

        Equation 2: p(c) = max over parents k of p(k) + t(k), and 0 for a root.
        """
        longest: dict[CallId, tuple[float, CallId | None]] = {}
        chains: dict[int, tuple[float, CallId | None]] = {}  # by the identity of a tuple of parents
        for node in self.calls:
            if node.state in (CallState.NAMED, CallState.RUNNING):
                continue
            before = chains.get(id(node.parents))
            if before is None:
                known = ((longest[edge.parent][0], edge.parent) for edge in node.parents if edge.parent in longest)
                before = chains[id(node.parents)] = max(known, key=lambda each: each[0], default=(0.0, None))
            before_s, call_id = max(before, (node.folded_s, None), key=lambda each: each[0])
            longest[node.call_id] = (before_s + node.service_s, call_id)
        return longest

    # -- reading

    @property
    def calls(self) -> tuple[CallNode, ...]:
        """All calls, in the order in which they started."""
        return tuple(self._calls.values())

    def copy(self) -> ProgramGraph:
        """Return the graph as it is now, which does not change any more."""
        made = ProgramGraph(self.program_id, self.session_id, self.name, self.parent_program_id)
        made._calls, made.folded = dict(self._calls), self.folded
        return made

    def __contains__(self, call_id: CallId) -> bool:
        return call_id in self._calls

    def __getitem__(self, call_id: CallId) -> CallNode:
        return self._calls[call_id]

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def threads(self) -> dict[ThreadId, tuple[CallId, ...]]:
        """The calls of each thread in order. Threads are in the order of their first calls."""
        threads: dict[ThreadId, list[CallId]] = {}
        for node in self.calls:
            threads.setdefault(node.thread_id, []).append(node.call_id)
        return {thread_id: tuple(calls) for thread_id, calls in threads.items()}

    @property
    def forks(self) -> tuple[CallId, ...]:
        """The calls that are a parent of several calls."""
        children = Counter(edge.parent for node in self.calls for edge in node.parents)
        return tuple(node.call_id for node in self.calls if children[node.call_id] > 1)

    @property
    def joins(self) -> tuple[CallId, ...]:
        """The calls that have several parents."""
        return tuple(node.call_id for node in self.calls if len(node.parents) > 1)

    @property
    def interceptions(self) -> tuple[Interception, ...]:
        """The interception before each call that has parents, if the call and a parent were on an engine."""
        calls = self._calls
        found = (_interception(node, calls) for node in tuple(calls.values()))
        return tuple(each for each in found if each is not None)

    def interception(self, call_id: CallId) -> Interception | None:
        """The interception before a call, as in `interceptions`."""
        calls = self._calls
        return _interception(calls[call_id], calls)

    def critical_path(self) -> CriticalPath:
        """Return the longest chain of calls that have left the engine (eq. 2). Guesses count as parents.

        Of chains that are equally long, it is one whose last call began first.
        """
        longest = self._longest()
        last = max(longest, key=lambda each: longest[each][0], default=None)
        if last is None or longest[last][0] < self.folded.path_s:
            return CriticalPath(self.folded.path_s, ())
        calls: list[CallId] = []
        call_id: CallId | None = last
        while call_id is not None:
            calls.append(call_id)
            call_id = longest[call_id][1]
        return CriticalPath(longest[last][0], tuple(reversed(calls)))

    # -- JSON

    def to_json(self) -> str:
        """Return the graph as one line of JSON, so that a file may hold many graphs::

            {"format": "weft.graph", "version": 1,
             "program": {"program_id", "session_id", "name",
                         "parent_program_id",                      # only if the program is inside another one
                         "folded": {"calls", "path_s", "service_s", …}},  # only if older calls were folded
             "calls": [{"call_id", "thread_id", "label", "state",
                        "parents": [{"call_id", "exact"}],           # the oldest first
                        "tools": [name],
                        "arrival_s", "completion_s",                 # null: has not reached, or not left, an engine
                        "service_s", "wait_s", "preemptions",
                        "prompt_tokens", "output_tokens", "cached_tokens",
                        "swapped_tokens", "recomputed_tokens", "fetched_tokens",
                        "folded_s",                                  # only if folded calls came before the call
                        "engine_id",                                 # only if it was on one
                        "earlier_engine_ids",                        # only if it was on others before
                        "waits"}]}                                   # only if it waited after it had begun to run

        Times are seconds of the engine's monotonic clock. Keys are in this order, and calls are in the order in which
        they started.
        """
        return document.write(self)

    @classmethod
    def from_json(cls, text: str) -> ProgramGraph:
        """Return the graph that `to_json` wrote as `text`.

        Raises:
            TraceError: the text is not such a graph.
        """
        return document.read(text, cls)

    # -- pictures in text: a box for each thread, guesses dashed, the critical path thick, tools at the edges

    def to_mermaid(self) -> str:
        """Return the graph as a Mermaid flowchart."""
        return flowchart.mermaid(self)

    def to_dot(self) -> str:
        """Return the graph in the DOT language of Graphviz."""
        return flowchart.dot(self)

    # -- what terminals and notebooks show

    def to_svg(self) -> str:
        """Return a picture of the graph in SVG. Of many calls, it has a part, and says so."""
        return picture.svg(self)

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def __rich__(self) -> Table:
        return flowchart.calls(self)

    def __str__(self) -> str:
        return str(flowchart.calls(self))

    def __repr__(self) -> str:
        return f"<weft.ProgramGraph {self.name!r} {self.program_id}: {len(self) + self.folded.calls} calls>"


def _interception(node: CallNode, calls: dict[CallId, CallNode]) -> Interception | None:
    ends = ((calls[edge.parent].completion_s, edge.parent) for edge in node.parents)
    known = [(end_s, parent) for end_s, parent in ends if end_s is not None]
    if not known or node.arrival_s is None:
        return None
    start_s, after = max(known, key=lambda each: each[0])
    return Interception(after, node.call_id, start_s, node.arrival_s, node.tools)
