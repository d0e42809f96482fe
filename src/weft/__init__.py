"""Weft: program-aware LLM serving for people who build agents.

Decorate the entrypoint of an agent with `@weft.program`, and pass the program on to its models. Stock vLLM then
schedules the calls of each run as one program. Importing `weft` needs neither vLLM nor torch: the engines,
`weft.MetricsCollector`, `weft.ProgramSpans`, `weft.connect` and `weft.openai_client` are imported when they are first
used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from weft.core.accounts import Account
from weft.core.errors import WeftError
from weft.core.kv_cache.config import SwapConfig
from weft.core.policies import PolicyConfig
from weft.core.process_rows import ProgramRow, ProgramState
from weft.core.process_table import ProcessTable
from weft.core.program import Program
from weft.core.program.decorator import program
from weft.core.routing import BalancerConfig, StealingConfig

if TYPE_CHECKING:
    from weft.engine.engine import Engine
    from weft.engine.multi import AsyncMultiLLMEngine, ServedModel
    from weft.engine.remote.engine import connect
    from weft.engine.watch.metrics.collector import MetricsCollector
    from weft.engine.watch.spans import ProgramSpans
    from weft.integrations.openai import openai_client

__version__ = "0.1.0"

__all__ = [
    "Account",
    "AsyncMultiLLMEngine",
    "BalancerConfig",
    "Engine",
    "MetricsCollector",
    "PolicyConfig",
    "ProcessTable",
    "Program",
    "ProgramRow",
    "ProgramSpans",
    "ProgramState",
    "ServedModel",
    "StealingConfig",
    "SwapConfig",
    "WeftError",
    "__version__",
    "connect",
    "openai_client",
    "program",
]


_LATER: Final = {  # imported when they are first used
    "AsyncMultiLLMEngine": "weft.engine.multi",
    "Engine": "weft.engine.engine",
    "MetricsCollector": "weft.engine.watch.metrics.collector",
    "ProgramSpans": "weft.engine.watch.spans",
    "ServedModel": "weft.engine.multi",
    "connect": "weft.engine.remote.engine",
    "openai_client": "weft.integrations.openai",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
