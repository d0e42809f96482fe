"""Which calls a call had to wait for, and which thread it belongs to, inferred from the tree of runs and from lineage.

Agent frameworks report a tree: a run starts inside a parent run and ends. Weft keeps a *frontier* per run: the calls
that everything started next inside it comes after. A run enters with its parent's frontier, and when it ends, the calls
it added take the place of those they came after. Siblings that overlap enter with the same frontier, so they come out
as branches; siblings one after another come out as a chain; what follows branches joins them. A call is a run of its
own.

Where a framework says in which order it starts runs, that is certain. Where somebody's code does, calls that overlapped
may belong to strands that know nothing of each other. What had ended is then a *guess* at what comes next, too much
rather than too little, and lineage, if it names some of the guesses, drops the others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

from weft.core.ids import CallId, ThreadId
from weft.core.program.lineage import NOTHING, Ancestry, Calls, Content, Given, Lineage

ROOT: Final[Hashable] = ("weft", "root")
_KEEP_ENDED: Final = 1000  # ended runs whose place is still known, for runs that start inside them all the same


class RunKind(Enum):
    """Who starts a run, and so what it has to wait for."""

    CODE = "code"  # somebody's code, which may run other things beside it and wait for none of them
    STEP = "step"  # a sequence: after the steps before it, however early it was opened (streams open all at once)
    STAGE = "stage"  # a framework or a branch: after the stages before it, and waited for by the stages after it


# How sure it is that what comes next waits for a call of the frontier.
_GUESS, _SEEN, _SAID = range(3)  # calls overlapped; they did not; a framework said so


@dataclass(frozen=True, slots=True)
class _Frontier:
    calls: Mapping[CallId, int] = field(default_factory=dict)
    tools: tuple[str, ...] = ()  # that have run since


@dataclass(eq=False, slots=True)
class _Run:
    key: Hashable
    parent: _Run | None
    place: RunKind
    entry: _Frontier | None = None  # None: not settled before the first call inside
    frontier: _Frontier | None = None  # None: as the entry
    is_open: bool = True
    is_calling: bool = False  # a call began inside
    busy: int = 0  # its open children that are calling
    in_doubt: bool = False  # a call inside comes after guesses of the runs around
    tool: str | None = None
    is_implicit: bool = False  # never reported; ends with its last call
    stage: Hashable = None  # the latest stage inside, and what all of it comes after
    stage_entry: _Frontier | None = None
    calls: set[CallId] = field(default_factory=set)  # in flight, made by the run itself


class Opened(NamedTuple):
    """What is known of a call when it starts."""

    thread_id: ThreadId
    parents: Calls  # the oldest first; none is an ancestor of another
    inexact: Calls  # the parents that are guesses
    tools: tuple[str, ...]  # that ran since the parents ended


class RunTree:
    """The tree of runs of one program. Not thread-safe: the program holds its lock.

    Args:
        new_thread: makes a thread id.
    """

    def __init__(self, new_thread: Callable[[], ThreadId]) -> None:
        self._root = _Run(ROOT, None, RunKind.STAGE, entry=_Frontier())
        self._runs: dict[Hashable, _Run] = {ROOT: self._root}
        self._ended: dict[Hashable, _Run] = {}
        self._calls: dict[CallId, _Run] = {}  # in flight
        self._lineage = Lineage()
        self._past = Ancestry(new_thread)

    # -- runs

    def start(
        self,
        run: Hashable,
        parent: Hashable | None,
        anchor: Hashable = ROOT,
        place: RunKind = RunKind.CODE,
        stage: Hashable = None,
    ) -> None:
        """A run starts inside `parent`, or where that has ended, inside the nearest run around it that has not; if it
        was never reported, inside `anchor` (the top, or a branch).

        Runs of one `stage` do not wait for each other, even when they are run one by one. None: a stage of its own.
        """
        up = self._living(parent, anchor)
        self._runs[run] = node = _Run(run, up, place)
        if place is not RunKind.STEP and up.entry is not None:  # else settled by the first call inside
            node.entry = self._frontier(up)
        if place is RunKind.STAGE and stage is not None:
            if stage != up.stage:
                up.stage, up.stage_entry = stage, node.entry
            node.entry = up.stage_entry

    def note_tool(self, run: Hashable, tool: str) -> None:
        """The run is a tool, or a human's answer. The next calls say that it ran before them."""
        node = self._runs.get(run)
        if node is not None:
            node.tool = tool
            now = self._frontier(node)
            node.frontier = _Frontier(now.calls, _joined(now.tools, (tool,)))

    def end(self, run: Hashable) -> None:
        """A run ends, well or not; its calls still in flight gave no result. Unknown runs are ignored."""
        node = self._runs.pop(run, None)
        if node is None:
            return
        for call_id in tuple(node.calls):
            self.drop_call(call_id)
        self._close(node)
        self._ended[run] = node
        if len(self._ended) > _KEEP_ENDED:
            del self._ended[next(iter(self._ended))]

    def _living(self, run: Hashable | None, anchor: Hashable) -> _Run:
        for key in (run, anchor):
            node = self._runs.get(key) or self._ended.get(key)
            if node is not None:
                return node if node.is_open else self._up(node)
        return self._root

    def _up(self, node: _Run) -> _Run:
        """The nearest run around one that has not ended."""
        up = node.parent
        while up is not None and not up.is_open:
            up = up.parent
        return up or self._root

    def _entry(self, node: _Run) -> _Frontier:
        if node.entry is None and node.place is RunKind.STEP:
            node.entry = self._frontier(self._up(node))  # what its sequence has come to by now
        elif node.entry is None:  # it started when nothing had been called in its parent: they begin after the same
            node.entry = self._entry(node.parent or self._root)
        return node.entry

    def _frontier(self, node: _Run) -> _Frontier:
        return node.frontier or self._entry(node)

    # -- calls

    def start_call(self, run: Hashable, call_id: CallId, anchor: Hashable = ROOT, given: Given = NOTHING) -> Opened:
        """The run makes a call. It need not have been reported, nor to be ended then.

        Args:
            run: the run.
            call_id: of the new call.
            anchor: where a run that was not reported is.
            given: what the call is given; read only if the runs leave something open.

        Returns:
            Its thread and its parents. It continues the thread of the first parent that is still the last call of its
            thread, looking at those that lineage proves before the others, and at older ones before younger; if there
            is none, the thread of a failed call with the same parents; else it begins a new one.
        """
        if run not in self._runs:
            self.start(run, run, anchor)
            self._runs[run].is_implicit = True
        node = self._runs[run]
        before = self._frontier(node)
        parents, proven = self._choose(before.calls, given)
        ordered = self._past.in_order(parents)
        inexact = tuple(call for call in ordered if parents[call] == _GUESS)
        leaf = self._calls[call_id] = _Run(call_id, node, RunKind.CODE, entry=before)
        node.calls.add(call_id)
        self._mark_calling(leaf)
        self._doubt(leaf, inexact)
        thread_id = self._past.add(call_id, ordered, proven)
        self._past.forget(self._in_use)
        return Opened(thread_id, ordered, inexact, before.tools)

    def end_call(self, call_id: CallId, gave: Content = NOTHING) -> None:
        """The call gave its result: what follows in its run comes after it. Ignored if the call is not in flight."""
        leaf = self._calls.get(call_id)
        if leaf is not None:
            self._past.finish(call_id)
            self._lineage.gave(call_id, gave)
            leaf.frontier = _Frontier({call_id: _SEEN})
            self.drop_call(call_id)

    def fail_call(self, call_id: CallId) -> None:
        """The call failed: what follows stands where it stood, and may continue its thread."""
        if call_id in self._calls:
            self._past.give_back(call_id)
            self.drop_call(call_id)

    def drop_call(self, call_id: CallId) -> None:
        """The call is over, without a result if it gave none yet. Ignored if the call is not in flight."""
        leaf = self._calls.pop(call_id, None)
        if leaf is not None:
            self._close(leaf)
            node = leaf.parent or self._root
            node.calls.discard(call_id)
            if node.is_implicit and not node.calls:
                self.end(node.key)

    def _mark_calling(self, node: _Run) -> None:
        """A call begins in a run: so does it in those around it."""
        while not node.is_calling:
            node.is_calling = True
            if node is self._root:
                return
            node = self._up(node)
            node.busy += 1

    def _choose(self, frontier: Mapping[CallId, int], given: Given) -> tuple[dict[CallId, int], Calls]:
        """A call's parents and how sure they are, and the calls that lineage proves.

        Lineage has a say if there are guesses, or if calls have finished that the frontier does not come after. If it
        names calls of the frontier, it drops the other guesses; what it names beside the frontier, it adds.
        """
        past = self._past
        covered = past.up_to(frontier)
        guesses = {call for call, sure in frontier.items() if sure == _GUESS}
        if not guesses and len(frontier) < 2 and not past.finished & ~covered:
            return dict(frontier), ()
        content = given() if callable(given) else given
        if not content.texts and not content.ids:
            return dict(frontier), ()
        proven = certain = self._lineage.certain(content)
        if guesses or not frontier:  # only then is a text inside a longer one worth a search
            proven = self._lineage.origins(content, quoted_from=frontier or None)
        named = frontier.keys() & set(proven)
        dropped = guesses - named - self._lineage.shared(content, guesses - named) if named else ()
        parents = {call: sure for call, sure in frontier.items() if call not in dropped}
        parents |= {call: _SEEN for call in named if parents[call] == _GUESS}
        for call in certain if frontier else proven:
            if past.has_finished(call) and not past.contains(covered, call):
                parents[call] = _SEEN
        return self._reduced(parents), proven

    def _reduced(self, calls: Mapping[CallId, int]) -> dict[CallId, int]:
        """Without the calls that others imply."""
        behind = self._past.before(calls)
        return {call: sure for call, sure in calls.items() if not self._past.contains(behind, call)}

    def _doubt(self, node: _Run, guesses: Calls) -> None:
        """A call begins after guesses: so does all that it is part of, up to the run where the guesses were made."""
        while node.entry is not None and not node.entry.calls.keys().isdisjoint(guesses):
            node.in_doubt = True
            node = self._up(node)

    def _close(self, node: _Run) -> None:
        """What a run added to its frontier takes, around it, the place of what that came after."""
        node.is_open = False
        up = self._up(node)
        others = up.busy
        if node.is_calling:
            others -= 1
            up.busy = others + node.busy  # what goes on inside a run that has ended goes on around it
        if node.frontier is None:
            return
        entry, here, now = self._entry(node), self._frontier(up), node.frontier
        tools = now.tools if node.tool is None else _joined(now.tools, (node.tool,))
        gained = [call for call in now.calls if call not in entry.calls]
        if not gained:
            up.frontier = _Frontier(here.calls, _joined(here.tools, tools))
            return
        beside = {call for call in here.calls if call not in entry.calls}  # of runs that ended while this one ran
        calls = self._reduced({**here.calls, **dict.fromkeys(gained, _SAID)})
        if node.place is RunKind.CODE:
            left = _GUESS in calls.values()  # a strand that this call has nothing to do with, and that may go on
            tangled = bool(beside or others) or node.in_doubt or left
            calls |= {call: _GUESS for call in beside & calls.keys() if tangled and calls[call] == _SEEN}
            calls |= {call: _GUESS if tangled else _SEEN for call in gained if call in calls}
        up.frontier = _Frontier(calls, tools)

    def _in_use(self) -> set[CallId]:
        nodes: set[_Run] = set()
        for leaf in (*self._runs.values(), *self._calls.values()):
            node: _Run | None = leaf
            while node is not None and node not in nodes:
                nodes.add(node)
                node = node.parent
        frontiers = (each for node in nodes for each in (node.entry, node.frontier, node.stage_entry))
        return {*self._calls, *(call for each in frontiers if each is not None for call in each.calls)}


def _joined(tools: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(tools + more))
