"""`weft.Engine`: one vLLM engine in this process, with programs, sessions and the process table."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, Final

import anyio
import anyio.to_thread

from weft.core.errors import (
    EngineClosedError,
    EngineError,
    EngineStartError,
)
from weft.core.graph import CallState
from weft.core.ids import CallId, EngineId, ProgramId, SessionId
from weft.core.log import get_logger
from weft.core.policies import PolicyConfig
from weft.core.process_table import (
    Account,
    CallIdentity,
    ProcessTable,
    ProgramInfo,
    ProgramRow,
    ProgramState,
)
from weft.core.program import Program
from weft.engine.calls import InFlight
from weft.engine.process import (
    LoopThread,
    child_processes,
    end_processes,
    host_untouched,
    is_spawned_main,
    shut_down,
)
from weft.engine.start import resolve_model, start_vllm
from weft.engine.wire import encode_call

_counter = itertools.count()


class Engine:
    """A vLLM engine whose scheduler knows programs. Starting takes 25 to 45 seconds and three processes.

    ::

        with weft.Engine("Qwen/Qwen2.5-7B-Instruct") as engine:
            model = ChatWeft(engine=engine)

    In a script, make engines under `if __name__ == "__main__":`, since vLLM starts its processes by running the script
    again. May be used from any thread and any number of event loops.

    Args:
        model: a folder in Hugging Face format or a hub name; None: the embedded SmolLM2-135M-Instruct.
        policy: a name in `weft.core.policies.POLICIES`, or a `PolicyConfig` with queue bounds and beta.
        tool_call_parser: vLLM's parser for tool calls that the model makes of its own accord, e.g. "hermes".
        clock: monotonic seconds, for the process table.
        **engine_args: vLLM's `AsyncEngineArgs`, e.g. `max_model_len=4096`, `max_num_seqs=16`.

    Raises:
        ModelNotFoundError, EngineStartError, UnsupportedVllmError, VllmUnavailableError, PolicyError: see
            `weft.core.errors`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        policy: str | PolicyConfig = "atlas",
        tool_call_parser: str | None = "hermes",
        clock: Callable[[], float] = time.monotonic,
        **engine_args: Any,
    ) -> None:
        self._start_abandoned = threading.Event()
        if is_spawned_main():
            raise EngineStartError(
                "weft.Engine was started while a child process was re-running your script. Put the code that starts "
                'it under `if __name__ == "__main__":`.'
            )
        self.policy = policy if isinstance(policy, PolicyConfig) else PolicyConfig(policy)
        self.engine_id = EngineId(f"engine-{next(_counter)}")
        self.model = resolve_model(model)
        self.table = ProcessTable()
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: dict[SessionId, set[ProgramId]] = {}
        self._in_flight: dict[CallId, InFlight] = {}
        self._aborted: dict[CallId, InFlight] = {}  # of running programs; their accounts come with a later output
        self._log = get_logger().bind(engine_id=self.engine_id)
        self._closed = False
        self._loop = LoopThread(self.engine_id)
        before = child_processes()
        try:
            with host_untouched():
                self._llm, self._endpoint = start_vllm(
                    self._loop,
                    model=self.model,
                    policy=self.policy,
                    engine_args=engine_args,
                    tool_call_parser=tool_call_parser,
                    on_account=_weakly(self),
                    abandoned=self._start_abandoned,
                )
        except BaseException:
            self._closed = True
            end_processes(child_processes() - before)  # vLLM's constructor, if still at it, fails at once
            self._loop.stop()
            raise
        self._children = child_processes() - before
        self._finalizer = weakref.finalize(self, shut_down, self._llm, self._loop, self._children)
        self._log.info("engine started", model=self.model, policy=self.policy.name)

    @classmethod
    async def create(cls, model: str | os.PathLike[str] | None = None, **arguments: Any) -> Engine:
        """Start an engine without blocking the caller's event loop; arguments as for `Engine`.

        Cancelling it ends the processes that have started.
        """
        engine = cls.__new__(cls)
        over = threading.Event()

        def start() -> None:
            try:
                engine.__init__(model, **arguments)  # type: ignore[misc]
            finally:
                over.set()

        try:
            await anyio.to_thread.run_sync(start, abandon_on_cancel=True)
        except anyio.get_cancelled_exc_class():
            engine._start_abandoned.set()  # noqa: SLF001  its own class
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(over.wait)
                await anyio.to_thread.run_sync(engine.shutdown)
            raise
        return engine

    # -- calls

    async def chat(self, body: Mapping[str, Any], program: Program, identity: CallIdentity) -> dict[str, Any]:
        """One chat completion, as OpenAI's `chat.completion` object.

        Args:
            body: the request in OpenAI's chat format; ids and model are filled in.
            program: the program it belongs to.
            identity: its ids, from `program.start_call`.

        Returns:
            vLLM's response, and under "weft" the call's ids and account (`service_s`, `wait_s`, `preemptions`, tokens).

        Raises:
            CallError, ProgramError, EngineError: see `weft.core.errors`. Cancelling aborts the call in the engine.
        """
        call, request = self._open_call(body, program, identity, stream=False)
        future = self._submit(call, self._endpoint_complete(call, request))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # it was not the caller who was cancelled
                self._raise_if_ended(call)
            raise

    def chat_sync(self, body: Mapping[str, Any], program: Program, identity: CallIdentity) -> dict[str, Any]:
        """`chat` for code without an event loop."""
        call, request = self._open_call(body, program, identity, stream=False)
        future = self._submit(call, self._endpoint_complete(call, request))
        try:
            return future.result()
        except FutureCancelledError:
            self._raise_if_ended(call)
            raise
        finally:
            future.cancel()  # a KeyboardInterrupt while waiting

    async def chat_stream(
        self, body: Mapping[str, Any], program: Program, identity: CallIdentity
    ) -> AsyncGenerator[dict[str, Any]]:
        """A chat completion as OpenAI `chat.completion.chunk` objects, the finishing one with the account under "weft".

        Closing the iterator aborts the call in the engine; otherwise as `chat`.
        """
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[Any] = asyncio.Queue()
        call, request = self._open_call(body, program, identity, stream=True)
        future = self._submit_stream(call, request, lambda item: loop.call_soon_threadsafe(items.put_nowait, item))
        try:
            while (item := await items.get()) is not _END:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            future.cancel()

    def chat_stream_sync(
        self, body: Mapping[str, Any], program: Program, identity: CallIdentity
    ) -> Generator[dict[str, Any]]:
        """`chat_stream` for code without an event loop."""
        items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        call, request = self._open_call(body, program, identity, stream=True)
        future = self._submit_stream(call, request, items.put)
        try:
            while (item := items.get()) is not _END:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            future.cancel()

    def _open_call(
        self, body: Mapping[str, Any], program: Program, identity: CallIdentity, *, stream: bool
    ) -> tuple[InFlight, Any]:
        try:
            if self._closed:
                raise EngineClosedError
            request = self._endpoint.make_request(
                {**body, "stream": stream, "request_id": identity.call_id, "session_id": program.session_id}
            )
            program.bind(self)
        except Exception:
            program.call_left(identity.call_id, self._clock(), Account(), CallState.FAILED)
            raise
        now_s = self._clock()
        row, attained = self.table.arrive(identity, self.engine_id, now_s)
        program.call_arrived(identity.call_id, now_s)
        request.vllm_xargs = {**(request.vllm_xargs or {}), **encode_call(identity, attained)}
        call = InFlight(program, identity, row)
        with self._lock:
            self._in_flight[identity.call_id] = call
        return call, request

    def _submit(self, call: InFlight, coroutine: Any) -> Future[Any]:
        call.future = self._loop.submit(coroutine)
        # Also for a call that is cancelled before its coroutine began.
        call.future.add_done_callback(lambda _future: self._leave(call))
        if self.table.get(call.identity.program_id) is None:  # its program ended on another thread meanwhile
            self._abort([call])
        return call.future

    async def _endpoint_complete(self, call: InFlight, request: Any) -> dict[str, Any]:
        try:
            response = await self._endpoint.complete(request)
            call.outcome = CallState.FINISHED
        except Exception:
            call.outcome = CallState.FAILED
            raise
        finally:
            self._leave(call)  # before the caller sees the result, so that its next call reads the new service
        return {**response, "weft": call.report()}

    def _submit_stream(self, call: InFlight, request: Any, deliver: Callable[[Any], object]) -> Future[Any]:
        """Carry a stream over to the caller's side; the last item is _END or an exception."""

        async def pump() -> None:
            try:
                async with aclosing(self._endpoint.stream(request)) as chunks:
                    async for chunk in chunks:
                        if any(choice.get("finish_reason") for choice in chunk["choices"]):
                            chunk["weft"] = call.report()
                        deliver(chunk)
                call.outcome = CallState.FINISHED
            except Exception:
                call.outcome = CallState.FAILED
                raise
            finally:
                self._leave(call)

        def end(future: Future[Any]) -> None:  # also of a stream that was aborted before it began
            error = call.ended_error(self._closed) if future.cancelled() else future.exception()
            with suppress(RuntimeError):  # the caller's event loop is gone, and the caller with it
                deliver(error or _END)

        future = self._submit(call, pump())
        future.add_done_callback(end)
        return future

    def _on_account(self, call_id: CallId, account: Account) -> None:
        call = self._in_flight.get(call_id)
        if call is not None:
            call.row.account = account
            return
        aborted = self._aborted.pop(call_id, None)
        if aborted is not None:
            self.table.settle(aborted.row, account)
            aborted.program.call_settled(call_id, aborted.row.account)

    def _leave(self, call: InFlight) -> None:
        with self._lock:
            if self._in_flight.pop(call.identity.call_id, None) is None:
                return
            if call.outcome is not CallState.FINISHED and not call.ended:
                self._aborted[call.identity.call_id] = call
        now_s = self._clock()
        self.table.leave(call.row, now_s)
        call.program.call_left(call.identity.call_id, now_s, call.row.account, call.outcome)
        call.program.log.debug(
            "call left the engine",
            thread_id=call.identity.thread_id,
            call_id=call.identity.call_id,
            service_s=round(call.row.account.service_s, 6),
            wait_s=round(call.row.account.wait_s, 6),
            preemptions=call.row.account.preemptions,
        )

    def _raise_if_ended(self, call: InFlight) -> None:
        error = call.ended_error(self._closed)
        if error is not None:
            raise error

    # -- sessions: the backend's operations, issued by Program

    def start_session(self, info: ProgramInfo) -> None:
        """Register a program under its session; a session begins with its first program (Autellix §5)."""
        if self._closed:
            raise EngineClosedError
        self.table.open(info, self._clock())
        with self._lock:
            self._sessions.setdefault(info.session_id, set()).add(info.program_id)

    def end_session(self, program_id: ProgramId, state: ProgramState) -> ProgramRow | None:
        """Abort a program's calls in flight and take its row out; a session ends with its last program."""
        with self._lock:
            calls = [call for call in self._in_flight.values() if call.identity.program_id == program_id]
        self._abort(calls)
        row = self.table.close(program_id, state, self._clock())
        if row is not None:
            with self._lock:
                self._aborted = {
                    call_id: call for call_id, call in self._aborted.items() if call.identity.program_id != program_id
                }
                programs = self._sessions[row.info.session_id]
                programs.discard(program_id)
                if not programs:
                    del self._sessions[row.info.session_id]
        return row

    def row(self, program_id: ProgramId) -> ProgramRow | None:
        """A running program's row."""
        return self.table.get(program_id)

    def _abort(self, calls: list[InFlight]) -> None:
        for call in calls:
            call.ended = True
            if call.future is not None:
                call.future.cancel()

    # -- life

    @property
    def sessions(self) -> dict[SessionId, frozenset[ProgramId]]:
        """The open sessions and their running programs."""
        with self._lock:
            return {session: frozenset(programs) for session, programs in self._sessions.items()}

    @property
    def is_alive(self) -> bool:
        """Whether it can take calls."""
        return not self._closed and not self._llm.errored

    @property
    def max_model_len(self) -> int:
        """The model's context in tokens."""
        return int(self._llm.model_config.max_model_len)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        tokenizer = self._llm.renderer.tokenizer
        if tokenizer is None:
            raise EngineError("this engine was started with skip_tokenizer_init; it has no tokenizer.")
        return list(tokenizer.encode(text, add_special_tokens=False))

    def count_prompt_tokens(self, body: Mapping[str, Any]) -> int:
        """How many tokens the prompt of a chat request has, as vLLM renders it; it need not fit the model's context.

        Raises:
            InvalidRequestError: it is no chat request, or the chat template refuses it.
            EngineClosedError: the engine was shut down.
        """
        if not self.is_alive:
            raise EngineClosedError
        request = self._endpoint.make_request(dict(body))
        return self._loop.submit(self._endpoint.count_prompt_tokens(request)).result()

    def shutdown(self) -> None:
        """Abort what runs and end the engine's processes. Later calls raise `EngineClosedError`. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with self._lock:
            calls = list(self._in_flight.values())
        self._abort(calls)
        self._finalizer()
        self._log.info("engine shut down")

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.shutdown)

    def __repr__(self) -> str:
        return f"<weft.Engine {self.engine_id} {self.model!r} {self.policy.name}>"


_END: Final = object()


def _weakly(engine: Engine) -> Callable[[CallId, Account], None]:
    """The engine's `_on_account`, without keeping the engine alive: an engine that nobody refers to shuts down."""
    reference = weakref.ref(engine)

    def on_account(call_id: CallId, account: Account) -> None:
        alive = reference()
        if alive is not None:
            alive._on_account(call_id, account)  # noqa: SLF001

    return on_account
