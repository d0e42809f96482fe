"""The recorder: recorded programs are read back from the trace, and an error of the recorder fails no program."""

from __future__ import annotations

import itertools
import logging
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_programs import programs

from weft.core.accounts import Account
from weft.core.errors import TraceError
from weft.core.ids import CallId, ProgramId, SessionId, ThreadId
from weft.core.process_rows import CallIdentity, ProgramInfo
from weft.core.program.graph import CallNode, CallState, Edge, ProgramGraph
from weft.core.sim import SimSettings, TraceCall, TraceProgram, simulate
from weft.core.trace import format as trace_format
from weft.core.trace.format import write
from weft.core.trace.prefixes import BLOCK_TOKENS
from weft.core.trace.recorder import Recorder, prepare


def read(path: Path) -> list[TraceProgram]:
    """The programs of a trace, without what was measured, which tests/core/show/test_recorded.py reads."""
    return [
        replace(program, calls=tuple(replace(call, measured=None) for call in program.calls))
        for program in trace_format.read(path)
    ]


ANY_CALL = CallIdentity(ProgramId("p"), ThreadId("t"), CallId("c"))  # the graph has the calls
_fresh = itertools.count(1000)  # token ids that no other prompt has


class Played:
    """A program of a trace that runs on an engine's clock and is recorded."""

    def __init__(self, recorder: Recorder, spec: TraceProgram) -> None:
        self.recorder, self.spec = recorder, spec
        self.program_id = ProgramId(spec.program)
        self.graph = ProgramGraph(self.program_id, SessionId("sess"), spec.name or "")

    def begin(self) -> None:
        name, tenant = self.spec.name or "", self.spec.tenant
        info = ProgramInfo(self.program_id, SessionId("sess"), name, tenant, deadline_s=self.spec.deadline_s)
        self.recorder.program_started(info, 0.0)
        self.recorder.call_arrived(ANY_CALL, self.graph, first_s(self.spec))

    def run(self) -> None:
        """Run all calls. Each takes a second and reports its output in two parts."""
        tokens: dict[str, list[int]] = {}
        ends: dict[str, float] = {}
        for call in self.spec.calls:
            call_id = CallId(call.call_id)
            edges = tuple(Edge(CallId(parent), True) for parent in call.parents)
            self.graph.open(CallNode(call_id, ThreadId("t0"), edges, "", (call.tool,) if call.tool else ()))
            before = tokens[call.parents[0]] if call.parents else list(range(100))  # shared by programs of one name
            shared = call.shared_prefix_tokens
            prompt = before[:shared] + list(itertools.islice(_fresh, call.prompt_tokens - shared))
            output = list(itertools.islice(_fresh, call.output_tokens))
            arrival_s = call.gap_s + max((ends[parent] for parent in call.parents), default=self.spec.arrival_s)
            self.graph.arrive(call_id, arrival_s)
            self.recorder.call_arrived(ANY_CALL, self.graph, arrival_s)
            self.recorder.note_tokens(self.program_id, call_id, prompt=prompt, output=output[:2])
            self.recorder.note_tokens(self.program_id, call_id, output=output[2:])
            account = Account(prompt_tokens=len(prompt), output_tokens=len(output), cached_tokens=1)
            ends[call.call_id] = arrival_s + 1
            self.graph.leave(call_id, arrival_s + 1, account, CallState.FINISHED)
            tokens[call.call_id] = prompt + output


def play(recorder: Recorder, *specs: TraceProgram) -> None:
    """Run programs one after another."""
    for spec in specs:
        played = Played(recorder, spec)
        played.begin()
        played.run()
        recorder.end(played.program_id)
    recorder.flush()


def one(program: str = "A", output_tokens: int = 4, **fields: str) -> TraceProgram:
    """Return a program of one call."""
    return TraceProgram(program, (TraceCall("c", (), output_tokens, 20),), **fields)


def first_s(program: TraceProgram) -> float:
    """Return the arrival time of the first call."""
    return program.arrival_s + min(call.gap_s for call in program.calls if not call.parents)


def found(shared: int, *ends: int) -> int:
    """Return how many of `shared` tokens are found in a prompt whose parts have these ends: whole blocks, unless an end
    lies in the last block."""
    whole = shared - shared % BLOCK_TOKENS
    return max(whole, *(min(shared, end) for end in ends if end - end % BLOCK_TOKENS == whole), 0)


