"""`weft.Engine`: one vLLM engine in this process, with programs, sessions and the process table."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, Unpack

from weft.core.kv_cache.config import SwapConfig, check_swap
from weft.core.kv_cache.policies import KvPolicyConfig
from weft.core.kv_cache.stats import SwapStats
from weft.core.policies import DEFAULT_POLICY, PolicyConfig
from weft.core.routing.admission import DEFAULT_MAX_CALLS, Admission
from weft.core.routing.liveness import DEFAULT_HANG_TIMEOUT_S
from weft.engine.host.create import Create
from weft.engine.host.frontend import FrontEnd
from weft.engine.host.in_flight import ModelEndpoint
from weft.engine.host.weak import weakly
from weft.engine.processes.fork import not_in_forks
from weft.engine.processes.host import shut_down
from weft.engine.vllm.start import DEFAULT_SWAP, open_log, resolve_model, start_vllm
from weft.engine.vllm.start_progress import StartProgress
from weft.engine.vllm_compat.options.engine_args import VllmArgs, check_engine_args

_engines: Final[weakref.WeakSet[Engine]] = weakref.WeakSet()  # of this process


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
        swap: Host memory for KV, by default sized by what the host has free; None: none, and what the device has no
            room for is computed again. A `kv_transfer_config` of your own takes precedence. `engine.host_kv_gib` says
            how much there is.
        kv_policy: What is evicted from the KV cache next: a name in `weft.core.kv_cache.policies.KV_POLICIES`, or a
            `KvPolicyConfig` with parameters. None: "next-use" with host memory, and without it as the policy says,
            "ended-first" or "lru". It has no effect without prefix caching, or for models with several kinds of
            attention.
        tool_call_parser: vLLM's parser for tool calls that the model makes of its own accord, e.g. "hermes".
        max_calls: How many calls may be in flight, the scheduler's queue included. Further calls are refused with
            `OverloadedError`.
        call_timeout_s: Seconds a call may take, its time in the queue included. `timeout_s` in its request takes
            precedence.
        program_timeout_s: Seconds a program may take from its first call on. `timeout_s` in its metadata takes
            precedence.
        hang_timeout_s: Seconds after which an engine is killed that does not answer and uses no CPU time; its calls
            fail with `EngineDiedError`. None: never, e.g. for debugging.
        clock: Monotonic seconds, for the process table.
        record: A file to which each program is appended, when it ends, as a trace for `weft sim`; None: the file named
            by WEFT_RECORD in the environment, if any.
        history: A file in which the engine keeps what programs did, such as "weft-history.json", so that the next one
            begins with it: execution graphs, and their work if the policy learns. None: it is forgotten at the end.
        listen: Where the engine serves its state over HTTP, for `weft top`: "unix:/path", or "127.0.0.1:8001"; port 0
            is any free one, and `engine.url` says which. Those who connect can see and end programs. None: nowhere.
        **engine_args: vLLM's `AsyncEngineArgs`, e.g. `max_model_len=4096`, `max_num_seqs=16`.

    Raises:
        ModelNotFoundError, EngineStartError, UnsupportedVllmError, VllmUnavailableError, PolicyError, KvPolicyError,
            ReplicaError: See `weft.core.errors`.
        TraceError: `record` cannot be written, or holds something other than a trace.
        HistoryError: `history` cannot be read or written.
        ListenError: The engine cannot listen there; only loopback addresses and unix sockets will do.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        policy: str | PolicyConfig = DEFAULT_POLICY,
        swap: SwapConfig | None = DEFAULT_SWAP,
        kv_policy: str | KvPolicyConfig | None = None,
        tool_call_parser: str | None = "hermes",
        max_calls: int = DEFAULT_MAX_CALLS,
        call_timeout_s: float | None = None,
        program_timeout_s: float | None = None,
        hang_timeout_s: float | None = DEFAULT_HANG_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        record: str | os.PathLike[str] | None = None,
        history: str | os.PathLike[str] | None = None,
        listen: str | None = None,
        **engine_args: Unpack[VllmArgs],
    ) -> None:
        super().__init__(
            policy,
            max_calls=max_calls,
            call_timeout_s=call_timeout_s,
            program_timeout_s=program_timeout_s,
            hang_timeout_s=hang_timeout_s,
            clock=clock,
            record=record,
            history=history,
            kv_policy=kv_policy,
            listen=listen,
        )
        check_engine_args(engine_args, Engine.__init__)
        check_swap(swap)
        with StartProgress() as progress:
            progress.stage("looking up the model")
            self.model = resolve_model(model)
            self._start_loop()
            log = open_log(self.engine_id, engine_args)
            progress.log = log.path if log is not None else None
            try:
                self._llm, chat, launch = start_vllm(
                    self._loop,
                    model=self.model,
                    policy=self.policy,
                    swap=swap,
                    kv_policy=self._kv_policy,
                    engine_args=engine_args,
                    tool_call_parser=tool_call_parser,
                    on_account=weakly(self._in_flight.account),
                    abandoned=self._start_abandoned,
                    progress=progress,
                    log=progress.log,
                    others=[engine.engine_id for engine in _engines if engine.is_alive],
                )
            except BaseException:
                self._stop_listening()
                self._loop.stop()
                if log is not None:
                    log.close(is_named=True)
                raise
            self.host_kv_gib = self._measured_host_kv()
            progress.ready(self.model, self.host_kv_gib)
        from weft.engine.vllm.watchdog import kill_if_stuck, report_death  # imports vLLM, as only a launch may

        self._only_endpoint = ModelEndpoint(chat, Admission(lambda: max_calls), self.engine_id, self.model)
        self._children = launch.processes
        self._finalizer = weakref.finalize(
            self, not_in_forks(shut_down), self._llm, self._loop, self._children, launch.tree(), log
        )
        self._loop.submit(kill_if_stuck(self._llm, self._children, self._hang_timeout_s))
        self._loop.submit(report_death(self._llm, self.engine_id))
        self._has_started()
        _engines.add(self)
        self._log.info(
            "engine started",
            model=self.model,
            policy=self.policy.name,
            log=str(progress.log),
            host_kv_gib=round(self.host_kv_gib, 1),
        )

    create = Create(__init__)
    """Start an engine without blocking the caller's event loop. Cancelling the start ends its processes."""

    def _endpoint(self, model: str | None) -> ModelEndpoint:
        del model  # vLLM refuses a wrong name
        return self._only_endpoint

    async def _send_to_schedulers(self, message: Mapping[str, Any]) -> list[Any]:
        from weft.engine.vllm_compat.control import send_to_scheduler

        return [await send_to_scheduler(self._llm, message)]

    @property
    def is_alive(self) -> bool:
        return super().is_alive and not self._llm.errored

    @property
    def swap_stats(self) -> SwapStats | None:
        self._check_process()
        return self._llm.swap_stats

    def __repr__(self) -> str:
        return f"<weft.Engine {self.engine_id} {self.model!r} {self.policy.name}>"
