"""A run tree whose runs, calls and threads have readable names."""

from __future__ import annotations

import itertools
from collections.abc import Hashable

from weft.core.ids import CallId, ThreadId
from weft.core.program.structure.lineage import NOTHING, Content, Inputs
from weft.core.program.structure.run_tree import ROOT, RunTree
from weft.core.program.structure.runs import RunKind


class Runs:
    """A run tree with readable names: threads are t0, t1, ..., and a call has the name of its run."""

    def __init__(self) -> None:
        count = itertools.count()
        self.tree = RunTree(lambda: ThreadId(f"t{next(count)}"))
        self.threads: dict[str, ThreadId] = {}
        self.parents: dict[str, set[CallId]] = {}
        self.inexact: dict[str, set[CallId]] = {}
        self.tools: dict[str, tuple[str, ...]] = {}

    def start(
        self,
        run: Hashable,
        parent: Hashable | None = None,
        anchor: Hashable = ROOT,
        kind: RunKind = RunKind.CODE,
        stage: Hashable = None,
    ) -> None:
        self.tree.start(run, parent, anchor, kind, stage=stage)

    def end(self, *runs: Hashable) -> None:
        for run in runs:
            self.tree.end(run)

    def begin(
        self,
        call: str,
        parent: Hashable | None = None,
        anchor: Hashable = ROOT,
        inputs: Inputs = NOTHING,
        *,
        kind: RunKind = RunKind.CODE,
        stage: Hashable = None,
    ) -> None:
        """Start a run that is a call."""
        self.tree.start(call, parent, anchor, kind, stage=stage)
        self.open(call, call, anchor, inputs)

    def open(self, run: Hashable, call: str, anchor: Hashable = ROOT, inputs: Inputs = NOTHING) -> None:
        """Start a call of a run."""
        opened = self.tree.start_call(run, CallId(call), anchor, inputs)
        assert len(set(opened.parents)) == len(opened.parents)
        assert set(opened.inexact) <= set(opened.parents)
        self.threads[call], self.parents[call] = opened.thread_id, set(opened.parents)
        self.inexact[call], self.tools[call] = set(opened.inexact), opened.tools

    def finish(self, *calls: str) -> None:
        """End runs that are calls with success; the output of each has the id of the call."""
        for call in calls:
            self.tree.end_call(CallId(call), content_of(call))
            self.tree.end(call)

    def call(
        self, call: str, parent: Hashable | None = None, anchor: Hashable = ROOT, inputs: Inputs = NOTHING
    ) -> set[CallId]:
        """Make a whole call and return its parents."""
        self.begin(call, parent, anchor, inputs)
        self.finish(call)
        return self.parents[call]


def content_of(*calls: str) -> Content:
    """Return the outputs of some calls, or an input that contains them."""
    return Content(ids=calls)
