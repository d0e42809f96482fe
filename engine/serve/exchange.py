"""A request to the server: its identity, its admission, and its errors as Weft writes them."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from weft.core.errors import InvalidRequestError, OverloadedError, WeftError
from weft.core.identity import Identity, identity_of
from weft.core.identity.families import starts_agents
from weft.core.identity.items import items_of_answer
from weft.core.identity.lineage import Placed
from weft.core.identity.sources import trace_id
from weft.core.routing.admission import Refused, check_timeout, refused_by
from weft.engine.host.call_path import fingerprint, settings_of
from weft.engine.host.in_flight import InFlight
from weft.engine.http.bodies import Arrivals
from weft.engine.http.check_ids import LIMIT_VARIABLE, App, CheckIds, Exchange, Message, Receive, Refusal, Scope, Send
from weft.engine.http.http_errors import (
    error_body,
    error_code,
    error_for,
    error_headers,
    error_status,
    path_of,
    typed_error,
)
from weft.engine.http.identity import without_scope
from weft.engine.serve.answers import (
    AnswerReader,
    ReadAnswer,
    add_report,
    add_report_to_events,
    choices_that_end,
    replace_error,
)
from weft.engine.serve.client import ServedEngine
from weft.engine.serve.keys import ApiKey, key_of
from weft.engine.serve.requests import ServedRequest
from weft.engine.serve.served_calls import REQUEST
from weft.engine.wire.call_header import check_shown

# In an answer of any of the APIs, whole or as a stream, that asks its client to call a tool. In a text, its quotes are
# escaped.
_ASKS: Final = re.compile(rb'"(?:finish|stop)_reason": ?"tool_(?:calls|use)"|"type": ?"function_call"')
# A call of a tool that frameworks take an answer with, and that returns to no model: smolagents, pydantic-ai.
_FINAL: Final = re.compile(rb'"(?:function": ?\{|(?:call_)?id": ?"[^"]{1,128}", ?)"name": ?"final_(?:answer|result)')
_TOKENS: Final = "/inference/v1/generate"
_RESPONSES: Final = "/v1/responses"
_REPORTING: Final = frozenset({"/v1/chat/completions", "/v1/completions"})  # their answers have the call's account
# These make one call at least.
_ADMITTED: Final = _REPORTING | {"/v1/chat/completions/batch", _RESPONSES, "/v1/messages", "/invocations", _TOKENS}
_REASONS: Final = {413: Refused.MAX_BODY_BYTES, 408: Refused.SLOW}  # by status
_TIMEOUT: Final = b"weft-timeout-s"
_DEADLINE: Final = b"weft-program-deadline-s"
PROGRAM: Final = b"weft-program-id"


class ServeRequests(CheckIds):
    """`CheckIds` for Weft's own server, which finds each request's program, and refuses calls that are too many."""

    def __init__(self, app: App, engine: ServedEngine) -> None:
        super().__init__(app)
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and key_of(scope) is None:  # an open path, which reads nothing that a client sent
            await self._app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    def make_exchange(self, scope: Scope, receive: Receive, send: Send) -> Exchange:
        key = key_of(scope)
        assert key is not None  # noqa: S101  see __call__
        limit = min(self._max_body_bytes, key.max_body_bytes or self._max_body_bytes)
        return _ServedExchange(scope, receive, send, limit, self._arrivals, engine=self._engine, client=key)


class _ServedExchange(Exchange):
    """A request to the server."""

    trust_advice = 'trust an API key by "trusted = true" in the file of --api-key-file'
    limit_advice = f"raise {LIMIT_VARIABLE}, or the key's max_body_bytes"

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        max_body_bytes: int,
        arrivals: Arrivals,
        *,
        engine: ServedEngine,
        client: ApiKey,
    ) -> None:
        super().__init__(
            scope, receive, send, max_body_bytes, arrivals, id_scope=client.scope, takes_figures=client.is_trusted
        )
        self._client = client
        self._path = path_of(scope)
        self._engine = engine
        self._key = secrets.token_hex(8)  # a client that knew another's key could make calls as its program
        self._peer = ":".join(map(str, scope.get("client") or ()))
        self._placed: Placed | None = None
        self._reads_answers = False  # because a later request may continue them
        self._answers: AnswerReader | None = None
        self._found: ServedRequest | None = None
        self._refused_by: WeftError | None = None
        self._choices = 1  # of the answer, that have not ended
        self._is_counted = False  # against the limit of its API key, and no call has taken the place
        self._held: Message | None = None  # the start of a whole response, until its length is known
        self._whole = bytearray()
        self._events = 0  # of a stream, until now
        self._asks = False  # the answer calls a tool
        self._is_final = False  # which takes the answer
        self._has_answer = False  # the client, or some of it
        self._status = 0  # of the answer; that of a stream may be good although an error is in it

    async def identify(self, request: dict[str, Any], body_bytes: int) -> bool:
        if self._path not in _ADMITTED:
            return False
        of_tokens = self._path == _TOKENS
        holder, name = (request.get("sampling_params"), "extra_args") if of_tokens else (request, "vllm_xargs")
        arguments = holder.get(name) if isinstance(holder, dict) else None
        if not isinstance(holder, dict) or not (arguments is None or isinstance(arguments, dict)):
            return False  # vLLM refuses it
        check_shown(arguments or {})
        found = identity_of(self._headers, {**request, "vllm_xargs": arguments}, self._id_scope)
        flow = found.flow if self._client.tenant is None else None
        found = replace(found, tenant=self._tenant(found.tenant) or flow)
        if isinstance(found, Identity):
            joined = self._engine.families.joined(found, self._id_scope)
            self._placed = Placed(self._engine.families.named(joined, request, self._id_scope))
            self._reads_answers = starts_agents(request.get("tools"))
        else:
            self._placed = await self._engine.lineage.place(
                replace(found, body_bytes=body_bytes), request, self._id_scope, self._peer
            )
            self._reads_answers = bool(self._placed.said.items)
        self._choices = _choices_of(request)
        traceparent = self._header(b"traceparent").decode("latin-1")
        self._found = ServedRequest(
            self._client,
            self._placed.identity,
            self._seconds(_TIMEOUT) or self._engine.call_timeout_s,
            partial(fingerprint, request),
            settings_of(holder),
            deadline_s=self._seconds(_DEADLINE),
            traceparent=traceparent if trace_id(traceparent) else "",
        )
        holder[name] = {**_hints(request), **(arguments or {}), REQUEST: self._key}
        return True

    def _tenant(self, named: str | None) -> str | None:
        """The tenant of a request's program. The scheduler divides its time among tenants, so who may name any tenant
        may take any share: InvalidRequestError, if the client names one and is not trusted."""
        if self._client.tenant is None or named is None:
            return named or self._client.tenant
        if not self._client.is_trusted:
            raise InvalidRequestError(
                "this API key has a tenant of its own: leave out weft-tenant and tenant. The server's operator can "
                f"{self.trust_advice}."
            )
        return named

    def take(self, request: dict[str, Any]) -> Refusal | None:
        if self._found is None:
            return None
        self._found.is_counted = self._is_counted
        try:
            self._engine.admit(self._key, self._found)
        except WeftError as error:
            self._refused_by = error
            status = error_status(error) if isinstance(error, OverloadedError) else HTTPStatus.SERVICE_UNAVAILABLE
            return Refusal(HTTPStatus(status), str(error), _encoded(error))
        finally:
            self._is_counted = self._found.is_counted
        return None

    def arriving(self) -> None:
        """Count the call before its bytes are held, or a key could hold any number of bodies beside its calls."""
        if self._path in _ADMITTED:
            self._engine.requests.count_call(self._client)
            self._is_counted = True

    def overloaded(self, error: OverloadedError) -> Refusal:
        self._refused_by = error
        return super().overloaded(error)

    async def _refuse(self, refusal: Refusal) -> None:
        await super()._refuse(refusal)
        reason = refused_by(self._refused_by) if self._refused_by is not None else _REASONS.get(refusal.status)
        self._engine.refused(reason or Refused.MALFORMED, self._client)

    async def receive(self) -> Message:
        message = await super().receive()
        if self._is_gone and self._answers is not None:  # the client may go on with what it has got
            answers, self._answers = self._answers.left(), None
            await self._note(answers)
            if self._placed is not None:
                self._engine.lineage.left(self._placed, self._id_scope)
        return message

    async def send(self, message: Message) -> None:
        """Add the program's id and the call's account; and to an error whether, and when, to try again."""
        request = self._engine.requests.get(self._key)
        if message["type"] == "http.response.start":
            self._status = message["status"]
        if request is not None and message["type"] == "http.response.start":
            more = [(PROGRAM, request.identity.program_id.partition("/")[2].encode("latin-1", "replace"))]
            if request.failure is not None and message["status"] >= 400:
                more += _encoded(request.failure)
            is_stream = dict(message["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")
            if message["status"] == HTTPStatus.OK and (self._reads_answers or self._path == _RESPONSES):
                self._answers = AnswerReader(is_stream=is_stream)
            message = {**message, "headers": [*message.get("headers", ()), *more]}
            if self._path in _REPORTING and not is_stream:
                self._held = message
                return
        if message["type"] == "http.response.start" and message["status"] >= HTTPStatus.BAD_REQUEST:
            self._held = message
            return
        if message["type"] == "http.response.body":
            body = message.get("body", b"")
            self._asks = self._asks or _ASKS.search(body) is not None
            self._is_final = self._is_final or _FINAL.search(body) is not None
            is_last = not message.get("more_body", False) and not self._is_gone  # vLLM answers those who have left, too
            is_over = is_last and (self._is_final or not self._asks)
            if is_over and request is not None and request.call is not None and request.failure is None:
                self._engine.programs.answered(request.call.identity)
            if self._answers is not None:
                await self._note(self._answers.take(body, is_last=not message.get("more_body", False)))
            if self._held is not None:
                await self._send_whole(self._held, message, request)
                return
            self._events += body.count(b"\ndata: ")
            if request is not None and (reported := self._reported(body, request)) is not body:
                message = {**message, "body": reported}
        await super().send(message)

    async def _send_whole(self, start: Message, message: Message, request: ServedRequest | None) -> None:
        """Send a response that is no stream, once all of it is there."""
        self._whole += message.get("body", b"")
        if message.get("more_body", False):
            return
        self._held, body = None, bytes(self._whole)
        if request is not None and request.failure is not None and start["status"] >= 400:
            body = json.dumps(self._failure(request.failure)).encode()
        elif request is not None and request.call is not None and start["status"] == HTTPStatus.OK:
            body = add_report(body, self._report(request.call))
        own = {b"content-length": b""}
        if start["status"] >= HTTPStatus.BAD_REQUEST:
            body, own[b"content-type"] = typed_error(self._path, start["status"], body), b"application/json"
        own[b"content-length"] = str(len(body)).encode()
        headers = [each for each in start["headers"] if each[0] not in own]
        await super().send({**start, "headers": [*headers, *own.items()]})
        await super().send({**message, "body": body})

    def _reported(self, events: bytes, request: ServedRequest) -> bytes:
        """The events of a stream, with the account in the one that ends the last choice, and Weft's errors."""
        if request.failure is not None:
            return replace_error(events, self._failure(request.failure))
        if self._path not in _REPORTING:
            return events
        self._choices -= (ended := choices_that_end(events))
        if request.call is not None and ended and self._choices <= 0:  # before, the call still runs
            return add_report_to_events(events, self._report(request.call))
        return events

    def _report(self, call: InFlight) -> dict[str, Any]:
        """A call's ids as its client knows them, and its account: seconds and tokens."""
        own = call.identity
        ids = {"program_id": own.program_id, "thread_id": own.thread_id, "call_id": own.call_id}
        known = {name: each.removeprefix(f"{self._id_scope}/") for name, each in ids.items()}
        return {**call.report(), **known, "parents": [each.removeprefix(f"{self._id_scope}/") for each in own.parents]}

    def _failure(self, error: WeftError) -> dict[str, Any]:
        """The body of an error in the form of the path, with ids as the client knows them."""
        body = error_body(error)
        body["error"] = {name: without_scope(value, self._id_scope) for name, value in body["error"].items()}
        found: dict[str, Any] = json.loads(typed_error(self._path, error_status(error), json.dumps(body).encode()))
        return found

    async def end_stream(self) -> bool:
        request = self._engine.requests.get(self._key)
        if request is None or request.failure is None or self._path != _RESPONSES or not self._has_begun:
            return False
        error = self._failure(request.failure)["error"]
        # Clients look for the error in the event itself, as in OpenAI's documentation, or under "error", as its SDK.
        event = {**error, "type": "error", "sequence_number": self._events, "error": error}
        body = b"event: error\ndata: " + json.dumps(event).encode() + b"\n\n"
        await super().send({"type": "http.response.body", "body": body})
        return True

    async def _note(self, answers: list[ReadAnswer]) -> None:
        """Note answers before the client gets them, because it may go on at once."""
        if self._placed is None:
            return
        for answer, is_part in answers:
            items = items_of_answer(answer) if self._reads_answers else []
            self._has_answer |= any(items)
            name = answer.get("id") if self._path == _RESPONSES else None
            response_id = name if isinstance(name, str) else None
            if not self._placed.said.items:
                self._engine.families.answered(self._placed.identity, items, self._id_scope)
            await self._engine.lineage.answered(self._placed, items, self._id_scope, response_id, is_part)

    def error_body(self, status: HTTPStatus, message: str) -> dict[str, Any]:
        code = error_code(self._refused_by) if self._refused_by is not None else "invalid_request"
        return error_for(self._path, status.value, message, code)

    def end(self) -> None:
        if self._is_counted:
            self._engine.requests.uncount_call(self._client)
        if self._placed is not None and not self._has_answer:
            request = self._engine.requests.get(self._key)
            failure = request.failure if request is not None else None
            status = error_status(failure) if failure is not None else self._status
            has_failed = status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR
            self._engine.lineage.left(self._placed, self._id_scope, has_failed=has_failed)
        self._engine.requests.end(self._key)

    def _seconds(self, name: bytes) -> float | None:
        """Return the value of a header in seconds, or None if it is not there."""
        text = self._header(name).decode("latin-1")
        if not text:
            return None
        try:
            return check_timeout(float(text), name.decode())
        except ValueError:
            wrong = f"{name.decode()} must be a number of seconds above 0, not {text!r:.80}."
            raise InvalidRequestError(wrong) from None


def _hints(request: Mapping[str, Any]) -> dict[str, Any]:
    """What Dynamo's `nvext.agent_hints` say of a call that the engine can use: that the next one comes soon."""
    extension = request.get("nvext")
    hints = extension.get("agent_hints") if isinstance(extension, Mapping) else None
    return {"prefetch": 1} if isinstance(hints, Mapping) and hints.get("speculative_prefill") is True else {}


def _choices_of(request: Mapping[str, Any]) -> int:
    """How many choices an answer has: `n` for each prompt."""
    n, prompt = request.get("n"), request.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and not all(isinstance(each, int) for each in prompt) else 1
    return (n if isinstance(n, int) and n > 0 else 1) * prompts


def _encoded(error: WeftError) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((name.encode(), value.encode()) for name, value in error_headers(error).items())
