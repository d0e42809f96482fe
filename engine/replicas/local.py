"""A replica on this host: a vLLM engine with processes of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from weft.core.errors import EngineError, EngineStartError
from weft.core.ids import EngineId
from weft.engine.kv_cache.shared import VARIABLE as SHARED_KV
from weft.engine.processes.launch import SHUTDOWN_S, Launch, end_processes, launch_environment, launch_lock
from weft.engine.processes.logs import START_MARK, cause
from weft.engine.processes.loop_thread import in_thread, settled, unread
from weft.engine.processes.tree import ProcessTree
from weft.engine.replicas.base import Replica, ReplicaGoneError
from weft.engine.vllm.accounting import AccountingLLM, OnAccount
from weft.engine.vllm.start import calibrate, construct, make_config, start_error
from weft.engine.vllm.watchdog import kill_if_stuck
from weft.engine.vllm_compat.control import send_to_scheduler
from weft.engine.vllm_compat.environment import START_WRITES, quiet
from weft.engine.vllm_compat.names import AsyncEngineArgs, EngineDeadError, RequestOutput, VLLMClientError


class _CancellationHandle:
    """Ends a call of a replica that is gone with `ReplicaGoneError`. vLLM would let the call wait for ever."""

    def __init__(self) -> None:
        self.scope = asyncio.timeout(None)
        self._waits_for_vllm = False  # False also while the reader of the stream has an output
        self._is_cancelled = False

    def begin_wait(self) -> None:
        """The call waits for vLLM from now on."""
        if self._is_cancelled:
            raise ReplicaGoneError
        self._waits_for_vllm = True

    def end_wait(self) -> None:
        """vLLM gave an output."""
        self._waits_for_vllm = False

    def cancel(self) -> None:
        """End the call, because no further output comes. May be called more than once."""
        was_cancelled, self._is_cancelled = self._is_cancelled, True
        if self._waits_for_vllm and not was_cancelled:
            self.scope.reschedule(asyncio.get_running_loop().time())


class LocalReplica(Replica):
    """A vLLM engine with processes of its own. Use it on one event loop.

    Args:
        arguments: vLLM's arguments, the same for each start.
        hang_timeout_s: Seconds without an answer after which an engine that hangs is killed; None: never.
    """

    def __init__(
        self,
        engine_id: EngineId,
        *,
        model: str,
        arguments: AsyncEngineArgs,
        environment: Mapping[str, str],
        log: Path,
        hang_timeout_s: float | None,
        on_account: OnAccount,
    ) -> None:
        self.engine_id = engine_id
        self.environment = dict(environment)
        self.shares_memory = self.moves_kv = SHARED_KV in environment
        self.log = str(log)
        self._log = log
        self.llm: AccountingLLM | None = None
        self._model = model
        self._arguments = arguments
        self._hang_timeout_s = hang_timeout_s
        self._on_account = on_account
        self._watching: asyncio.Future[None] | None = None
        self._processes: set[BaseProcess] = set()
        self._process_tree = ProcessTree([])
        self._handles: set[_CancellationHandle] = set()

    # -- life

    async def start(self, timeout_s: float) -> None:
        await self._ended()
        try:
            async with launch_lock.held_async():
                await self._launch(timeout_s)
        except EngineError:
            raise
        except Exception as error:
            raise start_error(self._model, error, self._log) from error

    async def _launch(self, timeout_s: float) -> None:
        launch = Launch()
        constructing = in_thread(lambda: self._construct(launch))
        try:
            done, _ = await asyncio.wait([constructing], timeout=timeout_s)
            if not done:
                raise self._not_ready(timeout_s)
            llm = constructing.result()
            try:  # the engine must also answer
                async with asyncio.timeout(timeout_s):
                    await llm.get_supported_tasks()
                    await calibrate(llm)
            except TimeoutError:
                raise self._not_ready(timeout_s) from None
        except BaseException:
            try:
                await settled(in_thread(launch.abandon))
            finally:  # it may be cancelled again
                unread(constructing)
            raise
        self._processes = launch.processes
        self._process_tree = launch.tree()
        llm.on_account = self._on_account
        self.llm = llm
        watching = kill_if_stuck(llm, self._processes, self._hang_timeout_s)
        self._watching = asyncio.ensure_future(watching)

    def _not_ready(self, timeout_s: float) -> EngineStartError:
        return EngineStartError(
            f"replica {self.engine_id} of {self._model!r} was not ready within {timeout_s:g} s. Its log, {self.log}, "
            "says how far it came; give it more time with start_timeout_s."
        )

    def _construct(self, launch: Launch) -> AccountingLLM:
        with self._log.open("a") as log:
            log.write(f"{START_MARK}{self.engine_id} of {self._model} starts\n")
        with launch_environment(START_WRITES, quiet()):
            number = int(self.engine_id.rpartition("/")[2])
            config = partial(make_config, self._arguments, self._log)
            return construct(launch, self._arguments, config, self.environment, number)

    @property
    def is_dead(self) -> bool:
        return self.llm is not None and self.llm.errored

    def why_dead(self) -> str:
        if self.llm is not None and self.llm.why_dead:
            return self.llm.why_dead
        codes = [process.exitcode for process in self._processes if process.exitcode]
        if codes and codes[0] < 0:  # a signal; what the log says is older
            return f"exit code {codes[0]}"
        error = cause(self._log).partition("\n")[0]
        return error or (f"exit code {codes[0]}" if codes else "one of its processes ended")

    def detach(self) -> None:
        llm, self.llm = self.llm, None
        if llm is None:
            return
        if self._watching is not None:
            self._watching.cancel()
        try:
            self._ending = in_thread(lambda: self._end(llm))
        except RuntimeError:  # the interpreter is ending and starts no more threads
            self._end(llm)
        for handle in list(self._handles):
            handle.cancel()
        if llm.output_handler is not None:  # it would log the end of the engine as an error
            llm.output_handler.cancel()

    def _end(self, llm: AccountingLLM) -> None:
        with suppress(Exception):  # parts of an engine that died are gone; the rest is done below
            llm.shutdown(timeout=SHUTDOWN_S)
        try:
            end_processes(self._processes)
        finally:
            self._processes = set()
            self._process_tree.end()

    # -- calls

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        llm = self.llm
        if llm is None:
            raise ReplicaGoneError
        handle = _CancellationHandle()
        self._handles.add(handle)
        try:
            async with handle.scope, aclosing(llm.generate(prompt, sampling_params, request_id, **kwargs)) as outputs:
                handle.begin_wait()
                async for output in outputs:
                    handle.end_wait()
                    yield output
                    handle.begin_wait()
        except (ReplicaGoneError, VLLMClientError):
            raise
        except EngineDeadError:
            raise ReplicaGoneError from None
        except Exception:
            if handle.scope.expired() or llm.errored:
                raise ReplicaGoneError from None
            raise
        finally:
            self._handles.discard(handle)

    async def send_to_scheduler(self, message: Mapping[str, Any]) -> Any:
        llm = self.llm
        if llm is not None:
            with suppress(EngineError):  # it died, and its scheduler with it
                return await send_to_scheduler(llm, message)
        return None
