"""The limits that an API key has of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.core.errors import KeyLimitError, OverloadedError, WeftError
from weft.core.identity import Evidence, Identity
from weft.core.identity.items import Item
from weft.core.identity.lineage import Lineage, Placed
from weft.core.routing.admission import Admission
from weft.engine.host.in_flight import InFlight
from weft.engine.serve.keys import ApiKey
from weft.engine.serve.programs import OpenPrograms


class CallsOfKeys:
    """Counts the calls in flight of keys that have a limit. Use it on the engine's event loop."""

    def __init__(self) -> None:
        self._admissions: dict[str, Admission] = {}  # by scope; no more than there are keys

    def enter(self, key: ApiKey, now_s: float) -> None:
        """Admit a call; `leave` ends it.

        Args:
            key: Of the request.
            now_s: Seconds of the engine's clock.

        Raises:
            KeyLimitError: The key has as many calls in flight as it may.
        """
        limit = key.max_calls
        if limit is None:
            return
        admission = self._admissions.get(key.scope)
        if admission is None:
            admission = self._admissions[key.scope] = Admission(lambda: limit)
        try:
            admission.enter(now_s)
        except OverloadedError as error:
            raise KeyLimitError("max_calls", limit, error.retry_after_s) from None

    def leave(self, key: ApiKey, now_s: float) -> None:
        """A call that was admitted has ended."""
        if key.max_calls is not None:
            self._admissions[key.scope].leave(now_s)

    def count(self, key: ApiKey) -> int:
        """The calls in flight of a key; 0 if it has no limit."""
        admission = self._admissions.get(key.scope)
        return admission.calls if admission is not None else 0


@dataclass(slots=True)
class ServedRequest:
    """An HTTP request that makes calls.

    Attributes:
        key: Who sent it.
        identity: Which program it belongs to.
        timeout_s: Seconds that a call of it may take; None: no limit.
        fingerprint: Of its system prompt and tools.
        settings: What it asks of sampling.
        traceparent: The header of the client's own span; "" if there is none.
        is_reserved: It was admitted as one call, and no call has taken the place yet.
        is_counted: A call of it was counted against the limit of its key while it arrived, and was not admitted yet.
        is_call: It is one call that no HTTP request is known of; its program ends with it.
        deadline_s: Seconds after which its program should have ended; None: whenever.
        failure: The error with which a call of it ended.
        call: The latest call of it.
    """

    key: ApiKey
    identity: Identity
    timeout_s: float | None
    fingerprint: Callable[[], str]
    settings: Mapping[str, float] = field(default_factory=dict)
    traceparent: str = ""
    is_reserved: bool = True
    is_counted: bool = False
    is_call: bool = False
    deadline_s: float | None = None
    failure: WeftError | None = None
    call: InFlight | None = None


class ServedRequests:
    """The requests that were admitted and have not ended. Use it on the engine's event loop.

    Args:
        programs: The open programs.
        admission: Of the model's calls.
        clock: Monotonic seconds.
    """

    def __init__(self, programs: OpenPrograms, admission: Admission, clock: Callable[[], float]) -> None:
        self._programs = programs
        self._admission = admission
        self._clock = clock
        self._calls_of_keys = CallsOfKeys()
        self._requests: dict[str, ServedRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, key: str) -> ServedRequest | None:
        """The request of a key; None: it was not admitted, or has ended."""
        return self._requests.get(key)

    def admit(self, key: str, request: ServedRequest) -> None:
        """Admit a request as one call; `end` follows.

        Args:
            key: Nobody else can guess it.
            request: The request.

        Raises:
            OverloadedError: There are too many calls, or too many of the API key.
        """
        self._programs.check_room(request.identity, request.key.max_programs)
        self.admit_call(request)
        now_s = self._clock()
        try:
            self._admission.enter(now_s)
        except OverloadedError:
            self.leave_call(request)
            raise
        self._requests[key] = request

    def end(self, key: str) -> None:
        """The request has its answer."""
        request = self._requests.pop(key, None)
        if request is None:
            return
        if request.is_reserved:
            self._admission.leave(self._clock())
            self.leave_call(request)
        if request.identity.ends:
            self._programs.end_after_calls(request.identity.program_id)

    def admit_call(self, request: ServedRequest) -> None:
        """Count a call against the limit of its API key; `leave_call` follows.

        Raises:
            KeyLimitError: The key has as many calls in flight as it may.
        """
        if not request.is_counted:
            self.count_call(request.key)
        request.is_counted = False

    def leave_call(self, request: ServedRequest) -> None:
        """A call that was counted has ended."""
        self.uncount_call(request.key)

    def count_call(self, key: ApiKey) -> None:
        """Count a call of an API key; `uncount_call` follows.

        Raises:
            KeyLimitError: The key has as many calls as it may.
        """
        self._calls_of_keys.enter(key, self._clock())

    def uncount_call(self, key: ApiKey) -> None:
        """A call that was counted has ended, or was given up."""
        self._calls_of_keys.leave(key, self._clock())


class SharedLineage:
    """`Lineage` on the server's event loop: one request uses it at a time, and large ones are read on another thread,
    while streams go on.

    Args:
        lineage: The lineage.
    """

    def __init__(self, lineage: Lineage) -> None:
        self._lineage = lineage
        self._lock = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._lineage)

    async def place(
        self, evidence: Evidence, body: Mapping[str, Any], scope: str, peer: str, *, is_large: bool
    ) -> Placed:
        """See `Lineage.place`.

        Args:
            evidence, body, scope, peer: As there.
            is_large: Reading it takes so long that it happens on another thread.
        """
        await self._lock.acquire()
        if not is_large:
            try:
                return self._lineage.place(evidence, body, scope, peer)
            finally:
                self._lock.release()
        reading = asyncio.get_running_loop().run_in_executor(None, self._lineage.place, evidence, body, scope, peer)
        reading.add_done_callback(lambda _reading: self._lock.release())
        return await asyncio.shield(reading)  # a cancelled request lets nobody in before the thread ends

    async def answered(
        self, placed: Placed, answers: Iterable[Iterable[Item]], scope: str, response_id: str | None
    ) -> None:
        """See `Lineage.answered`."""
        async with self._lock:
            self._lineage.answered(placed, answers, scope, response_id)
