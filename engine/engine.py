"""`weft.Engine`: one vLLM engine in this process, with programs, sessions and the process table."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from weft.core.kv_cache.config import SwapConfig
from weft.core.kv_cache.stats import SwapStats
from weft.core.policies import DEFAULT_POLICY, PolicyConfig
from weft.core.routing.admission import Admission
from weft.engine.frontend.calls import ModelEndpoint
from weft.engine.frontend.frontend import FrontEnd
from weft.engine.frontend.start import DEFAULT_SWAP, resolve_model, start_vllm
from weft.engine.frontend.weak import weakly
from weft.engine.processes.host import child_processes, end_processes, restored_environment, shut_down


class Engine(FrontEnd):
    """A vLLM engine whose scheduler knows programs. Starting takes 25 to 45 seconds and three processes.

    ::

        with weft.Engine("Qwen/Qwen2.5-7B-Instruct") as engine:
            model = ChatWeft(engine=engine)

    In a script, make engines under `if __name__ == "__main__":`, because vLLM starts its processes by running the
    script again. An engine may be used from any thread and any number of event loops.

    Args:
        model: A folder in Hugging Face format or a hub name; None: the embedded SmolLM2-135M-Instruct.
        policy: A name in `weft.core.policies.POLICIES`, or a `PolicyConfig` with parameters.
        swap: Host memory for the KV cache of preempted calls; None: their KV is recomputed. A `kv_transfer_config` of
            your own takes precedence.
        tool_call_parser: vLLM's parser for tool calls that the model makes of its own accord, e.g. "hermes".
        call_timeout_s: Seconds a call may take, its time in the queue included. `timeout_s` in its request takes
            precedence.
        program_timeout_s: Seconds a program may take from its first call on. `timeout_s` in its metadata takes
            precedence.
        clock: Monotonic seconds, for the process table.
        record: A file to which each program is appended, when it ends, as a trace for `weft sim`; None: the file named
            by WEFT_RECORD in the environment, if any.
        **engine_args: vLLM's `AsyncEngineArgs`, e.g. `max_model_len=4096`, `max_num_seqs=16`.

    Raises:
        ModelNotFoundError, EngineStartError, UnsupportedVllmError, VllmUnavailableError, PolicyError: See
            `weft.core.errors`.
        TraceError: `record` cannot be written, or holds something other than a trace.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        policy: str | PolicyConfig = DEFAULT_POLICY,
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
        self._start_loop()
        before = child_processes()
        try:
            with restored_environment():
                self._llm, chat = start_vllm(
                    self._loop,
                    model=self.model,
                    policy=self.policy,
                    swap=swap,
                    engine_args=engine_args,
                    tool_call_parser=tool_call_parser,
                    on_account=weakly(self._in_flight.account),
                    abandoned=self._start_abandoned,
                )
        except BaseException:
            self._closed = True
            end_processes(child_processes() - before)  # vLLM's constructor, if it still runs, then fails at once
            self._loop.stop()
            raise
        self._children = child_processes() - before
        self._only_endpoint = ModelEndpoint(chat, Admission(), self.engine_id)
        self._finalizer = weakref.finalize(self, shut_down, self._llm, self._loop, self._children)
        self._log.info("engine started", model=self.model, policy=self.policy.name)

    def _endpoint(self, model: str | None) -> ModelEndpoint:
        del model  # vLLM refuses a wrong name
        return self._only_endpoint

    async def _send_to_schedulers(self, message: Mapping[str, Any]) -> None:
        from weft.engine.vllm_compat.control import send_to_scheduler

        await send_to_scheduler(self._llm, message)

    @property
    def is_alive(self) -> bool:
        return not self._closed and not self._llm.errored

    @property
    def swap_stats(self) -> SwapStats | None:
        return self._llm.swap_stats

    def __repr__(self) -> str:
        return f"<weft.Engine {self.engine_id} {self.model!r} {self.policy.name}>"
