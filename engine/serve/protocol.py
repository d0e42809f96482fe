"""HTTP/1.1 with limits on what comes before a body: uvicorn's quick protocol has none of its own."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any, ClassVar, Final
from weakref import WeakSet

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from weft.engine.server.arrivals import BODY_S
from weft.engine.server.http_errors import openai_error

_HEAD_S: Final = 60.0
_MORE_S: Final = 5.0  # for the application's own answer to a body that is slow


class LimitedHttp(HttpToolsProtocol):
    """Refuses requests whose head is too large with status 431, and closes connections that are slow with a head, or
    with a body, also if nobody reads that body.

    Attributes:
        max_head_bytes: Of a request's first line and headers.
        max_headers: How many there may be.
    """

    max_head_bytes: ClassVar[int]
    max_headers: ClassVar[int]

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._head_bytes = 0  # of a head that is not complete
        self._in_head = True
        self._slow: asyncio.TimerHandle | None = None
        self._cycles: WeakSet[RequestResponseCycle] = WeakSet()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_of_head()
        # Of requests that were sent without waiting for answers, uvicorn tells only the latest. The application would
        # go on with the others, and each of its writes would be an error in the log.
        for cycle in list(self._cycles):
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.max_head_bytes and not self.transport.is_closing():
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, self._too_large)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        self._wait_for_head()

    def on_headers_complete(self) -> None:
        self._end_of_head()
        if not self.parser.should_upgrade():  # else another protocol has the connection from now on
            self._slow = self.loop.call_later(BODY_S + _MORE_S, self.transport.close)
        super().on_headers_complete()
        if self.cycle is not None:
            self._cycles.add(self.cycle)

    def on_message_complete(self) -> None:
        self._end_of_head()
        super().on_message_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > self.max_headers:
            raise ValueError  # the parser stops, and asks for the answer below

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is no HTTP, or that has too many headers."""
        if self.headers is not None and len(self.headers) > self.max_headers:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, self._too_large)
        else:
            self._refuse(HTTPStatus.BAD_REQUEST, f"{msg} Compare the client's request with HTTP/1.1.")

    @property
    def _too_large(self) -> str:
        return (
            f"the request has more than {self.max_headers} headers, or {self.max_head_bytes} bytes of them. Send "
            "fewer, or ask the server's operator to raise --h11-max-header-count or --h11-max-incomplete-event-size."
        )

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        body = json.dumps(openai_error(status.value, message, "invalid_http")).encode()
        fields = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self._end_of_head()
        self.transport.write(STATUS_LINE[status.value] + fields + body)
        self.transport.close()

    def _wait_for_head(self) -> None:
        self._in_head = True
        if self._slow is None:
            self._slow = self.loop.call_later(_HEAD_S, self.transport.close)

    def _end_of_head(self) -> None:
        self._in_head = False
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None


def limited_http(max_head_bytes: int, max_headers: int) -> type[LimitedHttp]:
    """The protocol with these limits, for `uvicorn.Config(http=…)`."""
    return type("LimitedHttp", (LimitedHttp,), {"max_head_bytes": max_head_bytes, "max_headers": max_headers})
