"""A receiver of spans by OTLP over HTTP, and spans as JSON, for tests."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan


class SpanReceiver:
    """Keeps the spans that it gets. Its port is free again after `close`."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                received = ExportTraceServiceRequest.FromString(body)
                for resource in received.resource_spans:
                    for scope in resource.scope_spans:
                        receiver.spans += scope.spans
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def until(self, is_wanted: Callable[[Span], bool]) -> Span:
        """The first span that a condition holds for. Wait until it has come."""
        while True:
            found = next((span for span in list(self.spans) if is_wanted(span)), None)
            if found is not None:
                return found
            time.sleep(0.05)

    def close(self) -> None:
        """Receive no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def attributes(span: Span) -> dict[str, str | int | float]:
    """The attributes of a span that are texts or numbers."""
    values = ((each.key, each.value, each.value.WhichOneof("value")) for each in span.attributes)
    return {key: getattr(value, kind) for key, value, kind in values if kind not in (None, "array_value")}


def otlp_json(spans: Sequence[ReadableSpan]) -> str:
    """Spans on one line of OTLP's JSON, as OpenTelemetry's collector writes them to a file."""
    row = MessageToDict(encode_spans(spans))
    for resource in row["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for key in ("traceId", "spanId", "parentSpanId"):
                    if key in span:  # ids are hexadecimal in OTLP, and not as in other JSON of protobuf
                        span[key] = base64.b64decode(span[key]).hex()
    return json.dumps(row) + "\n"