def as_recorded(made: list[TraceProgram], ends: list[int]) -> list[TraceProgram]:
    """Return the programs as a recorder writes them when they run one after another and end in this order."""
    start_s = min(map(first_s, made))
    firsts: dict[str | None, TraceCall] = {}  # by name, the call whose prompt others are compared with
    expected = []
    for program in made:
        calls = []
        by_id = {call.call_id: call for call in program.calls}
        late_s = first_s(program) - program.arrival_s
        for call in program.calls:
            shared = call.shared_prefix_tokens
            if call.parents:
                parent = by_id[call.parents[0]]
                ends_of = parent.prompt_tokens, parent.prompt_tokens + parent.output_tokens
                calls.append(replace(call, shared_prefix_tokens=found(shared, *ends_of)))
                continue
            first = firsts.get(program.name)
            common = min(shared, first.shared_prefix_tokens) if first is not None else 0
            known = found(common, first.prompt_tokens) if first is not None else 0
            if call.prompt_tokens:
                firsts.setdefault(program.name, call)
            calls.append(replace(call, gap_s=call.gap_s - late_s, shared_prefix_tokens=known))
        expected.append(replace(program, arrival_s=first_s(program) - start_s, calls=tuple(calls)))
    return [expected[index] for index in ends]


@given(programs(), st.data())
def test_recorded_programs_are_read_back(made: list[TraceProgram], data: st.DataObject) -> None:
    """They are in the order of their ends, with all fields of the trace, and can be simulated."""
    ends = data.draw(st.permutations(range(len(made))))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        recorder = Recorder(path)
        played = [Played(recorder, spec) for spec in made]
        for each in sorted(played, key=lambda each: first_s(each.spec)):
            each.begin()
        for each in played:
            each.run()
        for index in ends:
            recorder.end(played[index].program_id)
        assert recorder.flush()
        recorded = read(path)
        assert recorded == as_recorded(made, ends)
        result = simulate(recorded, SimSettings())
        assert {name: row.calls for name, row in result.programs.items()} == {p.program: len(p.calls) for p in made}


@given(st.text(), st.text(min_size=1) | st.none(), st.text(min_size=1) | st.none())
def test_any_name_is_read_back(name: str, tenant: str | None, tool: str | None) -> None:
    """This includes an empty name, line breaks and half a surrogate pair."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        call = TraceCall("c", (), 1, tool=tool)
        play(Recorder(path), TraceProgram("A", (call,), 0.0, name, tenant), one("B"))
        assert read(path) == [TraceProgram("A", (call,), 0.0, name or None, tenant), one("B")]


def test_a_program_has_one_line(tmp_path: Path) -> None:
    """A second end adds no line, nor do calls after the end; a program without an output token has no line."""
    path = tmp_path / "trace.jsonl"
    recorder = Recorder(path)
    played, failed = Played(recorder, one()), Played(recorder, one("failed"))
    played.begin()
    played.run()
    failed.begin()
    failed.graph.open(CallNode(CallId("c"), ThreadId("t0")))
    recorder.call_arrived(ANY_CALL, failed.graph, 0.5)
    failed.graph.leave(CallId("c"), 1.0, Account(), CallState.FAILED)
    recorder.end(played.program_id)
    recorder.end(failed.program_id)
    recorder.call_arrived(ANY_CALL, played.graph, 9.0)
    recorder.note_tokens(played.program_id, CallId("late"), prompt=[1])
    recorder.end(played.program_id)
    recorder.end_all()
    assert read(path) == [one()]


def test_programs_that_have_not_ended_are_written_at_shutdown(tmp_path: Path) -> None:
    """They have their calls with output tokens; a program without a call has no line."""
    path = tmp_path / "trace.jsonl"
    recorder = Recorder(path)
    played, idle = Played(recorder, one()), Played(recorder, one("idle"))
    idle.begin()
    played.begin()
    played.run()
    played.graph.open(CallNode(CallId("unfinished"), ThreadId("t0"), (Edge(CallId("c"), True),)))
    played.graph.arrive(CallId("unfinished"), 3.0)
    recorder.end_all()
    assert read(path) == [one()]


def test_the_child_of_a_call_without_output_is_compared_with_its_grandparent(tmp_path: Path) -> None:
    """The prompt of a call is compared with the parent that the call has in the trace."""
    path = tmp_path / "trace.jsonl"
    recorder = Recorder(path)
    played = Played(recorder, one())
    played.begin()
    rows = [("a", (), [1, 2, 3], [4]), ("b", ("a",), [9, 9], []), ("c", ("b",), [1, 2, 3, 4, 5], [6])]
    for call, parents, prompt, output in rows:
        call_id = CallId(call)
        played.graph.open(CallNode(call_id, ThreadId("t0"), tuple(Edge(CallId(parent), True) for parent in parents)))
        played.graph.arrive(call_id, 0.0)
        recorder.note_tokens(played.program_id, call_id, prompt=prompt, output=output)
        played.graph.leave(call_id, 0.0, Account(0, 0, 0, len(prompt), len(output)), CallState.FINISHED)
    recorder.end(played.program_id)
    recorder.flush()
    (recorded,) = read(path)
    assert recorded.calls == (TraceCall("a", (), 1, 3), TraceCall("c", ("a",), 1, 5, shared_prefix_tokens=4))


def test_a_long_program_keeps_a_bounded_number_of_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts that were not continued for the longest time are forgotten; the chain in use goes on, and no token
    ids are kept."""
    monkeypatch.setattr("weft.core.trace.recorder._MAX_BLOCKS", 20)
    path = tmp_path / "trace.jsonl"
    recorder = Recorder(path)
    calls = [TraceCall("root", (), 1, 64)]
    for number in range(30):
        parent = calls[-1] if number % 2 else calls[0]
        calls.append(TraceCall(f"c{number}", (parent.call_id,), 1, 65, shared_prefix_tokens=64 if number % 2 else 48))
    played = Played(recorder, TraceProgram("A", tuple(calls)))
    played.begin()
    played.run()
    program = recorder._open[played.program_id]
    assert program.blocks == sum(map(len, program.chains.values())) <= 20
    recorder.end(played.program_id)
    recorder.flush()
    (recorded,) = read(path)
    assert [call.shared_prefix_tokens for call in recorded.calls] == [0, *[48, 64] * 15]


