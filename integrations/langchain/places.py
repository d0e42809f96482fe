"""Where a run is in the tree of runs, and how it was started, from what LangChain and LangGraph say of it.

LangChain does not always name the true parent. A runnable that was bound (`bind`, `with_config`, `bind_tools`) merges
the callbacks that it is given with those of the code around it, and the merged ones name the run of that code. The two
differ where a runnable passes callbacks on without running its parts in their context: `RunnableBranch`, and the
batches of sequences. The tags of the run tell then that the parent is not the true one. Other code runs in a run's
context, but passes on the callbacks of a run further out: the attempts of `with_fallbacks`, and tools of LangGraph. The
run is inside the one of the context then.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

from weft.core.locks import fork_safe
from weft.core.program.structure.runs import RunKind

_STEPS: Final = ("graph:step:", "map:key:", "seq:step:")
_CHOICES: Final = ("condition:", "branch:")  # of `RunnableBranch`


class RunPlace(NamedTuple):
    parent: UUID | None
    kind: RunKind = RunKind.CODE
    stage: str | None = None
    task: str | None = None
    is_certain: bool = True  # False: the run is somewhere inside the parent


class OpenRun:
    """What is kept of a run that has not ended, for the runs inside it."""

    __slots__ = (
        "children",
        "holders",
        "is_choice",
        "is_model",
        "is_sequence",
        "is_task",
        "items",
        "name",
        "namespace",
        "owner",
        "place",
    )

    def __init__(
        self, metadata: dict[str, Any], name: str, parent: OpenRun | None, given: Any, *, is_model: bool
    ) -> None:
        self.is_model = is_model
        self.namespace = metadata.get("langgraph_checkpoint_ns")
        # The first run of a namespace is a node or @task of LangGraph. Its code starts the runs tagged as steps.
        self.is_task = self.namespace is not None and (parent is None or parent.namespace != self.namespace)
        self.name = name
        self.owner = metadata.get("lc_agent_name") or metadata.get("langgraph_node") or ""  # the agent or node
        self.is_choice = False  # a part of `RunnableBranch`
        # The runs that `.map()` has yet to start.
        self.items = len(given) if name.startswith("RunnableEach<") and isinstance(given, Sequence) else None
        self.is_sequence: bool | None = None  # None until the first run inside says it
        self.holders: dict[str, UUID] = {}  # by tag of a step, the first run that has it
        self.children: dict[UUID, None] = {}  # the open runs directly inside, without models
        self.place = RunPlace(None)


class OpenRuns:
    """The runs of a program that have not ended, or those of a handler without a program.

    Attributes:
        starting: Held while a run is added here and then reported to the program.
    """

    def __init__(self) -> None:
        self.starting = fork_safe(threading.RLock())
        self._runs: dict[UUID, OpenRun] = {}
        self._outermost: dict[UUID, None] = {}  # the open runs without a known parent, without models

    def get(self, run_id: UUID | None) -> OpenRun | None:
        return self._runs.get(run_id) if run_id is not None else None

    def __len__(self) -> int:
        return len(self._runs)

    def discard(self, run_id: UUID) -> None:
        """The run has ended."""
        run = self._runs.pop(run_id, None)
        self._outermost.pop(run_id, None)
        around = self.get(run.place.parent) if run is not None else None
        if around is not None:
            around.children.pop(run_id, None)

    def add(
        self,
        run_id: UUID,
        parent_id: UUID | None,
        *,
        tags: Sequence[str],
        metadata: dict[str, Any],
        name: str,
        given: Any,
        is_model: bool,
        context_id: UUID | None = None,
    ) -> RunPlace:
        """A run starts.

        Args:
            parent_id: The parent that LangChain names.
            context_id: The run in whose context the run starts.
            tags, metadata, name: What LangChain says of the run.
            is_model: Whether the run is a call of a model, which has no runs inside.
        """
        known = self.get(run_id)
        if known is not None:  # another handle of the program has reported it
            return known.place
        parent = self.get(parent_id)
        run = OpenRun(metadata, name, parent, given, is_model=is_model)
        run.place = self._place(run_id, run, parent_id, parent, tags=tags, context_id=context_id)
        self._runs[run_id] = run
        around = self.get(run.place.parent)
        if not is_model:
            (around.children if around is not None else self._outermost)[run_id] = None
        return run.place

    def _place(
        self,
        run_id: UUID,
        run: OpenRun,
        parent_id: UUID | None,
        parent: OpenRun | None,
        *,
        tags: Sequence[str],
        context_id: UUID | None,
    ) -> RunPlace:
        step = next((tag for tag in tags if tag.startswith(_STEPS)), "")
        if step.startswith("graph:"):
            return RunPlace(parent_id, RunKind.STAGE, step, run.namespace)  # LangGraph repeats a node in its namespace
        run.is_choice = any(tag.startswith(_CHOICES) for tag in tags)
        if parent is None or parent_id is None:
            if run.is_choice and self._outermost:  # the parent that is named is a run of another program
                return self._inside(None)
            return RunPlace(parent_id, *((RunKind.STAGE, "map") if step.startswith("map:") else ()))
        if self._is_inside(context_id, parent_id):
            return RunPlace(context_id)
        if parent.is_sequence is None:
            parent.is_sequence = "seq:step:1" in tags and not parent.is_task
        holder = parent.holders.setdefault(step, run_id) if step and not parent.is_task else run_id
        is_held = holder != run_id and holder in self._runs and not self._runs[holder].is_model
        if is_held or (parent.children and run.is_choice):
            return self._inside(holder if is_held else parent_id)
        return _part(parent_id, parent, "" if parent.is_task else step, is_first=holder == run_id)

    def _is_inside(self, run_id: UUID | None, outer_id: UUID) -> bool:
        """Whether a run is inside another one, and not a sequence, whose steps have tags of their own."""
        run = self.get(run_id)
        if run is None or run_id == outer_id or run.is_sequence:
            return False
        while run is not None and run.place.parent != outer_id:
            run = self.get(run.place.parent)
        return run is not None

    def _inside(self, run_id: UUID | None) -> RunPlace:
        """The place inside a run, or inside the open runs in it, if there is only one at each level. None: the top."""
        children = self._outermost if run_id is None else self._runs[run_id].children
        while len(children) == 1:
            run_id = next(iter(children))
            children = self._runs[run_id].children
        return RunPlace(run_id, is_certain=not children)


def _part(parent_id: UUID, parent: OpenRun, step: str, *, is_first: bool) -> RunPlace:
    """The place of a part of the parent. It is not certain if the parent gives its parts no such tags."""
    if step.startswith("map:"):
        return RunPlace(parent_id, RunKind.STAGE, "map") if is_first else RunPlace(parent_id)
    if step:
        # Two runs with the tag of one step were started by the code of this step, which has no run of its own.
        kind = RunKind.STEP if parent.is_sequence and is_first else RunKind.CODE
        return RunPlace(parent_id, kind, is_certain=bool(parent.is_sequence))
    if parent.items is not None:
        parent.items -= 1
        return (
            RunPlace(parent_id, RunKind.STAGE, "each") if parent.items >= 0 else RunPlace(parent_id, is_certain=False)
        )
    return RunPlace(parent_id)
