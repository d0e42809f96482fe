"""The options of `vllm serve` that `weft serve` passes on."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any, Final

from weft.core.errors import EngineStartError
from weft.engine.vllm_compat.engine_args import VllmArgs

EMBEDDED_NAME: Final = "smollm2-135m-instruct"
_DRAIN_S: Final = 30  # as long as Kubernetes waits

# What these ask for is done by Weft in another way, or not at all.
_OTHERS: Final = {
    "api_server_count": "one server process is enough for all replicas",
    "data_parallel_size": "pass --replicas instead",
    "grpc": "start vLLM's own server for gRPC",
    "grpc_port": "start vLLM's own server for gRPC",
    "headless": "pass --replicas, or --backend ray, instead",
    "lora_modules": "start vLLM's own server for static LoRA modules",
    "middleware": "put a proxy in front of the server instead",
    "scheduler_cls": "the scheduler is Weft's; --policy chooses its order",
}
_OURS: Final = frozenset({"model", "served_model_name", "scheduler_cls"})  # set by the engine


def parse_options(arguments: Sequence[str]) -> tuple[Namespace, dict[str, Any]]:
    """Read the command line of `vllm serve`, less the word itself.

    Returns:
        vLLM's options, for its application, and those of them for the engine that differ from vLLM's defaults.

    Raises:
        EngineStartError: An option makes no sense for several replicas.
        SystemExit: An option is unknown or malformed; vLLM's parser has printed why.
    """
    from weft.engine.vllm_compat.server_names import (
        FlexibleArgumentParser,
        make_arg_parser,
        validate_parsed_serve_args,
    )

    parser = make_arg_parser(FlexibleArgumentParser())
    parser.set_defaults(model=None, shutdown_timeout=_DRAIN_S)
    defaults = parser.parse_args([])
    options = parser.parse_args(list(arguments))
    for name, instead in _OTHERS.items():
        if getattr(options, name) != getattr(defaults, name):
            raise EngineStartError(f"weft serve takes no --{name.replace('_', '-')}: {instead}.")
    try:
        validate_parsed_serve_args(options)
    except ValueError as error:
        raise EngineStartError(f"{error}") from error
    options.model = options.model_tag or options.model
    if options.model is None:
        options.served_model_name = options.served_model_name or [EMBEDDED_NAME]
        options.enable_auto_tool_choice, options.tool_call_parser = True, options.tool_call_parser or "hermes"
    for_engine = {
        name: value
        for name, value in vars(options).items()
        if name in VllmArgs.__annotations__ and name not in _OURS and value != getattr(defaults, name)
    }
    return options, for_engine
