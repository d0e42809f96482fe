"""Asks a server, or an engine that listens, for its state."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final, Self, TypeVar
from urllib.parse import quote

import httpx2
from pydantic import TypeAdapter

from weft.core.errors import NotReachableError
from weft.core.show import LiveState, Timeline

_UNIX: Final = "unix:"
_STATE: Final = "/weft/state"
_ANSWER_S: Final = 5.0
_MOST_PORT: Final = 65_535
_MOST_BYTES: Final = 32 << 20  # of an answer; a state has less than one MB
STATES: Final = TypeAdapter(LiveState)
_TIMELINES: Final = TypeAdapter(Timeline)

T = TypeVar("T")


class StateClient:
    """A client of `GET /weft/state`. Use it on one event loop, in `async with`.

    Args:
        url: "http://host:8000", "host:8000", or "unix:/path".
        api_key: One of the server's keys, if it asks for one.

    Raises:
        NotReachableError: The address or the key is malformed.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")  # many have the base URL of OpenAI's clients at hand
        is_unix = url.startswith(_UNIX)
        base_url = "http://weft" if is_unix else self.url if "://" in url else f"http://{self.url}"
        if api_key and not (api_key.isascii() and api_key.isprintable()):  # the error of a header would show it
            raise NotReachableError(url, "the API key has characters that no header can have.")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            transport = httpx2.AsyncHTTPTransport(uds=url.removeprefix(_UNIX)) if is_unix else None
            self._http = httpx2.AsyncClient(
                transport=transport,
                base_url=base_url,
                headers=headers,
                timeout=_ANSWER_S,
                trust_env=not is_unix,  # no proxy leads to a unix socket
            )
            port = self._http.base_url.port
        except (httpx2.InvalidURL, ValueError) as error:
            raise NotReachableError(url, f"{error}.") from error
        if port is not None and not 0 < port <= _MOST_PORT:  # the operating system's error would have no message
            raise NotReachableError(url, f"there is no port {port}.")

    async def read(self) -> LiveState:
        """The state now.

        Raises:
            NotReachableError: Nothing answers there, what answers is not a Weft server, or the key is wrong.
        """
        return self._parsed(STATES, await self._ask("GET", _STATE), "state of a Weft engine")

    async def timeline(self, program_id: str) -> Timeline | None:
        """Return what a program did, and when, or None if the server does not know. It raises as `read`."""
        answer = await self._ask("GET", f"{_path(program_id)}/timeline", may_lack=(404, 405))
        return self._parsed(_TIMELINES, answer, "timeline of a program") if answer else None

    async def end(self, program_id: str) -> None:
        """End a program, or raise as `read`. One that has ended already is left as it is."""
        await self._ask("DELETE", _path(program_id), may_lack=(404,))

    async def _ask(self, method: str, path: str, *, may_lack: Collection[int] = ()) -> bytes:
        """The body of an answer; empty if its status is one of those in which what was asked for is not there."""
        body = bytearray()
        try:
            async with asyncio.timeout(_ANSWER_S), self._http.stream(method, path) as answer:
                if answer.is_success:
                    async for part in answer.aiter_bytes():
                        body += part
                        if len(body) > _MOST_BYTES:
                            raise NotReachableError(self.url, "the answer is too long to be an engine's state.")
        except TimeoutError as error:
            raise NotReachableError(self.url, f"no answer in {_ANSWER_S:.0f} s.") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            reason = str(error).rstrip(".") or type(error).__name__
            raise NotReachableError(self.url, f"{reason}.") from error
        if answer.status_code in (401, 403):
            raise NotReachableError(self.url, "the server asks for another API key; give --api-key.")
        if answer.status_code == 404 and path == _STATE:
            raise NotReachableError(
                self.url, "another server, such as vLLM's own, is there; it has no programs to show."
            )
        if not answer.is_success and answer.status_code not in may_lack:
            raise NotReachableError(self.url, f"{path} answers with status {answer.status_code}.")
        return bytes(body)

    def _parsed(self, adapter: TypeAdapter[T], answer: bytes, what: str) -> T:
        """Read an answer. Fields that are unknown here, as of a newer server, are left out."""
        try:
            return adapter.validate_json(answer)
        except ValueError as error:  # pydantic's, which lists every field
            raise NotReachableError(self.url, f"this is no {what}: {str(error).splitlines()[0]:.200}.") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._http.aclose()


def _path(program_id: str) -> str:
    return f"/weft/programs/{quote(program_id, safe='')}"
