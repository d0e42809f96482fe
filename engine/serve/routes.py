"""`/metrics`: vLLM's metrics and Weft's. Who asks without a key sees no name that a client sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.routing import Route

from weft.core.errors import InvalidIdError
from weft.core.identity import Source
from weft.core.identity.sources import foreign_id
from weft.core.ids import ProgramId
from weft.core.program import Program
from weft.engine.http.http_errors import openai_error
from weft.engine.serve.client import ServedEngine
from weft.engine.serve.keys import KeyRing, RequestKey, key_of
from weft.engine.vllm_compat.server_names import get_prometheus_registry
from weft.engine.watch.metrics.collector import MetricsCollector
from weft.engine.watch.metrics.names import ALL, Shown, shown_to_strangers
from weft.engine.watch.page import page_routes
from weft.engine.watch.reader import WatchedEngine
from weft.engine.watch.spans import ProgramSpans


def add_metrics(app: FastAPI, engine: WatchedEngine, keys: KeyRing) -> None:
    """Add the route, in front of vLLM's.

    A request with a trusted key, whose sender may know of all tenants, gets all names. So does everybody on a server
    without keys, which shows its programs to everybody anyway.
    """
    all_names = _registry(engine, ALL)
    few_names = _registry(engine, shown_to_strangers(keys.tenants)) if keys else all_names

    def metrics(request: Request) -> Response:  # on another thread, because it waits for the schedulers
        key = key_of(request.scope)
        own = all_names if key is not None and key.is_trusted else few_names
        return Response(
            generate_latest(get_prometheus_registry()) + generate_latest(own),
            headers={"content-type": CONTENT_TYPE_LATEST},
        )

    app.router.routes[:0] = [Route(path, metrics, methods=["GET"]) for path in ("/metrics", "/metrics/")]


def _registry(engine: WatchedEngine, shown: Shown) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(MetricsCollector(engine, shown=shown))
    return registry


@contextmanager
def spans_sent_to(endpoint: str | None, engine: WatchedEngine) -> Iterator[None]:
    """Send the spans of an engine's programs, and at the end those that have not been sent yet.

    The variable OTEL_EXPORTER_OTLP_TRACES_PROTOCOL names the protocol, as for vLLM's own server. OpenTelemetry's global
    tracer provider is left as it is.

    Args:
        endpoint: The endpoint of OTLP; without one there are no spans.
    """
    if endpoint is None:
        yield
        return
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from weft.engine.vllm_compat.server_names import get_span_exporter

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(get_span_exporter(endpoint)))
    ProgramSpans(engine, provider)
    try:
        yield
    finally:
        provider.shutdown()


def add_routes(app: FastAPI, served: ServedEngine) -> None:
    """Add Weft's own routes and the page. `Authenticate` guards them, as it guards vLLM's."""
    app.router.routes.extend(page_routes(served.timelines, _scope_of, needs_key=served.has_keys, has_models=True))

    @app.get("/weft/programs")
    async def list_programs(key: RequestKey) -> Response:
        """The open programs of the request's key: their calls, service and wait so far."""
        return JSONResponse({"programs": [_shown(program) for program in served.programs.of(key.scope)]})

    @app.get("/weft/state")
    async def state(key: RequestKey) -> Response:
        """What the engine does now, with the programs of the request's key: a `weft.core.show.LiveState`."""
        return Response(await served.live.read_json(f"{key.scope}/"), media_type="application/json")

    @app.delete("/weft/programs/{program_id:path}")
    async def end_program(program_id: str, key: RequestKey) -> Response:
        """End a program of the request's key. Its calls in flight are aborted, and its KV is released."""
        if served.programs.end(ProgramId(f"{key.scope}/{program_id}")):
            return Response(status_code=204)
        return JSONResponse(
            openai_error(404, f"no program {program_id!r:.80} of this key is open.", "program_not_open"), 404
        )

    @app.post("/programs/release")
    async def release_program(request: Request, key: RequestKey) -> Response:
        """End a program of the request's key, as clients of ThunderAgent do."""
        message = await _object_in(request)
        if isinstance(message, Response):
            return message
        name = foreign_id(message.get("program_id"))
        if name is None:
            return JSONResponse(openai_error(400, "program_id is missing or no id.", "invalid_request"), 400)
        ids = (f"{key.scope}/{Source.THUNDERAGENT}:{name}", f"{key.scope}/{name}")
        released = any(served.programs.end(ProgramId(each)) for each in ids)
        return JSONResponse({"program_id": message["program_id"], "released": released})

    @app.post("/weft/events")
    async def note_events(request: Request, key: RequestKey) -> Response:
        """Hear of tools, ends and signs of life of the programs of the request's key, as `weft.connect` sends them."""
        message = await _object_in(request)
        if isinstance(message, Response):
            return message
        try:
            served.note(key.scope, message)
        except InvalidIdError as error:
            return JSONResponse(openai_error(400, str(error), "invalid_request"), 400)
        return Response(status_code=204)


async def _object_in(request: Request) -> dict[str, Any] | Response:
    """The JSON object in a request, or the answer that there is none."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # pages of other sites may send other kinds without asking
        wrong = f"this path takes the content type application/json, not {kind!r:.80}."
        return JSONResponse(openai_error(415, wrong, "invalid_request"), 415)
    try:
        message = await request.json()
    except ValueError:
        message = None
    if not isinstance(message, dict):
        return JSONResponse(openai_error(400, "this path takes a JSON object.", "invalid_request"), 400)
    return message


def _scope_of(request: Request) -> str:
    key = key_of(request.scope)
    return f"{key.scope}/" if key is not None else "/"  # no program's


def _shown(program: Program) -> dict[str, Any]:
    """A program as the list has it. Times in seconds; service along the longest chain of calls, wait over all calls."""
    row = program.row
    return {
        "program_id": program.program_id.partition("/")[2],
        "name": program.name,
        "tenant": program.tenant,
        "state": str(program.state),
        "calls": row.calls if row is not None else 0,
        "calls_in_flight": len(row.in_flight) if row is not None else 0,
        "service_s": program.attained.service_s,
        "wait_s": program.attained.total_wait_s,
    }
