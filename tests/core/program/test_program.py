"""Programs and their branches: identity, config, session, branches, graph and end."""

from __future__ import annotations

import asyncio
import pydoc
import random
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from weft.core.accounts import Account, Attained
from weft.core.errors import InvalidIdError, ProgramEndedError, ProgramEngineError
from weft.core.ids import IdSource, ProgramId
from weft.core.process_rows import ProgramRow, ProgramState
from weft.core.program import Backend, Program, adapter, register_adapter
from weft.core.program import handle as program_module
from weft.core.testing import FakeClock, RecordingBackend


class Carrier:
    """Stands for the object that a framework takes."""

    def __init__(self, program: Program) -> None:
        self.program = program


@pytest.fixture
def langchain(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter for LangChain: the real one if its integration was imported, otherwise a stub for this test."""
    if "langchain" not in program_module._adapters:
        monkeypatch.setitem(program_module._adapters, "langchain", Carrier)


@pytest.fixture
def framework() -> Iterator[str]:
    """The name of a framework that exists in this test only."""
    yield "some framework"
    program_module._adapters.pop("some framework", None)


# -- identity


def test_each_program_has_its_own_ids() -> None:
    """Two programs of one name have different ids and sessions."""
    first, second = Program("answer"), Program("answer")
    assert first.program_id != second.program_id
    assert first.session_id != second.session_id
    assert first.name == "answer"
    assert Program().name == "program"


def test_the_arguments_can_be_read_back() -> None:
    """Session, tenant, tags and metadata are attributes; metadata is a read-only copy."""
    metadata = {"user": 7}
    program = Program("answer", session_id="s", tenant="acme", tags=iter(["a", "b"]), metadata=metadata)
    metadata["user"] = 8
    assert (program.session_id, program.tenant, program.tags) == ("s", "acme", ("a", "b"))
    assert program.metadata == {"user": 7}
    with pytest.raises(TypeError):
        program.metadata["user"] = 9  # type: ignore[index]


@pytest.mark.parametrize("field", ["session_id", "tenant"])
@pytest.mark.parametrize("value", ["", "x" * 257, "a\nb", 5])
def test_ids_that_cannot_travel_are_refused(field: str, value: object) -> None:
    """The constructor refuses an invalid session or tenant and names it."""
    options: dict[str, Any] = {field: value}
    with pytest.raises(InvalidIdError, match=f"^{field} must be"):
        Program(**options)


def test_a_seeded_id_source_gives_the_same_program_again() -> None:
    """The ids of program, session, threads and calls come from the source that is passed in."""

    def run(seed: int) -> list[Any]:
        program, backend = Program(ids=IdSource(random.Random(seed))), RecordingBackend()
        return [program.program_id, program.session_id, backend.call(program), backend.call(program)]

    assert run(3) == run(3)
    assert not set(run(3)) & set(run(4))


def test_repr() -> None:
    """A program shows its name, id and state; a branch also shows that it is one."""
    program = Program("answer")
    assert repr(program) == f"<weft.Program 'answer' {program.program_id} idle>"
    assert repr(program.branch()) == f"<weft.Program 'answer' {program.program_id} branch idle>"
    program.end()
    assert repr(program).endswith(" finished>")


# -- passing the program to a framework


def test_config_carries_the_program(langchain: None) -> None:
    """The config has the program as a callback, its tags, and its ids and metadata."""
    del langchain
    program = Program("answer", tags=["a"], metadata={"user": 7})
    config = program.config()
    assert config["callbacks"] == [adapter(program, "langchain")]
    assert config["callbacks"][0].program is program
    assert config["tags"] == ["a"]
    assert config["metadata"] == {"session_id": program.session_id, "program_id": program.program_id, "user": 7}
    assert set(config) == {"callbacks", "tags", "metadata"}


def test_config_adds_entries(langchain: None) -> None:
    """Callbacks, tags and metadata are added to the program's own; other entries are passed through."""
    del langchain
    program = Program("answer", tags=["a"], metadata={"user": 7, "try": 1})
    given: dict[str, Any] = {"callbacks": ["mine"], "tags": ["b"], "metadata": {"try": 2}}
    config = program.config(**given, recursion_limit=50, configurable={"thread_id": "t"})
    assert config["callbacks"] == [*program.callbacks, "mine"]
    assert config["tags"] == ["a", "b"]
    assert config["metadata"]["try"] == 2
    assert config["metadata"]["user"] == 7
    assert (config["recursion_limit"], config["configurable"]) == (50, {"thread_id": "t"})
    assert given == {"callbacks": ["mine"], "tags": ["b"], "metadata": {"try": 2}}, "the caller's lists are not changed"
    assert program.metadata == {"user": 7, "try": 1}


def test_one_adapter_per_handle(framework: str) -> None:
    """A handle returns the same object for a framework each time; a branch returns another object."""
    register_adapter(framework, Carrier)
    program = Program()
    branch = program.branch()
    assert adapter(program, framework) is adapter(program, framework)
    assert adapter(branch, framework) is adapter(branch, framework)
    assert (adapter(program, framework).program, adapter(branch, framework).program) == (program, branch)


def test_an_adapter_is_made_once_for_many_threads(framework: str) -> None:
    """Threads that request an adapter concurrently get one object."""
    together = threading.Barrier(8)
    register_adapter(framework, Carrier)
    program = Program()

    def ask(_: int) -> Any:
        together.wait()
        return adapter(program, framework)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(ask, range(8)))) == 1


