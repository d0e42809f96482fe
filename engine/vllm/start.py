"""Starting vLLM: its arguments, and its errors as Weft's."""

from __future__ import annotations

import math
import os
import random
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from pydantic import ValidationError

from weft.core.errors import EngineError, EngineStartError, ModelNotFoundError
from weft.core.ids import EngineId
from weft.core.kv_cache.config import auto_gib
from weft.engine.models.embedded import embedded_model
from weft.engine.options import EngineOptions
from weft.engine.processes.launch import Launch, launch_environment, launch_lock, start_cancelled
from weft.engine.processes.logs import EngineLog, cause
from weft.engine.processes.loop_thread import LoopThread
from weft.engine.processes.memory import free_bytes
from weft.engine.vllm_compat.environment import START_WRITES, quiet, sets_logging
from weft.engine.vllm_compat.versions.members import check_members
from weft.engine.vllm_compat.versions.version import check_vllm
from weft.engine.wire.scheduler_config import config_of_engine, encode_config

if TYPE_CHECKING:  # they import vLLM, which takes seconds
    from weft.engine.vllm.accounting import AccountingLLM, OnAccount
    from weft.engine.vllm.chat import ChatEndpoint
    from weft.engine.vllm.start_progress import StartProgress
    from weft.engine.vllm_compat.names import AsyncEngineArgs, VllmConfig

_SHARED: Final = re.compile("memory|in use", re.IGNORECASE)  # what engines compete for, in vLLM's errors
_CPU_KV_CACHE_BYTES: Final = 1 << 30
CPU_WORKER: Final = "weft.engine.vllm_compat.cpu_worker.SeededCPUWorker"
_CALIBRATION_PROMPTS: Final = 3
_CALIBRATION_TOKENS: Final = 256


def start_vllm(
    loop: LoopThread,
    *,
    model: str,
    options: EngineOptions,
    on_account: OnAccount,
    abandoned: threading.Event,
    progress: StartProgress,
    log: Path | None,
    others: Sequence[EngineId],
) -> tuple[AccountingLLM, ChatEndpoint, Launch]:
    """Start vLLM's processes with Weft's scheduler, and its chat endpoint on `loop`. Blocks until vLLM is ready.

    Args:
        loop: The event loop that vLLM's front end runs on from now on.
        abandoned: Set it from another thread to stop waiting.
        log: The file that vLLM's processes write to; None: the user has configured vLLM's logging.
        others: The engines that run in this process, for errors.

    Returns:
        vLLM's engine, its chat endpoint, and the launch, which knows its processes.

    Raises:
        ModelNotFoundError, EngineStartError, UnsupportedVllmError, VllmUnavailableError: see `weft.core.errors`. No
            process is left.
    """
    launch = Launch()

    with launch_lock.held(abandoned), launch_environment(START_WRITES, quiet()):
        check_members()
        from weft.engine.vllm.chat import ChatEndpoint, check_tool_call_parser

        check_tool_call_parser(options.tool_call_parser)

        async def start() -> tuple[AccountingLLM, ChatEndpoint]:
            arguments = engine_arguments(model, options)

            def configure() -> VllmConfig:
                config = make_config(arguments, log)
                progress.stage("starting the engine")
                return config

            llm = construct(launch, arguments, configure, {})
            progress.stage("warming up")
            await calibrate(llm)
            llm.on_account = on_account
            llm.log = log
            return llm, ChatEndpoint(llm, model, options.tool_call_parser)

        starting = loop.submit(start())
        try:
            wait_unless(abandoned, starting)
            return *starting.result(), launch
        except BaseException as error:
            launch.abandon()
            starting.cancel()
            if isinstance(error, EngineError) or not isinstance(error, Exception):
                raise
            raise start_error(model, error, log, others) from error


