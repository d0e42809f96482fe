"""The parts of `weft bench` that need no engine, by numbers worked out on paper."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.bench import load
from weft.bench.agreement import compare, fit
from weft.bench.clock import STEP_S, Clock
from weft.bench.journal import Journal
from weft.bench.load import AS_RECORDED, CLOSED, Prompts, Shape
from weft.bench.measures import EqualLatency, equal_latency, gains, measure, ratio
from weft.bench.records import Counts, Outcome, Round, Run
from weft.bench.replay import Play, SentCall
from weft.bench.session import lockstep, unloaded_steps
from weft.bench.settings import BenchSettings, loads
from weft.core.errors import BenchError
from weft.core.sim import StepSample, TraceCall, TraceProgram
from weft.core.sim.simulator import percentile
from weft.core.trace.format import path_tokens, write

STEPS = Shape(1.0, 1000, whole_steps=True)
# Two calls after one, the second of them after a tool of two steps, and one after both: 3 + max(2, 2 + 4) + 1 steps.
FORK = TraceProgram(
    "fork",
    (
        TraceCall("a", (), output_tokens=3, prompt_tokens=10),
        TraceCall("b", ("a",), output_tokens=2, prompt_tokens=14, shared_prefix_tokens=13),
        TraceCall("c", ("a",), output_tokens=4, prompt_tokens=14, shared_prefix_tokens=13, gap_s=2 * STEP_S),
        TraceCall("d", ("b", "c"), output_tokens=1, prompt_tokens=17, shared_prefix_tokens=16),
    ),
    name="fork",
)


class FakeEngine:
    """The first `slots` calls in flight give a token a step; it takes half a second a step."""

    tells_programs = False

    def __init__(self, *, counts_steps: bool = True, slots: int = 100) -> None:
        self._slots = slots
        self._time_s = 0.0
        self.clock = Clock(counts_steps=counts_steps, timer=lambda: self._time_s)
        self.sent: list[SentCall] = []
        self._left: dict[str, int] = {}

    def take_turn(self) -> None:
        self._time_s += 100.0  # other engines had theirs

    def send(self, call: SentCall, extra: dict[str, Any] | None) -> None:
        assert extra is None
        self.sent.append(call)
        self._left[call.request_id] = call.output_tokens

    def step(self) -> list[Any]:
        self.clock.begin_step()
        self._time_s += 0.5
        self.clock.end_step()
        for key in list(self._left)[: self._slots]:
            self._left[key] -= 1
        ended = [key for key, left in self._left.items() if left == 0]
        for key in ended:
            del self._left[key]
        return [SimpleNamespace(request_id=key, outputs=[SimpleNamespace(token_ids=[1, 2, 3])]) for key in ended]


def outcome(steps: int, tokens: int, path: int, unloaded: int = 10) -> Outcome:
    return Outcome("p", "chat", steps, steps * 0.5, tokens, path, unloaded)


def run(*programs: Outcome, **counts: Any) -> Run:
    return Run(list(programs), 100, 50.0, Counts(steps=50, prompt_tokens=10, **counts), [StepSample(1, 0, 5, 0.5)])


def rounds(**means: list[int]) -> list[Round]:
    """Rounds of a load, one program of 10 tokens each, with these steps by baseline."""
    count = len(next(iter(means.values())))
    return [
        Round("1", number, 100, 0, {name: run(outcome(steps[number], 10, 10)) for name, steps in means.items()})
        for number in range(count)
    ]


def test_the_clock_counts_only_its_own_turns() -> None:
    """Steps and their seconds count, what lies between does not; a jump counts as steps of the mean length."""
    now = SimpleNamespace(s=0.0)
    clock = Clock(counts_steps=True, timer=lambda: now.s)
    for begin_s, end_s in ((10.0, 11.0), (20.0, 23.0)):
        now.s = begin_s
        clock.begin_step()
        assert clock.now_s == clock.steps * STEP_S
        clock.note_scheduled()
        assert clock.now_s == (clock.steps + 1) * STEP_S
        now.s = end_s
        assert clock.end_step() == end_s - begin_s
    assert (clock.steps, clock.seconds) == (2, 4.0)
    clock.skip_to(5 * STEP_S)
    assert (clock.steps, clock.seconds, clock.now_s) == (5, 4.0 + 3 * 2.0, 5 * STEP_S)


def test_a_clock_of_seconds_jumps_in_seconds() -> None:
    """Six seconds without work are three steps where the mean step takes two."""
    now = SimpleNamespace(s=0.0)
    clock = Clock(counts_steps=False, timer=lambda: now.s)
    clock.begin_step()
    now.s = 2.0
    assert clock.now_s == 2.0
    clock.end_step()
    clock.skip_to(8.0)
    assert (clock.steps, clock.now_s) == (4, 8.0)


def test_critical_path_and_unloaded_steps() -> None:
    """The longest chain of the fork has 8 output tokens, and takes 10 steps with its tool."""
    assert path_tokens(FORK.calls) == 8
    assert unloaded_steps(BenchSettings("chat"), [FORK]) == {"fork": 10}


def test_a_replay_sends_calls_when_they_are_due() -> None:
    """The fork arrives at step 4, its first call takes 3 steps, the second follows at once, the third after 2, and the
    last when both have ended."""
    engine = FakeEngine()
    programs = [replace(FORK, arrival_s=4 * STEP_S)]
    play = Play(engine, programs, {"fork": 10}, Prompts("0", range(10, 900)))
    counts = list(play.run())
    assert play.outcomes == [Outcome("fork", "fork", 10, 5.0, 10, 8, 10)]
    assert [call.request_id for call in engine.sent] == ["0-a", "0-b", "0-c", "0-d"]
    assert (engine.clock.steps, counts[-1]) == (4 + 10, 1)


def test_arrivals_by_seconds_are_counted_from_when_they_were_due() -> None:
    """A program that is due during a step has waited for its end."""
    engine = FakeEngine(counts_steps=False)
    calls = (TraceCall("a", (), output_tokens=2, prompt_tokens=1),)
    programs = [TraceProgram("first", calls, 0.0), TraceProgram("second", calls, 0.2)]
    play = Play(engine, programs, {"first": 2, "second": 2}, Prompts("0", range(10, 900)))
    assert list(play.run())
    assert [(each.program, each.steps, each.seconds) for each in play.outcomes] == [
        ("first", 2, 1.0),
        ("second", 2, 1.3),
    ]


def test_places_are_the_order_of_arrival() -> None:
    """All calls of a program have its place, whatever its place in the file."""
    engine = FakeEngine()
    programs = [replace(FORK, program="late", arrival_s=2 * STEP_S), replace(FORK, program="early")]
    list(Play(engine, programs, {"late": 9, "early": 9}, Prompts("0", range(10, 900))).run())
    assert {(call.request_id[0], call.place) for call in engine.sent} == {("1", 0), ("0", 1)}


def test_prompts_share_what_the_trace_says() -> None:
    """A child begins with its first parent's prompt and output; programs of one name begin alike; the rest differs."""
    prompts = Prompts("0", range(10, 900))
    child = prompts.make(FORK, FORK.calls[1], list(range(13)))
    assert (child[:13], len(child)) == (list(range(13)), 14)
    root = TraceCall("a", (), output_tokens=1, prompt_tokens=30, shared_prefix_tokens=20)
    one = prompts.make(TraceProgram("one", (root,), name="x"), root, [])
    other = prompts.make(TraceProgram("other", (root,), name="x"), root, [])
    assert one[:20] == other[:20]
    assert one[20:] != other[20:]
    assert prompts.make(TraceProgram("one", (root,), name="x"), root, []) == one
    assert prompts.make(TraceProgram("one", (root,), name="y"), root, [])[:20] != one[:20]


