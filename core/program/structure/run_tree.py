"""Infers the parents and the thread of a call from the tree of runs and from lineage.

Agent frameworks report a tree: a run starts inside a parent run, and ends. Weft keeps a *frontier* for each run: the
calls that the next call inside the run comes after. A run starts with its parent's frontier, which is the run's
*entry*. When the run ends, the calls that it added replace its entry in the parent's frontier. Siblings that overlap
start with the same frontier, so their calls become branches. Siblings that run one after another become a chain. A call
after branches joins them. Each call is a run of its own.

If a framework states the order of its runs, the parents are certain. If user code decides the order, calls that
overlapped may belong to independent strands. Then all calls that had ended are *guesses* for the parents of the next
call, because too many parents are better than too few. If lineage names some of the guesses, the others are dropped
if it would have recognized them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Final, NamedTuple

from weft.core.ids import CallId, ThreadId
from weft.core.program.structure.lineage import NOTHING, Content, Inputs, TextLineage
from weft.core.program.structure.parents import Ancestry, Calls, Front, Frontier, ParentChoice, merged, newest, still
from weft.core.program.structure.runs import Run, RunKind, RunningTask

ROOT: Final[Hashable] = ("weft", "root")
KEEP_ENDED: Final = 1000  # ended runs that are kept, because a run may still start inside them
# Bounds for wide programs. A frontier has this many calls at most, the newest.
MOST_IN_FRONTIER: Final = 16_384


class Opened(NamedTuple):
    """The position of a new call in the program's graph."""

    thread_id: ThreadId
    parents: Calls  # the oldest first; none is an ancestor of another
    inexact: Calls  # the parents that are guesses
    tools: tuple[str, ...]  # the tools that ran after the parents


