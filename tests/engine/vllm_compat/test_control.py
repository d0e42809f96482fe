"""The control channel reaches the scheduler through vLLM's own handling of utility calls."""

from __future__ import annotations

import asyncio
import queue
from types import SimpleNamespace
from typing import Any

import pytest
from polling import until

from weft.core.errors import EngineDiedError, EngineError

pytestmark = [pytest.mark.engine, pytest.mark.anyio]  # these tests import vLLM, but start no engine


class Scheduler:
    """Answers messages; `fail` in a message makes it fail."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def __call__(self, message: dict[str, Any]) -> Any:
        self.messages.append(message)
        if "fail" in message:
            raise ValueError(message["fail"])
        return {"count": len(self.messages)}


class Core:
    """vLLM's engine process as far as it handles utility calls, with the messages encoded as for another process."""

    def __init__(self, scheduler: Any) -> None:
        from weft.engine.vllm_compat.names import EngineCoreProc, EngineShutdownState

        self._core: Any = EngineCoreProc.__new__(EngineCoreProc)  # without a model
        self._core.scheduler = scheduler
        self._core.output_queue = queue.Queue()
        self._core.shutdown_state = EngineShutdownState.RUNNING

    def call_utility(self, name: str, *arguments: Any) -> Any:
        from weft.engine.vllm_compat.names import EngineCoreRequestType, MsgpackDecoder, MsgpackEncoder

        request = MsgpackDecoder().decode(MsgpackEncoder().encode((0, 1, name, arguments)))
        self._core._handle_client_request(EngineCoreRequestType.UTILITY, request)
        output = self._core.output_queue.get_nowait()[1].utility_output
        if output.failure_message is not None:
            raise Exception(output.failure_message)
        return output.result.result

    async def call_utility_async(self, name: str, *arguments: Any) -> Any:
        return self.call_utility(name, *arguments)


def front_end(core: Any) -> Any:
    """An `AsyncLLM` or `LLMEngine` as the channel sees it."""
    return SimpleNamespace(engine_core=core, errored=False)


async def test_a_message_calls_the_scheduler() -> None:
    """The scheduler gets scalars and lists of scalars as they were sent, and its answer comes back."""
    from weft.engine.vllm_compat.control import send_to_scheduler

    scheduler = Scheduler()
    llm = front_end(Core(scheduler))
    message = {"kind": "ended", "programs": ["a", "b"], "at_s": 1.5, "count": 2, "last": None, "urgent": True}
    assert await send_to_scheduler(llm, message) == {"count": 1}
    assert await send_to_scheduler(llm, {}) == {"count": 2}
    assert scheduler.messages == [message, {}]


async def test_an_error_in_the_scheduler_is_an_error_here() -> None:
    """The error names the message and the scheduler's own error, and the next message gets through."""
    from weft.engine.vllm_compat.control import send_to_scheduler

    llm = front_end(Core(Scheduler()))
    with pytest.raises(EngineError, match=r"\{'fail': 'no such program'\}: .*no such program"):
        await send_to_scheduler(llm, {"fail": "no such program"})
    assert await send_to_scheduler(llm, {}) == {"count": 2}


async def test_a_scheduler_that_takes_no_messages_is_an_error_here() -> None:
    """A stock scheduler is not callable. That is no reason for the engine to end."""
    from weft.engine.vllm_compat.control import send_to_scheduler

    with pytest.raises(EngineError, match="not a callable object"):
        await send_to_scheduler(front_end(Core(SimpleNamespace())), {"kind": "ended"})


async def test_an_object_that_cannot_travel_is_refused() -> None:
    """msgpack carries no objects of the caller's own classes, and the scheduler is not called."""
    from weft.engine.vllm_compat.control import send_to_scheduler, send_to_scheduler_sync

    scheduler = Scheduler()
    with pytest.raises(TypeError, match="not serializable"):
        await send_to_scheduler(front_end(Core(scheduler)), {"program": object()})
    with pytest.raises(TypeError, match="not serializable"):
        send_to_scheduler_sync(front_end(Core(scheduler)), {"program": object()})
    assert scheduler.messages == []