def test_scaling_keeps_what_is_shared() -> None:
    """A tenth of all lengths and times, at least a token; a child of all of its parent still has all of it, 17 tokens,
    though a tenth of 165 is 16."""
    calls = (
        TraceCall("a", (), output_tokens=36, prompt_tokens=129, shared_prefix_tokens=63),
        TraceCall("b", ("a",), output_tokens=2, prompt_tokens=168, shared_prefix_tokens=165, gap_s=100 * STEP_S),
        TraceCall("c", ("a",), output_tokens=2, prompt_tokens=164, shared_prefix_tokens=100),
    )
    (program,) = load.fit([TraceProgram("p", calls, 1.0)], Shape(0.1, 1000, whole_steps=True)).programs
    sizes = [(call.prompt_tokens, call.shared_prefix_tokens, call.output_tokens) for call in program.calls]
    assert sizes == [(13, 6, 4), (18, 17, 1), (16, 10, 1)]
    assert (program.calls[1].gap_s, program.arrival_s) == (10 * STEP_S, 13 * STEP_S)


def test_calls_that_do_not_fit_are_cut_and_counted() -> None:
    """The prompt loses its end, what it shares is no longer than it, and a call that fits stays."""
    calls = (
        TraceCall("a", (), output_tokens=20, prompt_tokens=60),
        TraceCall("b", ("a",), output_tokens=30, prompt_tokens=90, shared_prefix_tokens=80),
        TraceCall("c", (), output_tokens=500, prompt_tokens=5),
    )
    found = load.fit([TraceProgram("p", calls)], Shape(1.0, 100, whole_steps=False))
    sizes = [(call.prompt_tokens, call.shared_prefix_tokens, call.output_tokens) for call in found.programs[0].calls]
    assert (sizes, found.cut_calls) == ([(60, 0, 20), (70, 70, 30), (1, 0, 99)], 2)