def test_a_framework_must_be_imported_first() -> None:
    """The error names the missing import."""
    with pytest.raises(LookupError, match=r"import weft\.integrations\.nowhere before"):
        adapter(Program(), "nowhere")


# -- the session on an engine


def test_a_session_begins_with_the_first_call(backend: RecordingBackend) -> None:
    """A program without calls does not use an engine; the first call opens its row, and later calls use it."""
    program = Program("answer", tenant="acme")
    assert program.row is None
    assert program.attained == Attained()
    backend.call(program)
    backend.call(program)
    [info] = backend.started
    assert (info.program_id, info.session_id, info.tenant) == (program.program_id, program.session_id, "acme")
    assert program.row is backend.row(program.program_id)


def test_a_program_shows_its_attained_service(backend: RecordingBackend) -> None:
    """Service and wait can be read while the program runs and after its end."""
    with Program() as program:
        backend.call(program, service_s=2.0)
        assert program.attained == Attained(2.0, 2.0)
        backend.call(program, service_s=1.0)
    assert program.attained == Attained(3.0, 3.0)
    assert program.row is not None
    assert program.row.calls == 2


def test_state_follows_the_calls(backend: RecordingBackend) -> None:
    """A program is idle, active while a call is in flight, idle again, and then has the state of its end."""
    program = Program()
    states = [program.state]
    program.reports.start_run("model", None)
    call = backend.begin(program, "model")
    states.append(program.state)
    backend.finish(program, "model", call, Account())
    states.append(program.state)
    program.end()
    states.append(program.state)
    assert states == [ProgramState.IDLE, ProgramState.ACTIVE, ProgramState.IDLE, ProgramState.FINISHED]


def test_one_program_runs_on_one_engine(backend: RecordingBackend) -> None:
    """A call on a second engine is refused without starting a session, and the first engine still works."""
    other = RecordingBackend()
    program = Program("answer")
    backend.call(program)
    with pytest.raises(ProgramEngineError, match=r"'answer' .* already runs on another engine"):
        other.call(program.branch())
    assert other.started == []
    backend.call(program)
    program.end()
    assert (len(backend.ended), other.ended) == (1, [])


def test_a_program_is_not_bound_to_an_engine_that_refuses_the_session(backend: RecordingBackend) -> None:
    """Another engine may still take the program."""

    class Closed(RecordingBackend):
        def start_session(self, info: object) -> None:
            raise RuntimeError("closed")

    program = Program()
    with pytest.raises(RuntimeError, match="closed"):
        program.reports.bind(Closed())
    backend.call(program)
    assert len(backend.started) == 1


def test_the_recorder_is_a_backend() -> None:
    """`RecordingBackend` implements the protocol `Backend`."""
    backend: Backend = RecordingBackend()
    program = Program()
    program.reports.bind(backend)
    assert backend.row(program.program_id) is program.row


