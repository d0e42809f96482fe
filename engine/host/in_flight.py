"""A call between its submission and its result."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple, ParamSpec, Protocol, TypeVar

from weft.core.accounts import Account
from weft.core.errors import EngineClosedError, EngineForkedError, ProgramEndedError, WeftError
from weft.core.ids import CallId, EngineId, ProgramId
from weft.core.kv_cache.stats import SwapStats
from weft.core.locks import fork_safe
from weft.core.process_rows import CallIdentity, CallRow, ProgramRow
from weft.core.process_table import ProcessTable
from weft.core.program import Program
from weft.core.program.graph import CallState
from weft.core.routing.admission import Admission, Deadline
from weft.core.trace.recorder import Recorder

# What goes back with an answer. Timelines read the waits, and clients do not.
_IDENTITY: Final = tuple(field.name for field in fields(CallIdentity))
_ACCOUNT: Final = tuple(field.name for field in fields(Account) if field.name != "waits")


class Endpoint(Protocol):
    """Chat completions of one model: vLLM's own layer in this process, a server's, or a script's. Requests and answers
    have OpenAI's format. Use it on the engine's event loop, but for `make_request` and `tokenize`."""

    @property
    def max_model_len(self) -> int:
        """The context length, in tokens."""

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""

    def make_request(
        self, body: dict[str, Any], program: Program | None = None, identity: CallIdentity | None = None
    ) -> Any:
        """Check a request, or raise InvalidRequestError. Returns it as an object with `request_id`, `vllm_xargs` and
        `return_token_ids`. Without program and identity, it is only to be counted."""

    async def count_prompt_tokens(self, request: Any) -> int:
        """The number of tokens of the rendered prompt."""

    async def complete(self, request: Any) -> dict[str, Any]:
        """One answer."""

    def stream(self, request: Any) -> AsyncGenerator[dict[str, Any]]:
        """The answer in chunks."""


class ModelEndpoint(NamedTuple):
    """What serves the calls of one model."""

    chat: Endpoint
    admission: Admission
    engine_id: EngineId | None  # where the calls run; None: a balancer assigns each call
    model: str = ""  # the name that the model is served by


class Link:
    """The way to where an engine's calls run. This one leads to an endpoint that has no scheduler.

    Attributes:
        hears_events: Whether anybody there wants to know what happens between calls.
    """

    hears_events: bool = False

    def __init__(self, endpoint: ModelEndpoint) -> None:
        self._endpoint = endpoint

    def endpoint(self, model: str | None) -> ModelEndpoint:
        """The endpoint of a model, or UnknownModelError; None: the request names none."""
        del model  # the endpoint refuses a wrong name, or takes any
        return self._endpoint

    async def send(self, message: Mapping[str, Any]) -> list[Any]:
        """Send a control message to every scheduler of the engine, on the engine's event loop. Returns their answers;
        None from a replica that does not run."""
        return []

    def swap_stats(self) -> SwapStats | None:
        """The swap's figures as of the last call that ended, all vLLM engines together; None without a swap."""
        return None


class ChatRequest:
    """A request to an endpoint that is not vLLM's, with the attributes that a host reads and sets."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.given = body
        self.request_id: str = body.get("request_id", "")
        self.stream: bool = body.get("stream", False)
        self.return_token_ids: bool = bool(body.get("return_token_ids"))
        self.vllm_xargs: dict[str, Any] | None = body.get("vllm_xargs")


class Life:
    """Whether an engine takes calls, for all of its parts.

    Attributes:
        is_closed: True also until the engine has started.
    """

    def __init__(self) -> None:
        self.is_closed = True
        self._process = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the one that started the engine."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Raise EngineForkedError in a forked child. Every use of the engine calls this first, because it could hang
        there."""
        if os.getpid() != self._process:
            raise EngineForkedError(self._process)


def _is_bare(choice: Mapping[str, Any]) -> bool:
    """Whether vLLM sends such a choice only where token ids are asked for."""
    return choice.get("delta") == {} and choice.get("finish_reason") is None and choice.get("logprobs") is None


