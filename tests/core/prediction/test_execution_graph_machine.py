"""Programs that fork, join, fail, end and are given up, in any order: cursors and counts against a naive model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weft.core.ids import CallId, ProgramId, ThreadId
from weft.core.prediction import Cost, ExecutionGraphs, Tier, execution_graph, foresight
from weft.core.prediction.template import COLD_PROGRAMS
from weft.core.process_rows import CallIdentity

MOST_CALLS = 12
MOST_NODES = 10
MOST_EDGES = 14
MOST_NEW = 3


@dataclass
class NaiveProgram:
    name: str
    parents: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of all calls that did not fail
    finished: set[str] = field(default_factory=set)
    opened: int = 0

    def open(self) -> set[str]:
        """The calls that are nobody's parent."""
        return set(self.parents) - {parent for each in self.parents.values() for parent in each}


class Programs(RuleBasedStateMachine):
    """The bounds are so small that names, nodes, edges and calls beyond them are usual."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(execution_graph, "MOST_CALLS", MOST_CALLS)
        self.patch.setattr(execution_graph, "MOST_NODES", MOST_NODES)
        self.patch.setattr(execution_graph, "MOST_EDGES", MOST_EDGES)
        self.patch.setattr(foresight, "_MOST_NEW", MOST_NEW)
        self.graphs = ExecutionGraphs()
        self.running: dict[str, NaiveProgram] = {}
        self.numbers = 0
        self.learned: Counter[str] = Counter()  # programs, by name
        self.visits: Counter[str] = Counter()
        self.now_s = 0.0

    def teardown(self) -> None:
        self.patch.undo()

    @precondition(lambda self: len(self.running) < 3)
    @rule(name=st.sampled_from(["chat", "chat", "tools", *(f"made up {number}" for number in range(6))]))
    def begin(self, name: str) -> None:
        self.numbers += 1
        self.running[f"p{self.numbers}"] = NaiveProgram(name)

    @rule(data=st.data(), label=st.sampled_from(["", "plan", "work", "x" * 500]), count=st.integers(0, 3))
    def arrive(self, data: st.DataObject, label: str, count: int) -> None:
        """A call after any calls that have finished: it goes on, forks, joins, or begins a thread."""
        program_id = self.choose(data)
        if program_id is None:
            return
        program = self.running[program_id]
        known = sorted(program.finished)
        parents = tuple(data.draw(st.lists(st.sampled_from(known), max_size=3, unique=True))) if known else ()
        self.now_s += 1
        call = f"c{program.opened}"
        program.opened += 1
        program.parents[call] = parents
        identity = CallIdentity(
            ProgramId(program_id), ThreadId(call), CallId(call), tuple(CallId(each) for each in parents)
        )
        tools = [f"tool {number}" for number in range(count)]
        self.graphs.arrive(program.name, identity, label=label, tools=tools, now_s=self.now_s)

    @rule(data=st.data(), has_result=st.booleans() | st.just(True))
    def leave(self, data: st.DataObject, *, has_result: bool) -> None:
        program_id = self.choose(data)
        if program_id is None:
            return
        program = self.running[program_id]
        in_flight = sorted(set(program.parents) - program.finished)
        if in_flight:
            call = data.draw(st.sampled_from(in_flight))
            if has_result:
                program.finished.add(call)
            else:
                del program.parents[call]
            self.now_s += 1
            cost = Cost(1.0, 10, 5) if has_result else None
            self.graphs.leave(ProgramId(program_id), CallId(call), cost, self.now_s)

    @rule(data=st.data(), learn=st.booleans() | st.just(True))
    def end(self, data: st.DataObject, *, learn: bool) -> None:
        """It ends with calls in flight or without, or it is given up."""
        program_id = self.choose(data)
        if program_id is None:
            return
        program = self.running.pop(program_id)
        self.graphs.end(ProgramId(program_id), learn=learn)
        if learn and program.finished and program.opened <= MOST_CALLS:
            self.learned[program.name] += 1
            self.visits[program.name] += len(program.finished)
        elif learn:  # a call in flight may have been forgotten, and does not count then
            self.learned[program.name] += 10**6

    def choose(self, data: st.DataObject) -> str | None:
        return data.draw(st.sampled_from(sorted(self.running))) if self.running else None

    @invariant()
    def counts_are_conserved_and_bounded(self) -> None:
        self.graphs.check_integrity()
        assert len(self.graphs.templates) <= MOST_NEW + 8
        for name, template in self.graphs.templates:
            if self.learned[name] < 10**6 and not name.startswith("made up"):  # these may have been forgotten
                assert template.ended == self.learned[name]
                assert sum(tally.visits for tally in template.graph.nodes.values()) == self.visits[name]

    @invariant()
    def cursors_are_the_calls_that_none_follows(self) -> None:
        for program_id, program in self.running.items():
            found = {each.call_id for each in self.graphs.cursors(ProgramId(program_id))}
            if program.opened <= MOST_CALLS:
                assert found == program.open()
            assert len(found) <= MOST_CALLS

    @invariant()
    def forecasts_are_chances(self) -> None:
        for program_id, program in self.running.items():
            found = self.graphs.successors(ProgramId(program_id))
            if self.graphs.tier(program.name) is Tier.COLD:
                assert not found
                assert self.graphs.remaining(ProgramId(program_id)) is None
            for forecast in found.values():
                assert abs(sum(each.chance for each in forecast.successors) + forecast.end - 1) < 1e-6
            left = self.graphs.remaining(ProgramId(program_id))
            if left is not None:
                assert all(0 <= each.mean < 1e6 and 0 <= each.spread < 1e6 for each in left)


Programs.TestCase.settings = settings(max_examples=50, stateful_step_count=50)
TestPrograms = Programs.TestCase


class WarmPrograms(Programs):
    """The same with forecasts from the first program on."""

    def __init__(self) -> None:
        super().__init__()
        from weft.core.prediction import template

        self.patch.setattr(template, "COLD_PROGRAMS", 1)
        assert COLD_PROGRAMS == 30


WarmPrograms.TestCase.settings = settings(max_examples=30, stateful_step_count=50)
TestWarmPrograms = WarmPrograms.TestCase