def test_an_engine_learns_which_tool_begins(backend: RecordingBackend) -> None:
    """The program waits for it. Of tools that are reported after they ran, nobody waits any more."""
    program = Program()
    program.reports.start_run("early", None)
    program.reports.note_tool("early", "nobody listens yet")
    backend.call(program)
    program.reports.start_run("tool", None)
    program.reports.note_tool("tool", "search")
    assert [tool.name for tool in backend.table.get(program.program_id).tools_running] == ["search"]
    program.reports.end_run("tool")
    program.reports.note_tools("later", ["run", "test"])
    assert backend.tools == backend.returned == [(program.program_id, "search")]


def test_a_human_is_waited_for_until_the_next_call(backend: RecordingBackend) -> None:
    """The run that asked ends at once, and its end is not the answer."""
    program = Program()
    backend.call(program)
    program.reports.start_run("ask", None)
    program.reports.note_human("ask")
    program.reports.end_run("ask")
    assert (backend.tools, backend.returned) == ([(program.program_id, "human")], [])
    backend.call(program)
    assert backend.returned == [(program.program_id, "human")]


def test_a_program_announces_its_next_call_to_its_engine(backend: RecordingBackend) -> None:
    """Before the first call there is no engine to tell."""
    program = Program()
    program.expect_call()
    backend.call(program)
    program.expect_call()
    assert backend.announced == [program.program_id]


def test_the_fake_clock_never_goes_back() -> None:
    """It stands still, advances on request, and refuses negative seconds."""
    clock = FakeClock(5.0)
    assert (clock(), clock()) == (5.0, 5.0)
    clock.advance(0.5)
    clock.advance(0)
    assert clock() == 5.5
    with pytest.raises(ValueError, match=r"0\.1 s"):
        clock.advance(-0.1)


# -- the end

ENDINGS: list[tuple[BaseException | None, ProgramState]] = [
    (None, ProgramState.FINISHED),
    (ValueError("boom"), ProgramState.FAILED),
    (asyncio.CancelledError(), ProgramState.CANCELLED),
    (KeyboardInterrupt(), ProgramState.CANCELLED),
    (GeneratorExit(), ProgramState.CANCELLED),
]


@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize(("error", "state"), ENDINGS)
def test_leaving_the_block_ends_the_program(
    backend: RecordingBackend, error: BaseException | None, state: ProgramState, bound: bool
) -> None:
    """`with` ends the program with the state of the block, re-raises the error, and ends the session on the engine."""
    program = Program()

    def block() -> None:
        with program:
            if bound:
                backend.call(program)
            if error is not None:
                raise error

    if error is None:
        block()
    else:
        with pytest.raises(type(error)) as caught:
            block()
        assert caught.value is error
    assert program.state is state
    assert backend.ended == ([(program.program_id, state)] if bound else [])
    assert len(backend.table) == 0


@pytest.mark.parametrize(("error", "state"), ENDINGS[:2])
def test_leaving_the_async_block_ends_the_program(error: BaseException | None, state: ProgramState) -> None:
    """`async with` ends the program with the state of the block."""

    async def block() -> ProgramState:
        program = Program()
        try:
            async with program as entered:
                assert entered is program
                if error is not None:
                    raise error
        except ValueError:
            pass
        return program.state

    assert asyncio.run(block()) is state


def test_ending_twice_changes_nothing(backend: RecordingBackend) -> None:
    """The state of the first end stays, and the engine's session ends once."""
    program = Program()
    backend.call(program)
    program.end(ProgramState.FAILED)
    program.end(ProgramState.FINISHED)
    assert program.state is ProgramState.FAILED
    assert backend.ended == [(program.program_id, ProgramState.FAILED)]


def test_many_threads_end_a_program_once(backend: RecordingBackend) -> None:
    """A program that several threads end at once ends once, and its last row stays readable."""
    program = Program()
    backend.call(program, service_s=1.0)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: program.end(), range(8)))
    assert len(backend.ended) == 1
    assert program.attained.service_s == 1.0


def test_attained_service_can_be_read_while_the_program_ends() -> None:
    """A reader between the removal of the live row and the arrival of the last row gets zeros, not an error."""

    class EndsAfterOneLook(RecordingBackend):
        def row(self, program_id: ProgramId) -> ProgramRow | None:
            row = super().row(program_id)
            self.table.close(program_id, ProgramState.FINISHED, self.clock())
            return row

    program, backend = Program(), EndsAfterOneLook()
    program.reports.bind(backend)
    assert program.attained == Attained()
    assert program.row is None


