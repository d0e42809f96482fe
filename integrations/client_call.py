"""A model call of a client that knows no runs but its own: what its program is told of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any, NamedTuple, Self

from weft.core.program import Program
from weft.core.program.structure.lineage import NOTHING, Content


class Caller(NamedTuple):
    program: Program | None = None  # None: the call is a program of its own
    agent: str | None = None
    run: Hashable = None  # in which the call is made; None: where the handle says
    is_certain: bool = True  # False: the call is perhaps not directly in the run
    reports_tools: bool = False  # tools are reported as they run; otherwise only requests and answers tell of them


class ClientCall:
    """A model call. It is named when it is made, and its program counts it however the `with` block ends.

    Args:
        tool_calls: The ids of all tool calls in the input. None of them runs any more, with a result or without one.
        tools_before: The names of the tools that ran before it.

    Attributes:
        output: The content of its answer, if there is one.
        tools: The names of the tools that the answer calls, by tool call.

    Raises:
        ProgramEndedError: The program has ended.
    """

    def __init__(
        self, caller: Caller, inputs: Callable[[], Content], tool_calls: Collection[str], tools_before: Iterable[str]
    ) -> None:
        self._caller = caller
        self._run = object()
        self.program = caller.program or Program("chat")
        self.output = NOTHING
        self.tools: dict[str, str] = {}
        reports = self.program.reports
        reports.tools_ended(tool_calls)
        reports.start_run(self._run, caller.run, is_certain=caller.is_certain, runs_code=False)
        if not caller.reports_tools:
            reports.note_tools(self._run, tools_before)
        self.identity = reports.start_call(self._run, inputs, label=caller.agent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        reports = self.program.reports
        if error is None:
            reports.end_call(self._run, self.identity, self.output)
        reports.end_run(self._run)
        if self._caller.program is None:
            reports.end_with(error)
        elif error is None and not self._caller.reports_tools:
            for tool_call, name in self.tools.items():  # the client runs them now
                reports.tool_began(tool_call, name)
