"""The AutoGen examples as users run them."""

from __future__ import annotations

import pytest
from background import ROOT, TINY, CommandResult

pytest.importorskip("autogen_agentchat", reason="the AutoGen extra is not installed")

from weft.core.program.graph import ProgramGraph

EXAMPLES = ROOT / "examples"
ON_TINY = ("--model", TINY, "--picture", "graph.json")


def output(command_result: CommandResult) -> tuple[str, ProgramGraph]:
    """The text that an example prints, and the graph that it draws."""
    return command_result.printed(), ProgramGraph.from_json((command_result.folder / "graph.json").read_text())


def count_lines(printed: str, first_word: str) -> int:
    return sum(line.split()[:1] == [first_word] for line in printed.splitlines())


@pytest.mark.engine
@pytest.mark.background(EXAMPLES / "debate_autogen.py", *ON_TINY)
def test_the_debate(command_result: CommandResult) -> None:
    """Three programs have five rounds in all, every verdict has its form, and the graph is a chain."""
    printed, graph = output(command_result)
    assert [count_lines(printed, name) for name in ("pro", "contra", "judge")] == [5, 5, 5]
    assert printed.count('{"winner":') + printed.count('{ "winner":') == 5
    assert printed.count("finished") == 3
    assert [call.label for call in graph.calls] == ["pro", "contra", "judge"] * 3
    assert len(graph.threads) == 1


@pytest.mark.engine
@pytest.mark.background(EXAMPLES / "graphflow_autogen.py", *ON_TINY)
def test_the_review(command_result: CommandResult) -> None:
    """In both programs a writer, three parallel reviewers and a summariser speak; the graph forks and joins."""
    printed, graph = output(command_result)
    assert [count_lines(printed, name) for name in ("writer", "grammar", "summariser")] == [2, 2, 2]
    assert printed.count("finished") == 2
    writer, *reviewers, summariser = graph.calls
    assert (graph.forks, graph.joins) == ((writer.call_id,), (summariser.call_id,))
    assert [edge.parent for edge in summariser.parents] == [reviewer.call_id for reviewer in reviewers]
    assert len(graph.threads) == 3