def test_a_round_is_the_same_at_every_rate_but_for_its_arrivals() -> None:
    """Twice the rate, half the time; closed, all at once; another round, other programs."""
    shape = Shape(1.0, 10**6, whole_steps=False)
    slow, fast, at_once, other = (
        load.draw("chat", name, number, shape, programs=5, seed=0).programs
        for name, number in (("1", 0), ("2", 0), (CLOSED, 0), ("1", 1))
    )
    assert [program.calls for program in slow] == [program.calls for program in fast]
    assert [program.arrival_s for program in fast] == pytest.approx([program.arrival_s / 2 for program in slow])
    assert {program.arrival_s for program in at_once} == {0.0}
    assert slow[0].calls != other[0].calls


def test_rates_stretch_a_file(tmp_path: Path) -> None:
    """Three programs in 4 s are 0.5 a second: at 1 a second they take 2 s. Programs that come at once have no rate."""
    path = tmp_path / "trace.jsonl"
    calls = (TraceCall("a", (), output_tokens=1),)
    write([TraceProgram(name, calls, at_s) for name, at_s in (("c", 7.0), ("a", 3.0), ("b", 4.0))], path)
    shape = Shape(1.0, 100, whole_steps=False)

    def arrivals(name: str) -> list[float]:
        return [program.arrival_s for program in load.draw(str(path), name, 0, shape, programs=9, seed=0).programs]

    assert (arrivals(AS_RECORDED), arrivals("1"), arrivals(CLOSED)) == ([0, 1, 4], [0, 0.5, 2], [0, 0, 0])
    write([TraceProgram(name, calls) for name in "ab"], path)
    with pytest.raises(BenchError, match="all arrive at once"):
        arrivals("1")


