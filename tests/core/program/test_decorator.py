"""`@program` on every kind of function."""

# No `from __future__ import annotations` here: annotations are real objects, as in most users' code. Tests of
# annotations that are text write their own modules (see `written`).

import asyncio
import functools
import gc
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

import pytest

import weft
from weft.core.errors import ProgramEndedError, ProgramParameterError
from weft.core.process_rows import ProgramState
from weft.core.program import Program
from weft.core.testing import RecordingBackend

FINISHED, FAILED, CANCELLED = ProgramState.FINISHED, ProgramState.FAILED, ProgramState.CANCELLED


# -- the four kinds of function


def function_of(act: Callable[[Program], Any]) -> Any:
    @weft.program
    def entry(question: str, program: Program) -> str:
        act(program)
        return question

    return entry


def coroutine_of(act: Callable[[Program], Any]) -> Any:
    @weft.program
    async def entry(question: str, program: Program) -> str:
        await asyncio.sleep(0)
        act(program)
        return question

    return entry


def generator_of(act: Callable[[Program], Any]) -> Any:
    @weft.program
    def entry(question: str, program: Program) -> Generator[str]:
        yield question[0]
        act(program)
        yield question[1:]

    return entry


def async_generator_of(act: Callable[[Program], Any]) -> Any:
    @weft.program
    async def entry(question: str, program: Program) -> AsyncGenerator[str]:
        yield question[0]
        await asyncio.sleep(0)
        act(program)
        yield question[1:]

    return entry


class Caller:
    """An object that is called as a function."""

    def __init__(self, act: Callable[[Program], Any]) -> None:
        self.act = act

    async def __call__(self, question: str, program: Program) -> str:
        await asyncio.sleep(0)
        self.act(program)
        return question


def instance_of(act: Callable[[Program], Any]) -> Any:
    return weft.program(Caller(act))


def partial_of(act: Callable[[Program], Any]) -> Any:
    def entry(given: Callable[[Program], Any], question: str, program: Program) -> str:
        given(program)
        return question

    return weft.program(functools.partial(entry, act))


KINDS = [function_of, coroutine_of, generator_of, async_generator_of, instance_of, partial_of]


def test_an_instance_has_the_name_of_its_class() -> None:
    """The table shows the class of a callable object, also with further options."""
    seen: list[Program] = []
    entry = instance_of(seen.append)
    asyncio.run(entry("Why?"))
    asyncio.run(entry.options(tenant="ann")("Why?"))
    assert [(program.name, program.tenant) for program in seen] == [("Caller", None), ("Caller", "ann")]
    assert entry.__name__ == entry.options(tenant="ann").__name__ == "Caller"
    assert list(inspect.signature(entry).parameters) == ["question"]


def test_an_instance_without_a_parameter_for_the_program() -> None:
    """The error names the method."""

    class Wrong:
        def __call__(self, question: str) -> str:
            return question

    with pytest.raises(ProgramParameterError, match=r"Wrong\.__call__\(\) has no parameter annotated"):
        weft.program(Wrong())
    with pytest.raises(ProgramParameterError, match=r"partial\(\) has no parameter annotated"):
        weft.program(functools.partial(Wrong()))


