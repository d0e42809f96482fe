"""Starting vLLM: its arguments, its errors as ours."""

from __future__ import annotations

import os
import threading
from concurrent.futures import wait
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from pydantic import ValidationError

from weft.core.errors import EngineStartError, ModelNotFoundError
from weft.core.policies import PolicyConfig
from weft.engine.model import embedded_model
from weft.engine.process import LoopThread

if TYPE_CHECKING:  # they import vLLM, which takes seconds
    from weft.engine.endpoint import AccountingLLM, ChatEndpoint, OnAccount

_CPU_KV_CACHE_BYTES: Final = 1 << 30


def start_vllm(
    loop: LoopThread,
    *,
    model: str,
    policy: PolicyConfig,
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
    from weft.engine.endpoint import AccountingLLM, ChatEndpoint
    from weft.engine.scheduler import WeftScheduler
    from weft.engine.vllm_api import AsyncEngineArgs, current_platform

    arguments: dict[str, Any] = {"served_model_name": model, "disable_log_stats": True}
    if current_platform.is_cpu():
        arguments["kv_cache_memory_bytes"] = _CPU_KV_CACHE_BYTES
        arguments["dtype"] = "float32"  # bfloat16 is emulated, and slower, on CPUs without AMX
    arguments |= engine_args
    arguments |= {
        "model": model,
        "scheduler_cls": WeftScheduler,
        "additional_config": {
            **engine_args.get("additional_config", {}),
            "weft": {**asdict(policy), "one_client": True},
        },
    }

    async def start() -> tuple[AccountingLLM, ChatEndpoint]:
        llm = cast("AccountingLLM", AccountingLLM.from_engine_args(AsyncEngineArgs(**arguments)))
        llm.on_account = on_account
        return llm, ChatEndpoint(llm, model, tool_call_parser)

    starting = loop.submit(start())
    while not starting.done():
        wait([starting], timeout=0.2)
        if abandoned.is_set():
            raise EngineStartError("the start was cancelled.")
    try:
        return starting.result()
    except OSError as error:  # how transformers and the hub say that neither folder nor hub has the model
        raise ModelNotFoundError(model, f"{_reason(error)}.") from error
    except Exception as error:
        raise EngineStartError(
            f"vLLM did not start: {_reason(error)}. Its own output above says more; `weft doctor` checks the "
            "installation, and vLLM's AsyncEngineArgs lists the arguments."
        ) from error


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
