"""All doors of `weft serve` in memory: its guards and routes over a scripted engine, without a model or a socket."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import AsyncGenerator, Mapping
from types import SimpleNamespace
from typing import Any

import httpx
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client.parser import text_string_to_metric_families

from weft.engine.serve.client import ServedEngine
from weft.engine.serve.keys import KeyRing, make_key_ring
from weft.engine.serve.routes import add_metrics, add_routes
from weft.engine.serve.server import guarded
from weft.engine.vllm_compat.server_names import GracefulHTTPError
from weft.testing import ScriptedEngine

CHAT = "/v1/chat/completions"
BODY = {"model": "scripted", "messages": [{"role": "user", "content": "Hello"}]}


class _Engine(ScriptedEngine):
    """A scripted engine that a server takes for one of several replicas."""

    is_ready = True

    def __init__(self) -> None:
        super().__init__(lambda _body: "yes")
        self.programs.messages._send = self._hear
        self.programs._hears_events = True
        self.told: list[Mapping[str, Any]] = []  # what the schedulers would get

    def served(self) -> tuple[Any, Any]:
        llm = SimpleNamespace(
            vllm_config=None, model_config=None, renderer=None, input_processor=None, failures={}, generate=_generate
        )
        return self._link.endpoint(None), llm

    async def _hear(self, message: Mapping[str, Any]) -> list[Any]:
        self.told.append(message)
        return []


async def _generate(prompt: Any, *_arguments: Any, **_keywords: Any) -> AsyncGenerator[Any]:
    answer = SimpleNamespace(index=0, finish_reason="stop", stop_reason=None, token_ids=[2])
    yield SimpleNamespace(finished=True, outputs=[answer], prompt_token_ids=prompt["prompt_token_ids"])


class Doors:
    """A server. Use it in `with`.

    Args:
        keys: Of the server; none: everybody is served.
    """

    def __init__(self, keys: KeyRing | None = None) -> None:
        self.keys = keys or make_key_ring()
        self.engine = _Engine()

    def __enter__(self) -> Doors:
        self.engine.submit(self._start()).result()
        return self

    def __exit__(self, *_error: object) -> None:
        self.engine.submit(self._stop()).result()
        self.engine.shutdown()

    async def _start(self) -> None:
        self.served = ServedEngine(self.engine, has_keys=len(self.keys) > 0)  # type: ignore[arg-type]  # see `_Engine`
        app = FastAPI()
        app.post(CHAT)(self._chat)
        add_routes(app, self.served)
        add_metrics(app, self.engine, self.keys)
        options = Namespace(host=None, root_path=None, allowed_origins=["*"])
        transport = httpx.ASGITransport(guarded(app, self.served, options, self.keys), client=("127.0.0.1", 5))
        self._client = httpx.AsyncClient(transport=transport, base_url="http://localhost:8000")

    async def _stop(self) -> None:
        self.served.stop()
        await self._client.aclose()

    async def _chat(self, request: Request) -> Response:
        """As vLLM's route does, with less around it."""
        body = await request.json()
        params: Any = SimpleNamespace(extra_args=body.get("vllm_xargs"))
        try:
            async for _output in self.served.generate({"prompt_token_ids": [1]}, params, "chatcmpl-1"):
                pass
        except GracefulHTTPError as error:
            return JSONResponse({"error": {"message": str(error), "type": "error"}}, error.http_status.value)
        return JSONResponse({"id": "chatcmpl-1", "choices": [{"index": 0, "message": {"content": "yes"}}]})

    def ask(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """Send a request, and wait for its answer."""
        return self.engine.submit(self._client.request(method, path, **arguments)).result()

    def chat(
        self, headers: Mapping[str, str] | None = None, body: Mapping[str, Any] = BODY, **arguments: Any
    ) -> httpx.Response:
        """Make a call with fields in `vllm_xargs`."""
        return self.ask("POST", CHAT, json={**body, "vllm_xargs": arguments}, headers=headers)

    def labels(self, headers: Mapping[str, str] | None = None) -> set[str]:
        """The values of all labels of Weft's metrics in `/metrics`, which must answer."""
        answer = self.ask("GET", "/metrics", headers=headers)
        assert answer.status_code == 200, answer.text
        families = [each for each in text_string_to_metric_families(answer.text) if each.name.startswith("weft:")]
        return {value for family in families for sample in family.samples for value in sample.labels.values()}
