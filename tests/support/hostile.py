"""Requests that mean harm, from a seed, and what their client may get for them."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/invocations", "/tokenize")
_READ = ("/v1/models", "/weft/programs", "/weft/state", "/version", "/openapi.json", "/load")
_MESSAGES = [{"role": "user", "content": "Hello"}]
_TIMEOUT_S = 120.0


class Attack(NamedTuple):
    """One connection of a client that means harm.

    Attributes:
        name: Of its kind.
        data: What the client sends.
        allowed: The statuses that it may get. All of 400 and above must have a typed body.
        may_hear_nothing: The connection may end without an answer, because the client has closed its side.
    """

    name: str
    data: bytes
    allowed: frozenset[int]
    may_hear_nothing: bool = False

    @property
    def is_anthropics(self) -> bool:
        return b" /v1/messages" in self.data.partition(b"\r\n")[0]


class Answer(NamedTuple):
    """What came back. Status 0: nothing."""

    status: int
    body: bytes


def attacks(seed: int, count: int, key: str, stolen: list[str], max_body_bytes: int) -> Iterator[Attack]:
    """Make attacks.

    Args:
        seed: The same seed makes the same attacks.
        count: How many.
        key: The attacker's own key.
        stolen: The ids of another key's programs, as far as the attacker could know them.
        max_body_bytes: That the attacker's key may send.
    """
    maker = _Requests(random.Random(seed), key, stolen, max_body_bytes)
    kinds: tuple[Callable[[], Attack], ...] = (
        maker.without_key,
        maker.wrong_route,
        maker.broken_json,
        maker.deep_json,
        maker.wrong_types,
        maker.hostile_id,
        maker.stolen_program,
        maker.many_headers,
        maker.broken_http,
        maker.large_body,
        maker.figures,
        maker.form,
        maker.half_closed,
    )
    for number in range(count):
        # Calls that run take long, so they are few.
        yield maker.stolen_call() if number % 100 == 50 else maker.rng.choice(kinds)()


async def strike(port: int, attack: Attack) -> Answer:
    """Send an attack, and read the answer to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            writer.write(attack.data)
            if attack.may_hear_nothing and writer.can_write_eof():
                writer.write_eof()
            while piece := await reader.read(1 << 16):
                received += piece
    except ConnectionError:  # the server closed while it was still being sent to
        pass
    finally:
        writer.close()
    head, _, body = received.partition(b"\r\n\r\n")
    return Answer(int(head.split()[1]) if head else 0, body)


def fault_of(attack: Attack, answer: Answer) -> str | None:
    """Why an answer is not what the attack should get."""
    shown = f"{attack.name}: {attack.data[:300]!r} got {answer.status} {answer.body[:300]!r}"
    if answer.status == 0:
        return None if attack.may_hear_nothing else shown
    if answer.status not in attack.allowed and answer.status != 429:  # its own limit
        return shown
    if answer.status < 400 or attack.data.startswith(b"HEAD "):
        return None
    try:
        found = json.loads(answer.body)
        typed = isinstance(found["error"]["message"], str) and isinstance(found["error"]["type"], str)
        if attack.is_anthropics and found["error"].get("code") != "invalid_http":  # which has no path yet
            typed &= found["type"] == "error"
    except (ValueError, LookupError, TypeError):
        typed = False
    return None if typed else f"not typed: {shown}"


