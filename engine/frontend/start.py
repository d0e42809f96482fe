"""Starting vLLM: its arguments, its errors as ours."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from pydantic import ValidationError

from weft.core.errors import EngineError, EngineStartError, ModelNotFoundError
from weft.core.kv_cache.config import SwapConfig
from weft.core.policies import PolicyConfig
from weft.engine.models.embedded import embedded_model
from weft.engine.processes.loop_thread import LoopThread

if TYPE_CHECKING:  # they import vLLM, which takes seconds
    from weft.engine.frontend.accounting import AccountingLLM, OnAccount
    from weft.engine.frontend.chat import ChatEndpoint
    from weft.engine.vllm_compat.names import AsyncEngineArgs

_CPU_KV_CACHE_BYTES: Final = 1 << 30
_CALIBRATION_PROMPTS: Final = 3
_CALIBRATION_TOKENS: Final = 256


def start_vllm(
    loop: LoopThread,
    *,
    model: str,
    policy: PolicyConfig,
    swap: SwapConfig | None,
    engine_args: dict[str, Any],
    tool_call_parser: str | None,
    on_account: OnAccount,
    abandoned: threading.Event,
) -> tuple[AccountingLLM, ChatEndpoint]:
    """Start vLLM's processes with Weft's scheduler, and its chat endpoint on `loop`. Blocks until it is ready.

    Args:
        loop: where vLLM's front end lives from now on.
        abandoned: set it from another thread to give up waiting.

    Raises:
        ModelNotFoundError, EngineStartError, UnsupportedVllmError, VllmUnavailableError: see `weft.core.errors`.
    """
    from weft.engine.frontend.accounting import AccountingLLM
    from weft.engine.frontend.chat import ChatEndpoint

    async def start() -> tuple[AccountingLLM, ChatEndpoint]:
        arguments = engine_arguments(model, policy, swap, engine_args)
        llm = cast("AccountingLLM", AccountingLLM.from_engine_args(arguments))
        await calibrate(llm)
        llm.on_account = on_account
        return llm, ChatEndpoint(llm, model, tool_call_parser)

    starting = loop.submit(start())
    wait_unless(abandoned, starting)
    try:
        return starting.result()
    except Exception as error:
        raise start_error(model, error) from error


def wait_unless(abandoned: threading.Event, starting: Future[Any]) -> None:
    """Wait until something of a start is done.

    Raises:
        EngineStartError: `abandoned` was set meanwhile.
    """
    while not starting.done():
        wait([starting], timeout=0.2)
        if abandoned.is_set():
            raise EngineStartError("the start was cancelled.")


def engine_arguments(
    model: str, policy: PolicyConfig, swap: SwapConfig | None, engine_args: Mapping[str, Any]
) -> AsyncEngineArgs:
    """vLLM's arguments for an engine with Weft's scheduler: ours, then the user's `engine_args`, then what must be.

    Raises:
        TypeError: `engine_args` has one that vLLM does not know.
    """
    from weft.engine.kv_cache.connector import transfer_config
    from weft.engine.scheduler import WeftScheduler
    from weft.engine.vllm_compat.names import AsyncEngineArgs, current_platform

    arguments: dict[str, Any] = {"served_model_name": model, "disable_log_stats": True}
    if current_platform.is_cpu():
        arguments["kv_cache_memory_bytes"] = _CPU_KV_CACHE_BYTES
        arguments["dtype"] = "float32"  # bfloat16 is emulated, and slower, on CPUs without AMX
    if swap is not None:
        arguments["kv_transfer_config"] = transfer_config(swap)
    arguments |= engine_args
    arguments |= {
        "model": model,
        "scheduler_cls": WeftScheduler,
        "additional_config": {
            **engine_args.get("additional_config", {}),
            "weft": {**asdict(policy), "one_client": True},
        },
    }
    return AsyncEngineArgs(**arguments)


def start_error(model: str, error: Exception, log: Path | None = None) -> EngineError:
    """What the user is told when vLLM did not start.

    Args:
        model: what was to be started.
        error: what vLLM raised.
        log: where its processes write, if not to the terminal.
    """
    if isinstance(error, OSError):  # how transformers and the hub say that neither folder nor hub has the model
        return ModelNotFoundError(model, f"{_reason(error)}.")
    output = f"Its log, {log}," if log is not None else "Its own output above"
    return EngineStartError(
        f"vLLM did not start: {_reason(error)}. {output} says more; `weft doctor` checks the installation, and vLLM's "
        "AsyncEngineArgs lists the arguments."
    )


async def calibrate(llm: AccountingLLM) -> None:
    """Compute a few prompts of random tokens, from which the scheduler learns how fast prefill is, where it needs to
    know that to choose between swap and recompute."""
    from weft.engine.vllm_compat.names import SamplingParams

    transfer = llm.vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector_extra_config.get("min_tokens") != "auto":
        return
    llm.on_account = lambda _call_id, _account: None
    rng = random.Random(0)  # noqa: S311  no secret
    length = min(_CALIBRATION_TOKENS, llm.model_config.max_model_len - 1)
    tokens = range(10, min(llm.model_config.get_vocab_size(), 1000))  # the special ones come before or after
    for number in range(_CALIBRATION_PROMPTS):
        (prompt,) = await llm.renderer.render_cmpl_async([{"prompt_token_ids": rng.choices(tokens, k=length)}])
        async for _ in llm.generate(prompt, SamplingParams(max_tokens=1, detokenize=False), f"calibration-{number}"):
            pass


def resolve_model(model: str | os.PathLike[str] | None) -> str:
    """A folder that is there, a hub name as it stands, or for None the embedded model, prepared if need be.

    Raises:
        ModelNotFoundError: a path to nothing, or to a folder that holds no model.
        ModelPrepareError: the embedded model could not be prepared.
    """
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


def _reason(error: BaseException) -> str:
    """An error in one line; pydantic's say what is wrong below the first."""
    if isinstance(error, ValidationError):
        return "; ".join(problem["msg"] for problem in error.errors())
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(".: ")