def test_measures() -> None:
    """Two programs of 20 and 60 steps, 10 and 20 tokens, 5 and 20 of them on the path."""
    found = measure(run(outcome(20, 10, 5), outcome(60, 20, 20), cached_tokens=4, schedule_s=0.1))
    assert found["steps"] == {"mean": 40, "p50": 40, "p95": 58, "p99": pytest.approx(59.6)}
    assert found["steps_per_token"]["mean"] == (20 / 5 + 60 / 20) / 2
    assert found["seconds_per_token_of_all"]["mean"] == (10 / 10 + 30 / 20) / 2
    assert (found["load_factor"], found["times_unloaded"]["mean"]) == (80 / 20, 4)
    assert (found["tokens_per_step"], found["cache_hit_rate"]) == (0.3, 0.4)
    assert found["schedule_seconds_per_step"] == 0.002
    assert percentile([1.0, 2.0, 4.0], 75) == 3.0


def test_ratios_are_taken_round_by_round() -> None:
    """20/40, 30/30 and 60/20: median 1, from 0.5 to 3; not the ratio of medians."""
    played = rounds(base=[40, 30, 20], ours=[20, 30, 60])
    ours, base = ([measure(round_.runs[name]) for round_ in played] for name in ("ours", "base"))
    assert ratio(ours, base, "steps.mean") == (1.0, 0.5, 3.0)


def test_throughput_at_equal_latency() -> None:
    """Between 2 and 4 programs a second the baseline goes from 3 to 5, so it has the base's 4 at 3; 9 it never has."""
    base, baseline = {1.0: 2.0, 2.0: 4.0, 4.0: 9.0}, {1.0: 2.5, 2.0: 3.0, 4.0: 5.0}
    assert equal_latency(base, baseline) == [
        EqualLatency(2.0, 4.0, 3.0, is_bound=False),
        EqualLatency(4.0, 9.0, 4.0, is_bound=True),
    ]
    assert equal_latency(base, baseline)[0].gain == 1.5
    assert [each.gain for each in equal_latency(base, base)] == [1.0, 1.0, 1.0]


def test_gains_need_two_rates() -> None:
    """With one rate there is nothing to interpolate; with two, medians over rounds are used."""
    played = rounds(base=[10, 30, 20], ours=[10, 10, 10])
    by_rate = {"1": played, "2": [replace(each, load="2") for each in played]}
    measured = {
        rate: {name: [measure(each.runs[name]) for each in several] for name in ("base", "ours")}
        for rate, several in by_rate.items()
    }
    assert gains("base", {"1": measured["1"]}) == {}
    assert gains("base", measured)["ours"] == [EqualLatency(rate, 2.0, 2.0, is_bound=True) for rate in (1.0, 2.0)]


def test_lockstep_takes_turns() -> None:
    """A step of one after a step of the other, until both have ended; it tells of each program that ends."""
    turns = []

    def play(name: str, counts: list[int]) -> Any:
        for count in counts:
            turns.append(name)
            yield count

    assert len(list(lockstep([play("a", [0, 1, 3]), play("b", [2])]))) == 3 + 2
    assert turns == ["a", "b", "a", "a"]


def test_the_simulator_plays_what_was_played(tmp_path: Path) -> None:
    """An engine that runs one call at a time, half a second a step, agrees with the simulator on both clocks."""
    path = tmp_path / "trace.jsonl"
    calls = (TraceCall("a", (), output_tokens=5), TraceCall("b", ("a",), output_tokens=4, gap_s=3 * STEP_S))
    write([TraceProgram(name, calls, at * STEP_S) for name, at in (("p", 0), ("q", 7), ("r", 30))], path)
    settings = BenchSettings(str(path), scale=1.0, batch_size=1, baselines=("stock-fcfs",))
    drawn = load.draw(str(path), AS_RECORDED, 0, Shape(1.0, 4096, whole_steps=True), programs=9, seed=0).programs
    engine = FakeEngine(slots=1)
    play = Play(engine, drawn, unloaded_steps(settings, drawn), Prompts("0", range(10, 900)))
    assert list(play.run())
    # p runs 0-5; q 7-12, for which p's second call waits, 12-16; q's second one 16-20; r 30-35 and 38-42.
    assert [(each.program, each.steps) for each in play.outcomes] == [("p", 16), ("q", 13), ("r", 12)]
    samples = [StepSample(1, 0, 5, 0.5), StepSample(2, 3, 9, 0.5)] * engine.clock.steps_at_work
    run_ = Run(play.outcomes, engine.clock.steps, engine.clock.seconds, Counts(), samples[: engine.clock.steps_at_work])
    found = Round(AS_RECORDED, 0, 4096, 0, {"stock-fcfs": run_})
    assert fit([found]).step_s(1, 2, 3) == pytest.approx(0.5)
    agreement, best = compare(settings, [found], lambda: None)
    assert (agreement.steps_off, agreement.real_steps) == (0, 41 / 3)
    assert agreement.off == pytest.approx(0, abs=1e-9)
    assert (best.baseline, best.off) == ("srpt", None)


