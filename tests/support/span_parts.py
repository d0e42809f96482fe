"""Programs whose runs come from spans: a global provider with the processor, and graphs as short texts."""

from __future__ import annotations

import ast
import re
import site
from collections import Counter
from pathlib import Path

import pytest
from client_packages import Package, installed
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

import weft
from weft.integrations.otel import WeftSpanProcessor


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> TracerProvider:
    """The global provider during a test."""
    made = TracerProvider()
    made.add_span_processor(WeftSpanProcessor())
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", made)
    return made


def edges(program: weft.Program) -> list[str]:
    """A program's calls: agent and number, then those that it comes after, with "?" if that is a guess."""
    counts: Counter[str] = Counter()
    names = {}
    for call in program.graph.calls:
        names[call.call_id] = f"{call.label}{counts[call.label]}"
        counts[call.label] += 1
    return sorted(
        f"{names[call.call_id]} <- "
        + ", ".join(sorted(names[edge.parent] + ("" if edge.exact else "?") for edge in call.parents))
        for call in program.graph.calls
    )


def on_path(package: Package) -> None:
    """Make the packages of a throw-away environment importable here, after those of this one."""
    (folder,) = installed(package).folder.glob("lib/python3*/site-packages")
    site.addsitedir(str(folder))


def page_blocks() -> list[str]:
    """The examples of the page that need a framework which is not in the pinned set."""
    page = Path(__file__).parents[2] / "docs" / "how-to" / "spans.md"
    return re.findall(r"```py\n(.*?)```", page.read_text(), flags=re.DOTALL)


async def run_block(block: str, **names: object) -> dict[str, object]:
    """Run an example, and return its names."""
    code = compile(block, "spans.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    running = eval(code, names)  # noqa: S307  the page's own code
    if running is not None:
        await running
    return names
