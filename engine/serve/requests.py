"""HTTP requests that make calls, from their admission to their answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from weft.core.errors import OverloadedError, WeftError
from weft.core.identity import Identity
from weft.core.routing.admission import Admission
from weft.engine.frontend.calls import InFlight
from weft.engine.serve.keys import ApiKey
from weft.engine.serve.limits import CallsOfKeys
from weft.engine.serve.programs import OpenPrograms


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
