"""A history on real vLLM: an engine begins with what earlier ones learned, and adds its own programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from background import CommandResult
from recorded_host import recorded_host, report_of

import weft
from weft.core.errors import HistoryError
from weft.core.policies.history import History
from weft.core.prediction import Tier

pytestmark = pytest.mark.engine


@recorded_host
def test_an_engine_begins_with_what_earlier_ones_learned(command_result: CommandResult) -> None:
    """The class is known from the start and shown below the programs. After the shutdown the file has the engine's own
    programs as well, the last one included."""
    report = report_of(command_result)
    (shown,) = (line.split() for line in report["table"].split("classes")[1].splitlines() if "chat" in line)
    assert shown[:4] == ["chat", "5", "0", "0"]
    assert len(report["fingerprint"]) == 16  # of the first call's system prompt and tools
    history = History.from_json((command_result.folder / "weft-history.json").read_bytes())
    (model,) = history.models
    assert {name: past.ended for (_, name), past in history[model].items()} == {"chat": 5, "late": 1}
    assert all(9 <= work < 100 for past in [history[model][None, "late"]] for work in past.finished)
    assert "forecasts" not in report["table"]  # too few programs of any name have ended
    assert [(row.name, row.tier, row.ended) for row in history.graphs.rows()][:2] == [
        ("chat", Tier.COLD, 2),
        ("late", Tier.COLD, 1),
    ]
    chat = history.graphs.templates.get("chat")
    assert chat is not None
    ((_, node),) = chat.graph.nodes.items()
    assert node.mean.output_tokens == 9
    assert node.mean.service_s > 0


def test_a_history_that_cannot_be_kept_is_an_error_before_anything_starts(tmp_path: Path, tiny_model: Path) -> None:
    """Both engines refuse a file that they cannot write."""
    for kind in (weft.Engine, weft.AsyncMultiLLMEngine):
        with pytest.raises(HistoryError, match="cannot be kept: No such file or directory"):
            kind(tiny_model, policy="auto", history=tmp_path / "no" / "history.json")
