"""Forecasts of an engine's programs: fed from their calls, and shown in the process table."""

from __future__ import annotations

import pytest

import weft
from weft.core.errors import CallError
from weft.core.prediction import Node, StaticGraph, Tier
from weft.core.prediction.static_graph import Targets
from weft.core.prediction.template import COLD_PROGRAMS
from weft.testing import ScriptedEngine

BODY = {"messages": [{"role": "user", "content": "hello"}]}


def call(engine: ScriptedEngine, program: weft.Program, label: str) -> None:
    run = object()
    identity = program.reports.start_call(run, label=label)
    engine.chat_sync(BODY, program, identity)
    program.reports.end_call(run, identity)


def run(engine: ScriptedEngine, name: str, *labels: str, graph: StaticGraph | None = None) -> None:
    with weft.Program(name, graph=graph) as program:
        for label in labels:
            call(engine, program, label)


def test_an_engine_forecasts_from_the_30th_program_of_a_name_on() -> None:
    """From labels and parents that the program's own graph has. The table shows each name with its tier."""
    with ScriptedEngine(lambda _body: "hello") as engine:
        for _ in range(COLD_PROGRAMS):
            run(engine, "loop", "plan", "act", "act")
        run(engine, "new", "chat")
        assert [(row.name, row.tier, row.ended, row.calls) for row in engine.table.forecasts()] == [
            ("loop", Tier.INFERRED, 30, 3.0),
            ("new", Tier.COLD, 1, 1.0),
        ]
        assert [line.split()[:2] for line in str(engine.table).split("forecasts")[1].splitlines()[-2:]] == [
            ["loop", "inferred"],
            ["new", "cold"],
        ]
        with weft.Program("loop") as program:
            call(engine, program, "plan")
            (found,) = engine.forecasts.successors(program.program_id).values()
            left = engine.forecasts.remaining(program.program_id)
        assert found.likeliest == Node("act")
        assert left is not None
        assert left.calls.mean == pytest.approx(2, abs=0.3)
        assert len(engine.forecasts) == 0


def test_a_program_that_hands_over_its_graph_is_forecast_from_the_start() -> None:
    """Its labels are the nodes of the graph."""
    graph = StaticGraph({"plan": Targets(always=("act",)), "act": Targets(one_of=("act", ""))})
    with ScriptedEngine(lambda _body: "hello") as engine:

        @weft.program(graph=graph)
        def agent(program: weft.Program) -> Node | None:
            call(engine, program, "plan")
            (found,) = engine.forecasts.successors(program.program_id).values()
            return found.likeliest

        assert agent() == Node("act")
        assert engine.forecasts.tier("agent") is Tier.HINTS


def test_calls_that_fail_and_programs_that_are_cancelled_are_not_learned_from() -> None:
    """A program that raises has ended; of one that was cancelled nobody knows what it would have done."""
    replies = iter(["hello", CallError("no"), "hello", "hello"])
    with ScriptedEngine(lambda _body: next(replies)) as engine:

        @weft.program
        def failed(program: weft.Program) -> None:
            call(engine, program, "a")
            call(engine, program, "b")

        @weft.program
        def cancelled(program: weft.Program) -> None:
            call(engine, program, "a")
            raise KeyboardInterrupt

        with pytest.raises(CallError):
            failed()
        with pytest.raises(KeyboardInterrupt):
            cancelled()
        (row,) = engine.forecasts.rows()
        assert (row.name, row.ended, row.calls) == ("failed", 1, 1.0)
