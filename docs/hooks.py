"""Hooks of the site's build: pages that follow from the code, and a check that nothing is loaded over the network.

A comment in a page is replaced by generated Markdown:

- `<!-- registry: PACKAGE -->`: the policies or balancers that are registered in PACKAGE, with their parameters.
- `<!-- cli -->`: every command of `weft` with its arguments and options.
- `<!-- metrics -->`: the metrics for Prometheus.
- `<!-- clients -->`: what the server saw of real clients, from docs/results/clients.json.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer
import typer.main
from mkdocs.exceptions import PluginError

from weft.commands.cli import app
from weft.commands.shared import described
from weft.engine.watch.metrics.export import METRICS

_REGISTRY = re.compile(r"<!-- registry: ([\w.]+) -->")
_CLI = "<!-- cli -->"
_METRICS = "<!-- metrics -->"
_CLIENTS = "<!-- clients -->"
_LOADED = re.compile(r"<(?:script|img|iframe)[^>]+src=\"?https?:|<link[^>]+href=\"?https?:[^>]+rel=\"?stylesheet")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the comments in a page by what they stand for."""
    markdown = _REGISTRY.sub(lambda found: registry_table(found[1]), markdown)
    if _METRICS in markdown:
        markdown = markdown.replace(_METRICS, metrics_table())
    if _CLIENTS in markdown:
        markdown = markdown.replace(_CLIENTS, clients_table())
    return markdown.replace(_CLI, cli_reference()) if _CLI in markdown else markdown


def on_page_content(html: str, **_: Any) -> str:
    """Remove the `::` that announces a literal block in a docstring. Markdown would show it."""
    return html.replace("<p>::</p>", "").replace("::</p>", ":</p>")


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that loads a script, a style sheet or a picture from another host.

    Raises:
        PluginError: The page does. The message shows what.
    """
    if found := _LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads something over the network: {found[0]!r}. Put it into docs/.")
    return output


def metrics_table() -> str:
    """The metrics for Prometheus as a table."""
    rows = (
        f"| `{each.name}` | {each.kind} | {', '.join(f'`{label}`' for label in each.labels)} | {each.meaning} |"
        for each in METRICS
    )
    return "\n".join(("| name | kind | labels | what it says |", "|---|---|---|---|", *rows))


def clients_table() -> str:
    """What the server saw of real clients as a table, the wrong cells first."""
    found = json.loads((Path(__file__).parent / "results/clients.json").read_text())
    lines = ["| client | case | API | identified by | expected | seen | commit |", "|---|---|---|---|---|---|---|"]
    for each in sorted(found["cases"], key=lambda case: (case["expected"] == case["seen"], case["client"])):
        expected, seen = ("<br>".join(f"`{program}`" for program in each[name]) for name in ("expected", "seen"))
        verdict = "as expected" if each["expected"] == each["seen"] else f"**wrong**: {seen}<br>{each['why_wrong']}"
        name = f"{each['client']} {each['version']}"
        what = " | ".join((name, each["case"], each["api"], each["identified_by"]))
        lines.append(f"| {what} | {expected} | {verdict} | `{each['commit']}` |")
    right = sum(case["expected"] == case["seen"] for case in found["cases"])
    lacks = "; ".join(f"{client} has no {what}" for client, what in found["lacks"].items())
    return "\n".join([f"{right} of {len(found['cases'])} cases are as expected.", "", *lines, "", f"{lacks}."])


def registry_table(package: str) -> str:
    """The registered policies or balancers of a package as a table, and the parameters of each."""
    registrations = importlib.import_module(package).registrations()
    lines = ["| name | what it does | parameters |", "|---|---|---|"]
    classes: dict[type[Any], list[str]] = {}
    for each in registrations:
        names = [f"`{field.name}`" for field in fields(each.parameters)]
        note = " In simulation only." if getattr(each, "simulation_only", False) else ""
        summary = f"{_capitalised(each.summary).removesuffix('.')}.{note}"
        lines.append(f"| `{each.name}` | {summary} | {', '.join(names)} |")
        if names:
            classes.setdefault(each.parameters, []).append(f"`{each.name}`")
    for parameters, names in classes.items():
        meanings = {name: text for kind in reversed(parameters.__mro__) for name, text in described(kind).items()}
        lines += ["", f"## Parameters of {', '.join(names)}", "", "| parameter | default | meaning |", "|---|---|---|"]
        for field in fields(parameters):
            lines.append(f"| `{field.name}` | `{field.default!r}` | {meanings.get(field.name, '')} |")
    return "\n".join(lines)


def cli_reference() -> str:
    """A section for each command: what it does, its usage, and its arguments and options as `--help` shows them."""
    lines: list[str] = []
    for words, command in commands():
        context = typer.Context(command, info_name=words)
        usage = command.get_usage(context).removeprefix("Usage: ")
        lines += [f"## {words}", "", str(command.help), "", "```text", usage, "```", ""]
        lines += ["| | meaning |", "|---|---|"]
        for parameter in command.get_params(context):
            name, meaning = parameter.get_help_record(context) or ("", "")
            lines.append(f"| `{name}` | {meaning.replace('|', chr(92) + '|')} |")
        lines.append("")
    return "\n".join(lines)


def commands() -> Iterator[tuple[str, Any]]:
    """Every command of `weft` with the words that call it, such as `weft model prepare`."""
    groups = [("weft", typer.main.get_command(app))]
    while groups:
        words, command = groups.pop(0)
        inner = getattr(command, "commands", {})
        if not inner:
            yield words, command
        groups += [(f"{words} {name}", each) for name, each in sorted(inner.items())]


def _capitalised(text: str) -> str:
    """A text as a sentence begins. A name such as vLLM stays as it is."""
    return text[:1].upper() + text[1:] if text.split(" ", maxsplit=1)[0].islower() else text
