"""The report for an issue: what a maintainer asks, and no secret."""

from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest

from weft.views.machine_report import machine_report, redacted

SECRETS = (
    "api_key='hunter2hunter2'",
    '"api_key": ["hunter2hunter2", "other-hunter2"]',
    "--api-key hunter2hunter2 --port 8000",
    "HF_TOKEN=hunter2hunter2",
    "Authorization: Bearer hunter2hunter2",
    "sk-hunter2hunter2hunter2",
    "https://user:hunter2@proxy.example/",
    "Received request: prompt: 'hunter2 is my password', params",
    "password = hunter2",
    "a line with my-own-hunter2 that only the environment knows",
)
KEPT = ("max_tokens=16, skip_tokenizer_init=False", "num_tokens: 7", "--max-num-batched-tokens 64", "key=value")


@pytest.mark.parametrize("line", SECRETS)
def test_a_secret_is_left_out(line: str) -> None:
    """By the name before it, by its form, or because the environment has it under such a name."""
    found = redacted(line, {"WEFT_API_KEY": "my-own-hunter2", "PATH": "/bin"})
    assert "hunter2" not in found
    assert "***" in found


@pytest.mark.parametrize("line", KEPT)
def test_a_figure_of_tokens_is_no_secret(line: str) -> None:
    """The report is worth little without vLLM's options."""
    assert redacted(line, {}) == line


def test_the_report_has_checks_settings_versions_and_logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a long log, its end and the lines with options and errors; of the environment, what concerns engines."""
    monkeypatch.setattr(platformdirs, "user_log_path", lambda _name: tmp_path)
    lines = [
        "non-default args: {'model': 'tiny', 'api_key': ['hunter2']}",
        *(f"line {n}" for n in range(500)),
        "the end",
    ]
    (tmp_path / "1-1-1-engine.log").write_text("\n".join(lines))
    environment = {"VLLM_LOGGING_LEVEL": "DEBUG", "HF_TOKEN": "hunter2", "MY_APP": "private"}
    found = machine_report(["ok Python: 3.11.7"], environment)
    assert "hunter2" not in found
    assert "private" not in found
    assert str(Path.home()) not in found
    for part in (
        "ok Python: 3.11.7",
        "VLLM_LOGGING_LEVEL=DEBUG",
        "HF_TOKEN=***",
        "'model': 'tiny'",
        "the end",
        "numpy==",
    ):
        assert part in found
    assert "line 499" in found
    assert "line 9\n" not in found
