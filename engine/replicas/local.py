"""A replica on this host: a vLLM engine with processes of its own."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, cast

from weft.core.errors import EngineError, EngineStartError
from weft.core.ids import EngineId
from weft.engine.frontend.accounting import AccountingLLM, OnAccount
from weft.engine.frontend.start import calibrate, start_error
from weft.engine.processes.host import child_processes, end_processes, host_untouched
from weft.engine.processes.loop_thread import in_thread
from weft.engine.processes.tree import ProcessTree
from weft.engine.replicas.base import Replica, ReplicaGoneError
from weft.engine.vllm_compat.names import (
    AsyncEngineArgs,
    EngineDeadError,
    LoggingConfig,
    RequestOutput,
    VLLMClientError,
)

# Processes inherit the environment, which is the host's: one replica of this host starts at a time.
_starting: Final = threading.Lock()


class _CancellationHandle:
    """A call's hold on its replica: cut, it ends with `ReplicaGoneError` where vLLM would let it wait for ever."""

    def __init__(self) -> None:
        self.scope = asyncio.timeout(None)
        self._waits = False  # for vLLM, not for whoever reads the stream
        self._is_cut = False

    def wait(self) -> None:
        """Now it waits for vLLM."""
        if self._is_cut:
            raise ReplicaGoneError
        self._waits = True

    def go_on(self) -> None:
        """vLLM gave something."""
        self._waits = False

    def cut(self) -> None:
        """Nothing will come any more."""
        self._is_cut = True
        if self._waits:
            self.scope.reschedule(asyncio.get_running_loop().time())


class LocalReplica(Replica):
    """A vLLM engine. Use it on one event loop.

    Args:
        engine_id: its name.
        model: as errors name it.
        arguments: vLLM's, of which each start gets the same.
        environment: variables that its processes see, e.g. the cores or GPUs to use.
        log: the file its processes write to, added to at each start.
        on_account: told of each call's account.
    """

    def __init__(
        self,
        engine_id: EngineId,
        *,
        model: str,
        arguments: AsyncEngineArgs,
        environment: Mapping[str, str],
        log: Path,
        on_account: OnAccount,
    ) -> None:
        self.engine_id = engine_id
        self.environment = dict(environment)
        self.log = str(log)
        self._log = log
        self.llm: AccountingLLM | None = None
        self._model = model
        self._arguments = arguments
        self._on_account = on_account
        self._processes: set[BaseProcess] = set()
        self._process_tree = ProcessTree([])
        self._handles: set[_CancellationHandle] = set()

    # -- life

    async def start(self, timeout_s: float) -> None:
        await self._ended()
        while not _starting.acquire(blocking=False):  # noqa: ASYNC110  other engines have other event loops
            await asyncio.sleep(0.1)
        try:
            before = child_processes()
            constructing = in_thread(self._construct)
            try:
                done, _ = await asyncio.wait([constructing], timeout=timeout_s)
                if not done:
                    raise self._not_ready(timeout_s)
                llm = constructing.result()
                self._processes = _engine_processes(before)
                try:  # does it answer?
                    async with asyncio.timeout(timeout_s):
                        await llm.get_supported_tasks()
                        await calibrate(llm)
                except TimeoutError:
                    raise self._not_ready(timeout_s) from None
            except BaseException:
                await asyncio.shield(asyncio.ensure_future(self._abandon(constructing, before)))
                raise
            self._process_tree = ProcessTree(process.pid for process in self._processes if process.pid is not None)
            llm.on_account = self._on_account
            self.llm = llm
        except EngineError:
            raise
        except Exception as error:
            raise start_error(self._model, error, self._log) from error
        finally:
            _starting.release()

    def _not_ready(self, timeout_s: float) -> EngineStartError:
        return EngineStartError(
            f"replica {self.engine_id} of {self._model!r} was not ready within {timeout_s:g} s. Its log, {self.log}, "
            "says how far it came; give it more time with start_timeout_s."
        )

    def _construct(self) -> AccountingLLM:
        with self._log.open("a") as log:
            log.write(f"--- {self.engine_id} of {self._model} starts\n")
        with host_untouched():
            config = self._arguments.create_engine_config()
            if not config.logging_config.configure_logging:  # else the user has set it up
                config.logging_config = _ChildLogging(self._log)
            os.environ.update(self.environment)
            llm = AccountingLLM.from_vllm_config(
                config,
                enable_log_requests=self._arguments.enable_log_requests,
                disable_log_stats=self._arguments.disable_log_stats,
            )
        return cast("AccountingLLM", llm)

    @staticmethod
    async def _abandon(constructing: asyncio.Future[AccountingLLM], before: set[BaseProcess]) -> None:
        """vLLM's constructor cannot be interrupted, but fails when its processes are gone."""
        while not constructing.done():
            await in_thread(lambda: end_processes(_engine_processes(before), grace_s=2.0))
            await asyncio.wait([constructing], timeout=0.2)
        if not constructing.cancelled() and constructing.exception() is None:
            await in_thread(constructing.result().shutdown)
        await in_thread(lambda: end_processes(_engine_processes(before), grace_s=2.0))

    @property
    def is_dead(self) -> bool:
        return self.llm is not None and self.llm.errored

    def why_dead(self) -> str:
        codes = [process.exitcode for process in self._processes if process.exitcode]
        return f"exit code {codes[0]}" if codes else "one of its processes ended"

    def detach(self) -> None:
        llm, self.llm = self.llm, None
        if llm is not None:
            for handle in list(self._handles):
                handle.cut()
            if llm.output_handler is not None:  # it would log the end of its engine as an error
                llm.output_handler.cancel()
            try:
                self._ending = in_thread(lambda: self._end(llm))
            except RuntimeError:  # the interpreter is ending, and gives no more threads
                self._end(llm)

    def _end(self, llm: AccountingLLM) -> None:
        with suppress(Exception):  # of an engine that died, parts are gone; the rest is done here
            llm.shutdown()
        end_processes(self._processes)
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
                handle.wait()
                async for output in outputs:
                    handle.go_on()
                    yield output
                    handle.wait()
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


def _engine_processes(before: set[BaseProcess]) -> set[BaseProcess]:
    """vLLM's engine processes that are new, and not whatever else the host has started meanwhile."""
    return {process for process in child_processes() - before if process.name.startswith("EngineCore")}


class _ChildLogging:
    """vLLM hands its logging configuration to its processes, but applies it in this one as well. This one changes
    nothing here, and unpickles as one that has a process write to a file."""

    configure_logging = False
    pylogging_config_file = None
    log_level = "WARNING"
    formatter = "text"

    def __init__(self, log: Path) -> None:
        self._path = _write_logging_config(log)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(LoggingConfig, configure_logging=True, pylogging_config_file=str(self._path)), ()


def _write_logging_config(log: Path) -> Path:
    """A logging configuration for an engine's processes: they add what vLLM says to `log`."""
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"}},
        "handlers": {"file": {"class": "logging.FileHandler", "filename": str(log), "formatter": "line"}},
        "root": {"level": "WARNING", "handlers": ["file"]},
        "loggers": {"vllm": {"level": "INFO"}},
    }
    path = log.with_suffix(".json")
    path.write_text(json.dumps(config))
    return path
