"""The execution graphs of all program names, and where each running program is in its own."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from weft.core.ids import CallId, CallIdentity, ProgramId, ThreadId
from weft.core.locks import fork_safe
from weft.core.prediction.execution_graph import Cost, Cursor, ExecutionGraph, ProgramCursors
from weft.core.prediction.static_graph import StaticGraph
from weft.core.prediction.template import Estimate, Forecast, Remaining, Template, Tier

MOST_NAMES: Final = 256  # names with a template
_MOST_NEW: Final = MOST_NAMES // 4  # of these, names of which few programs have ended
_KNOWN_FROM: Final = 3  # ended programs from which on a name is not new
MOST_SIZE: Final = 65_536  # nodes and edges of all names together
MOST_PROGRAMS: Final = 65_536  # running programs that are followed
MOST_LETTERS: Final = 1024  # of a name; longer ones count as one if they begin alike


@dataclass(frozen=True, slots=True)
class ForecastRow:
    """What is known of a program name, for people."""

    name: str
    tier: Tier
    ended: int  # programs that have ended so far
    nodes: int  # pairs of label and tools that are told apart
    calls: float  # the mean number of calls of a program; nan: unknown


class Templates:
    """A template for each name. The names that were used longest ago are forgotten.

    Names of which fewer than three programs have ended have a quarter of the space to themselves, so that a flood of
    made-up names does not drive out those in use.
    """

    def __init__(self) -> None:
        self._new: OrderedDict[str, Template] = OrderedDict()  # the latest used last
        self._known: OrderedDict[str, Template] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._new) + len(self._known)

    def __iter__(self) -> Iterator[tuple[str, Template]]:
        """Names and templates, those used longest ago first, and those of few programs before the others."""
        yield from [*self._new.items(), *self._known.items()]

    def get(self, name: str) -> Template | None:
        name = name[:MOST_LETTERS]
        return self._known.get(name) or self._new.get(name)

    def use(self, name: str) -> Template:
        """The template of a name, a new one if there is none."""
        name = name[:MOST_LETTERS]
        found = self.get(name)
        if found is None:
            found = self._new[name] = Template()
            while len(self._new) > _MOST_NEW:
                self._size -= self._new.popitem(last=False)[1].graph.size
        (self._known if name in self._known else self._new).move_to_end(name)
        return found

    def learn(self, name: str, counts: ExecutionGraph) -> None:
        """A program of this name has ended."""
        template = self.use(name)
        before = template.graph.size
        template.learn(counts)
        self._sort_in(name[:MOST_LETTERS], template, before)

    def restore(self, name: str, graph: ExecutionGraph, ended: int, weight: float) -> None:
        """Take over what an earlier run has learned of a name. The caller has checked the values."""
        template = self.use(name)
        before = template.graph.size
        template.restore(graph, ended, weight)
        self._sort_in(name[:MOST_LETTERS], template, before)

    def _sort_in(self, name: str, template: Template, size_before: int) -> None:
        self._size += template.graph.size - size_before
        if template.ended >= _KNOWN_FROM and name in self._new:
            self._known[name] = self._new.pop(name)
        while len(self._known) > MOST_NAMES - _MOST_NEW:
            self._size -= self._known.popitem(last=False)[1].graph.size
        while self._size > MOST_SIZE and len(self) > 1:
            names = self._new or self._known
            self._size -= names.popitem(last=False)[1].graph.size

    def check_integrity(self) -> None:
        """Assert that the bounds hold, and that no visit is lost. For tests."""
        graphs = [template.graph for _, template in self]
        for graph in graphs:
            graph.check_integrity()
        if self._size != sum(graph.size for graph in graphs) or self._size > MOST_SIZE or len(self) > MOST_NAMES:
            raise AssertionError(f"{len(self)} names of size {self._size}")


class ExecutionGraphs:
    """Learns from programs that end, and says what running ones do next (SAGA §3.2, the agent execution graph).

    A program of a name whose tier is cold has no forecast. All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self.templates = Templates()
        self.learned = 0  # programs, since the start
        self._programs: OrderedDict[ProgramId, tuple[str, ProgramCursors]] = OrderedDict()  # the oldest first
        self._lock = fork_safe(threading.RLock())

    # -- events

    def use_hint(self, name: str, graph: StaticGraph) -> None:
        """A program begins whose author has handed over its static graph."""
        with self._lock:
            self.templates.use(name).use_hint(graph)

    def arrive(
        self, name: str, identity: CallIdentity, *, label: str = "", tools: Iterable[str] = (), now_s: float
    ) -> None:
        """A call begins.

        Args:
            label: What the program's author calls this kind of call.
            tools: The tools that ran between its parents and the call.
        """
        with self._lock:
            program_id = identity.program_id
            if program_id not in self._programs:
                self._programs[program_id] = name, ProgramCursors()
                if len(self._programs) > MOST_PROGRAMS:
                    self._programs.popitem(last=False)
            self._programs[program_id][1].arrive(identity, label, tools, now_s)

    def leave(self, program_id: ProgramId, call_id: CallId, cost: Cost | None, now_s: float) -> None:
        """A call ends.

        Args:
            cost: What it cost; None: it has no result, so nothing follows it.
        """
        with self._lock:
            found = self._programs.get(program_id)
            if found is not None:
                found[1].leave(call_id, cost, now_s)

    def end(self, program_id: ProgramId, *, learn: bool = True) -> None:
        """A program is gone.

        Args:
            program_id: The program. An unknown one changes nothing.
            learn: Whether to learn from it. A cancelled or abandoned program says little about others.
        """
        with self._lock:
            found = self._programs.pop(program_id, None)
            if found is not None and learn:
                name, cursors = found
                counts = cursors.finish()
                if counts.nodes:
                    self.templates.learn(name, counts)
                    self.learned += 1

    # -- forecasts

    def __len__(self) -> int:
        """The number of running programs that are followed."""
        return len(self._programs)

    def tier(self, name: str) -> Tier:
        """What forecasts of a name rest on (SAGA §3.3)."""
        with self._lock:
            template = self.templates.get(name)
            return template.tier if template is not None else Tier.COLD

    def successors(self, program_id: ProgramId) -> dict[ThreadId, Forecast]:
        """What each thread of a program does after the call that it runs or ran last (SAGA §3.2, P).

        Empty: the program is not known, or its tier is cold. A thread whose next node is unknown is left out.
        """
        with self._lock:
            found, template = self._find(program_id)
            made = {} if template is None else {each.thread_id: template.forecast(each.node) for each in found}
            return {thread_id: forecast for thread_id, forecast in made.items() if forecast is not None}

    def remaining(self, program_id: ProgramId) -> Remaining | None:
        """What is left of a program: its running calls from their start, and the calls that follow (SAGA eq. 9).

        None: the program is not known, its tier is cold, or nothing is known of the nodes where it is.
        """
        with self._lock:
            found, template = self._find(program_id)
            total = None
            for each in found if template is not None else ():
                left = template.left(each.node) if template is not None else None
                if left is not None:
                    part = left.with_call if each.is_running else left.after
                    total = part if total is None else total.plus(part)
            return total

    def remaining_service(self, program_id: ProgramId, served_s: float = 0.0) -> Estimate | None:
        """The seconds on the model executor that a program still needs, with the standard deviation (SAGA eq. 9).

        Args:
            program_id: The program.
            served_s: The seconds that its running calls have had already, which are subtracted.
        """
        left = self.remaining(program_id)
        return left and Estimate(max(0.0, left.service_s.mean - served_s), left.service_s.spread)

    def cursors(self, program_id: ProgramId) -> tuple[Cursor, ...]:
        """Where each thread of a program is."""
        with self._lock:
            return self._find(program_id)[0]

    @contextmanager
    def unchanged(self) -> Iterator[Templates]:
        """The templates, which do not change within the block."""
        with self._lock:
            yield self.templates

    def rows(self) -> list[ForecastRow]:
        """What is known of each name, those with the most ended programs first."""
        with self._lock:
            return sorted(map(_row, self.templates), key=lambda row: (-row.ended, row.name))

    def _find(self, program_id: ProgramId) -> tuple[tuple[Cursor, ...], Template | None]:
        found = self._programs.get(program_id)
        return (found[1].cursors, self.templates.get(found[0])) if found is not None else ((), None)

    def check_integrity(self) -> None:
        """Assert that cursors and counts are sound. For tests."""
        with self._lock:
            self.templates.check_integrity()
            for _, cursors in self._programs.values():
                cursors.check_integrity()


def _row(named: tuple[str, Template]) -> ForecastRow:
    name, template = named
    visits = sum(tally.visits for tally in template.graph.nodes.values())
    nodes = {node.any_depth for node in template.graph}
    calls = visits / template.weight if template.weight else float("nan")
    return ForecastRow(name, template.tier, template.ended, len(nodes), calls)
