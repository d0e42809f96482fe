"""`weft serve`: vLLM's HTTP server over Weft's engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from weft.commands.choices import one_of
from weft.commands.model import fetch_model
from weft.core.policies import DEFAULT_POLICY, POLICIES
from weft.core.routing import BALANCERS, DEFAULT_BALANCER
from weft.core.routing.admission import DEFAULT_MAX_CALLS
from weft.engine.models.embedded import is_embedded_model_ready
from weft.engine.vllm_compat.version import check_vllm

if TYPE_CHECKING:
    from weft.engine.multi import AsyncMultiLLMEngine

# What is unknown here is for vLLM's own parser, the model included.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def serve(  # noqa: PLR0917  typer reads options off the signature
    context: typer.Context,
    replicas: Annotated[int, typer.Option(min=1, help="How many engines serve the model.")] = 1,
    policy: Annotated[str, one_of(POLICIES, help="The scheduling policy.")] = DEFAULT_POLICY,
    balancer: Annotated[str, one_of(BALANCERS, help="How calls are given to engines.")] = DEFAULT_BALANCER,
    backend: Annotated[
        Literal["mp", "ray"], typer.Option(help="Where engines run: processes of this host, or a Ray cluster.")
    ] = "mp",
    max_calls: Annotated[
        int, typer.Option(min=1, help="Calls in flight on an engine; further ones get status 429.")
    ] = DEFAULT_MAX_CALLS,
    api_key_file: Annotated[
        Path | None, typer.Option(help="TOML with API keys, each with a tenant, a weight and limits.")
    ] = None,
) -> None:
    """Serve a model over HTTP, as OpenAI and Anthropic do: weft serve [MODEL], then any options of `vllm serve`.

    Without MODEL it serves the embedded one. SIGTERM lets the calls in flight end, for --shutdown-timeout seconds.
    """
    check_vllm()
    from weft.engine.serve.options import parse_options, take_keys, with_weights

    options, engine_args = parse_options(context.args)
    keys = take_keys(options, api_key_file)
    if options.model is None and not is_embedded_model_ready():
        fetch_model()
    from weft.engine.multi import ServedModel
    from weft.engine.serve.server import serve as run

    engine_options: dict[str, Any] = {
        "models": [ServedModel(options.model, replicas, (options.served_model_name or [None])[0])],
        "policy": with_weights(policy, keys),
        "balancer": balancer,
        "backend": backend,
        "max_calls": max_calls,
        **engine_args,
    }
    run(options, engine_options, keys, _announce)


def _announce(engine: AsyncMultiLLMEngine, address: str) -> None:
    typer.echo(f"{', '.join(engine.models)} at {address} (Ctrl-C or SIGTERM ends the server)")