def make_config(arguments: AsyncEngineArgs, log: Path | None) -> VllmConfig:
    """vLLM's configuration. It makes vLLM's processes write to `log`, unless the user has configured vLLM's logging."""
    from weft.engine.vllm_compat.logs import EngineLogging

    config = arguments.create_engine_config()
    is_users = config.logging_config.configure_logging or sets_logging()
    config.logging_config = EngineLogging(config.logging_config, None if is_users else log)
    return config


def open_log(engine_id: EngineId, engine_args: Mapping[str, Any]) -> EngineLog | None:
    """The file for vLLM's log; None if the user has configured vLLM's logging."""
    return None if sets_logging() or "logging_config" in engine_args else EngineLog(engine_id)


def construct(
    launch: Launch,
    arguments: AsyncEngineArgs,
    make_config: Callable[[], VllmConfig],
    environment: Mapping[str, str],
    replica: int | None = None,
) -> AccountingLLM:
    """Construct vLLM's engine, and its processes, on the calling thread, which is blocked meanwhile.

    Args:
        launch: Can be abandoned from another thread.
        replica: The number of the engine among those of this process, for vLLM's metrics; None if it is the only one.
    """
    from weft.engine.vllm.accounting import AccountingLLM
    from weft.engine.vllm_compat.logs import leave_out_expected_ends
    from weft.engine.watch.metrics.vllm_metrics import stat_logger

    leave_out_expected_ends()

    stat_loggers = None if replica is None or arguments.disable_log_stats else [stat_logger(replica)]

    def make_engine(config: VllmConfig) -> AccountingLLM:
        with launch_environment((), environment):
            llm = AccountingLLM.from_vllm_config(
                config,
                stat_loggers=stat_loggers,
                enable_log_requests=arguments.enable_log_requests,
                disable_log_stats=arguments.disable_log_stats,
            )
        return cast("AccountingLLM", llm)

    return launch.run(make_config, make_engine)


def wait_unless(abandoned: threading.Event, starting: Future[Any]) -> None:
    """Wait until a part of a start is done, or raise EngineStartError once `abandoned` is set."""
    while not starting.done():
        wait([starting], timeout=0.2)
        if abandoned.is_set():
            raise start_cancelled()


def engine_arguments(model: str, options: EngineOptions, *, most_gib: float | None = None) -> AsyncEngineArgs:
    """vLLM's arguments for an engine with Weft's scheduler. Raises TypeError if vLLM does not know one of them.

    `options.engine_args` override Weft's defaults. Model, scheduler and policy override both. `most_gib` is what
    `most_host_gib` says; None: this is the only engine.
    """
    from weft.engine.kv_cache.connector import transfer_config
    from weft.engine.scheduler import WeftScheduler
    from weft.engine.scheduler.journal import JournaledScheduler
    from weft.engine.vllm_compat.logs import host_logging
    from weft.engine.vllm_compat.names import AsyncEngineArgs, current_platform

    arguments: dict[str, Any] = {
        "served_model_name": model,
        "disable_log_stats": True,
        "logging_config": host_logging(),
    }
    if current_platform.is_cpu():
        arguments["kv_cache_memory_bytes"] = _CPU_KV_CACHE_BYTES
        arguments["dtype"] = "float32"  # bfloat16 is emulated, and slower, on CPUs without AMX
        arguments["worker_cls"] = CPU_WORKER
    swap, engine_args = options.swap, options.engine_args
    if swap is not None and swap.space_gib == "auto" and most_gib is None:
        most_gib = most_host_gib([(engine_args, 1)])
    if swap is not None and most_gib != 0:
        arguments["kv_transfer_config"] = transfer_config(swap, most_gib)
    arguments |= engine_args
    served = _served_name(arguments)
    settings = config_of_engine(options, served)
    arguments |= {
        "model": model,
        "scheduler_cls": JournaledScheduler if settings.journal else WeftScheduler,
        "additional_config": {**engine_args.get("additional_config", {}), "weft": encode_config(settings)},
    }
    return AsyncEngineArgs(**arguments)


