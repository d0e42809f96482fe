"""`weft.Engine`: one vLLM engine in this process, with programs, sessions and the process table."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.to_thread

from weft.core.errors import (
    EngineClosedError,
    EngineError,
)
from weft.core.ids import ProgramId, SessionId
from weft.core.kv_cache.config import SwapConfig
from weft.core.kv_cache.stats import SwapStats
from weft.core.policies import PolicyConfig
from weft.core.routing.admission import Admission
from weft.engine.frontend.calls import Served
from weft.engine.frontend.frontend import FrontEnd, weakly
from weft.engine.frontend.start import resolve_model, start_vllm
from weft.engine.processes.host import (
    child_processes,
    end_processes,
    host_untouched,
    shut_down,
)
from weft.engine.processes.loop_thread import LoopThread

DEFAULT_SWAP = SwapConfig()


class Engine(FrontEnd):
    """A vLLM engine whose scheduler knows programs. Starting takes 25 to 45 seconds and three processes.

    ::

        with weft.Engine("Qwen/Qwen2.5-7B-Instruct") as engine:
            model = ChatWeft(engine=engine)

    In a script, make engines under `if __name__ == "__main__":`, since vLLM starts its processes by running the script
    again. May be used from any thread and any number of event loops.

    Args:
        model: a folder in Hugging Face format or a hub name; None: the embedded SmolLM2-135M-Instruct.
        policy: a name in `weft.core.policies.POLICIES`, or a `PolicyConfig` with queue bounds and beta.
        swap: host memory for the KV cache of preempted calls; None: they are computed again. Your own
            `kv_transfer_config` goes before it.
        tool_call_parser: vLLM's parser for tool calls that the model makes of its own accord, e.g. "hermes".
        call_timeout_s: seconds a call may take, its time in the queue included; `timeout_s` in its request goes before.
        program_timeout_s: seconds a program may take from its first call on; `timeout_s` in its metadata goes before.
        clock: monotonic seconds, for the process table.
        record: a file to which each program is appended, when it ends, as a trace for `weft sim` (docs/simulator.md);
            None: the one that WEFT_RECORD in the environment names, if any.
        **engine_args: vLLM's `AsyncEngineArgs`, e.g. `max_model_len=4096`, `max_num_seqs=16`.

    Raises:
        ModelNotFoundError, EngineStartError, UnsupportedVllmError, VllmUnavailableError, PolicyError: see
            `weft.core.errors`.
        TraceError: `record` cannot be written, or holds something else than a trace.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        policy: str | PolicyConfig = "atlas",
        swap: SwapConfig | None = DEFAULT_SWAP,
        tool_call_parser: str | None = "hermes",
        call_timeout_s: float | None = None,
        program_timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        record: str | os.PathLike[str] | None = None,
        **engine_args: Any,
    ) -> None:
        super().__init__(policy, call_timeout_s, program_timeout_s, clock, record)
        self.model = resolve_model(model)
        self._loop = LoopThread(self.engine_id)
        before = child_processes()
        try:
            with host_untouched():
                self._llm, self._endpoint = start_vllm(
                    self._loop,
                    model=self.model,
                    policy=self.policy,
                    swap=swap,
                    engine_args=engine_args,
                    tool_call_parser=tool_call_parser,
                    on_account=weakly(self._on_account),
                    abandoned=self._start_abandoned,
                )
        except BaseException:
            self._closed = True
            end_processes(child_processes() - before)  # vLLM's constructor, if still at it, fails at once
            self._loop.stop()
            raise
        self._children = child_processes() - before
        self._serving = Served(self._endpoint, Admission(), self.engine_id)
        self._finalizer = weakref.finalize(self, shut_down, self._llm, self._loop, self._children)
        self._log.info("engine started", model=self.model, policy=self.policy.name)

    @classmethod
    async def create(cls, model: str | os.PathLike[str] | None = None, **arguments: Any) -> Self:
        """Start an engine without blocking the caller's event loop; arguments as for `Engine`.

        Cancelling it ends the processes that have started.
        """
        engine = cls.__new__(cls)
        over = threading.Event()

        def start() -> None:
            try:
                engine.__init__(model, **arguments)  # type: ignore[misc]
            finally:
                over.set()

        try:
            await anyio.to_thread.run_sync(start, abandon_on_cancel=True)
        except anyio.get_cancelled_exc_class():
            engine._start_abandoned.set()  # noqa: SLF001  its own class
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(over.wait)
                await anyio.to_thread.run_sync(engine.shutdown)
            raise
        return engine

    def _served(self, model: str | None) -> Served:
        del model  # vLLM knows its name
        return self._serving

    # -- life

    @property
    def sessions(self) -> dict[SessionId, frozenset[ProgramId]]:
        """The open sessions and their running programs."""
        with self._lock:
            return {session: frozenset(programs) for session, programs in self._sessions.items()}

    @property
    def is_alive(self) -> bool:
        """Whether it can take calls."""
        return not self._closed and not self._llm.errored

    @property
    def max_model_len(self) -> int:
        """The model's context in tokens."""
        return int(self._llm.model_config.max_model_len)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        tokenizer = self._llm.renderer.tokenizer
        if tokenizer is None:
            raise EngineError("this engine was started with skip_tokenizer_init; it has no tokenizer.")
        return list(tokenizer.encode(text, add_special_tokens=False))

    def count_prompt_tokens(self, body: Mapping[str, Any]) -> int:
        """How many tokens the prompt of a chat request has, as vLLM renders it; it need not fit the model's context.

        Raises:
            InvalidRequestError: it is no chat request, or the chat template refuses it.
            EngineClosedError: the engine was shut down.
        """
        if not self.is_alive:
            raise EngineClosedError
        request = self._endpoint.make_request(dict(body))
        return self._loop.submit(self._endpoint.count_prompt_tokens(request)).result()

    @property
    def swap_stats(self) -> SwapStats | None:
        """What the swap has done, and how full its memory is, as of the call that ended last; None if there is none."""
        return self._llm.swap_stats

    def shutdown(self) -> None:
        """Abort what runs and end the engine's processes. Later calls raise `EngineClosedError`. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with self._lock:
            calls = list(self._in_flight.values())
        self._abort(calls)
        if self._recorder is not None:
            self._recorder.end_all()
        self._finalizer()
        self._log.info("engine shut down")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.shutdown)

    def __repr__(self) -> str:
        return f"<weft.Engine {self.engine_id} {self.model!r} {self.policy.name}>"