def run(entry: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the result of any kind of function; the items of a generator are joined."""
    result = entry(*args, **kwargs)
    if inspect.isasyncgen(result):

        async def collect() -> str:
            return "".join([str(item) async for item in result])

        return asyncio.run(collect())
    if inspect.isawaitable(result):

        async def wait() -> Any:
            return await result

        return asyncio.run(wait())
    return "".join(map(str, result)) if inspect.isgenerator(result) else result


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_runs_as_a_program(backend: RecordingBackend, kind: Callable[..., Any]) -> None:
    """A function of any kind gets a running program and returns its result, and the program ends with it."""
    seen: list[Program] = []

    def act(program: Program) -> None:
        backend.call(program)
        seen.append(program)
        assert backend.ended == []

    assert run(kind(act), "why?") == "why?"
    [program] = seen
    assert program.name == ("Caller" if kind is instance_of else "entry")
    assert backend.ended == [(program.program_id, FINISHED)]
    assert program.state is FINISHED
    assert len(backend.table) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_each_call_is_a_new_program(backend: RecordingBackend, kind: Callable[..., Any]) -> None:
    """Two calls of an entrypoint are two programs in two sessions."""
    entry = kind(backend.call)
    run(entry, "one")
    run(entry, "two")
    assert len({info.program_id for info in backend.started}) == 2
    assert len({info.session_id for info in backend.started}) == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [ValueError("boom"), asyncio.CancelledError(), KeyboardInterrupt()])
def test_errors_pass_and_end_the_program(
    backend: RecordingBackend, kind: Callable[..., Any], error: BaseException
) -> None:
    """An error reaches the caller unchanged; the program has failed, or was cancelled for a cancellation."""

    def act(program: Program) -> None:
        backend.call(program)
        raise error

    with pytest.raises(type(error)) as caught:
        run(kind(act), "why?")
    if not isinstance(error, asyncio.CancelledError):  # asyncio makes a new one
        assert caught.value is error
    assert [state for _, state in backend.ended] == [FAILED if isinstance(error, Exception) else CANCELLED]


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_function_stays(kind: Callable[..., Any]) -> None:
    """`inspect` reports the same kind of function for an entrypoint as for the decorated function."""
    entry = kind(lambda program: None)
    for ask in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
        assert ask(entry) == ask(entry.__wrapped__)


@pytest.mark.parametrize("kind", KINDS)
def test_passing_a_program_makes_a_branch(backend: RecordingBackend, kind: Callable[..., Any]) -> None:
    """With `program=` an entrypoint runs as a branch of that program, and its end does not end the program."""
    seen: list[Program] = []

    def act(program: Program) -> None:
        seen.append(program)
        backend.call(program)

    with Program("outer") as outer:
        before = backend.call(outer)
        assert run(kind(act), "why?", program=outer) == "why?"
        assert outer.state is ProgramState.IDLE
        assert backend.ended == []
        after = backend.call(outer)
    [inner] = seen
    assert inner.is_branch
    assert inner is not outer
    assert inner.program_id == outer.program_id
    assert [call.parents for call in backend.calls[1:]] == [(before.call_id,), (backend.calls[1].call_id,)]
    assert after is backend.calls[2]
    assert backend.ended == [(outer.program_id, FINISHED)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_failing_branch_does_not_end_the_program(backend: RecordingBackend, kind: Callable[..., Any]) -> None:
    """The error reaches the outer entrypoint, which decides."""

    def act(program: Program) -> None:
        backend.call(program)
        raise ValueError("boom")

    outer = Program("outer")
    with pytest.raises(ValueError, match="boom"):
        run(kind(act), "why?", program=outer)
    assert outer.state is ProgramState.IDLE
    backend.call(outer)


@pytest.mark.parametrize("kind", KINDS)
def test_passing_none_makes_a_program(backend: RecordingBackend, kind: Callable[..., Any]) -> None:
    """`program=None`, e.g. from an optional parameter, is the same as no argument."""
    run(kind(backend.call), "why?", program=None)
    assert [state for _, state in backend.ended] == [FINISHED]


def test_a_leaked_handle_takes_no_calls(backend: RecordingBackend) -> None:
    """A call through a handle that outlived its entrypoint is refused."""
    kept: list[Program] = []
    run(function_of(kept.append), "why?")
    with pytest.raises(ProgramEndedError, match="'entry'"):
        backend.call(kept[0])


# -- cancellation and unfinished generators


def test_a_cancelled_task_cancels_its_program(backend: RecordingBackend) -> None:
    """Cancelling the task of an entrypoint ends its program and the call in flight."""
    seen: list[Program] = []

    @weft.program
    async def entry(program: Program) -> None:
        seen.append(program)
        program.reports.start_run("model", None)
        backend.begin(program, "model")
        await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(entry())
        await asyncio.sleep(0)
        assert seen[0].state is ProgramState.ACTIVE
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(main())
    assert seen[0].state is CANCELLED
    assert seen[0].row is not None
    assert seen[0].row.active == {}


@pytest.mark.parametrize("how", ["close", "collect", "throw"])
def test_an_abandoned_generator_ends_its_program(backend: RecordingBackend, how: str) -> None:
    """The program of a generator that is closed early or dropped is cancelled; if it raises, the program has failed."""
    cleaned: list[str] = []

    @weft.program
    def entry(program: Program) -> Generator[int]:
        backend.call(program)
        try:
            yield 1
            yield 2
        finally:
            cleaned.append("inner")

    generator: Any = entry()
    assert next(generator) == 1
    assert backend.ended == []
    if how == "close":
        generator.close()
    elif how == "collect":
        del generator
        gc.collect()
    else:
        with pytest.raises(ValueError, match="boom"):
            generator.throw(ValueError("boom"))
    assert [state for _, state in backend.ended] == [FAILED if how == "throw" else CANCELLED]
    assert cleaned == ["inner"]


def test_a_generator_that_is_never_started_opens_no_program(backend: RecordingBackend) -> None:
    """The program begins with the first item."""
    generator = generator_of(backend.call)("why?")
    del generator
    gc.collect()
    assert backend.started == []


def test_a_generator_passes_everything_through() -> None:
    """Sent values, thrown errors and the return value pass between the caller and the function."""

    @weft.program
    def entry(program: Program) -> Generator[Any, Any, str]:
        got = yield program.state
        try:
            yield got
        except KeyError as error:
            yield error.args[0]
        return "returned"

    def outer() -> Generator[Any, Any, None]:
        results.append((yield from entry()))

    results: list[str] = []
    generator = outer()
    assert next(generator) is ProgramState.IDLE
    assert generator.send("sent") == "sent"
    assert generator.throw(KeyError("thrown")) == "thrown"
    assert next(generator, "over") == "over"
    assert results == ["returned"]


@pytest.mark.parametrize("how", ["aclose", "collect", "break", "throw", "cancel"])
def test_an_abandoned_async_generator_ends_its_program(backend: RecordingBackend, how: str) -> None:
    """An async generator that is closed, dropped or cancelled cancels its program after its clean-up; if it raises, the
    program has failed."""
    cleaned: list[str] = []

    @weft.program
    async def entry(program: Program) -> AsyncGenerator[int]:
        backend.call(program)
        try:
            yield 1
            await asyncio.Event().wait()
            yield 2
        finally:
            await asyncio.sleep(0)
            assert backend.ended == []
            cleaned.append("inner")

    async def main() -> None:
        generator: Any = entry()
        if how == "break":
            async for _ in generator:
                break
        else:
            assert await anext(generator) == 1
        assert backend.ended == []
        if how == "aclose":
            await generator.aclose()
        elif how == "throw":
            with pytest.raises(ValueError, match="boom"):
                await generator.athrow(ValueError("boom"))
        elif how == "cancel":
            task = asyncio.ensure_future(anext(generator))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        else:
            del generator
            gc.collect()
            for _ in range(5):  # the loop closes it in a new task
                await asyncio.sleep(0)
        assert [state for _, state in backend.ended] == [FAILED if how == "throw" else CANCELLED]
        assert cleaned == ["inner"]

    asyncio.run(main())


def test_an_async_generator_passes_everything_through(backend: RecordingBackend) -> None:
    """Sent values and thrown errors reach the function, which may continue after either."""

    @weft.program
    async def entry(program: Program) -> AsyncGenerator[Any, Any]:
        backend.call(program)
        got = yield "first"
        try:
            yield got
        except KeyError as error:
            yield error.args[0]
        try:
            yield "again"
        except ValueError:
            return

    async def main() -> None:
        generator: Any = entry()
        assert await anext(generator) == "first"
        assert await generator.asend("sent") == "sent"
        assert await generator.athrow(KeyError("thrown")) == "thrown"
        assert await anext(generator) == "again"
        with pytest.raises(StopAsyncIteration):
            await generator.athrow(ValueError("handled by returning"))
        assert [state for _, state in backend.ended] == [FINISHED]

    asyncio.run(main())


@pytest.mark.parametrize("kind", [generator_of, async_generator_of])
def test_an_error_in_the_reader_cancels_the_program(backend: RecordingBackend, kind: Callable[..., Any]) -> None:
    """A reader that fails abandons its unfinished generator: the program is cancelled, it has not failed."""
    entry = kind(backend.call)

    async def read() -> None:
        generator = entry("why?")
        if inspect.isasyncgen(generator):
            await anext(generator)
            await anext(generator)
            await generator.aclose()
        else:
            next(generator)
            next(generator)
            generator.close()
        raise ValueError("in the reader")

    with pytest.raises(ValueError, match="in the reader"):
        asyncio.run(read())
    assert [state for _, state in backend.ended] == [CANCELLED]


# -- forms of the decorator


def test_bare_with_parentheses_and_with_options(backend: RecordingBackend) -> None:
    """`@program`, `@program()` and `@program(name=...)` all decorate; options reach the program."""

    @weft.program
    def bare(program: Program) -> None:
        backend.call(program)

    @weft.program()
    def parenthesised(program: Program) -> None:
        backend.call(program)

    @weft.program(name="nightly", session_id="s", tenant="acme", tags=["a"], metadata={"k": 1})
    def full(program: Program) -> None:
        backend.call(program)

    for entry in (bare, parenthesised, full):
        entry()
    assert [info.name for info in backend.started] == ["bare", "parenthesised", "nightly"]
    info = backend.started[-1]
    assert (info.session_id, info.tenant, info.tags, info.metadata) == ("s", "acme", ("a",), {"k": 1})


def test_options_for_one_use(backend: RecordingBackend) -> None:
    """`options` returns a new entrypoint and does not change the old one; None leaves an option as it was."""

    @weft.program(name="answer", tags=["a"], tenant="acme")
    def answer(question: str, program: Program) -> str:
        backend.call(program)
        return question

    other = answer.options(session_id="user-1", tags=["b"], tenant=None)
    assert other("one") == "one"
    assert other.options(name="renamed")("two") == "two"
    assert answer("three") == "three"
    assert [(info.name, info.tags, info.tenant) for info in backend.started] == [
        ("answer", ("b",), "acme"),
        ("renamed", ("b",), "acme"),
        ("answer", ("a",), "acme"),
    ]
    sessions = [info.session_id for info in backend.started]
    assert sessions[:2] == ["user-1", "user-1"]
    assert sessions[2] != "user-1"


class Agent:
    """An agent with an entrypoint of each kind of method, in both orders of decorators."""

    label = "class"

    def __init__(self, backend: RecordingBackend) -> None:
        self.backend = backend
        self.label = "instance"

    @weft.program
    def of_instance(self, question: str, program: Program) -> tuple[str, str]:
        self.backend.call(program)
        return self.label, question

    @weft.program
    async def of_instance_async(self, question: str, program: Program) -> tuple[str, str]:
        self.backend.call(program)
        return self.label, question

    @classmethod
    @weft.program
    def of_class(cls, question: str, program: Program) -> tuple[str, str]:
        assert isinstance(program, Program)
        return cls.label, question

    @weft.program(name="outside")
    @classmethod
    def of_class_outside(cls, question: str, program: Program) -> tuple[str, str]:
        assert program.name == "outside"
        return cls.label, question

    @staticmethod
    @weft.program
    def of_none(question: str, program: Program) -> tuple[str, str]:
        assert isinstance(program, Program)
        return "static", question

    @weft.program(name="outside")
    @staticmethod
    def of_none_outside(question: str, program: Program) -> tuple[str, str]:
        assert program.name == "outside"
        return "static", question


@pytest.mark.parametrize(
    ("method", "owner"),
    [
        ("of_instance", "instance"),
        ("of_class", "class"),
        ("of_class_outside", "class"),
        ("of_none", "static"),
        ("of_none_outside", "static"),
    ],
)
def test_methods_of_each_kind(backend: RecordingBackend, method: str, owner: str) -> None:
    """Instance, class and static methods can be entrypoints, in either order of the decorators."""
    agent = Agent(backend)
    bound: Any = getattr(agent, method)
    assert bound("why?") == (owner, "why?")
    assert bound(question="why?") == (owner, "why?")
    assert list(inspect.signature(bound).parameters) == ["question"]
    if owner != "instance":
        assert getattr(Agent, method)("why?") == (owner, "why?")


def test_an_async_method(backend: RecordingBackend) -> None:
    """A coroutine method can be an entrypoint; each call of it is one program."""
    assert asyncio.run(Agent(backend).of_instance_async("why?")) == ("instance", "why?")
    assert [info.name for info in backend.started] == ["of_instance_async"]


def test_options_of_a_method_take_the_instance_first(backend: RecordingBackend) -> None:
    """`options` of a method returns a function whose first argument is the instance."""
    entry = Agent.of_instance.options(session_id="user-1")
    assert entry(Agent(backend), "why?") == ("instance", "why?")
    assert backend.started[0].session_id == "user-1"


# -- concurrency


@pytest.mark.parametrize("kind", KINDS)
def test_programs_at_once_do_not_mix(backend: RecordingBackend, kind: Callable[..., Any]) -> None:
    """Twenty concurrent runs of one entrypoint are twenty separate programs."""
    seen: list[Program] = []

    def act(program: Program) -> None:
        seen.append(program)
        backend.call(program)
        backend.call(program)

    entry = kind(act)

    async def one(number: int) -> str:
        result = entry.options(session_id=f"user {number}")(f"{number} why?")
        if inspect.isasyncgen(result):
            return "".join([str(item) async for item in result])
        if inspect.isawaitable(result):
            return str(await result)
        await asyncio.sleep(0)
        return "".join(result)

    async def main() -> list[str]:
        return await asyncio.gather(*(one(number) for number in range(20)))

    assert asyncio.run(main()) == [f"{number} why?" for number in range(20)]
    assert len({program.program_id for program in seen}) == 20
    assert {info.session_id for info in backend.started} == {f"user {number}" for number in range(20)}
    for program in seen:
        first, second = (call for call in backend.calls if call.program_id == program.program_id)
        assert (first.parents, second.parents) == ((), (first.call_id,))
    assert {state for _, state in backend.ended} == {FINISHED}
