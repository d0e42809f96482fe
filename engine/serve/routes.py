"""Routes of Weft's own, under `/weft`, in addition to vLLM's."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

import fastapi
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from weft.core.ids import ProgramId
from weft.core.live import to_json
from weft.core.program import Program
from weft.engine.serve.client import ServedEngine
from weft.engine.server.http_errors import openai_error
from weft.engine.server.identity import scope_of
from weft.engine.vllm_compat.server_names import AuthenticationMiddleware


def add_routes(app: FastAPI, served: ServedEngine, options: Namespace) -> None:
    """Add them. They take the keys that vLLM's `--api-key` names, which vLLM itself asks for under `/v1` only."""
    keys = [key for key in (options.api_key or [os.environ.get("VLLM_API_KEY")]) if key]
    guard = AuthenticationMiddleware(app, keys)

    def refusal(request: fastapi.Request) -> Response | None:
        if not keys or guard.verify_token(request.headers):
            return None
        return JSONResponse(openai_error(401, "this needs an API key of the server.", "unauthorized"), 401)

    @app.get("/weft/programs")
    async def list_programs(request: fastapi.Request) -> Response:
        """The open programs of the request's key: their calls, service and wait so far."""
        programs = served.programs.of(scope_of(request.headers.raw))
        return refusal(request) or JSONResponse({"programs": [_shown(program) for program in programs]})

    @app.get("/weft/state")
    async def state(request: fastapi.Request) -> Response:
        """What the engine does now, with the programs of the request's key: a `weft.core.live.LiveState`."""
        refused = refusal(request)
        if refused is not None:
            return refused
        return JSONResponse(to_json(await served.live.read(f"{scope_of(request.headers.raw)}/")))

    @app.delete("/weft/programs/{program_id:path}")
    async def end_program(program_id: str, request: fastapi.Request) -> Response:
        """End a program of the request's key. Its calls in flight are aborted, and its KV is released."""
        refused = refusal(request)
        if refused is not None:
            return refused
        if served.programs.end(ProgramId(f"{scope_of(request.headers.raw)}/{program_id}")):
            return Response(status_code=204)
        return JSONResponse(
            openai_error(404, f"no program {program_id!r:.80} of this key is open.", "program_not_open"), 404
        )


def _shown(program: Program) -> dict[str, Any]:
    """A program as the list has it. Times in seconds; service along the longest chain of calls, wait over all calls."""
    row = program.row
    return {
        "program_id": program.program_id.partition("/")[2],
        "name": program.name,
        "tenant": program.tenant and program.tenant.partition("/")[2],
        "state": str(program.state),
        "calls": row.calls if row is not None else 0,
        "calls_in_flight": len(row.in_flight) if row is not None else 0,
        "service_s": program.attained.service_s,
        "wait_s": program.attained.total_wait_s,
    }