def most_host_gib(engines: Iterable[tuple[Mapping[str, Any], int]]) -> float:
    """The most host memory for KV that each worker of these engines takes with "auto", in GiB.

    Args:
        engines: vLLM's arguments for each model, and how many engines of it run on this host.
    """
    degrees = "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"
    workers = sum(count * math.prod(given.get(each) or 1 for each in degrees) for given, count in engines)
    return auto_gib(free_bytes(), workers)


def _served_name(arguments: Mapping[str, Any]) -> str:
    """The name by which vLLM serves the model. It may have several, of which the first counts."""
    name = arguments["served_model_name"]
    return name if isinstance(name, str) else str(next(iter(name or ()), ""))


def start_error(model: str, error: Exception, log: Path | None = None, others: Sequence[EngineId] = ()) -> EngineError:
    """The error that a user gets when vLLM did not start.

    Args:
        others: The engines that run in this process. They have taken what this one lacked, if it was memory or a port.
    """
    if isinstance(error, OSError) and _is_about_model(error):
        return ModelNotFoundError(model, f"{_reason(error)}.")
    reason = (cause(log) if log is not None else "") or _reason(error)
    if others and _SHARED.search(reason):
        reason = (
            f"{reason.rstrip('.')}. This process also runs {', '.join(others)}, which has its share. To serve several "
            "models, start one weft.AsyncMultiLLMEngine(models=[weft.ServedModel(...), ...])"
        )
    more = "Its own output above says more; " if log is None else ""
    if log is not None and log.stat().st_size:
        more = f"Its log, {log}, says more; "
    return EngineStartError(
        f"vLLM did not start: {reason.rstrip('.')}. {more}`weft doctor` checks the installation, and vLLM's "
        "AsyncEngineArgs lists the arguments."
    )


async def calibrate(llm: AccountingLLM) -> None:
    """Compute a few prompts of random tokens, so that the scheduler learns the speed of prefill.

    It does so only where the scheduler must choose between swap and recomputation.
    """
    from weft.engine.vllm_compat.names import SamplingParams

    transfer = llm.vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector_extra_config.get("min_tokens") != "auto":
        return
    llm.on_account = lambda _call_id, _account: None
    rng = random.Random(0)  # noqa: S311  no secret
    length = min(_CALIBRATION_TOKENS, llm.model_config.max_model_len - 1)
    tokens = range(10, min(llm.model_config.get_vocab_size(), 1000))  # special tokens come before or after these
    for number in range(_CALIBRATION_PROMPTS):
        (prompt,) = await llm.renderer.render_cmpl_async([{"prompt_token_ids": rng.choices(tokens, k=length)}])
        async for _ in llm.generate(prompt, SamplingParams(max_tokens=1, detokenize=False), f"calibration-{number}"):
            pass


def resolve_model(model: str | os.PathLike[str] | None) -> str:
    """The folder of a model, or its hub name as it is. None is the embedded model, which is prepared if necessary.

    Raises:
        VllmUnavailableError, UnsupportedVllmError: No engine could load the model, so none is downloaded either.
        ModelNotFoundError: The path leads nowhere, or to a folder without a model.
        ModelPrepareError: The embedded model could not be prepared.
    """
    check_vllm()
    if model is None:
        return str(embedded_model())
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(str(model), "the folder has no config.json.")
        return str(path)
    if path.is_absolute() or str(model).startswith("."):
        raise ModelNotFoundError(str(model), "there is no such folder.")
    return str(model)


def _is_about_model(error: OSError) -> bool:
    """Whether transformers or the hub do not know a model. The system's own errors have a number or a class of their
    own: a full disk, a port in use, a connection that was refused."""
    return error.errno is None and (type(error) is OSError or type(error).__module__.startswith("huggingface_hub"))


def _reason(error: BaseException) -> str:
    """An error in one line. Pydantic's errors have their reasons below the first line."""
    if isinstance(error, ValidationError):
        return "; ".join(problem["msg"] for problem in error.errors())
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(".: ")
