"""`weft.Engine`: one vLLM engine in this process, with programs, sessions and the process table."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Unpack

from weft.core.kv_cache.stats import SwapStats
from weft.core.policies import PolicyConfig
from weft.core.routing.admission import Admission
from weft.engine.host.create import Create
from weft.engine.host.frontend import FrontEnd
from weft.engine.host.in_flight import Link, ModelEndpoint, weakly
from weft.engine.options import EngineKeywords, EngineOptions, with_signature
from weft.engine.processes.fork import not_in_forks
from weft.engine.processes.host import shut_down
from weft.engine.vllm.start import open_log, resolve_model, start_vllm
from weft.engine.vllm.start_progress import StartProgress

if TYPE_CHECKING:  # it imports vLLM, which takes seconds
    from weft.engine.vllm.accounting import AccountingLLM

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
        **options: What `weft.engine.options.EngineOptions` lists, such as `policy="atlas"` and `max_calls=64`;
            and vLLM's `AsyncEngineArgs`, such as `max_model_len=4096` and `max_num_seqs=16`.

    Raises:
        ModelNotFoundError, EngineStartError, UnsupportedVllmError, VllmUnavailableError, PolicyError, KvPolicyError,
            SwapArgumentError, ReplicaError, InvalidRequestError: See `weft.core.errors`.
        TraceError: `record` cannot be written, or holds something other than a trace.
        HistoryError: `history` cannot be read or written.
        ListenError: The engine cannot listen there; only loopback addresses and unix sockets will do.
    """

    @with_signature
    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Unpack[EngineKeywords]) -> None:
        given = EngineOptions.of(options, Engine.__init__)
        super().__init__(given)
        self.policy: PolicyConfig = given.policy
        with StartProgress() as progress:
            progress.stage("looking up the model")
            self.model = resolve_model(model)
            self._start_loop()
            log = open_log(self.engine_id, given.engine_args)
            progress.log = log.path if log is not None else None
            try:
                self._llm, chat, launch = start_vllm(
                    self._loop,
                    model=self.model,
                    options=given,
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
            endpoint = ModelEndpoint(chat, Admission(lambda: given.max_calls), self.engine_id, self.model)
            self._connect(_OneEngine(self._llm, endpoint, given), learns=given.learns)
            self.host_kv_gib = self._measured_host_kv()
            progress.ready(self.model, self.host_kv_gib)
        from weft.engine.vllm.watchdog import kill_if_stuck, report_death  # imports vLLM, as only a launch may

        self._children = launch.processes
        self._finalizer = weakref.finalize(
            self, not_in_forks(shut_down), self._llm, self._loop, self._children, launch.tree(), log
        )
        self._loop.submit(kill_if_stuck(self._llm, self._children, given.hang_timeout_s))
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

    @property
    def is_alive(self) -> bool:
        return super().is_alive and not self._llm.errored

    def __repr__(self) -> str:
        return f"<weft.Engine {self.engine_id} {self.model!r} {self.policy.name}>"


class _OneEngine(Link):
    """The way to one vLLM engine."""

    def __init__(self, llm: AccountingLLM, endpoint: ModelEndpoint, options: EngineOptions) -> None:
        super().__init__(endpoint)
        self.hears_events = options.predicts
        self._llm = llm

    async def send(self, message: Mapping[str, Any]) -> list[Any]:
        from weft.engine.vllm_compat.control import send_to_scheduler

        return [await send_to_scheduler(self._llm, message)]

    def swap_stats(self) -> SwapStats | None:
        return self._llm.swap_stats