def test_a_call_that_is_forgotten_shares_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the first parent's hashes are gone, the figure is 0 rather than a guess, and late output changes nothing."""
    monkeypatch.setattr("weft.core.trace.recorder._MAX_BLOCKS", 2)
    path = tmp_path / "trace.jsonl"
    recorder = Recorder(path)
    calls = (TraceCall("a", (), 1, 32), TraceCall("b", (), 1, 32), TraceCall("c", ("a",), 1, 32, 0.0, None, None, 32))
    played = Played(recorder, TraceProgram("A", calls))
    played.begin()
    played.run()
    recorder.note_tokens(played.program_id, CallId("a"), output=[1] * 32)
    assert list(recorder._open[played.program_id].chains) == ["c"]
    recorder.end_all()
    assert [call.shared_prefix_tokens for call in read(path)[0].calls] == [0, 0, 0]


# -- the file


def test_several_recorders_append_to_one_file(tmp_path: Path) -> None:
    """Several recorders on several threads write whole lines."""
    path = tmp_path / "trace.jsonl"

    def work(recorder: Recorder, number: int) -> None:
        play(recorder, *(one(f"{number}-{index}", 1 + index) for index in range(50)))

    recorders = [Recorder(path) for _ in range(3)]
    threads = [
        threading.Thread(target=work, args=(recorder, number)) for number, recorder in enumerate(recorders + recorders)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorded = {program.program: program.calls[0].output_tokens for program in read(path)}
    assert recorded == {f"{number}-{index}": 1 + index for number in range(6) for index in range(50)}


def test_a_trace_is_appended_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing line break at the end of the file is added first; a relative path means the folder of the start."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "trace.jsonl"
    write([one("old")], path)
    path.write_text(path.read_text().rstrip("\n"))
    recorder = Recorder("trace.jsonl")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    play(recorder, one("new"))
    assert read(path) == [one("old"), one("new")]
    assert prepare(path) == 2


def test_files_that_cannot_be_recorded_into_are_refused(tmp_path: Path) -> None:
    """A folder, a file in a missing folder, and a file that is not a trace are refused; the latter is not changed."""
    with pytest.raises(TraceError, match="is not a file; name a trace file"):
        Recorder(tmp_path)
    with pytest.raises(TraceError, match=r"cannot be recorded into: No such file.* Choose another file"):
        Recorder(tmp_path / "no" / "trace.jsonl")
    script = tmp_path / "agent.py"
    script.write_text("print('Hi')\n")
    with pytest.raises(TraceError, match=r"agent\.py, line 1: not JSON"):
        Recorder(script)
    assert script.read_text() == "print('Hi')\n"


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Cut off writes beyond `size` bytes of a file, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("free", [0, 30])
def test_a_full_disk_stops_only_the_recording(free: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There is one warning, the file keeps its whole lines, and programs continue."""
    path = tmp_path / "trace.jsonl"
    recorder = Recorder(path)
    play(recorder, one("A"))
    with largest_file(path.stat().st_size + free), caplog.at_level(logging.WARNING):
        play(recorder, one("B"), one("C"))
        messages = [record.getMessage() for record in caplog.records]
    play(recorder, one("D"))
    assert read(path) == [one("A")]
    assert len(messages) == 1
    assert "recording stopped" in messages[0]
    assert str(path) in messages[0]