@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize(
    "use",
    [
        lambda program, backend: program.reports.start_call("run"),
        lambda program, backend: program.reports.bind(backend),
        lambda program, backend: backend.call(program),
        lambda program, backend: backend.call(program.branch()),
    ],
    ids=["start_call", "bind", "call", "call on a branch"],
)
def test_an_ended_program_takes_no_calls(
    backend: RecordingBackend, use: Callable[[Program, RecordingBackend], object], bound: bool
) -> None:
    """A call after the end is refused with the program's name and id, with or without an engine."""
    program = Program("answer")
    if bound:
        backend.call(program)
    program.end()
    with pytest.raises(ProgramEndedError, match=f"'answer' .{program.program_id}. has ended") as caught:
        use(program, backend)
    assert caught.value.program_id == program.program_id
    assert len(backend.calls) == bound


def test_a_call_in_flight_at_the_end_counts(backend: RecordingBackend) -> None:
    """The program's last row includes the cost of an aborted call, without waiting for its result."""
    program = Program()
    program.reports.start_run("model", None)
    call = backend.begin(program, "model")
    call.account = Account(service_s=2.0, wait_s=1.0)
    program.end(ProgramState.CANCELLED)
    assert program.attained == Attained(2.0, 2.0, 1.0, 1.0)
    backend.finish(program, "model", call, Account(service_s=50.0))
    assert program.attained == Attained(2.0, 2.0, 1.0, 1.0)
    assert program.state is ProgramState.CANCELLED


# -- concurrency


@pytest.mark.parametrize("where", ["one event loop", "threads"])
def test_twenty_programs_at_once_do_not_mix(backend: RecordingBackend, where: str) -> None:
    """Programs that interleave have separate ids, parents, threads and accounts."""

    async def agent(number: int) -> Program:
        with Program(f"agent {number}", session_id=f"user {number}") as program:
            for _ in range(5):
                await asyncio.sleep(0)
                program.reports.start_run("model", None)  # the same name in each program
                call = backend.begin(program, "model")
                await asyncio.sleep(0)
                backend.finish(program, "model", call, Account(service_s=float(number)))
                program.reports.end_run("model")
            return program

    async def all_of_them() -> list[Program]:
        return await asyncio.gather(*(agent(number) for number in range(20)))

    if where == "threads":
        with ThreadPoolExecutor(20) as pool:
            programs = list(pool.map(lambda number: asyncio.run(agent(number)), range(20)))
    else:
        programs = asyncio.run(all_of_them())

    assert len({program.program_id for program in programs}) == 20
    for number, program in enumerate(programs):
        mine = [call for call in backend.calls if call.program_id == program.program_id]
        assert [call.parents for call in mine] == [(), *((call.call_id,) for call in mine[:-1])]
        assert len({call.thread_id for call in mine}) == 1
        assert program.attained == Attained(5.0 * number, 5.0 * number)
        assert program.session_id == f"user {number}"
    assert len({call.thread_id for call in backend.calls}) == 20
    assert len({call.call_id for call in backend.calls}) == 100
    backend.table.check_integrity()


FOR_USERS = {
    *("attach", "attained", "branch", "callbacks", "config", "end", "expect_call", "graph", "is_branch"),
    *("parent_program_id", "row", "state"),
}


def test_help_shows_of_a_program_what_users_need() -> None:
    """Integrations and engines take `program.reports`, so that their methods are not among these."""
    shown = pydoc.render_doc(Program, renderer=pydoc.plaintext)
    members = shown.partition("Methods defined here:")[2]
    names = re.findall(r"^ \|  (?:async )?(\w+)(?:\(.*)?$", members, re.MULTILINE)
    assert {name for name in names if not name.startswith("_")} == FOR_USERS
    assert "inherited" not in members
    with Program() as program:
        assert {name for name in dir(program) if not name.startswith("_")} == FOR_USERS | {
            *("program_id", "session_id", "name", "tenant", "timeout_s", "deadline_s", "tags", "metadata", "log"),
            "reports",
        }