class RunTree:
    """The tree of runs of one program. Not thread-safe: the program holds its lock."""

    def __init__(self, new_thread: Callable[[], ThreadId]) -> None:
        self._root = Run(ROOT, None, RunKind.STAGE, entry=Frontier())
        self._runs: dict[Hashable, Run] = {ROOT: self._root}
        self._ended: dict[Hashable, Run] = {}  # for each ended run, the run that enclosed it
        self._calls: dict[CallId, Run] = {}  # the runs of the calls in flight
        self._begun: dict[RunningTask, dict[Hashable, Run]] = {}  # by task: the open runs of code that it has begun
        self._lineage = TextLineage()
        self._ancestry = Ancestry(new_thread)
        self._choice = ParentChoice(self._ancestry, self._lineage)

    # -- runs

    def start(
        self,
        run: Hashable,
        parent: Hashable | None,
        anchor: Hashable = ROOT,
        kind: RunKind = RunKind.CODE,
        *,
        stage: Hashable = None,
        task: Hashable = None,
        is_certain: bool = True,
        is_late: bool = False,
        task_around: RunningTask | None = None,
        runs_code: bool = False,
    ) -> None:
        """Start a run inside `parent`. If `parent` has ended, the run is inside the nearest enclosing open run.

        A run that is reported a second time, by another handle of the program, goes to the inner one of both places,
        or to the one that is not certain.

        Args:
            anchor: the run that the reporting handle stands for: the top, or a branch. It is the enclosing run if
                `parent` was never reported, or if the branch is inside `parent`.
            kind: how the run was started.
            stage: the stage of a run of kind `STAGE`. Runs of one stage do not wait for each other, even if they run
                one after another. None: the run is a stage by itself.
            task: what the run of a stage does. A run with the task of an earlier run of the stage does it again, so
                it comes after that run.
            is_certain: False: the run is directly in `parent` or in any open run inside that. All parents of its calls
                are guesses, and so are those of the calls in these open runs from now on.
            is_late: True: the run belongs to one that has ended, and need not have waited for what the enclosing run
                has done besides. The parents of its first call are guesses.
            task_around: the task of the event loop in which the run begins; None if it is not known. If the task has
                begun other runs that are open and not around this one, their code does not go on, for example in a
                stream that is neither read to its end nor closed. This run comes after their calls so far, as guesses.
            runs_code: whether the task may leave the run like that.
        """
        enclosing = self._innermost_open(parent, anchor)
        known = self._runs.get(run)
        is_new_doubt = known is not None and not is_certain and known.doubt is None
        if known is not None and (known.is_calling or not (is_new_doubt or self._is_inside(enclosing, known.parent))):
            return
        if known is not None:
            (known.parent or self._root).tools.pop(run, None)
        doubt = enclosing.doubt or (known.doubt if known is not None else None)
        if not is_certain and doubt is None:
            doubt = enclosing
            for other in self._runs.values():
                if self._is_inside(other, enclosing):
                    other.doubt = enclosing
        self._runs[run] = node = Run(run, enclosing, kind, task=task, doubt=doubt)
        if kind is not RunKind.STEP and enclosing.entry is not None:  # otherwise the first call inside determines it
            node.entry = self._frontier(enclosing)
        if kind is RunKind.STAGE and stage is not None:
            if stage != enclosing.stage:
                enclosing.stage, enclosing.stage_entry = stage, node.entry
                enclosing.attempts.clear()
            node.entry = enclosing.attempts.get(task, enclosing.stage_entry)
        if is_late:
            around = self._frontier(enclosing)
            node.entry = self._with_guesses(around, around.front.calls)
        if task_around is not None:
            self._begin_in_task(node, task_around, runs_code=runs_code)

    def _begin_in_task(self, node: Run, task: RunningTask, *, runs_code: bool) -> None:
        """Note the task of a new run. Open runs of the task that are not around the new one do not go on meanwhile."""
        begun = self._begun.get(task)
        if begun and node.kind in {RunKind.CODE, RunKind.BRANCH}:  # the steps of a stream begin in turns
            left = self._not_covered(node, (each for each in begun.values() if not self._is_inside(node, each)))
            if left:
                node.entry = self._with_guesses(self._frontier(node), left)
        if runs_code:
            node.task_around = task
            self._begun.setdefault(task, {})[node.key] = node

    def _end_in_task(self, node: Run) -> int:
        """Forget the task of a run that ends, and return the calls of open runs in it that do not go on either."""
        if node.task_around is not None:
            begun = self._begun[node.task_around]
            begun.pop(node.key, None)
            if not begun:
                del self._begun[node.task_around]
        if not node.calling_children:
            return 0
        over = (each for task, begun in self._begun.items() if task.is_over for each in begun.values())
        left = self._not_covered(node, (each for each in over if self._is_inside(each, node)))
        if left:
            node.frontier = self._with_guesses(self._frontier(node), left)
        return left

    def _not_covered(self, node: Run, runs: Iterable[Run]) -> int:
        """Return the last calls of some runs, less those that the next call of a run comes after anyway."""
        calls = functools.reduce(int.__or__, (each.frontier.front.calls for each in runs if each.frontier), 0)
        return calls and calls & ~self._frontier(node).front.covered

    def _with_guesses(self, frontier: Frontier, guesses: int) -> Frontier:
        """Return a frontier with some calls as guesses, which may be calls of it."""
        front = frontier.front
        past = front.past | self._ancestry.past_of(guesses)
        calls = (front.calls | guesses) & ~past
        certain = calls & ~guesses
        groups = still(front.groups, calls)
        guesses = (front.guesses | guesses) & calls
        return Frontier(
            Front(calls, guesses, front.stated & certain, front.branched & certain, past, groups), frontier.tools
        )

    def is_open(self, run: Hashable) -> bool:
        """Whether a run was reported and has not ended."""
        return run in self._runs

    def knows_run(self, run: Hashable) -> bool:
        """Whether a run was reported and is not forgotten."""
        return run in self._runs or run in self._ended

    def is_inside(self, run: Hashable, outer: Hashable) -> bool:
        """Whether a run is inside another one. An ended run stands for the nearest open run around it."""
        node = self._nearest_open(run)
        return node is not None and self._is_inside(node, self._nearest_open(outer))

    def is_nested(self, run: Hashable, other: Hashable) -> bool:
        """Whether two runs are the same, or one is inside the other one, as `is_inside` says it."""
        node, another = self._nearest_open(run), self._nearest_open(other)
        return node is another or self.is_inside(run, other) or self.is_inside(other, run)

    def innermost_around(self, run: Hashable, other: Hashable) -> Hashable:
        """Return the innermost open run that two runs are inside."""
        node = self._nearest_open(run) or self._root
        while node is not self._root and not self.is_inside(other, node.key):
            node = self._enclosing(node)
        return node.key

    def note_tool(self, run: Hashable, tool: str) -> None:
        """Note that the run is a tool, or a human's answer. The next calls name it as having run before them."""
        node = self._runs.get(run)
        if node is not None:
            node.tool = tool
            (node.parent or self._root).tools[run] = None
            frontier = self._frontier(node)
            node.frontier = Frontier(frontier.front, merged(frontier.tools, (tool,)))

    def end(self, run: Hashable) -> tuple[Hashable, ...]:
        """End a run, with or without success. Its calls in flight have no result. Unknown runs are ignored.

        The tools in it that are still open end before it: a framework may not report that a tool was cancelled.

        Returns the run and those tools.
        """
        node = self._runs.pop(run, None)
        if node is None:
            return (run,)
        (node.parent or self._root).tools.pop(run, None)
        tools = [ended for tool in tuple(node.tools) for ended in self.end(tool)]
        for call_id in tuple(node.calls):
            self.drop_call(call_id)
        self._ended[run] = self._close(node, self._end_in_task(node))
        if len(self._ended) > KEEP_ENDED:
            del self._ended[next(iter(self._ended))]
        return run, *tools

    def _innermost_open(self, run: Hashable | None, anchor: Hashable) -> Run:
        """Return the run, or the anchor if the run is not known or encloses the anchor."""
        node, branch = self._nearest_open(run), self._nearest_open(anchor) or self._root
        return branch if node is None or self._is_inside(branch, node) else node

    def _nearest_open(self, run: Hashable | None) -> Run | None:
        node = self._runs.get(run) or self._ended.get(run)
        return node if node is None or node.is_open else self._enclosing(node)

    def _is_inside(self, node: Run, outer: Run | None) -> bool:
        """Whether a run is inside another one."""
        inside = node.parent
        while inside is not None and inside is not outer:
            inside = inside.parent
        return inside is not None

    def _enclosing(self, node: Run) -> Run:
        """Return the nearest enclosing run that is open."""
        enclosing = node.parent
        while enclosing is not None and not enclosing.is_open:
            enclosing = enclosing.parent
        if node.entry is not None or node.kind is RunKind.STEP:  # the ended runs in between are not needed any more
            node.parent = enclosing
        return enclosing or self._root

    def _entry(self, node: Run) -> Frontier:
        if node.entry is None and node.kind is RunKind.STEP:
            node.entry = self._frontier(self._enclosing(node))  # the present frontier of the sequence
        elif node.entry is None:  # no call had begun in the parent when this run started, so both have the same entry
            node.entry = self._entry(node.parent or self._root)
        return node.entry

    def _frontier(self, node: Run) -> Frontier:
        return node.frontier or self._entry(node)

    # -- calls

    def start_call(self, run: Hashable, call_id: CallId, anchor: Hashable = ROOT, inputs: Inputs = NOTHING) -> Opened:
        """Start a call of a run. A run that was not reported starts here, and ends with its last call.

        Args:
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
        front = before.front if node.doubt is None else self._doubtful_front(node.doubt, before.front)
        parents, proven = self._choice.choose(front, inputs)
        ordered, inexact = self._choice.listed(parents)
        call_run = self._calls[call_id] = Run(call_id, node, RunKind.CODE, entry=before, doubt=node.doubt)
        node.calls.add(call_id)
        self._mark_calling(call_run)
        if parents.guesses:
            self._mark_guesses(call_run, parents.guesses)
        possible = self._choice.possible(parents, front)
        thread_id = self._ancestry.add(call_id, parents.calls, parents.covered, possible, proven)
        renumbered = self._ancestry.forget(self._set_in_use)
        if renumbered is not None:
            for front in self._fronts():
                front.renumber(renumbered)
        return Opened(thread_id, ordered, inexact, before.tools)

    def _doubtful_front(self, around: Run, front: Front) -> Front:
        """Return a frontier with those of a run and of all open runs inside it. Everything in it is a guess."""
        inside = (run for run in self._runs.values() if run.frontier is not None and self._is_inside(run, around))
        fronts = [front, self._frontier(around).front, *(run.frontier.front for run in inside if run.frontier)]
        past = functools.reduce(int.__or__, (each.past for each in fronts))
        calls = functools.reduce(int.__or__, (each.calls for each in fronts)) & ~past
        return Front(calls, calls, past=past, groups=still(sum((each.groups for each in fronts), ()), calls))

    def end_call(self, call_id: CallId, output: Content = NOTHING) -> None:
        """End a call that has a result: the next call in its run comes after it. Ignored if it is not in flight."""
        call_run = self._calls.get(call_id)
        if call_run is not None:
            self._ancestry.finish(call_id)
            self._lineage.add_output(call_id, output)
            call_run.frontier = Frontier(Front(self._ancestry.one(call_id), past=self._ancestry.past(call_id)))
            self.drop_call(call_id)

    def drop_call(self, call_id: CallId) -> None:
        """End a call. Ignored if the call is not in flight.

        If the call has no result, because it failed or was cancelled, the next call has the same parents and may
        continue the thread.
        """
        call_run = self._calls.pop(call_id, None)
        if call_run is not None:
            if not self._ancestry.has_finished(call_id):
                self._ancestry.release_thread(call_id)
            node = call_run.parent or self._root
            self._close(call_run)
            node.calls.discard(call_id)
            if node.is_implicit and not node.calls:
                self.end(node.key)

    def _mark_calling(self, node: Run) -> None:
        """Note that a call begins in a run, and therefore in the enclosing runs."""
        while not node.is_calling:
            node.is_calling = True
            if node is self._root:
                return
            is_branch = node.kind is RunKind.BRANCH
            node = self._enclosing(node)
            node.calling_children += 1
            node.calling_branches += is_branch

    def _mark_guesses(self, node: Run, guesses: int) -> None:
        """Note that a call begins after guesses, in its run and in all enclosing runs that start with these guesses."""
        while node.entry is not None and node.entry.front.calls & guesses:
            node.follows_guesses = True
            node = self._enclosing(node)

    def _close(self, node: Run, doubtful: int = 0) -> Run:
        """Close a run: in the frontier of the enclosing run, the calls that it added replace its entry.

        `doubtful` is those of its calls that stay guesses, because the run need not have waited for them.

        Returns the enclosing run.
        """
        node.is_open = False
        enclosing = self._enclosing(node)
        siblings, branches = enclosing.calling_children, enclosing.calling_branches
        if node.is_calling:
            siblings -= 1
            branches -= node.kind is RunKind.BRANCH
            enclosing.calling_children = siblings + node.calling_children  # open runs inside move up
            enclosing.calling_branches = branches + node.calling_branches
        if node.frontier is None:
            return enclosing
        if node.task is not None and enclosing.stage is not None:
            enclosing.attempts[node.task] = node.frontier
        entry, around, inside = self._entry(node), self._frontier(enclosing), node.frontier
        tools = inside.tools if node.tool is None else merged(inside.tools, (node.tool,))
        added = inside.front.calls & ~entry.front.calls
        if not added:
            enclosing.frontier = Frontier(around.front, merged(around.tools, tools))
            return enclosing
        front = around.front
        concurrent = front.calls & ~entry.front.calls  # of runs that ended during this run
        # All calls of the entry are in the frontier around, or came before it, so their past is no new one.
        past = front.past | inside.front.past
        calls = (front.calls | added) & ~past
        added &= calls
        others = calls & ~added
        guesses, stated, branched = front.guesses & others, front.stated & others, front.branched & others
        if node.doubt is not None:  # the run may have come after other calls, without having them as parents
            guesses = calls
        elif node.kind is RunKind.CODE or node.kind is RunKind.BRANCH:
            # Another strand may continue independently: a concurrent run, or one that a remaining guess belongs to.
            # Branches are no strands for each other.
            is_branch = node.kind is RunKind.BRANCH
            strands = (siblings - branches, concurrent & ~front.branched) if is_branch else (siblings, concurrent)
            if any(strands) or node.follows_guesses or guesses:
                guesses |= concurrent & calls & ~stated | added
            elif is_branch:
                branched |= added
        else:
            stated |= added
        guesses |= doubtful & calls
        stated, branched = stated & ~doubtful, branched & ~doubtful
        if calls.bit_count() > MOST_IN_FRONTIER:
            calls = newest(calls, MOST_IN_FRONTIER * 3 // 4)
        branched &= calls & ~guesses
        groups = still((*front.groups, added), calls)
        enclosing.frontier = Frontier(Front(calls, guesses & calls, stated & calls, branched, past, groups), tools)
        return enclosing

    # -- memory

    def knows(self, call_id: CallId) -> bool:
        """Whether a call is in flight, or may be a parent of a later call."""
        return self._ancestry.knows(call_id)

    def _set_in_use(self) -> int:
        """The calls that are in flight, and those that an open run comes after."""
        in_flight = self._ancestry.set_of(self._calls)
        return functools.reduce(int.__or__, (front.calls for front in self._fronts()), in_flight)

    def _fronts(self) -> Iterator[Front]:
        """Yield the calls of each frontier that is in use, once."""
        nodes: set[Run] = set()
        seen: set[Front] = set()
        for leaf in (*self._runs.values(), *self._calls.values()):
            node: Run | None = leaf
            while node is not None and node not in nodes:
                nodes.add(node)
                for frontier in (node.entry, node.frontier, node.stage_entry, *node.attempts.values()):
                    if frontier is not None and frontier.front not in seen:
                        seen.add(frontier.front)
                        yield frontier.front
                node = node.parent
