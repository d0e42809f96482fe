"""Routes of Weft's own, under `/weft`, in addition to vLLM's."""

from __future__ import annotations

import os
from argparse import Namespace

import fastapi
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from weft.core.ids import ProgramId
from weft.engine.serve.client import ServedEngine
from weft.engine.server.http_errors import openai_error
from weft.engine.server.identity import scope_of
from weft.engine.vllm_compat.server_names import AuthenticationMiddleware


def add_routes(app: FastAPI, served: ServedEngine, options: Namespace) -> None:
    """Add them. They take the keys that vLLM's `--api-key` names, which vLLM itself asks for under `/v1` only."""
    keys = [key for key in (options.api_key or [os.environ.get("VLLM_API_KEY")]) if key]
    guard = AuthenticationMiddleware(app, keys)

    @app.delete("/weft/programs/{program_id:path}")
    async def end_program(program_id: str, request: fastapi.Request) -> Response:
        """End a program of the request's key. Its calls in flight are aborted, and its KV is released."""
        if keys and not guard.verify_token(request.headers):
            return JSONResponse(openai_error(401, "this needs an API key of the server.", "unauthorized"), 401)
        if served.programs.end(ProgramId(f"{scope_of(request.headers.raw)}/{program_id}")):
            return Response(status_code=204)
        return JSONResponse(
            openai_error(404, f"no program {program_id!r:.80} of this key is open.", "program_not_open"), 404
        )
