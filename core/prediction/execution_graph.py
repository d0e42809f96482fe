"""The execution graph of a program name: what its programs did from each node on, in counts (SAGA §3.2).

A running program has a cursor for each thread, which says where it is in the graph.

SAGA's graph is G = (V, E, P, φ): nodes, edges, the chance of each edge, and the tool of each node. Here a node is the
label of a call, the tools that ran before it, and the class of its depth. Two counts are kept of each edge:

- `first`: how often the first call that followed a call of the node was of the other node. Together with the number of
  calls that no call followed, it gives the chance P of each next node, and the chance of the end.
- `share`: the number of calls that followed. A call is divided among the parents that end its longest chains. It gives
  the expected number of calls that follow, which is above 1 where threads fork and below 1 where they join.

The counts are conserved: each visit of a node is a start or a sum of shares, and it has one first successor or one end.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from weft.core.ids import CallId, CallIdentity, ThreadId

MOST_NODES: Final = 256  # of one graph
MOST_EDGES: Final = 1024  # of one graph
MOST_LETTERS: Final = 128  # of a label or a tool; longer ones count as one if they begin alike
_MOST_TOOLS: Final = 8  # of a node
_MOST_DEPTH: Final = 24
_RARE: Final = 0.75  # visits below which a node is rare, after the counts were halved: it was visited once


class Node(NamedTuple):
    """What a call is known by."""

    label: str
    tools: tuple[str, ...] = ()  # the tools between its parents and the call, sorted, each once
    depth: int = 0  # class of the number of calls before it on its longest chain; also 0 if depths do not count

    @classmethod
    def of(cls, label: str, tools: Iterable[str], calls_before: int) -> Self:
        """The node of a call. Long names, and tools beyond the bound, are cut off."""
        names = sorted({tool[:MOST_LETTERS] for tool in tools})
        return cls(label[:MOST_LETTERS], tuple(names[:_MOST_TOOLS]), _depth_class(calls_before))

    @property
    def any_depth(self) -> Node:
        """The same node without its depth."""
        return Node(self.label, self.tools) if self.depth else self


def _depth_class(calls_before: int) -> int:
    """0, 1, 2 to 3, 4 to 7, 8 to 15; then two classes for each power of two, because long chains have the most left."""
    octave = calls_before.bit_length()
    if octave < 5:
        return octave
    return min(2 * octave - 5 + (calls_before >> (octave - 2) & 1), _MOST_DEPTH)


OTHER: Final = Node("\tother")  # all nodes beyond the bounds together
ANY: Final = Node("\tany")  # all nodes together, for the coarsest estimate


class Cost(NamedTuple):
    """What a call costs, and the pause before it."""

    service_s: float = 0.0  # seconds on the model executor
    output_tokens: float = 0.0
    prefill_tokens: float = 0.0  # prompt tokens that were computed
    pause_s: float = 0.0  # from the end of its last parent to its arrival: tools, humans, the program's code


@dataclass(slots=True)
class Succession:
    """The counts of an edge."""

    first: float = 0.0
    share: float = 0.0


@dataclass(slots=True)
class Tally:
    """The counts of a node."""

    visits: float = 0.0
    starts: float = 0.0
    ends: float = 0.0
    sums: list[float] = field(default_factory=lambda: [0.0] * len(Cost._fields))
    squares: list[float] = field(default_factory=lambda: [0.0] * len(Cost._fields))
    edges: dict[Node, Succession] = field(default_factory=dict)

    @property
    def mean(self) -> Cost:
        return Cost(*(each / self.visits for each in self.sums)) if self.visits else Cost()


class ExecutionGraph:
    """The counts of programs of one name. At most 256 nodes and 1024 edges; further nodes count as one."""

    def __init__(self) -> None:
        self.nodes: dict[Node, Tally] = {}
        self.edges = 0

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def size(self) -> int:
        """Nodes and edges."""
        return len(self.nodes) + self.edges

    # -- counting

    def visit(self, node: Node, parents: Sequence[tuple[Node, bool, float]], cost: Cost) -> Node:
        """A call has finished.

        Args:
            parents: For each parent: its node, which has been visited before; whether this is the first call that
                followed it; and its share in the call. The shares add up to 1.

        Returns the node that it counts as.
        """
        node = self._known(node)
        tally = self.nodes[node]
        tally.visits += 1
        for place, value in enumerate(cost):
            tally.sums[place] += value
            tally.squares[place] += value * value
        tally.starts += not parents
        for parent, is_first, share in parents:
            self._add(parent, node, float(is_first), share)
        return node

    def end(self, node: Node) -> None:
        """No call followed a call of this node, which has been visited, before its program ended."""
        self.nodes[node].ends += 1

    def add(self, other: ExecutionGraph, rename: Callable[[Node], Node] = lambda node: node) -> None:
        """Add the counts of another graph, with other names for its nodes."""
        names = {node: self._known(rename(node)) for node in other.nodes}
        for node, tally in other.nodes.items():
            mine = self.nodes[names[node]]
            mine.visits += tally.visits
            mine.starts += tally.starts
            mine.ends += tally.ends
            for place, (value, square) in enumerate(zip(tally.sums, tally.squares, strict=True)):
                mine.sums[place] += value
                mine.squares[place] += square
            for target, edge in tally.edges.items():
                self._add(names[node], names[target], edge.first, edge.share)

    def lumped(self, rename: Callable[[Node], Node]) -> ExecutionGraph:
        """The same counts with nodes of the same new name taken together."""
        made = ExecutionGraph()
        made.add(self, rename)
        return made

    def halved(self) -> ExecutionGraph:
        """A copy with halved counts, so that later programs count more. Rare nodes are taken together."""
        made = self.lumped(lambda node: node if self.nodes[node].visits / 2 >= _RARE else OTHER)
        for tally in made.nodes.values():
            tally.visits, tally.starts, tally.ends = tally.visits / 2, tally.starts / 2, tally.ends / 2
            tally.sums = [each / 2 for each in tally.sums]
            tally.squares = [each / 2 for each in tally.squares]
            for edge in tally.edges.values():
                edge.first, edge.share = edge.first / 2, edge.share / 2
        return made

    def _known(self, node: Node) -> Node:
        """The node, or `OTHER` if the graph is full."""
        if node not in self.nodes:
            if node is not OTHER and len(self.nodes) >= MOST_NODES - 1:
                return self._known(OTHER)
            self.nodes[node] = Tally()
        return node

    def _add(self, source: Node, target: Node, first: float, share: float) -> None:
        edge = self._edge(self.nodes[source], target)
        if edge is None:  # too many edges: the visit becomes a start, and its parent an end
            self.nodes[source].ends += first
            self.nodes[target].starts += share
        else:
            edge.first += first
            edge.share += share

    def _edge(self, tally: Tally, target: Node) -> Succession | None:
        edge = tally.edges.get(target)
        if edge is None and self.edges < MOST_EDGES:
            edge = tally.edges[target] = Succession()
            self.edges += 1
        return edge

    # -- reading

    def chances(self, node: Node) -> dict[Node | None, float]:
        """The chance of each node that may follow first. The key None is the end. Empty: the node is not known."""
        tally = self.nodes.get(node)
        if tally is None or not tally.visits:
            return {}
        found: dict[Node | None, float] = {each: edge.first / tally.visits for each, edge in tally.edges.items()}
        found[None] = tally.ends / tally.visits
        return {each: chance for each, chance in found.items() if chance > 0}

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def check_integrity(self) -> None:
        """Assert that no visit is lost, and that the bounds hold. For tests, and for graphs from a file."""
        came = {node: tally.starts for node, tally in self.nodes.items()}
        for node, tally in self.nodes.items():
            went = tally.ends + sum(edge.first for edge in tally.edges.values())
            if not math.isclose(went, tally.visits, rel_tol=1e-6, abs_tol=1e-4):
                raise AssertionError(f"{node}: {tally.visits} visits, and {went} successors and ends")
            for target, edge in tally.edges.items():
                came[target] += edge.share
        for node, tally in self.nodes.items():
            if not math.isclose(came[node], tally.visits, rel_tol=1e-6, abs_tol=1e-4):
                raise AssertionError(f"{node}: {tally.visits} visits, and {came[node]} starts and shares")
        if len(self.nodes) > MOST_NODES or self.edges > MOST_EDGES:
            raise AssertionError(f"{len(self.nodes)} nodes and {self.edges} edges")
        if self.edges != sum(len(tally.edges) for tally in self.nodes.values()):
            raise AssertionError("the edges are miscounted")


MOST_CALLS: Final = 512  # calls of a program that are in flight, or may still become parents
_MOST_PARENTS: Final = 64  # parents of a call that are counted: the newest


@dataclass(slots=True, eq=False)
class Cursor:
    """A call that no other call follows yet: it runs, or its thread is between two calls."""

    call_id: CallId
    thread_id: ThreadId
    node: Node
    calls_before: int  # on the longest chain that leads to it
    parents: tuple[Cursor, ...]  # empty once it has finished
    pause_s: float  # from the end of its last parent to its arrival
    is_running: bool = True
    is_followed: bool = False  # a call that follows it has finished
    following: int = 0  # calls in flight that follow it
    left_s: float = 0.0  # when it finished


class ProgramCursors:
    """The cursors of one program, and the counts of what it did.

    If a call fails, or is cancelled, its parents get their cursors back. If a program has more than 512 calls, the
    oldest can no longer be parents, and threads that stopped at them count as ended.
    """

    def __init__(self) -> None:
        self._calls: OrderedDict[CallId, Cursor] = OrderedDict()  # the oldest first
        self._open: dict[CallId, Cursor] = {}
        self._counts = ExecutionGraph()

    def arrive(self, identity: CallIdentity, label: str, tools: Iterable[str], now_s: float) -> None:
        """A call begins. The cursors of its parents move to it. A call that began before changes nothing.

        Args:
            identity: The call. Parents that are not known are left out.
            tools: The tools that ran between its parents and the call.
        """
        call_id, parents = identity.call_id, identity.parents[-_MOST_PARENTS:]
        if call_id in self._calls:
            return
        before, depth, left_s = [], 0, -math.inf
        for parent in parents:
            each = self._calls.get(parent)
            if each is not None and not each.is_running:
                before.append(each)
                each.following += 1
                depth, left_s = max(depth, each.calls_before + 1), max(left_s, each.left_s)
        pause_s = max(0.0, now_s - left_s) if before else 0.0
        cursor = Cursor(call_id, identity.thread_id, Node.of(label, tools, depth), depth, tuple(before), pause_s)
        self._calls[call_id] = cursor
        self._open[call_id] = cursor
        for each in before:
            self._place(each)
        if len(self._calls) > MOST_CALLS:
            self._forget(next(iter(self._calls)))

    def leave(self, call_id: CallId, cost: Cost | None, now_s: float) -> None:
        """A call ends. An unknown call changes nothing.

        Args:
            cost: What it cost, without its pause. None: it has no result, so nothing follows it.
        """
        cursor = self._calls.get(call_id)
        if cursor is None or not cursor.is_running:
            return
        parents, cursor.parents = cursor.parents, ()
        for each in parents:
            each.following -= 1
        if cost is None:
            del self._calls[call_id], self._open[call_id]
            for each in parents:
                self._place(each)
            return
        cursor.is_running, cursor.left_s = False, now_s
        last = [each for each in parents if each.calls_before == cursor.calls_before - 1]  # on its longest chains
        before = [(each.node, not each.is_followed, (each in last) / len(last)) for each in parents]
        cursor.node = self._counts.visit(cursor.node, before, cost._replace(pause_s=cursor.pause_s))
        for each in parents:
            each.is_followed = True

    def finish(self) -> ExecutionGraph:
        """End the program, and return its counts. Calls in flight do not count."""
        for call_id in [call_id for call_id, each in self._calls.items() if each.is_running]:
            self.leave(call_id, None, 0.0)
        while self._calls:
            self._forget(next(iter(self._calls)))
        return self._counts

    @property
    def cursors(self) -> tuple[Cursor, ...]:
        """The calls that no call follows yet, the oldest first."""
        return tuple(self._open.values())

    def _place(self, cursor: Cursor) -> None:
        """Keep the cursor of a call while no call follows it."""
        if cursor.is_followed or cursor.following:
            self._open.pop(cursor.call_id, None)
        elif self._calls.get(cursor.call_id) is cursor:
            self._open[cursor.call_id] = cursor

    def _forget(self, call_id: CallId) -> None:
        cursor = self._calls[call_id]
        if cursor.is_running:
            self.leave(call_id, None, 0.0)
            return
        del self._calls[call_id]
        self._open.pop(call_id, None)
        if not cursor.is_followed:
            self._counts.end(cursor.node)
            cursor.is_followed = True  # so that its end is counted once

    def check_integrity(self) -> None:
        """Assert that the calls that no call follows have cursors, and that the bounds hold. For tests."""
        calls = self._calls
        is_open = {call_id for call_id, each in calls.items() if not each.is_followed and not each.following}
        if is_open != set(self._open) or len(calls) > MOST_CALLS:
            raise AssertionError(f"{len(self._open)} cursors of {len(calls)} calls, and {len(is_open)} should be")
        following = [parent for each in calls.values() for parent in each.parents]
        if any(each.following != sum(parent is each for parent in following) for each in calls.values()):
            raise AssertionError("the calls in flight that follow a call are miscounted")
