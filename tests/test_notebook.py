"""The example notebook runs, and its outputs are tables and a picture."""

from __future__ import annotations

import json
import re

import pytest
from background import ROOT, TINY, CommandResult, script

NOTEBOOK = ROOT / "examples" / "first_look.ipynb"

# The notebook with the tiny model, which starts sooner. Prints the outputs of its cells by MIME type.
RUN = f"""
import json, sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read({str(NOTEBOOK)!r}, as_version=4)
for cell in notebook.cells:
    cell.source = cell.source.replace("weft.Engine.create(", f"weft.Engine.create({{sys.argv[-1]!r}}, ")
NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
print(json.dumps([output.get("data") or {{"stream": output.get("text")}} for output in outputs]))
"""


@pytest.mark.engine
@pytest.mark.background.with_args(script(RUN), TINY)  # a mark that is called with a function decorates it
def test_the_notebook_runs(command_result: CommandResult) -> None:
    """On a real engine, in a kernel: the table, the picture of a graph, a program with both, and the calls as text."""
    outputs = json.loads(command_result.printed().splitlines()[-1])
    html = [output["text/html"] for output in outputs if "text/html" in output]
    (svg,) = [output["image/svg+xml"] for output in outputs if "image/svg+xml" in output]
    captions = re.findall(r"<caption[^>]*>([^<]*)</caption>", html[0])
    tables = dict(zip(captions, html[0].split("<caption")[1:], strict=True))
    trips = {name: table.count("<td style='text-align: left'>trip</td>") for name, table in tables.items()}
    assert trips == {"process table": 2}  # two programs of one name, of which nothing is known yet
    assert "<svg " in html[1]
    for name in ("planner", "guide", "writer", "trip: 5 calls"):
        assert name in svg
    assert any("trip: 5 calls" in output.get("stream", "") for output in outputs)


def test_the_notebook_has_no_outputs() -> None:
    """Outputs would change with each execution, so the repository has none."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells if "outputs" in cell)