def test_the_journal_goes_on(tmp_path: Path) -> None:
    """Rounds come back as they were; a line that was being written is dropped; other settings are refused."""
    (played,) = rounds(base=[40])
    Journal(tmp_path, {"seed": 0}).add(played)
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"load": "1", "num')
    journal = Journal(tmp_path, {"seed": 0})
    assert journal.rounds == {("1", 0): played}
    journal.add(replace(played, number=1))
    assert set(Journal(tmp_path, {"seed": 0}).rounds) == {("1", 0), ("1", 1)}
    with pytest.raises(BenchError, match=r"other settings \(seed: 0 there, 1 now\)\. Choose another --out"):
        Journal(tmp_path, {"seed": 1})


@pytest.mark.parametrize("text", ["no json\n", '{"settings": {}}\n{"load": 1}\n', "[]\n", '{"x": 1}\n'])
def test_what_is_no_journal_is_refused(tmp_path: Path, text: str) -> None:
    """Another file of that name is not written to."""
    (tmp_path / "rounds.jsonl").write_text(text)
    with pytest.raises(BenchError, match="no journal"):
        Journal(tmp_path, {})
    assert (tmp_path / "rounds.jsonl").read_text() == text


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    """The error names the file and another way."""
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="Choose another --out"):
        Journal(tmp_path / "file", {})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"baselines": ("stock-fcfs", "best")}, "no baseline 'best'"),
        ({"baselines": ("atlas", "atlas")}, "named twice"),
        ({"scale": 0.0}, "--scale is 0"),
        ({"programs": 0}, "--programs is 0"),
        ({"kv_tokens": 0}, "--kv-tokens is 0"),
        ({"source": "nowhere.jsonl"}, "neither a trace file nor"),
    ],
)
def test_settings_that_make_no_sense(wrong: dict[str, Any], message: str) -> None:
    """They are refused before anything starts."""
    with pytest.raises(BenchError, match=message):
        BenchSettings(**({"source": "chat"} | wrong))


def test_sizes_scale_with_lengths() -> None:
    """A tenth of 4,096 tokens a slot in whole blocks of 32, and of 2,048 a step, but at least one a slot."""
    settings = BenchSettings("chat", batch_size=8)
    assert (settings.room_tokens, settings.chunk_tokens) == (3264, 205)
    assert (BenchSettings("chat", kv_tokens=70).room_tokens, BenchSettings("chat", scale=0.001).chunk_tokens) == (64, 8)


def test_what_is_played(tmp_path: Path) -> None:
    """Rates in order, then the closed batch; a trace without rates as recorded; a generator needs one of them."""
    path = tmp_path / "trace.jsonl"
    write([TraceProgram("a", (TraceCall("a", (), output_tokens=1),))], path)
    generated, recorded = BenchSettings("chat"), BenchSettings(str(path))
    assert loads(generated, [2, 0.5], closed=True) == ["0.5", "2", CLOSED]
    assert loads(recorded, [], closed=False) == [AS_RECORDED]
    assert json.dumps(recorded.to_json()).count("sha256") == 1
    for rates in ([], [0.0], [1.0, 1.0]):
        with pytest.raises(BenchError, match="--rates"):
            loads(generated, rates, closed=False)
