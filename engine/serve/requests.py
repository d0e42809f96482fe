"""The HTTP requests of a server that were admitted, and the limit of calls that an API key has of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from weft.core.errors import KeyLimitError, OverloadedError, WeftError
from weft.core.identity import Evidence, Identity
from weft.core.identity.lineage import Answers, Lineage, Placed
from weft.core.routing.admission import Admission
from weft.engine.host.in_flight import InFlight
from weft.engine.serve.keys import ApiKey
from weft.engine.serve.programs import OpenPrograms

R = TypeVar("R")
PLACED_ELSEWHERE_BYTES: Final = 64 << 10  # of a body: a longer one may hold up streams while its program is looked for


@dataclass(slots=True)
class ServedRequest:
    """An HTTP request that makes calls, with the API key of its client."""

    key: ApiKey
    identity: Identity  # the program that it belongs to
    timeout_s: float | None  # of each of its calls; None sets no limit
    fingerprint: Callable[[], str]  # of its system prompt and tools
    settings: Mapping[str, float] = field(default_factory=dict)  # of the sampling
    traceparent: str = ""  # of the client's own span, or "" without one
    is_reserved: bool = True  # it was admitted as one call, and no call has taken this place yet
    is_counted: bool = False  # against the limit of its key while it arrived, and not admitted yet
    is_call: bool = False  # a single call without a known HTTP request; its program then ends with the call
    deadline_s: float | None = None  # after which its program should have ended; None sets no deadline
    failure: WeftError | None = None  # with which one of its calls ended
    call: InFlight | None = None  # the latest one


class ServedRequests:
    """The requests that were admitted and have not ended. Use it on the engine's event loop."""

    def __init__(self, programs: OpenPrograms, admission: Admission, clock: Callable[[], float]) -> None:
        self._programs = programs
        self._admission = admission
        self._clock = clock
        self._of_keys: dict[str, Admission] = {}  # by scope, of the keys that have a limit
        self._requests: dict[str, ServedRequest] = {}

    def get(self, key: str) -> ServedRequest | None:
        return self._requests.get(key)

    def admit(self, key: str, request: ServedRequest) -> None:
        """Admit a request as one call; `end` follows. `key` is a random text by which it is found again, which no
        client may be able to guess. Raises OverloadedError if there are too many calls, or too many of the API key."""
        self._programs.check_room(request.identity, request.key.max_programs)
        self.admit_call(request)
        now_s = self._clock()
        try:
            self._admission.enter(now_s)
        except OverloadedError:
            self.uncount_call(request.key)
            raise
        self._requests[key] = request

    def end(self, key: str) -> None:
        """Note that a request has its answer."""
        request = self._requests.pop(key, None)
        if request is None:
            return
        if request.is_reserved:
            self._admission.leave(self._clock())
            self.uncount_call(request.key)
        if request.identity.ends:
            self._programs.end_after_calls(request.identity.program_id)

    def admit_call(self, request: ServedRequest) -> None:
        """Count a call against the limit of its API key, unless that was done while its request arrived;
        `uncount_call` follows. Raises KeyLimitError if the key has as many calls in flight as it may."""
        if not request.is_counted:
            self.count_call(request.key)
        request.is_counted = False

    def count_call(self, key: ApiKey) -> None:
        """Count a call against the limit of its API key, if the key has one (KeyLimitError); `uncount_call` follows."""
        limit = key.max_calls
        if limit is None:
            return
        admission = self._of_keys.get(key.scope) or self._of_keys.setdefault(key.scope, Admission(lambda: limit))
        try:
            admission.enter(self._clock())
        except OverloadedError as error:
            raise KeyLimitError("max_calls", limit, error.retry_after_s) from None

    def uncount_call(self, key: ApiKey) -> None:
        """Note that a call that was counted has ended, or that its request was given up before it was admitted."""
        if key.max_calls is not None:
            self._of_keys[key.scope].leave(self._clock())


class SharedLineage:
    """`Lineage` on the server's event loop: one request uses it at a time, and what is done for large ones is done on
    another thread, while streams go on."""

    def __init__(self, lineage: Lineage) -> None:
        self._lineage = lineage
        self._lock = asyncio.Lock()
        self._left: list[Callable[[], None]] = []  # of requests that got no whole answer, before the next is placed

    async def place(self, evidence: Evidence, body: Mapping[str, Any], scope: str, peer: str) -> Placed:
        await self._lock.acquire()
        while self._left:
            self._left.pop(0)()
        return await self._locked(evidence.body_bytes, partial(self._lineage.place, evidence, body, scope, peer))

    def left(self, placed: Placed, scope: str, *, has_failed: bool = False) -> None:
        """See `Lineage.left`. It is noted before the next request is placed: another thread may have the lineage."""
        self._left.append(partial(self._lineage.left, placed, scope, has_failed=has_failed))

    async def answered(
        self, placed: Placed, answers: Answers, scope: str, response_id: str | None, is_part: bool = False
    ) -> None:
        await self._lock.acquire()
        work = partial(self._lineage.answered, placed, answers, scope, response_id, is_part)
        await self._locked(placed.body_bytes, work)

    async def _locked(self, body_bytes: int, work: Callable[[], R]) -> R:
        """Do what the lock was taken for, on another thread if the request is large."""
        if body_bytes <= PLACED_ELSEWHERE_BYTES:
            try:
                return work()
            finally:
                self._lock.release()
        working = asyncio.get_running_loop().run_in_executor(None, work)
        working.add_done_callback(lambda _working: self._lock.release())
        return await asyncio.shield(working)  # a cancelled request lets nobody in before the thread ends
