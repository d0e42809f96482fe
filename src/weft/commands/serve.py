"""`weft serve`: vLLM's HTTP server over Weft's engine."""

from __future__ import annotations

import asyncio
import math
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from weft.commands.demo import fetch_model
from weft.commands.shared import (
    BalancerOption,
    GateOption,
    KvPolicyOption,
    StealingOption,
    check_flags,
    one_of,
    setting,
)
from weft.core.errors import SwapArgumentError
from weft.core.kv_cache.config import SwapConfig
from weft.core.policies import DEFAULT_POLICY, POLICIES
from weft.core.routing import DEFAULT_BALANCER, StealingConfig
from weft.core.routing.admission import DEFAULT_MAX_CALLS
from weft.core.routing.liveness import DEFAULT_HANG_TIMEOUT_S
from weft.core.testing.script import Script
from weft.engine.models.embedded import is_embedded_model_ready
from weft.engine.options import EngineOptions
from weft.engine.replicas.ray.cluster import connection
from weft.engine.serve.script_file import read_script
from weft.engine.vllm.start_progress import host_memory
from weft.engine.vllm_compat.known_names import serve_flags
from weft.engine.vllm_compat.versions.version import check_vllm

if TYPE_CHECKING:
    from weft.engine.multi import AsyncMultiLLMEngine

# What is unknown here is for vLLM's own parser, the model included.
# -h is not typer's here, because typer would find it in vLLM's -dph.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]}


def serve(  # noqa: PLR0917  typer reads options off the signature
    context: typer.Context,
    replicas: Annotated[
        int, typer.Option(min=1, help="How many engines serve the model, each on GPUs of its own.")
    ] = 1,
    policy: Annotated[str, one_of(POLICIES, help="How calls are scheduled.")] = DEFAULT_POLICY,
    gate: GateOption = None,
    kv_policy: KvPolicyOption = None,
    host_kv_gib: Annotated[
        str,
        typer.Option(
            metavar="GIB",
            help="GiB of host memory for KV, for each worker process of each engine; 0: none; auto: the workers share "
            "half of what the host has free, at most four times the KV cache each.",
        ),
    ] = "auto",
    balancer: BalancerOption = DEFAULT_BALANCER,
    backend: Annotated[
        Literal["mp", "ray"], typer.Option(help="Where engines run: processes of this host, or a Ray cluster.")
    ] = "mp",
    stealing: StealingOption = False,
    max_calls: Annotated[
        int, setting(EngineOptions, "max_calls", "Further calls get status 429.", min=1)
    ] = DEFAULT_MAX_CALLS,
    hang_timeout_s: Annotated[
        float, setting(EngineOptions, "hang_timeout_s", "It is started again. 0 means never.", min=0)
    ] = DEFAULT_HANG_TIMEOUT_S,
    history: Annotated[Path | None, setting(EngineOptions, "history")] = None,
    journal: Annotated[Path | None, setting(EngineOptions, "journal")] = None,
    join: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Be a door of the engine on the Ray cluster at ADDRESS.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A TOML file of API keys, each with a tenant, a weight and limits.")
    ] = None,
    scripted: Annotated[
        Path | None,
        typer.Option(help="Run no model: this file of rules (TOML) or of a function (Python) answers. For tests."),
    ] = None,
) -> None:
    """Serve a model over HTTP with the APIs of OpenAI and Anthropic.

    Without MODEL the server has the embedded one. Any options of `vllm serve` may follow, such as --port. At SIGTERM or
    Ctrl-C, the calls in flight have --shutdown-timeout seconds to end.
    """
    if "-h" in context.args:
        typer.echo(context.get_help())
        raise typer.Exit
    check_vllm()
    check_flags(context.args, serve_flags(), [name for each in context.command.params for name in each.opts])
    swap = _host_memory(host_kv_gib)
    if join is not None:
        backend = "ray"
        connection.open(join)
    script = Script(read_script(scripted)) if scripted is not None else None
    folder = TemporaryDirectory(prefix="weft-scripted-")
    with Console(stderr=True).status("reading the options, which takes vLLM some seconds"):
        from weft.engine.serve.options import gpus_of_replicas, parse_options, take_keys, with_weights
        from weft.engine.serve.script_file import scripted_arguments

        first = scripted_arguments(Path(folder.name)) if script is not None else []
        options, engine_args = parse_options([*first, *context.args])
    keys = take_keys(options, api_key_file)
    devices = gpus_of_replicas(options, replicas) if backend == "mp" and script is None else []
    if options.model is None and not is_embedded_model_ready():
        fetch_model()
    import uvloop  # vLLM brings it along

    from weft.engine.multi import AsyncMultiLLMEngine, ServedModel
    from weft.engine.serve.server import serve as run

    engine = {
        "models": [ServedModel(options.model, replicas, (options.served_model_name or [None])[0])],
        "policy": with_weights(policy, keys, gate=gate),
        "kv_policy": kv_policy,
        "swap": swap if script is None else None,
        "history": history,
        "journal": journal,
        "balancer": balancer,
        "devices": devices,
        "stealing": StealingConfig() if stealing else None,
        "max_calls": max_calls,
        "hang_timeout_s": hang_timeout_s or None,
        **engine_args,
    }
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())  # as in vLLM's own server
    with folder:
        if join is not None:
            from weft.engine.serve.doors.door import serve_door
            from weft.engine.serve.doors.owner import Setup

            serve_door(options, Setup.of(engine, options, keys, scripted), hang_timeout_s or None, typer.echo)
        else:
            run(options, partial(AsyncMultiLLMEngine, **engine, backend=script or backend), keys, _announce)


def _host_memory(given: str) -> SwapConfig | None:
    if given == "auto":
        return SwapConfig()
    try:
        gib = float(given)
    except ValueError:
        gib = math.nan
    if not 0 <= gib < math.inf:
        raise SwapArgumentError(
            f"--host-kv-gib is {given}. Give the GiB for each worker, 0 for no host memory, or auto."
        )
    return SwapConfig(gib) if gib else None


def _announce(engine: AsyncMultiLLMEngine, address: str) -> None:
    page = "" if address.startswith("unix:") else f"web page: {address}/weft; "
    typer.echo(host_memory(engine.host_kv_gib))
    typer.echo(f"{', '.join(engine.models)} at {address} ({page}Ctrl-C or SIGTERM ends the server)")
