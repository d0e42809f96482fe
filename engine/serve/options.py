"""The options of `vllm serve` that `weft serve` passes on."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from weft.core.errors import EngineStartError, ReplicaError
from weft.core.log import get_logger
from weft.core.policies import PolicyConfig
from weft.core.routing.placement import share_gpus
from weft.engine.serve.keys import KeyRing, make_key_ring
from weft.engine.vllm_compat.known_names import VllmArgs
from weft.engine.vllm_compat.versions.members import check_members

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
_MULTIPROCESS: Final = "PROMETHEUS_MULTIPROC_DIR"  # of Prometheus' client library
# Set by the engine; and spans, which vLLM's engine makes only where it keeps its statistics.
_OURS: Final = frozenset({"model", "served_model_name", "scheduler_cls", "otlp_traces_endpoint"})


def parse_options(arguments: Sequence[str]) -> tuple[Namespace, dict[str, Any]]:
    """Read the command line of `vllm serve`, less the word itself. Returns vLLM's options, for its application, and
    those of them for the engine that differ from vLLM's defaults. Raises EngineStartError if an option makes no sense
    for several replicas, or PROMETHEUS_MULTIPROC_DIR is set. If an option is malformed, vLLM's parser ends the process.
    """
    if _MULTIPROCESS in os.environ:
        raise EngineStartError(
            f"with {_MULTIPROCESS} the route /metrics would serve files of other processes and nothing of Weft, which "
            "has one server process; unset the variable."
        )
    check_members()
    from weft.engine.vllm_compat.server_names import FlexibleArgumentParser, make_arg_parser, validate_parsed_serve_args

    parser = make_arg_parser(FlexibleArgumentParser())
    parser.prog = "weft serve"
    parser.usage = "weft serve [MODEL] [OPTIONS]"  # of vLLM's own usage, the error below it is the last of 150 lines
    parser.set_defaults(model=None, shutdown_timeout=_DRAIN_S)
    defaults = parser.parse_args([])
    options = parser.parse_args(list(arguments))
    for name, instead in _OTHERS.items():
        if getattr(options, name, None) != getattr(defaults, name, None):  # versions of vLLM differ in what they have
            raise EngineStartError(f"weft serve takes no --{name.replace('_', '-')}: {instead}.")
    try:
        validate_parsed_serve_args(options)
    except ValueError as error:
        raise EngineStartError(f"{error}") from error
    options.model = options.model_tag or options.model
    if options.model is None:
        options.served_model_name = options.served_model_name or [EMBEDDED_NAME]
        options.enable_auto_tool_choice, options.tool_call_parser = True, options.tool_call_parser or "hermes"
    names = VllmArgs.__annotations__.keys() - _OURS
    given = [(name, value) for name, value in vars(options).items() if name in names]
    for_engine = {name: value for name, value in given if value != getattr(defaults, name)}
    for_engine["disable_log_stats"] = options.disable_log_stats  # vLLM's default, for its metrics, is not Weft's
    return options, for_engine


def gpus_of_replicas(options: Namespace, replicas: int) -> list[str]:
    """For each replica on this host the GPUs that it sees, as in CUDA_VISIBLE_DEVICES. No two replicas share one. The
    list is empty if each sees what the server sees: there is only one, vLLM does not run on CUDA, or there are too few
    GPUs, but `--gpu-memory-utilization` lets all replicas share. Otherwise too few raise ReplicaError."""
    from weft.engine.vllm_compat.names import current_platform

    if replicas == 1 or not current_platform.is_cuda():
        return []
    import torch

    count = torch.cuda.device_count()  # of those that are visible; it does not initialize CUDA
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = list(map(str, range(count))) if visible is None else [name.strip() for name in visible.split(",")][:count]
    each = options.tensor_parallel_size * options.pipeline_parallel_size * options.prefill_context_parallel_size
    found = share_gpus(names, replicas, each)
    if not found and replicas * options.gpu_memory_utilization > 1:
        raise ReplicaError(
            f"{replicas} replicas with {each} GPU{'s' if each > 1 else ''} each need {replicas * each}, and the server "
            f"sees {count}. Pass fewer --replicas, or --backend ray with a cluster that has more. To let all replicas "
            f"share GPUs, pass a --gpu-memory-utilization of at most {100 // replicas / 100}."
        )
    return found


def take_keys(options: Namespace, file: Path | None) -> KeyRing:
    """The API keys that the server takes. They are taken off vLLM's options and out of the environment, because vLLM
    would ask for them a second time, and so that no process that the server starts has them. Raises KeyFileError if
    they make no sense. Raises EngineStartError if vLLM would show a client's stored answers to other keys."""
    of_environment = os.environ.pop("VLLM_API_KEY", None)
    plain = [key for key in (options.api_key or [of_environment]) if key]
    options.api_key = None
    keys = make_key_ring(plain, file)
    if len(keys) > 1 and os.environ.get("VLLM_ENABLE_RESPONSES_API_STORE", "0") not in ("", "0"):
        raise EngineStartError(
            "VLLM_ENABLE_RESPONSES_API_STORE is set: vLLM shows stored responses to every key that knows their id. "
            "Unset it, or run a server for each key."
        )
    return keys


def with_weights(policy: str, keys: KeyRing, *, gate: bool | None = None) -> PolicyConfig:
    """A policy, with the weights of the keys' tenants if it is one that shares by tenant. It runs behind the gate if
    `gate` says so; None leaves that to the policy."""
    if policy == "fair":
        return PolicyConfig(policy, weights=keys.weights, gate=gate)
    if keys.weights:
        get_logger().warning(f"the weights of API keys have no effect under {policy}: pass --policy fair")
    return PolicyConfig(policy, gate=gate)