async def test_a_dead_engine_is_an_error() -> None:
    """vLLM refuses to send to an engine that it knows to be dead."""
    from weft.engine.vllm_compat.control import send_to_scheduler, send_to_scheduler_sync
    from weft.engine.vllm_compat.names import EngineDeadError

    class Dead:
        def call_utility(self, *_: Any) -> Any:
            raise EngineDeadError

        async def call_utility_async(self, *_: Any) -> Any:
            raise EngineDeadError

    with pytest.raises(EngineDiedError):
        await send_to_scheduler(front_end(Dead()), {})
    with pytest.raises(EngineDiedError):
        send_to_scheduler_sync(front_end(Dead()), {})


class Silent:
    """A client whose engine never answers."""

    def __init__(self) -> None:
        self.has_begun, self.is_cancelled = asyncio.Event(), asyncio.Event()

    async def call_utility_async(self, *_: Any) -> Any:
        self.has_begun.set()
        try:
            await asyncio.Future()
        finally:
            self.is_cancelled.set()


class Watched:
    """An `AsyncLLM` as the channel sees it, which counts how often the channel has looked whether it has died."""

    def __init__(self, core: Silent) -> None:
        self.engine_core, self.is_dead, self.looks = core, False, 0

    @property
    def errored(self) -> bool:
        self.looks += 1
        return self.is_dead


@pytest.mark.timeout(30)
async def test_an_engine_that_dies_during_a_message_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM never answers such a message; the sender does not wait for it."""
    from weft.engine.vllm_compat import control

    monkeypatch.setattr(control, "_WATCH_S", 0.01)
    client = Silent()
    llm = Watched(client)
    sending = asyncio.ensure_future(control.send_to_scheduler(llm, {}))  # type: ignore[arg-type]  # as `front_end`
    await until(lambda: llm.looks >= 2)
    assert not sending.done()
    llm.is_dead = True
    with pytest.raises(EngineDiedError):
        await sending
    await client.is_cancelled.wait()


@pytest.mark.timeout(30)
async def test_a_cancelled_sender_stops_waiting() -> None:
    """Cancelling the sender cancels vLLM's call too."""
    from weft.engine.vllm_compat.control import send_to_scheduler

    client = Silent()
    sending = asyncio.ensure_future(send_to_scheduler(front_end(client), {}))
    await client.has_begun.wait()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await client.is_cancelled.wait()


def test_a_blocking_engine_in_another_process() -> None:
    """An `LLMEngine` with processes of its own takes the same way."""
    from weft.engine.vllm_compat.control import send_to_scheduler_sync

    scheduler = Scheduler()
    engine = front_end(Core(scheduler))
    assert send_to_scheduler_sync(engine, {"kind": "ended"}) == {"count": 1}
    with pytest.raises(EngineError, match="no such program"):
        send_to_scheduler_sync(engine, {"fail": "no such program"})
    assert scheduler.messages == [{"kind": "ended"}, {"fail": "no such program"}]


@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_an_engine_in_this_process(error: type[Exception]) -> None:
    """The scheduler of an engine in this process is called directly, and any error of it is an `EngineError`."""
    from weft.engine.vllm_compat.control import send_to_scheduler_sync
    from weft.engine.vllm_compat.names import InprocClient

    def fail(message: dict[str, Any]) -> None:
        raise error(message["fail"])

    client: Any = InprocClient.__new__(InprocClient)
    client.engine_core = SimpleNamespace(scheduler=Scheduler())
    assert send_to_scheduler_sync(front_end(client), {"kind": "ended"}) == {"count": 1}
    client.engine_core.scheduler = fail
    with pytest.raises(EngineError, match="no such program"):
        send_to_scheduler_sync(front_end(client), {"fail": "no such program"})


def test_vllm_takes_the_scheduler_for_true() -> None:
    """vLLM calls only an attribute that is true, and an empty scheduler is to be called too."""
    from weft.engine.scheduler import WeftScheduler

    assert not hasattr(WeftScheduler, "__len__")
    assert not hasattr(WeftScheduler, "__bool__")
