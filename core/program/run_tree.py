"""Infers the parents and the thread of a call from the tree of runs and from lineage.

Agent frameworks report a tree: a run starts inside a parent run, and ends. Weft keeps a *frontier* for each run: the
calls that the next call inside the run comes after. A run starts with its parent's frontier, which is the run's
*entry*. When the run ends, the calls that it added replace its entry in the parent's frontier. Siblings that overlap
start with the same frontier, so their calls become branches. Siblings that run one after another become a chain. A call
after branches joins them. Each call is a run of its own.

If a framework states the order of its runs, the parents are certain. If user code decides the order, calls that
overlapped may belong to independent strands. Then all calls that had ended are *guesses* for the parents of the next
call, because too many parents are better than too few. If lineage names some of the guesses, the others are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

from weft.core.ids import CallId, ThreadId
from weft.core.program.ancestry import Ancestry, Calls
from weft.core.program.lineage import NOTHING, Content, Inputs, Lineage

ROOT: Final[Hashable] = ("weft", "root")
_KEEP_ENDED: Final = 1000  # ended runs that are kept, because a run may still start inside them


class RunKind(Enum):
    """How a run was started. This decides which calls the run comes after, and which calls come after the run."""

    # User code started the run. The code may run other things at the same time and need not wait for them.
    CODE = "code"
    # The run is a step of a sequence. It comes after the steps before it, even if it was opened before they ended: a
    # sequence that streams opens all its steps at once.
    STEP = "step"
    # A framework started the run, or it is a branch. It comes after all stages before it, and later stages wait for it.
    STAGE = "stage"


class _Certainty(Enum):
    """How certain it is that the next call comes after a call of the frontier."""

    GUESS = "the calls of the frontier overlapped"
    OBSERVED = "no other call overlapped"
    STATED = "a framework stated it"


@dataclass(frozen=True, slots=True)
class _Frontier:
    """The calls that the next call inside a run comes after."""

    calls: Mapping[CallId, _Certainty] = field(default_factory=dict)
    tools: tuple[str, ...] = ()  # the tools that ran after these calls


@dataclass(eq=False, slots=True)
class _Run:
    key: Hashable
    parent: _Run | None
    kind: RunKind
    entry: _Frontier | None = None  # None until the first call inside determines it
    frontier: _Frontier | None = None  # None: the same as the entry
    is_open: bool = True
    is_calling: bool = False  # a call has begun inside
    calling_children: int = 0  # open runs directly inside in which a call has begun
    follows_guesses: bool = False  # a call inside comes after guesses of the enclosing runs
    tool: str | None = None
    is_implicit: bool = False  # the framework did not report it; it ends with its last call
    stage: Hashable = None  # the latest stage among the runs inside
    stage_entry: _Frontier | None = None  # the entry of all runs of that stage
    calls: set[CallId] = field(default_factory=set)  # the calls in flight that the run itself has made


class Opened(NamedTuple):
    """The position of a new call in the program's graph."""

    thread_id: ThreadId
    parents: Calls  # the oldest first; none is an ancestor of another
    inexact: Calls  # the parents that are guesses
    tools: tuple[str, ...]  # the tools that ran after the parents


