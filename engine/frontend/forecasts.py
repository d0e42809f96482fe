"""Execution graphs of an engine's programs: fed from their calls, and saved with the history."""

from __future__ import annotations

import asyncio
from typing import Final

from weft.core.accounts import Account
from weft.core.ids import ProgramId
from weft.core.prediction import Cost, ExecutionGraphs
from weft.core.process_rows import CallIdentity, ProgramInfo, ProgramState
from weft.core.program.graph import ProgramGraph
from weft.engine.frontend.history_file import HistoryFile
from weft.engine.frontend.scheduler_messages import Batches
from weft.engine.processes.loop_thread import LoopThread, in_thread

SAVE_EVERY_S: Final = 10.0
_LEARNED_FROM: Final = (ProgramState.FINISHED, ProgramState.FAILED)


class Forecasts:
    """Reports calls and programs to the execution graphs. Any thread may call its methods.

    Programs that were cancelled or abandoned are not learned from, because nothing says where they would have ended.

    Args:
        graphs: The execution graphs.
        loop: The engine's event loop.
        file: Where they are kept, saved ten seconds after a program has ended; None: nowhere.
    """

    def __init__(self, graphs: ExecutionGraphs, loop: LoopThread, file: HistoryFile | None) -> None:
        self.graphs = graphs
        self._file = file
        self._saves = Batches[None](loop, self._save_later)

    def program_started(self, info: ProgramInfo) -> None:
        """A program has made its first call."""
        if info.graph is not None:
            self.graphs.use_hint(info.name, info.graph)

    def call_arrived(self, identity: CallIdentity, graph: ProgramGraph, now_s: float) -> None:
        """A call reaches the engine; its label and the tools before it are in the program's graph."""
        if identity.call_id in graph:
            node = graph[identity.call_id]
            self.graphs.arrive(graph.name, identity, label=node.label, tools=node.tools, now_s=now_s)
        else:
            self.graphs.arrive(graph.name, identity, now_s=now_s)

    def call_left(self, identity: CallIdentity, account: Account | None, now_s: float) -> None:
        """A call has left the engine; without an account, it has no result."""
        cost = None
        if account is not None:
            computed = max(0, account.prompt_tokens - account.cached_tokens)
            cost = Cost(account.service_s, account.output_tokens, computed)
        self.graphs.leave(identity.program_id, identity.call_id, cost, now_s)

    def program_ended(self, program_id: ProgramId, state: ProgramState) -> None:
        """A program has ended."""
        self.graphs.end(program_id, learn=state in _LEARNED_FROM)
        if self._file is not None:
            self._saves.add(None)

    async def _save_later(self, _ends: tuple[None, ...]) -> None:
        await asyncio.sleep(SAVE_EVERY_S)
        if self._file is not None:
            await in_thread(self._file.save)
