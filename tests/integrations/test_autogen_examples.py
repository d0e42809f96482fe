"""The AutoGen examples as users run them."""

from __future__ import annotations

import pytest
from background import CommandResult

pytest.importorskip("autogen_agentchat", reason="the AutoGen extra is not installed")

from scripts_on_one_engine import Printed, on_one_engine, printed_by

from weft.core.program.graph import ProgramGraph
from weft.examples.debate_autogen import MOTIONS
from weft.examples.graphflow_autogen import SUBJECTS


def output(command_result: CommandResult, name: str) -> tuple[Printed, ProgramGraph]:
    """What an example prints, and the graph that it draws."""
    printed = printed_by(command_result, name)
    return printed, ProgramGraph.from_json((printed.folder / "graph.json").read_text())


def count_lines(printed: Printed, first_word: str) -> int:
    return sum(line.split()[:1] == [first_word] for line in printed.text.splitlines())


@pytest.mark.engine
@on_one_engine
def test_the_debate(command_result: CommandResult) -> None:
    """Three programs have five rounds in all, every verdict has its form, and the graph is a chain."""
    printed, graph = output(command_result, "debate_autogen")
    assert [count_lines(printed, name) for name in ("pro", "contra", "judge")] == [5, 5, 5]
    assert printed.text.count('{"winner":') + printed.text.count('{ "winner":') == 5
    assert len(printed.finished(*MOTIONS)) == 3
    assert [call.label for call in graph.calls] == ["pro", "contra", "judge"] * 3
    assert len(graph.threads) == 1


@pytest.mark.engine
@on_one_engine
def test_the_review(command_result: CommandResult) -> None:
    """In both programs a writer, three parallel reviewers and a summariser speak; the graph forks and joins."""
    printed, graph = output(command_result, "graphflow_autogen")
    assert [count_lines(printed, name) for name in ("writer", "grammar", "summariser")] == [2, 2, 2]
    assert len(printed.finished(*SUBJECTS)) == 2
    writer, *reviewers, summariser = graph.calls
    assert (graph.forks, graph.joins) == ((writer.call_id,), (summariser.call_id,))
    assert [edge.parent for edge in summariser.parents] == [reviewer.call_id for reviewer in reviewers]
    assert len(graph.threads) == 3