@dataclass(eq=False, slots=True)
class InFlight:
    """A call that an engine is busy with."""

    program: Program
    identity: CallIdentity
    row: CallRow
    of_program: ProgramRow
    endpoint: ModelEndpoint
    deadline: Deadline
    recorder: Recorder | None = None  # None: the call is not recorded
    hides_ids: bool = False  # the answer has token ids for the recorder only
    future: Future[Any] | None = None  # None until the call is submitted
    outcome: CallState = CallState.CANCELLED  # until the engine has given its whole answer, or failed to
    stopped: bool = False  # a stop string ended it in the front end, which then aborts it in the scheduler
    ended: bool = False  # its program ended, or the engine was shut down, before the call did

    def note_answer(self, answer: Mapping[str, Any]) -> None:
        """Read from a completion or a chunk which answer it is, and why choices have ended."""
        known = self.row.answer
        known.answer_id, known.model = answer["id"], answer["model"]
        for choice in answer["choices"]:
            if choice.get("finish_reason"):
                known.finish_reasons[choice["index"]] = choice["finish_reason"]
            self.stopped |= isinstance(choice.get("stop_reason"), str)

    def note_tokens(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Give the prompt and more of the output to the recorder, if there is one."""
        if self.recorder is not None:
            self.recorder.note_tokens(self.identity.program_id, self.identity.call_id, prompt=prompt, output=output)

    def take_ids(self, answer: dict[str, Any]) -> bool:
        """Record the token ids of a completion or of a chunk, and remove them unless the caller asked for them. Returns
        whether to pass the answer on: a chunk that vLLM sent only for its ids is not for the caller."""
        prompt, output = self._read_ids(answer, "prompt_token_ids"), list[int]()
        for choice in answer["choices"]:
            ids = self._read_ids(choice, "token_ids")
            if choice["index"] == 0:  # the recorder keeps one answer a call
                output = ids
        self.note_tokens(prompt, output)
        return not self.hides_ids or not answer["choices"] or not all(map(_is_bare, answer["choices"]))

    def _read_ids(self, data: dict[str, Any], key: str) -> list[int]:
        return (data.pop(key, None) if self.hides_ids else data.get(key)) or []

    def awaits_account(self, outcome: CallState) -> bool:
        """Whether the call, which has left so, has a final account that only its scheduler knows."""
        return (self.stopped or outcome is not CallState.FINISHED) and not self.ended

    def report(self) -> dict[str, Any]:
        """Ids and account, as they go back with the answer."""
        identity, account = self.identity, self.row.account
        return {name: getattr(identity, name) for name in _IDENTITY} | {
            name: getattr(account, name) for name in _ACCOUNT
        }

    @asynccontextmanager
    async def in_time(self, clock: Callable[[], float], *, is_stream: bool) -> AsyncIterator[None]:
        """Cancel the body when the call's deadline passes, and raise DeadlineError. If the program has ended on another
        thread, cancel at once: its schedulers may know, and would keep a program that comes afterwards."""
        if self.ended or not math.isnan(self.of_program.end_s):
            self.ended = True
            raise asyncio.CancelledError
        left_s = self.deadline.at_s - clock()
        scope = asyncio.timeout(left_s if left_s < math.inf else None)
        try:
            async with scope:
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise self.deadline.error(self.row.account.output_tokens if is_stream else 0) from error

    def abort(self) -> None:
        """End the call, because its program has ended or the engine is being shut down."""
        self.ended = True
        if self.future is not None:
            self.future.cancel()

    def ended_error(self, engine_closed: bool) -> WeftError | None:
        """Why the call was aborted; None if its caller aborted it."""
        if engine_closed:
            return EngineClosedError()
        return ProgramEndedError(self.program.program_id, self.program.name) if self.ended else None


class InFlightCalls:
    """Keeps the calls in flight. May be used from any thread."""

    def __init__(self, table: ProcessTable, clock: Callable[[], float]) -> None:
        self.table = table
        self._clock = clock
        self._lock = fork_safe(threading.Lock())
        self._calls: dict[CallId, InFlight] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, call_id: CallId) -> bool:
        return call_id in self._calls

    def add(self, call: InFlight) -> None:
        """A call was admitted."""
        with self._lock:
            self._calls[call.identity.call_id] = call

    def leave(self, call: InFlight) -> CallState | None:
        """A call has left the engine, finished or not. Returns how; None if it was not in flight, because leaving twice
        changes nothing."""
        call_id = call.identity.call_id
        with self._lock:
            if self._calls.pop(call_id, None) is None:
                return None
            outcome = call.outcome  # of a call that another thread aborts, the loop may set it from now on
        now_s = self._clock()
        account = call.row.account
        call.endpoint.admission.leave(now_s)
        self.table.leave(call.row, now_s)
        row = call.row
        call.program.reports.call_left(
            call_id, now_s, account, outcome, engine_id=row.engine_id, earlier_engine_ids=row.earlier_engine_ids
        )
        call.program.log.debug(
            "call left the engine",
            thread_id=call.identity.thread_id,
            call_id=call_id,
            service_s=round(account.service_s, 6),
            wait_s=round(account.wait_s, 6),
            preemptions=account.preemptions,
        )
        return outcome

    def abort(self, program_id: ProgramId | None = None) -> None:
        """Abort the calls of a program that has ended; None: all calls, because the engine is being shut down."""
        with self._lock:
            calls = [call for call in self._calls.values() if program_id in (None, call.identity.program_id)]
        for call in calls:
            call.abort()

    def account(self, call_id: CallId, account: Account) -> None:
        """An output brought a call's account so far. Outputs of a call that has left come late and change nothing."""
        call = self._calls.get(call_id)
        if call is not None:
            call.row.account = account

    def assign(self, call_id: CallId, engine_id: EngineId) -> EngineId | None:
        """A call was assigned to a replica. Returns another one if that has the latest KV of the call's program."""
        call = self._calls.get(call_id)
        return self.table.assign(call.row, engine_id) if call is not None else None


# -- methods of an engine as callbacks that do not keep the engine alive. An engine without references shuts down.


P = ParamSpec("P")
R = TypeVar("R")


def weakly(method: Callable[P, R]) -> Callable[P, R | None]:
    """A method that does nothing once its object is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
        alive = reference()
        return alive(*args, **kwargs) if alive is not None else None

    return call