class RunTree:
    """The tree of runs of one program. Not thread-safe: the program holds its lock.

    Args:
        new_thread: makes a thread id.
    """

    def __init__(self, new_thread: Callable[[], ThreadId]) -> None:
        self._root = _Run(ROOT, None, RunKind.STAGE, entry=_Frontier())
        self._runs: dict[Hashable, _Run] = {ROOT: self._root}
        self._ended: dict[Hashable, _Run] = {}
        self._calls: dict[CallId, _Run] = {}  # the runs of the calls in flight
        self._lineage = Lineage()
        self._ancestry = Ancestry(new_thread)

    # -- runs

    def start(
        self,
        run: Hashable,
        parent: Hashable | None,
        anchor: Hashable = ROOT,
        kind: RunKind = RunKind.CODE,
        stage: Hashable = None,
    ) -> None:
        """Start a run inside `parent`. If `parent` has ended, the run is inside the nearest enclosing open run.

        Args:
            run: the key of the new run.
            parent: the enclosing run.
            anchor: the enclosing run if `parent` was never reported: the top, or a branch.
            kind: how the run was started.
            stage: the stage of a run of kind `STAGE`. Runs of one stage do not wait for each other, even if they run
                one after another. None: the run is a stage by itself.
        """
        enclosing = self._nearest_open(parent, anchor)
        self._runs[run] = node = _Run(run, enclosing, kind)
        if kind is not RunKind.STEP and enclosing.entry is not None:  # otherwise the first call inside determines it
            node.entry = self._frontier(enclosing)
        if kind is RunKind.STAGE and stage is not None:
            if stage != enclosing.stage:
                enclosing.stage, enclosing.stage_entry = stage, node.entry
            node.entry = enclosing.stage_entry

    def note_tool(self, run: Hashable, tool: str) -> None:
        """Note that the run is a tool, or a human's answer. The next calls name it as having run before them."""
        node = self._runs.get(run)
        if node is not None:
            node.tool = tool
            frontier = self._frontier(node)
            node.frontier = _Frontier(frontier.calls, _merged(frontier.tools, (tool,)))

    def end(self, run: Hashable) -> None:
        """End a run, with or without success. Its calls in flight have no result. Unknown runs are ignored."""
        node = self._runs.pop(run, None)
        if node is None:
            return
        for call_id in tuple(node.calls):
            self.drop_call(call_id)
        self._close(node)
        self._ended[run] = node
        if len(self._ended) > _KEEP_ENDED:
            del self._ended[next(iter(self._ended))]

    def _nearest_open(self, run: Hashable | None, anchor: Hashable) -> _Run:
        for key in (run, anchor):
            node = self._runs.get(key) or self._ended.get(key)
            if node is not None:
                return node if node.is_open else self._enclosing(node)
        return self._root

    def _enclosing(self, node: _Run) -> _Run:
        """Return the nearest enclosing run that is open."""
        enclosing = node.parent
        while enclosing is not None and not enclosing.is_open:
            enclosing = enclosing.parent
        return enclosing or self._root

    def _entry(self, node: _Run) -> _Frontier:
        if node.entry is None and node.kind is RunKind.STEP:
            node.entry = self._frontier(self._enclosing(node))  # the present frontier of the sequence
        elif node.entry is None:  # no call had begun in the parent when this run started, so both have the same entry
            node.entry = self._entry(node.parent or self._root)
        return node.entry

    def _frontier(self, node: _Run) -> _Frontier:
        return node.frontier or self._entry(node)

    # -- calls

    def start_call(self, run: Hashable, call_id: CallId, anchor: Hashable = ROOT, inputs: Inputs = NOTHING) -> Opened:
        """Start a call of a run. A run that was not reported starts here, and ends with its last call.

        Args:
            run: the run.
            call_id: the new call.
            anchor: the enclosing run of a run that was not reported.
            inputs: the input of the call. It is read only if the runs leave the parents in doubt.

        Returns:
            The call's thread and parents. The call continues the thread of the first parent that is still the last call
            of its thread. Parents that lineage proves come first, then older parents before younger ones. If there is
            no such parent, the call continues the thread of a failed call with the same parents. Otherwise it begins a
            new thread.
        """
        if run not in self._runs:
            self.start(run, run, anchor)
            self._runs[run].is_implicit = True
        node = self._runs[run]
        before = self._frontier(node)
        parents, proven = self._choose_parents(before.calls, inputs)
        ordered = self._ancestry.in_order(parents)
        inexact = tuple(call for call in ordered if parents[call] is _Certainty.GUESS)
        call_run = self._calls[call_id] = _Run(call_id, node, RunKind.CODE, entry=before)
        node.calls.add(call_id)
        self._mark_calling(call_run)
        self._mark_guesses(call_run, inexact)
        thread_id = self._ancestry.add(call_id, ordered, proven)
        self._ancestry.forget(self._calls_in_use)
        return Opened(thread_id, ordered, inexact, before.tools)

    def end_call(self, call_id: CallId, output: Content = NOTHING) -> None:
        """End a call that has a result: the next call in its run comes after it. Ignored if it is not in flight."""
        call_run = self._calls.get(call_id)
        if call_run is not None:
            self._ancestry.finish(call_id)
            self._lineage.add_output(call_id, output)
            call_run.frontier = _Frontier({call_id: _Certainty.OBSERVED})
            self.drop_call(call_id)

    def fail_call(self, call_id: CallId) -> None:
        """End a call that failed: the next call has the same parents and may continue the thread."""
        if call_id in self._calls:
            self._ancestry.release_thread(call_id)
            self.drop_call(call_id)

    def drop_call(self, call_id: CallId) -> None:
        """End a call, without a result unless `end_call` gave one. Ignored if the call is not in flight."""
        call_run = self._calls.pop(call_id, None)
        if call_run is not None:
            self._close(call_run)
            node = call_run.parent or self._root
            node.calls.discard(call_id)
            if node.is_implicit and not node.calls:
                self.end(node.key)

    def _mark_calling(self, node: _Run) -> None:
        """Note that a call begins in a run, and therefore in the enclosing runs."""
        while not node.is_calling:
            node.is_calling = True
            if node is self._root:
                return
            node = self._enclosing(node)
            node.calling_children += 1

    def _mark_guesses(self, node: _Run, guesses: Calls) -> None:
        """Note that a call begins after guesses, in its run and in all enclosing runs that start with these guesses."""
        while node.entry is not None and not node.entry.calls.keys().isdisjoint(guesses):
            node.follows_guesses = True
            node = self._enclosing(node)

    def _choose_parents(
        self, frontier: Mapping[CallId, _Certainty], inputs: Inputs
    ) -> tuple[dict[CallId, _Certainty], Calls]:
        """Choose the parents of a call with their certainty, and return the calls that lineage proves as well.

        Lineage is asked if the frontier has guesses or several calls, or if calls outside the frontier's past have
        finished. If lineage names calls of the frontier, the other guesses are dropped. Other calls that it names are
        added.
        """
        ancestry = self._ancestry
        covered = ancestry.with_ancestors(frontier)
        guesses = {call for call, certainty in frontier.items() if certainty is _Certainty.GUESS}
        if not guesses and len(frontier) < 2 and not ancestry.finished & ~covered:
            return dict(frontier), ()
        content = inputs() if callable(inputs) else inputs
        if not content.texts and not content.ids:
            return dict(frontier), ()
        proven = certain = self._lineage.certain(content)
        if guesses or not frontier:  # only then is a search inside longer texts worth its time
            proven = self._lineage.origins(content, quoted_from=frontier or None)
        named = frontier.keys() & set(proven)
        dropped = guesses - named - self._lineage.ambiguous(content, guesses - named) if named else ()
        parents = {call: certainty for call, certainty in frontier.items() if call not in dropped}
        parents |= dict.fromkeys(named & guesses, _Certainty.OBSERVED)
        for call in certain if frontier else proven:
            if ancestry.has_finished(call) and not ancestry.contains(covered, call):
                parents[call] = _Certainty.OBSERVED
        return self._without_implied(parents), proven

    def _without_implied(self, calls: Mapping[CallId, _Certainty]) -> dict[CallId, _Certainty]:
        """Return the calls that are not ancestors of others among them."""
        implied = self._ancestry.ancestors(calls)
        return {call: certainty for call, certainty in calls.items() if not self._ancestry.contains(implied, call)}

    def _close(self, node: _Run) -> None:
        """Close a run: in the frontier of the enclosing run, the calls that it added replace its entry."""
        node.is_open = False
        enclosing = self._enclosing(node)
        calling_siblings = enclosing.calling_children
        if node.is_calling:
            calling_siblings -= 1
            enclosing.calling_children = calling_siblings + node.calling_children  # open runs inside move up
        if node.frontier is None:
            return
        entry, around, inside = self._entry(node), self._frontier(enclosing), node.frontier
        tools = inside.tools if node.tool is None else _merged(inside.tools, (node.tool,))
        added = [call for call in inside.calls if call not in entry.calls]
        if not added:
            enclosing.frontier = _Frontier(around.calls, _merged(around.tools, tools))
            return
        concurrent = {call for call in around.calls if call not in entry.calls}  # of runs that ended during this run
        calls = self._without_implied({**around.calls, **dict.fromkeys(added, _Certainty.STATED)})
        if node.kind is RunKind.CODE:
            # Another strand may continue independently: a concurrent run, or one that a remaining guess belongs to.
            strands = bool(concurrent or calling_siblings) or node.follows_guesses or _Certainty.GUESS in calls.values()
            if strands:
                calls |= {call: _Certainty.GUESS for call in concurrent if calls.get(call) is _Certainty.OBSERVED}
            certainty = _Certainty.GUESS if strands else _Certainty.OBSERVED
            calls |= {call: certainty for call in added if call in calls}
        enclosing.frontier = _Frontier(calls, tools)

    def _calls_in_use(self) -> set[CallId]:
        nodes: set[_Run] = set()
        for leaf in (*self._runs.values(), *self._calls.values()):
            node: _Run | None = leaf
            while node is not None and node not in nodes:
                nodes.add(node)
                node = node.parent
        frontiers = (each for node in nodes for each in (node.entry, node.frontier, node.stage_entry))
        return {*self._calls, *(call for each in frontiers if each is not None for call in each.calls)}


def _merged(tools: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(tools + more))
