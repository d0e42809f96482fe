"""`@program`: on every kind of function, from the first argument to the last end."""

# No `from __future__ import annotations` here: annotations are real objects, as in most users' code. What differs when
# they are text is tested on files written for it (see `written`).

import asyncio
import gc
import importlib.util
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from pathlib import Path
from types import ModuleType
from typing import Any, Optional, get_type_hints

import pytest

import weft
from weft.core.errors import ProgramEndedError, ProgramParameterError
from weft.core.process_table import ProgramState
from weft.core.program import Program
from weft.core.testing import RecordingBackend

FINISHED, FAILED, CANCELLED = ProgramState.FINISHED, ProgramState.FAILED, ProgramState.CANCELLED


@pytest.fixture
def backend() -> RecordingBackend:
    return RecordingBackend()


# -- the four kinds of function, as one


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


KINDS = [function_of, coroutine_of, generator_of, async_generator_of]


def run(entry: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of any kind of function; what a generator yields is put together."""
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
    """A function of any kind gets a running program, gives what it gave before, and the program ends with it."""
    seen: list[Program] = []

    def act(program: Program) -> None:
        backend.call(program)
        seen.append(program)
        assert backend.ended == []

    assert run(kind(act), "why?") == "why?"
    [program] = seen
    assert program.name == "entry"
    assert backend.ended == [(program.program_id, FINISHED)]
    assert program.state is FINISHED
    assert len(backend.table) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_each_call_is_a_program_of_its_own(backend: RecordingBackend, kind: Callable[..., Any]) -> None:
    """Calling an entrypoint twice gives two programs in two sessions."""
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
    """An error reaches the caller as itself; the program failed, or was cancelled if nobody waits any more."""

    def act(program: Program) -> None:
        backend.call(program)
        raise error

    with pytest.raises(type(error)) as caught:
        run(kind(act), "why?")
    if not isinstance(error, asyncio.CancelledError):  # asyncio makes a new one
        assert caught.value is error
    assert [state for _, state in backend.ended] == [FAILED if isinstance(error, Exception) else CANCELLED]


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_stays_what_it_was(kind: Callable[..., Any]) -> None:
    """Code that asks what kind of function an entrypoint is gets the answer it got before."""
    entry = kind(lambda program: None)
    for ask in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
        assert ask(entry) == ask(entry.__wrapped__)


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_given_by_hand_makes_a_branch(backend: RecordingBackend, kind: Callable[..., Any]) -> None:
    """With `program=` an entrypoint is a part of that program: a branch, whose end does not end the whole."""
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
def test_a_failing_part_does_not_end_the_whole(backend: RecordingBackend, kind: Callable[..., Any]) -> None:
    """An error in an entrypoint that is part of another leaves that one to decide."""

    def act(program: Program) -> None:
        backend.call(program)
        raise ValueError("boom")

    outer = Program("outer")
    with pytest.raises(ValueError, match="boom"):
        run(kind(act), "why?", program=outer)
    assert outer.state is ProgramState.IDLE
    backend.call(outer)


@pytest.mark.parametrize("kind", KINDS)
def test_none_given_by_hand_makes_a_program(backend: RecordingBackend, kind: Callable[..., Any]) -> None:
    """`program=None`, as passed on from an optional parameter, is the same as nothing."""
    run(kind(backend.call), "why?", program=None)
    assert [state for _, state in backend.ended] == [FINISHED]


def test_the_program_is_over_for_what_it_leaked(backend: RecordingBackend) -> None:
    """A call made through a handle that outlived its entrypoint is refused."""
    kept: list[Program] = []
    run(function_of(kept.append), "why?")
    with pytest.raises(ProgramEndedError, match="'entry'"):
        backend.call(kept[0])


# -- cancellation and generators that are not run to their end


def test_a_cancelled_task_cancels_its_program(backend: RecordingBackend) -> None:
    """Cancelling the task of an entrypoint ends its program, the call in flight included."""
    seen: list[Program] = []

    @weft.program
    async def entry(program: Program) -> None:
        seen.append(program)
        program.start_run("model", None)
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
def test_a_generator_given_up_ends_its_program(backend: RecordingBackend, how: str) -> None:
    """A generator that is closed early or dropped is cancelled; one that lets an error out has failed."""
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


def test_a_generator_never_started_opens_nothing(backend: RecordingBackend) -> None:
    """A generator that nobody reads from makes no program."""
    generator = generator_of(backend.call)("why?")
    del generator
    gc.collect()
    assert backend.started == []


def test_a_generator_hands_everything_through() -> None:
    """Values sent in, errors thrown in and the return value pass between the caller and the function."""

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
def test_an_async_generator_given_up_ends_its_program(backend: RecordingBackend, how: str) -> None:
    """An async generator that is closed, dropped or cancelled cancels its program, once its clean-up has run; one that
    lets an error out has failed."""
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
            for _ in range(5):  # the loop closes it in a task of its own
                await asyncio.sleep(0)
        assert [state for _, state in backend.ended] == [FAILED if how == "throw" else CANCELLED]
        assert cleaned == ["inner"]

    asyncio.run(main())


def test_an_async_generator_hands_everything_through(backend: RecordingBackend) -> None:
    """Values sent in and errors thrown in reach the function, and it may go on after either."""

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
def test_an_error_in_the_reader_is_not_the_programs(backend: RecordingBackend, kind: Callable[..., Any]) -> None:
    """A reader that fails while it holds an unfinished generator gives it up: cancelled, not failed."""
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


# -- how it is written


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
    """`options` makes the same entrypoint with other options, and leaves the first as it was; None means as before."""

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
    def of_nobody(question: str, program: Program) -> tuple[str, str]:
        assert isinstance(program, Program)
        return "static", question

    @weft.program(name="outside")
    @staticmethod
    def of_nobody_outside(question: str, program: Program) -> tuple[str, str]:
        assert program.name == "outside"
        return "static", question


@pytest.mark.parametrize(
    ("method", "owner"),
    [
        ("of_instance", "instance"),
        ("of_class", "class"),
        ("of_class_outside", "class"),
        ("of_nobody", "static"),
        ("of_nobody_outside", "static"),
    ],
)
def test_methods_of_each_kind(backend: RecordingBackend, method: str, owner: str) -> None:
    """Instance, class and static methods are entrypoints, whichever decorator stands outside."""
    agent = Agent(backend)
    bound: Any = getattr(agent, method)
    assert bound("why?") == (owner, "why?")
    assert bound(question="why?") == (owner, "why?")
    assert list(inspect.signature(bound).parameters) == ["question"]
    if owner != "instance":
        assert getattr(Agent, method)("why?") == (owner, "why?")


def test_an_async_method(backend: RecordingBackend) -> None:
    """A coroutine method is an entrypoint, each call of it one program."""
    assert asyncio.run(Agent(backend).of_instance_async("why?")) == ("instance", "why?")
    assert [info.name for info in backend.started] == ["of_instance_async"]


def test_options_of_a_method_take_the_instance_first(backend: RecordingBackend) -> None:
    """`options` of a method makes a function: the instance is its first argument."""
    entry = Agent.of_instance.options(session_id="user-1")
    assert entry(Agent(backend), "why?") == ("instance", "why?")
    assert backend.started[0].session_id == "user-1"


# -- arguments


def first_of_all(program: Program, a: int, b: int = 2) -> Any:
    return (a, b)


def in_the_middle(a: int, program: Program, b: int = 2) -> Any:
    return (a, b)


def after_a_default(a: int = 1, program: Optional[Program] = None, b: int = 2) -> Any:  # noqa: UP045 - as users write it
    assert program is not None
    return (a, b)


def before_more(a: int, program: Program, *rest: int, c: int = 3) -> Any:
    return (a, rest, c)


def only_by_name(a: int, *, program: Program, b: int = 2) -> Any:
    return (a, b)


def only_by_place(a: int, program: Program, /, b: int = 2) -> Any:
    return (a, b)


def with_any_names(a: int, program: Program, **rest: int) -> Any:
    return (a, rest)


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "result"),
    [
        (first_of_all, (1,), {}, (1, 2)),
        (first_of_all, (1, 5), {}, (1, 5)),
        (first_of_all, (), {"b": 5, "a": 1}, (1, 5)),
        (in_the_middle, (1, 5), {}, (1, 5)),
        (in_the_middle, (1,), {"b": 5}, (1, 5)),
        (after_a_default, (), {}, (1, 2)),
        (after_a_default, (7, 8), {}, (7, 8)),
        (after_a_default, (), {"b": 8}, (1, 8)),
        (before_more, (1,), {}, (1, (), 3)),
        (before_more, (1, 2, 3), {"c": 4}, (1, (2, 3), 4)),
        (only_by_name, (1,), {"b": 5}, (1, 5)),
        (only_by_place, (1, 5), {}, (1, 5)),
        (with_any_names, (1,), {"x": 5}, (1, {"x": 5})),
    ],
)
def test_callers_need_not_know_where_the_program_goes(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    """Callers pass the other arguments, by place or by name, as if the parameter were not there."""
    entry: Any = weft.program(function)
    assert entry(*args, **kwargs) == result
    assert entry(*args, **kwargs, program=Program("outer")) == result


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1, 2, 3), {}), ((1,), {"a": 1}), ((1,), {"unknown": 1}), ((Program(), 1, 2), {})]
)
def test_wrong_arguments_are_a_type_error(
    backend: RecordingBackend, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Missing, unknown and surplus arguments fail as for any function, and no program begins."""
    entry: Any = weft.program(in_the_middle)
    with pytest.raises(TypeError, match="argument"):
        entry(*args, **kwargs)
    assert backend.started == []


def test_the_parameter_is_gone_from_what_others_see() -> None:
    """Signature, annotations and type hints have the other parameters, in order; name and text are the function's."""

    @weft.program
    def answer(question: str, program: Program, *, limit: int = 3) -> str:
        """Answer a question."""
        return question * limit

    assert str(inspect.signature(answer)) == "(question: str, *, limit: int = 3) -> str"
    hints = {"question": str, "limit": int, "return": str}
    assert answer.__annotations__ == hints
    assert get_type_hints(answer) == hints
    entry: Any = answer
    assert (entry.__name__, entry.__doc__, entry.__module__) == ("answer", "Answer a question.", __name__)
    assert entry.__qualname__.endswith("<locals>.answer")
    assert "program" in entry.__wrapped__.__annotations__, "the function itself is left alone"


# -- which parameter


class Special(Program):
    """Some host's own kind of program."""


def written(folder: Path, source: str) -> ModuleType:
    """A module with this source, imported from a file, as a user's would be."""
    path = folder / "users_agent.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("users_agent", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SOURCE = """{future}
import typing
from typing import TYPE_CHECKING, Optional, Union
import weft
import weft as w
from weft import Program
from weft.core.program import Program as Renamed

if TYPE_CHECKING:
    from nowhere import Missing

@weft.program
def entry(question: {other}, program: {annotation} = None, extra: int = 0):
    return question, type(program), extra
"""

ANNOTATIONS = [
    "Program",
    "weft.Program",
    "w.Program",
    "'Program'",
    "'weft.Program'",
    "Optional[Program]",
    "typing.Optional[weft.Program]",
    "Optional['Program']",
    "Union[Program, None]",
    "Program | None",
    "None | Program",
    "'weft.Program | None'",
]


@pytest.mark.parametrize("future", ["", "from __future__ import annotations"], ids=["objects", "text"])
@pytest.mark.parametrize("annotation", [*ANNOTATIONS, "Renamed"])
def test_the_parameter_is_found_by_its_annotation(tmp_path: Path, future: str, annotation: str) -> None:
    """The annotation may be the class or text, optional or not, under any name, evaluated late or at once."""
    module = written(tmp_path, SOURCE.format(future=future, annotation=annotation, other="str"))
    assert module.entry("why?", 5) == ("why?", Program, 5)
    assert list(inspect.signature(module.entry).parameters) == ["question", "extra"]


@pytest.mark.parametrize("annotation", ANNOTATIONS)
def test_the_parameter_is_found_beside_names_that_are_missing(tmp_path: Path, annotation: str) -> None:
    """Where another annotation cannot be evaluated, say as it is imported for type checkers only, the text decides."""
    source = SOURCE.format(future="from __future__ import annotations", annotation=annotation, other="Missing")
    assert written(tmp_path, source).entry("why?", 5) == ("why?", Program, 5)


def test_the_parameter_is_found_where_program_itself_is_for_type_checkers(tmp_path: Path) -> None:
    """`Program` may be imported under TYPE_CHECKING only."""
    source = """
from __future__ import annotations
from typing import TYPE_CHECKING
from weft.core.program.decorator import program as weft_program
if TYPE_CHECKING:
    from weft import Program

@weft_program
def entry(question: str, program: Program) -> str:
    return question + program.name
"""
    assert written(tmp_path, source).entry("why? ") == "why? entry"


def test_the_parameter_may_have_any_name() -> None:
    """The annotation decides, not the name; a parameter named `program` may be anything."""

    @weft.program
    def entry(program: str, handle: weft.Program) -> tuple[str, str]:
        return program, handle.name

    assert entry("by place") == ("by place", "entry")
    assert entry(program="by name") == ("by name", "entry")


def no_parameter(question: str) -> None: ...


def not_annotated(question: str, program) -> None: ...  # type: ignore[no-untyped-def] # noqa: ANN001


def in_a_list(programs: list[Program]) -> None: ...


def any_number(*programs: Program) -> None: ...


def any_names(**programs: Program) -> None: ...


def alike(program: "ProgramState", programmer: str) -> None: ...


def two(first: Program, second: Program) -> None: ...


def three(first: Program, second: Optional[Program], third: "weft.Program") -> None: ...  # noqa: UP045


@pytest.mark.parametrize(
    "function", [no_parameter, not_annotated, in_a_list, any_number, any_names, alike], ids=lambda f: f.__name__
)
def test_a_function_without_the_parameter_is_refused(function: Callable[..., None]) -> None:
    """Decorating a function that has nowhere to put the program fails at once and says what to add."""
    with pytest.raises(
        TypeError, match=rf"{function.__name__}\(\) has no parameter annotated with weft\.Program\. Give"
    ):
        weft.program(function)
    with pytest.raises(ProgramParameterError):
        weft.program(name="x")(function)


@pytest.mark.parametrize(("function", "count"), [(two, 2), (three, 3)])
def test_a_function_with_several_is_refused(function: Callable[..., None], count: int) -> None:
    """Several parameters leave open which one is meant; the message counts them."""
    with pytest.raises(ProgramParameterError, match=rf"{function.__name__}\(\) has {count} parameters annotated"):
        weft.program(function)


def test_decorating_twice_is_refused() -> None:
    """An entrypoint has no Program parameter left, so it cannot be made one again."""
    with pytest.raises(ProgramParameterError):
        weft.program(weft.program(in_the_middle))


# -- many at once


@pytest.mark.parametrize("kind", KINDS)
def test_programs_at_once_do_not_mix(backend: RecordingBackend, kind: Callable[..., Any]) -> None:
    """Twenty runs of one entrypoint at a time, of each kind, are twenty programs that each see only themselves."""
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
