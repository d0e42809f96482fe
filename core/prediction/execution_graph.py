"""The execution graph of a program name: what its programs did from each step on, in counts (SAGA §3.2).

SAGA's graph is G = (V, E, P, φ): steps, edges, the chance of each edge, and the tool of each step. Here a step is the
label of a call, the tools that ran before it, and the class of its depth. Two counts are kept of each edge:

- `first`: how often a call of the step was followed by one of the other step at first. With the calls that were
  followed by none it gives the chance P of each next step, and that of the end.
- `share`: the calls that followed, each shared out among the parents that ended its longest chains. It gives the
  expected number of calls that follow, which is above 1 where threads fork and below 1 where they join.

So the counts are conserved: each visit of a step is a start or comes by shares, and it ends or has a first successor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

MOST_STEPS: Final = 256  # of one graph
MOST_EDGES: Final = 1024
MOST_LETTERS: Final = 128  # of a label or a tool; longer ones count as one if they begin alike
_MOST_TOOLS: Final = 8  # of a step
_MOST_AGE: Final = 22
_RARE: Final = 0.75  # visits; what was seen once before the counts were halved is rare


class Step(NamedTuple):
    """What a call is known by."""

    label: str
    tools: tuple[str, ...] = ()  # that ran between its parents and the call, sorted, each once
    age: int = 0  # class of the number of calls before it on its longest chain; 0 also: of any age

    @classmethod
    def of(cls, label: str, tools: Iterable[str], calls_before: int) -> Self:
        """The step of a call. What exceeds the bounds is cut off."""
        names = sorted({tool[:MOST_LETTERS] for tool in tools})
        return cls(label[:MOST_LETTERS], tuple(names[:_MOST_TOOLS]), _age(calls_before))

    @property
    def ageless(self) -> Step:
        """The same at any depth."""
        return Step(self.label, self.tools) if self.age else self


def _age(calls_before: int) -> int:
    """0, 1, 2 to 3, 4 to 7; then two classes for each power of two, because the ends of long chains matter most."""
    octave = calls_before.bit_length()
    if octave < 4:
        return octave
    return min(2 * octave - 4 + (calls_before >> (octave - 2) & 1), _MOST_AGE)


OTHER: Final = Step("\tother")  # all steps beyond the bounds together
ANY: Final = Step("\tany")


class Cost(NamedTuple):
    """What a call costs, and the pause before it."""

    service_s: float = 0.0  # seconds on the model executor
    output_tokens: float = 0.0
    prefill_tokens: float = 0.0  # prompt tokens that were computed
    pause_s: float = 0.0  # from the end of its last parent to its arrival: tools, humans, the program's code


@dataclass(slots=True)
class Edge:
    """The counts of an edge."""

    first: float = 0.0
    share: float = 0.0


@dataclass(slots=True)
class Node:
    """The counts of a step."""

    visits: float = 0.0
    starts: float = 0.0
    ends: float = 0.0
    sums: list[float] = field(default_factory=lambda: [0.0] * len(Cost._fields))
    squares: list[float] = field(default_factory=lambda: [0.0] * len(Cost._fields))
    edges: dict[Step, Edge] = field(default_factory=dict)

    @property
    def mean(self) -> Cost:
        """The mean cost of its calls."""
        return Cost(*(each / self.visits for each in self.sums)) if self.visits else Cost()


class ExecutionGraph:
    """The counts of programs of one name. At most 256 steps and 1024 edges; further steps count as one."""

    def __init__(self) -> None:
        self.nodes: dict[Step, Node] = {}
        self.edges = 0

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def size(self) -> int:
        """Steps and edges."""
        return len(self.nodes) + self.edges

    # -- counting

    def visit(self, step: Step, parents: Sequence[tuple[Step, bool, float]], cost: Cost) -> Step:
        """A call has finished.

        Args:
            step: Its step.
            parents: The steps of its parents, which have been visited before, and for each whether this is the first
                call that followed it, and its share in the call. The shares add up to 1.
            cost: What it cost.

        Returns:
            The step that it counts as.
        """
        step = self._known(step)
        node = self.nodes[step]
        node.visits += 1
        for place, value in enumerate(cost):
            node.sums[place] += value
            node.squares[place] += value * value
        node.starts += not parents
        for parent, is_first, share in parents:
            self._add(parent, step, float(is_first), share)
        return step

    def end(self, step: Step) -> None:
        """No call followed a call of this step, which has been visited, before its program ended."""
        self.nodes[step].ends += 1

    def add(self, other: ExecutionGraph, rename: Callable[[Step], Step] = lambda step: step) -> None:
        """Add the counts of another graph, with other names for its steps."""
        names = {step: self._known(rename(step)) for step in other.nodes}
        for step, node in other.nodes.items():
            mine = self.nodes[names[step]]
            mine.visits += node.visits
            mine.starts += node.starts
            mine.ends += node.ends
            for place, (value, square) in enumerate(zip(node.sums, node.squares, strict=True)):
                mine.sums[place] += value
                mine.squares[place] += square
            for target, edge in node.edges.items():
                self._add(names[step], names[target], edge.first, edge.share)

    def lumped(self, rename: Callable[[Step], Step]) -> ExecutionGraph:
        """The same counts with steps of the same new name taken together."""
        made = ExecutionGraph()
        made.add(self, rename)
        return made

    def halved(self) -> ExecutionGraph:
        """The counts halved, so that later programs count more. Steps that were hardly seen are taken together."""
        made = self.lumped(lambda step: step if self.nodes[step].visits / 2 >= _RARE else OTHER)
        for node in made.nodes.values():
            node.visits, node.starts, node.ends = node.visits / 2, node.starts / 2, node.ends / 2
            node.sums = [each / 2 for each in node.sums]
            node.squares = [each / 2 for each in node.squares]
            for edge in node.edges.values():
                edge.first, edge.share = edge.first / 2, edge.share / 2
        return made

    def _known(self, step: Step) -> Step:
        """The step, or what stands for it in a graph that is full."""
        if step not in self.nodes:
            if step is not OTHER and len(self.nodes) >= MOST_STEPS - 1:
                return self._known(OTHER)
            self.nodes[step] = Node()
        return step

    def _add(self, source: Step, target: Step, first: float, share: float) -> None:
        edge = self._edge(self.nodes[source], target)
        if edge is None:  # too many edges: the visit becomes a start, and its parent an end
            self.nodes[source].ends += first
            self.nodes[target].starts += share
        else:
            edge.first += first
            edge.share += share

    def _edge(self, node: Node, target: Step) -> Edge | None:
        edge = node.edges.get(target)
        if edge is None and self.edges < MOST_EDGES:
            edge = node.edges[target] = Edge()
            self.edges += 1
        return edge

    # -- reading

    def chances(self, step: Step) -> dict[Step | None, float]:
        """The chance of each step that may follow first; None: of the end. Empty: the step is not known."""
        node = self.nodes.get(step)
        if node is None or not node.visits:
            return {}
        found: dict[Step | None, float] = {each: edge.first / node.visits for each, edge in node.edges.items()}
        found[None] = node.ends / node.visits
        return {each: chance for each, chance in found.items() if chance > 0}

    def __iter__(self) -> Iterator[Step]:
        return iter(self.nodes)

    def check_integrity(self) -> None:
        """Assert that no visit is lost, and that the bounds hold. For tests, and for graphs from a file.

        Raises:
            AssertionError: The counts do not add up; the message names the step.
        """
        came = {step: node.starts for step, node in self.nodes.items()}
        for step, node in self.nodes.items():
            went = node.ends + sum(edge.first for edge in node.edges.values())
            if not math.isclose(went, node.visits, rel_tol=1e-6, abs_tol=1e-4):
                raise AssertionError(f"{step}: {node.visits} visits, and {went} successors and ends")
            for target, edge in node.edges.items():
                came[target] += edge.share
        for step, node in self.nodes.items():
            if not math.isclose(came[step], node.visits, rel_tol=1e-6, abs_tol=1e-4):
                raise AssertionError(f"{step}: {node.visits} visits, and {came[step]} starts and shares")
        if len(self.nodes) > MOST_STEPS or self.edges > MOST_EDGES:
            raise AssertionError(f"{len(self.nodes)} steps and {self.edges} edges")
        if self.edges != sum(len(node.edges) for node in self.nodes.values()):
            raise AssertionError("the edges are miscounted")
