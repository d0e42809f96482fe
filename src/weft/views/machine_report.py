"""The report of `weft doctor --report`: what a maintainer asks of an installation, without its secrets."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import platformdirs

_LOGS: Final = 2  # the newest ones
_LOG_LINES: Final = 60
_VARIABLES: Final = ("WEFT_", "VLLM_", "CUDA_", "NVIDIA_", "HF_", "TORCH", "OMP_", "RAY_", "XDG_", "LD_PRELOAD")
_NAME: Final = (
    r"[\w.-]*(?:api[_-]?keys?|(?:secret|access|private)[_-]?key|token(?!s|iz)|secret|passw(?:or)?d|credential|cookie|"
    r"authorization)"
)
_IS_SECRET: Final = re.compile(_NAME, re.IGNORECASE)
# A prompt may be in vLLM's log where --enable-log-requests is on. What begins like the keys of known services is one.
_SECRETS: Final = (
    (re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]+", re.IGNORECASE), r"\1 ***"),
    (
        re.compile(rf"({_NAME}[\w-]*[\"']?\s*[=:]\s*)(\[[^\]]*\]?|\"[^\"]*\"?|'[^']*'?|[^\s,;}})]+)", re.IGNORECASE),
        r"\1***",
    ),
    (re.compile(rf"(--{_NAME}[\w-]*\s+)(\S+)", re.IGNORECASE), r"\1***"),
    (re.compile(r"\b(?:sk|pk|hf|gh[opsu]|glpat|xox[abp])[-_][\w-]{8,}"), "***"),
    (re.compile(r"://[^/\s@]+@"), "://***@"),
    (re.compile(r"(\bprompt\w*[\"']?\s*[=:]\s*)(\"[^\"]*\"?|'[^']*'?|\[[^\]]*\]?)"), r"\1***"),
)
_ENGINE_LINES: Final = re.compile(r"non-default args|Initializing .* engine|\bconfig\b.*:|Error\b|Exception\b")


def redacted(text: str, environment: Mapping[str, str]) -> str:
    """The text without secrets: values of names that sound like one, keys of known forms, and the values that the
    environment has under such names. The home folder is `~`."""
    known = {value for name, value in environment.items() if _IS_SECRET.search(name) and len(value) >= 6}
    for value in sorted(known, key=len, reverse=True):
        text = text.replace(value, "***")
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text.replace(str(Path.home()), "~")


def machine_report(checks: Iterable[str], environment: Mapping[str, str] = os.environ) -> str:
    """Versions, the doctor's lines, settings from the environment, and the ends of the newest logs, as Markdown."""
    packages = sorted({f"{each.name}=={each.version}" for each in importlib.metadata.distributions()}, key=str.lower)
    settings = (f"{name}={environment[name]}" for name in sorted(environment) if name.startswith(_VARIABLES))
    parts = [
        ("System", [platform.platform(), f"Python {platform.python_version()}"]),
        ("weft doctor", checks),
        ("Environment variables", settings),
        *((f"Log {log.name}", _shown(log)) for log in _newest_logs()),
        ("Packages", packages),
    ]
    lines = ["<!-- Read this before you send it. What looks like a secret is ***; only you know what else is one. -->"]
    for title, part in parts:
        lines += ["", f"### {title}", "", "```text", *part, "```"]
    return redacted("\n".join(lines), environment)


def _newest_logs() -> list[Path]:
    logs = sorted(platformdirs.user_log_path("weft").glob("*.log"), key=lambda log: log.name)
    return logs[-_LOGS:]


def _shown(log: Path) -> list[str]:
    """The lines with an engine's options and errors, and the last ones."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError as error:
        return [str(error)]
    before = [line for line in lines[:-_LOG_LINES] if _ENGINE_LINES.search(line)]
    return [*before[-_LOG_LINES:], *lines[-_LOG_LINES:]]