class _Requests:
    def __init__(self, rng: random.Random, key: str, stolen: list[str], max_body_bytes: int) -> None:
        self.rng, self._stolen, self._max_body_bytes = rng, stolen, max_body_bytes
        self._credentials = (f"Authorization: Bearer {key}".encode(), f"x-api-key: {key}".encode())

    # -- parts

    def _request(
        self, path: str | bytes, body: bytes = b"", method: str = "POST", headers: tuple[bytes, ...] = (), **more: Any
    ) -> bytes:
        """A whole request, with the attacker's key in one of its forms."""
        lines = [
            f"{method} ".encode() + (path.encode() if isinstance(path, str) else path) + b" HTTP/1.1",
            b"Host: x",
            b"Connection: close",
            *more.get("credentials", (self.rng.choice(self._credentials),)),
            *((b"Content-Length: %d" % len(body),) if body or method == "POST" else ()),
            *((b"Content-Type: application/json",) if not any(b"content-type" in h.lower() for h in headers) else ()),
            *headers,
        ]
        return b"\r\n".join(lines) + b"\r\n\r\n" + body

    def _body(self, path: str, **more: Any) -> dict[str, Any]:
        prompt: dict[str, Any] = {"messages": _MESSAGES, "max_tokens": 1}
        if path in ("/v1/completions", "/tokenize"):
            prompt = {"prompt": "Hello", "max_tokens": 1} if path == "/v1/completions" else {"prompt": "Hello"}
        elif path == "/v1/responses":
            prompt = {"input": "Hello", "max_output_tokens": 16}
        return {"model": "tiny", **prompt, **more}

    def _junk(self, most: int = 40) -> bytes:
        return self.rng.randbytes(self.rng.randrange(1, most))

    def _text(self, most: int = 40) -> str:
        return "".join(chr(self.rng.randrange(33, 127)) for _ in range(self.rng.randrange(1, most)))

    # -- kinds

    def without_key(self) -> Attack:
        path = self.rng.choice((*_PATHS, *_READ, f"/weft/programs/{self.rng.choice(self._stolen)}", "/nothing"))
        wrong = self.rng.choice(
            [
                (),
                (b"Authorization: Bearer " + self._text().encode(),),
                (b"Authorization: Basic " + self._text().encode(),),
                (b"Authorization: Bearer " + self._junk().replace(b"\r", b"").replace(b"\n", b"").replace(b"\0", b""),),
                (b"x-api-key: " + self._text().encode(), self._credentials[1]),
                (b"x-api-key: ",),
                (b"Authorization: " + b"Bearer " * 50,),
            ]
        )
        method = self.rng.choice(["GET", "POST", "DELETE", "PUT", "OPTIONS", "PATCH"])
        data = self._request(path, self._junk(), method, credentials=wrong)
        return Attack("without key", data, frozenset({400, 401}))

    def wrong_route(self) -> Attack:
        path, method = self.rng.choice(
            [
                (
                    self.rng.choice(_PATHS),
                    self.rng.choice(["GET", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE"]),
                ),
                (self.rng.choice(_READ), self.rng.choice(["POST", "PUT", "PATCH"])),
                ("/health", self.rng.choice(["POST", "PUT", "DELETE"])),
                ("/weft/" + self._text().replace("?", "").replace("#", "").replace("%", ""), "GET"),
                ("/weft/programs/../../etc/passwd", "GET"),
                ("/v1/%2e%2e/weft/state%00", "GET"),
                ("//v1/chat/completions", "POST"),
                ("/V1/chat/completions", "POST"),
                ("/v1/chat/completions/" + "x" * 3000, "POST"),
                ("/v1/responses/resp_" + self._text().replace("/", "").replace("?", "").replace("#", ""), "GET"),
                ("/v1/responses/resp_1/cancel", "POST"),
                ("/server_info", "GET"),
                ("/sleep", "POST"),
                ("/pause", "POST"),
                ("/collective_rpc", "POST"),
                ("/v1/load_lora_adapter", "POST"),
                ("/v1/embeddings", "POST"),
                ("/v1/audio/transcriptions", "POST"),
                ("/cohere/v2/chat", "POST"),
            ]
        )
        allowed = frozenset({307, 400, 403, 404, 405, 422})  # 307: /weft/ is /weft
        return Attack("wrong route", self._request(path, b"{}" if method == "POST" else b"", method), allowed)

    def broken_json(self) -> Attack:
        path = self.rng.choice(_PATHS)
        whole = json.dumps(self._body(path)).encode()
        body = self.rng.choice(
            [
                whole[: self.rng.randrange(1, len(whole))],
                b"",
                self._junk(200),
                b"null",
                b"[]",
                b'"text"',
                b"7",
                b"\xff\xfe" + whole,
                whole + b"}",
                b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
                b'{"model": "tiny", "messages": NaN, "prompt": Infinity, "input": -Infinity}',
                b'{"model": ' + b"9" * 6000 + b"}",
                b"{" + b'"a":1,' * 2000 + b"}",
                b"\0" * 50,
            ]
        )
        return Attack("broken JSON", self._request(path, body), frozenset({400, 422}))

    def deep_json(self) -> Attack:
        path, depth = self.rng.choice(_PATHS), self.rng.choice([1500, 5000, 9000])
        body = self.rng.choice(
            [
                b"[" * depth,
                b'{"a":' * (depth // 2),
                b'{"model": "tiny", "vllm_xargs": ' + b"[" * depth + b"]" * depth + b"}",
                b'{"model": "tiny", "metadata": ' + b"[" * depth + b"]" * depth + b"}",
            ]
        )
        return Attack("deep JSON", self._request(path, body), frozenset({400, 413, 422}))

    def wrong_types(self) -> Attack:
        path = self.rng.choice(_PATHS)
        prompt = {"/v1/completions": "prompt", "/tokenize": "prompt", "/v1/responses": "input"}.get(path, "messages")
        field, value = self.rng.choice(
            [
                (prompt, 7),
                (prompt, {"a": 1}),
                (prompt, [{"role": ["user"], "content": {"a": 1}}]),
                (prompt, [[[-1]]]),
                ("model", "no-such-model" + self._text()),
            ]
        )
        if path not in ("/tokenize", "/v1/responses", "/v1/messages"):
            field, value = self.rng.choice(
                [
                    (field, value),
                    ("temperature", "hot"),
                    ("temperature", -1),
                    ("top_p", 7),
                    ("n", 0),
                    ("n", 10**9),
                    ("max_tokens", -5),
                    ("max_tokens", 10**12),
                    ("stop", [["a"]]),
                    ("logit_bias", {"a": "b"}),
                    ("logprobs", 10**9),
                    ("vllm_xargs", 7),
                    ("vllm_xargs", ["a"]),
                    ("stream_options", {"include_usage": True}),
                ]
            )
        return Attack(
            f"wrong type of {field} for {path}",
            self._request(path, json.dumps({**self._body(path), field: value}).encode()),
            # SageMaker's route takes another model's name for an adapter of the only one.
            frozenset({400, 404, 422, *((200,) if (path, field) == ("/invocations", "model") else ())}),
        )

    def hostile_id(self) -> Attack:
        path = self.rng.choice(_PATHS[:4])
        header = self.rng.choice(["weft-program-id", "weft-session-id", "weft-program-name", "X-Session-ID"])
        if self.rng.random() < 0.5:
            value = self.rng.choice([b"x" * 300, b"a\tb", b"\xff\x80" * 200, b"a\x85b"])
            data = self._request(
                path, json.dumps(self._body(path)).encode(), headers=(header.encode() + b": " + value,)
            )
        else:
            field = self.rng.choice(["program_id", "session_id", "thread_id", "tenant"])
            value_: Any = self.rng.choice(["", "x" * 300, 7, ["a"], {"a": "b"}, "a\nb", "a\u0000b", "\ud800", 1e308])
            data = self._request(path, json.dumps(self._body(path, vllm_xargs={field: value_})).encode())
        return Attack("hostile id", data, frozenset({400, 422}))

    def stolen_program(self) -> Attack:
        """The id of another key's program, with every trick to get out of one's own scope."""
        stolen = self.rng.choice(self._stolen)
        tricks = (
            stolen,
            f"-/{stolen}",
            f"..%2f{stolen}",
            f"%2e%2e/-/{stolen}",
            f"{stolen}%00",
            f"/{stolen}",
            "%2f" * 9,
        )
        data = self._request("/weft/programs/" + self.rng.choice(tricks), method="DELETE")
        return Attack("stolen program", data, frozenset({204, 404, 405}))  # 204: one of its own, of the same name

    def stolen_call(self) -> Attack:
        """A call that is right but for its ids. It must be a program of the attacker's own."""
        stolen = self.rng.choice(self._stolen)
        header = self.rng.choice(["weft-program-id", "x-claude-code-session-id", "session-id", "X-Session-ID"])
        ends = (b"weft-program-end: true",) if self.rng.random() < 0.5 else ()
        body = json.dumps(self._body("/v1/chat/completions")).encode()
        data = self._request(
            "/v1/chat/completions", body, headers=(f"{header}: {stolen}".encode("latin-1", "replace"), *ends)
        )
        return Attack("stolen call", data, frozenset({200, 409, 429}))  # 409: it has ended its own program

    def many_headers(self) -> Attack:
        headers = self.rng.choice(
            [
                tuple(b"x-%d: y" % number for number in range(300)),
                (b"x: " + b"y" * 400_000,),
                (b"cookie: " + b"a=b; " * 60_000,),
            ]
        )
        return Attack("headers", self._request("/v1/models", method="GET", headers=headers), frozenset({431}))

    def broken_http(self) -> Attack:
        data = self.rng.choice(
            [
                b"GET " + self._junk().replace(b"\n", b"") + b" \x01HTTP/1.1\r\n\r\n",
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + self._junk() + b"\r\n\r\n",
                b"GET /v1/models HTTP/9.9\r\nHost: x\r\n\r\n",
                b"GET /v1/\xff\xfe HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
                b"POST /v1/models HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
                b"POST /v1/models HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
                b"POST /v1/models HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
                b"POST /v1/models HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
                b"GET /v1/models HTTP/1.1\r\nbad header\r\n\r\n",
                b"GET /v1/models HTTP/1.1\r\nx: a\0b\r\n\r\n",
            ]
        )
        return Attack("broken HTTP", data, frozenset({400, 401}))

    def large_body(self) -> Attack:
        path = self.rng.choice(_PATHS)
        if self.rng.random() < 0.5:
            announced = self._max_body_bytes + self.rng.choice([1, 10**6, 10**18])
            data = self._request(path, b"", headers=()).replace(b"Content-Length: 0", b"Content-Length: %d" % announced)
        else:
            body = b"".join(b"1000\r\n" + b" " * 4096 + b"\r\n" for _ in range(self._max_body_bytes // 4096 + 2))
            data = self._request(path, b"", headers=()).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
            data += body + b"0\r\n\r\n"
        return Attack("large body", data, frozenset({413}))

    def figures(self) -> Attack:
        path = self.rng.choice(_PATHS[:4])
        figure = self.rng.choice(["service_s", "total_wait_s", "wait_s", "time_left_s", "program_calls", "tenant"])
        value = "guests" if figure == "tenant" else self.rng.choice([0, 1e300, -1, "0"])
        return Attack(
            "figures", self._request(path, json.dumps(self._body(path, vllm_xargs={figure: value})).encode()), _REFUSED
        )

    def form(self) -> Attack:
        value = json.dumps({"program_id": self.rng.choice(self._stolen)}).replace("&", "")
        kind, body = self.rng.choice(
            [
                (b"application/x-www-form-urlencoded", f"vllm_xargs={value}".encode()),
                (b"multipart/form-data; boundary=x", b"--x\r\n" + self._junk()),
                (b"multipart/form-data", b"--x--"),
                (b"text/plain", b"{}"),
            ]
        )
        path = self.rng.choice(_PATHS)
        return Attack(
            "form", self._request(path, body, headers=(b"Content-Type: " + kind,)), frozenset({400, 404, 415, 422})
        )

    def half_closed(self) -> Attack:
        """The client closes its side in the middle of a request, or after it."""
        path = self.rng.choice(_PATHS)
        whole = self._request(path, json.dumps(self._body(path, model="no-such-model")).encode())
        data = whole[: self.rng.randrange(1, len(whole) + 1)]
        return Attack("half closed", data, frozenset({400, 401, 404, 405}), may_hear_nothing=True)


_REFUSED = frozenset({400})
