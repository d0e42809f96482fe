"""The AutoGen examples, as people run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("autogen_agentchat", reason="the AutoGen extra is not installed")

from weft.core.graph import ProgramGraph

ROOT = Path(__file__).parents[2]


def shown(name: str, model: Path, folder: Path) -> tuple[str, ProgramGraph]:
    """What an example prints, and the graph that it draws."""
    picture = folder / "graph.json"
    command = [sys.executable, f"examples/{name}.py", "--model", str(model), "--picture", str(picture)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, ProgramGraph.from_json(picture.read_text())


def lines(printed: str, first_word: str) -> int:
    return sum(line.split()[:1] == [first_word] for line in printed.splitlines())


@pytest.mark.engine
def test_the_debate(tiny_model: Path, tmp_path: Path) -> None:
    """Five rounds in three programs, each verdict in its form; the graph is a chain."""
    printed, graph = shown("debate_autogen", tiny_model, tmp_path)
    assert [lines(printed, name) for name in ("pro", "contra", "judge")] == [5, 5, 5]
    assert printed.count('{"winner":') + printed.count('{ "winner":') == 5
    assert printed.count("finished") == 3
    assert [call.label for call in graph.calls] == ["pro", "contra", "judge"] * 3
    assert len(graph.threads) == 1


@pytest.mark.engine
def test_the_review(tiny_model: Path, tmp_path: Path) -> None:
    """A writer, three reviewers beside each other and a summariser, twice; the graph forks and joins."""
    printed, graph = shown("graphflow_autogen", tiny_model, tmp_path)
    assert [lines(printed, name) for name in ("writer", "grammar", "summariser")] == [2, 2, 2]
    assert printed.count("finished") == 2
    writer, *reviewers, summariser = graph.calls
    assert (graph.forks, graph.joins) == ((writer.call_id,), (summariser.call_id,))
    assert [edge.parent for edge in summariser.parents] == [reviewer.call_id for reviewer in reviewers]
    assert len(graph.threads) == 3
