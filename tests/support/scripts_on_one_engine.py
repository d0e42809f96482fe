"""Scripts as users run them, one after another on one engine, whose start takes longer than all of them.

    python tests/support/scripts_on_one_engine.py MODEL

Each runs as `__main__` in a folder of its own, where it leaves its files and what it prints. `weft.Engine.create` lends
it the engine, which outlives it. Other tests run scripts of these kinds with an engine that they start themselves.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree as ET

import pytest
from background import ROOT, TINY, CommandResult
from snippets import whole_files

import weft

EXAMPLES = {
    "mcts_langgraph": ["--rollouts", "2", "1 1 1 1", "1 1 1 2"],
    "map_reduce_langchain": [],
    "chatbot_session": ["--turns", "3"],
    "openai_sdk": [],
    "debate_autogen": ["--picture", "graph.json"],
    "graphflow_autogen": ["--picture", "graph.json"],
}
TUTORIAL = ROOT / "docs" / "tutorial" / "first-gain.md"
on_one_engine = pytest.mark.background(Path(__file__), TINY)


class Printed(NamedTuple):
    """What a script left."""

    text: str
    folder: Path

    @property
    def words(self) -> set[str]:
        """The words of its picture."""
        (path,) = self.folder.glob("*.svg")
        picture = ET.parse(path).getroot()  # noqa: S314  our own file
        assert picture.tag.endswith("svg")
        return {text for text in map(str.strip, picture.itertext()) if text}

    def finished(self, *names: str) -> list[str]:
        """The rows of finished programs with these names. The process table has those of earlier scripts as well."""
        begin = tuple(name[:12] for name in names)  # the column is narrow
        return [row for row in self.text.splitlines() if row.startswith(begin) and row.rstrip().endswith(" finished")]


def printed_by(command_result: CommandResult, name: str) -> Printed:
    """What a script left. Fails if the script did."""
    assert command_result.exit_code == 0, command_result.stderr[-4000:]
    folder = command_result.folder / name
    text = (folder / "printed.txt").read_text()
    assert "Traceback" not in text + command_result.stderr, text + command_result.stderr
    return Printed(text, folder)


class LentEngine(weft.Engine):
    """An engine that outlives the blocks of the scripts."""

    async def __aexit__(self, *_: object) -> None:
        return


def run(path: Path, *arguments: str) -> None:
    """Run a script in its folder, and write what it prints into `printed.txt`."""
    folder = Path.cwd() / path.stem
    folder.mkdir(exist_ok=True)
    with (folder / "printed.txt").open("w") as printed, redirect_stdout(printed):
        before, sys.argv = Path.cwd(), [str(path), *arguments]
        os.chdir(folder)
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                traceback.print_exc(file=printed)
        except Exception:
            traceback.print_exc(file=printed)
        finally:
            os.chdir(before)


def main(model: str) -> None:
    """Run all of them."""
    from weft.examples._run import QUICK

    # Few slots, so that programs compete. Blocks are small, since only whole blocks are cached.
    with LentEngine(model, max_num_seqs=2, block_size=32, **QUICK) as engine:

        async def lend(*_: Any, **_more: Any) -> weft.Engine:
            return engine

        weft.Engine.create = lend  # type: ignore[assignment,method-assign]
        for name, arguments in EXAMPLES.items():
            run(ROOT / "examples" / f"{name}.py", "--model", model, *arguments)
        sys.path.insert(0, str(Path.cwd()))  # the second file of the tutorial imports the first
        for name, source in whole_files(TUTORIAL).items():
            Path(name).write_text(source)
            run(Path(name).resolve(), "atlas")


if __name__ == "__main__":
    main(sys.argv[1])
