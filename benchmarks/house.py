"""How big the tree is, how it is laid out, and how many hops a call makes in it.

`make house` prints the table. tests/test_house.py holds each figure at what was reached, so that none grows unseen.
"""

from __future__ import annotations

import ast
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table

ROOT: Final = Path(__file__).resolve().parents[1]
PRODUCT: Final = ("core", "engine", "integrations", "src/weft")


def sources() -> list[Path]:
    """The product's Python files. The links in src/weft lead to the other folders, and are not followed."""
    found = (path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py"))
    return sorted({path.resolve() for path in found if "__pycache__" not in path.parts})


class Size(NamedTuple):
    """The figures of the tree at rest."""

    lines: int
    files: int
    most_files_in_a_folder: int
    class_names_used_twice: int
    module_names_used_three_times: int
    files_that_spell_kv_policy: int
    files_that_define_program_ended: int


def size() -> Size:
    """Measure the tree."""
    texts = {path: path.read_text() for path in sources()}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    classes = Counter(
        node.name
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    modules = Counter(path.stem for path in texts if path.stem != "__init__")
    return Size(
        lines=sum(text.count("\n") for text in texts.values()),
        files=len(texts),
        most_files_in_a_folder=max(Counter(path.parent for path in texts).values()),
        class_names_used_twice=sum(count > 1 for count in classes.values()),
        module_names_used_three_times=sum(count > 2 for count in modules.values()),
        files_that_spell_kv_policy=sum("kv_policy" in text for text in texts.values()),
        files_that_define_program_ended=sum(_defines(tree, "program_ended") for tree in trees.values()),
    )


def _defines(tree: ast.Module, name: str) -> bool:
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.walk(tree))


class Hops(NamedTuple):
    """The functions of Weft that were called, in the order of their calls."""

    files: int
    calls: int
    changes_of_file: int

    def within(self, most: Hops) -> bool:
        """Whether none of the figures is above another's."""
        return all(mine <= theirs for mine, theirs in zip(self, most, strict=True))


class Trail:
    """Notes the calls of Weft's functions on all threads that start while it listens, and on this one.

    Generators and comprehensions count as calls, because Python runs each in a frame of its own.
    """

    def __init__(self) -> None:
        self._names = {str(path): str(path.relative_to(ROOT)) for path in sources()}
        self._files: dict[str, str | None] = {}
        self.called: list[tuple[str, str]] = []  # file and function
        self.is_on = False

    def note(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Note an event of `sys.setprofile`."""
        if event != "call" or not self.is_on:
            return
        path = frame.f_code.co_filename
        if path not in self._files:
            self._files[path] = self._names.get(str(Path(path).resolve()))
        file = self._files[path]
        if file is not None:
            self.called.append((file, frame.f_code.co_name))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen while the body runs; threads have to start in it."""
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def hops(self, called: list[tuple[str, str]] | None = None) -> Hops:
        """Count what was called; None: all of it."""
        files = [file for file, _ in (self.called if called is None else called)]
        return Hops(len(set(files)), len(files), sum(a != b for a, b in pairwise(files)))


def hops_of_a_call() -> tuple[Hops, Hops]:
    """What `ChatWeft.invoke` with a program passes through before the chat endpoint, and after its answer.

    The call is the second one of its program. `ScriptedEngine` stands in for vLLM; all before it is what `weft.Engine`
    uses.
    """
    import weft
    from weft.integrations.langchain import ChatWeft
    from weft.testing import ScriptedEngine

    trail = Trail()
    with trail.listening(), ScriptedEngine(lambda _request: "Yes.") as engine, weft.Program("house") as program:
        model = ChatWeft(engine=engine)
        model.invoke("Is it so?", program.config())
        trail.is_on = True
        model.invoke("Is it so?", program.config())
        trail.is_on = False
    stand_in, called = "src/weft/testing/scripted.py", without_clock(trail.called)
    first = next(at for at, each in enumerate(called) if each == (stand_in, "complete"))
    last = max(at for at, (file, _) in enumerate(called) if file == stand_in)
    own = [each for each in called[:first] if each[0] != stand_in]
    return trail.hops(own), trail.hops(called[last + 1 :])


def hops_of_an_end() -> Hops:
    """What vLLM's scheduler passes through in the step in which a program's call ends, with host memory."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from scheduler_harness import SchedulerHarness

    from weft.core.ids import CallId, ProgramId, ThreadId
    from weft.core.process_rows import CallIdentity
    from weft.engine.wire.call_header import CallHeader, encode_call

    trail = Trail()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"name": "auto", "kv_policy": "next-use"}
        harness = SchedulerHarness(Path(folder), settings, prefix_caching=True, swap_blocks=100)
        header = CallHeader(CallIdentity(ProgramId("p"), ThreadId("t"), CallId("c")), program_name="house")
        harness.add("c", prompt=list(range(100, 140)), max_tokens=2, **encode_call(header))
        harness.step()
        with trail.listening():
            output = harness.scheduler.schedule()
            executed = harness.worker.execute(output)
            trail.is_on = True
            harness.scheduler.update_from_output(output, executed)
            trail.is_on = False
        assert not harness.scheduler.requests, "the call has ended"  # noqa: S101  or it is not its end that is measured
    return trail.hops(without_clock(trail.called))


def without_clock(called: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """What was called, less the tests' clock: that of `weft.Engine` is Python's."""
    return [each for each in called if each[0] != "core/testing/__init__.py"]


def main() -> None:
    """Print the figures."""
    tree = Table("the tree", "")
    for name, value in size()._asdict().items():
        tree.add_row(name.replace("_", " "), f"{value:,}")
    before, after = hops_of_a_call()
    ways = {
        "a call, before vLLM": before,
        "its end, in the front end": after,
        "its end, in the scheduler, with host memory": hops_of_an_end(),
    }
    hops = Table("hops of", "files", "calls", "changes of file")
    for name, found in ways.items():
        hops.add_row(name, *map(str, found))
    Console().print(tree, hops)


if __name__ == "__main__":
    main()
