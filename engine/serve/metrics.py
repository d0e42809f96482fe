"""`/metrics`: vLLM's metrics and Weft's. Who asks without a key sees no name that a client sent."""

from __future__ import annotations

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.engine.serve.auth import key_of
from weft.engine.serve.keys import KeyRing
from weft.engine.telemetry.collector import MeasuredEngine, MetricsCollector
from weft.engine.telemetry.names import ALL, Shown, shown_to_strangers
from weft.engine.vllm_compat.server_names import get_prometheus_registry


def add_metrics(app: FastAPI, engine: MeasuredEngine, keys: KeyRing) -> None:
    """Add the route, in front of vLLM's.

    A request with a trusted key, whose sender may know of all tenants, gets all names. So does everybody on a server
    without keys, which shows its programs to everybody anyway.

    Args:
        app: vLLM's application.
        engine: Its metrics are added to vLLM's.
        keys: The server's.
    """
    all_names = _registry(engine, ALL)
    few_names = _registry(engine, shown_to_strangers(keys.tenants)) if keys else all_names

    def metrics(request: Request) -> Response:  # no coroutine: it waits for the schedulers
        key = key_of(request.scope)
        own = all_names if key is not None and key.is_trusted else few_names
        return Response(
            generate_latest(get_prometheus_registry()) + generate_latest(own),
            headers={"content-type": CONTENT_TYPE_LATEST},
        )

    app.router.routes[:0] = [Route(path, metrics, methods=["GET"]) for path in ("/metrics", "/metrics/")]


def _registry(engine: MeasuredEngine, shown: Shown) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(MetricsCollector(engine, shown=shown))
    return registry
