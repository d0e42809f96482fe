"""The table of `weft top`: columns, order, filter, and names that mean harm."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from timeline_parts import run, think_and_sum

from weft.core.show import LiveProgram, LiveReplica, LiveState, timeline
from weft.views.top_screens import calls
from weft.views.top_table import COLUMNS, Choice, columns_for, count, label, programs, replicas, seconds, summary

PROGRAM = LiveProgram(
    program_id="prog-1",
    name="agent",
    session_id="sess-1",
    tenant=None,
    state="idle",
    tools=(),
    level=None,
    threads=1,
    calls=1,
    calls_in_flight=0,
    prompt_tokens=10,
    output_tokens=5,
    service_s=1.5,
    wait_s=0.5,
    tools_s=2.0,
    kv_tokens=None,
    preemptions=0,
    engine_ids=("engine-0",),
    age_s=9.0,
    due_in_s=None,
    parent_program_id=None,
)
REPLICA = LiveReplica("engine-0", "acme/m", "ready", 1, 2, 3, 0, 0.5)


def state_of(*open_programs: LiveProgram, total: int | None = None, ended: tuple[LiveProgram, ...] = ()) -> LiveState:
    count = len(open_programs) if total is None else total
    return LiveState(20.0, "m", "atlas", (REPLICA,), open_programs, count, ended)


def names(choice: Choice, state: LiveState) -> list[str]:
    return [each.name for each in choice.programs(state)]


def test_programs_are_ordered_by_any_column() -> None:
    """Texts from a to z, numbers from the largest on; the other way round if asked. At first those that run lead."""
    b = replace(PROGRAM, name="b", state="waiting", service_s=3.0, kv_tokens=100)
    a = replace(PROGRAM, name="a", state="tool", tools=("search",), service_s=2.0)
    c = replace(PROGRAM, name="C", state="running", level=1, service_s=1.0)
    state = state_of(a, b, c)
    assert names(Choice(), state) == ["C", "b", "a"]
    assert names(Choice("name"), state) == ["a", "b", "C"]
    assert names(Choice("service"), state) == ["b", "a", "C"]
    assert names(Choice("service", is_reversed=True), state) == ["C", "a", "b"]
    for column in COLUMNS:
        assert sorted(names(Choice(column.key), state)) == ["C", "a", "b"], "what is unknown has its place too"
    choice = Choice(COLUMNS[-1].key)
    choice.next_order(1)
    assert choice.order == COLUMNS[0].key


def test_the_queue_is_a_level_or_a_place() -> None:
    """Policies with one queue have places. The program that is served first leads, and those without a queue follow."""
    places = [replace(PROGRAM, name=str(place), place=place) for place in (3, 1, None, 2)]
    assert [each.queue for each in places] == ["#3", "#1", "", "#2"]
    assert names(Choice("queue"), state_of(*places)) == ["1", "2", "3", "None"]
    levels = [replace(PROGRAM, name=f"Q{level + 1}", level=level, place=9 - level) for level in (1, 0)]
    assert [each.queue for each in levels] == ["Q2", "Q1"]
    assert names(Choice("queue"), state_of(*levels)) == ["Q1", "Q2"]


def test_a_filter_finds_names_ids_states_and_tools() -> None:
    """In any case, and in the programs that have ended too, if they are shown."""
    search = replace(PROGRAM, name="Agent", program_id="trip-17", state="tool", tools=("web_search",))
    other = replace(PROGRAM, name="other", tenant="acme", engine_ids=("engine-1",))
    ended = replace(PROGRAM, name="agent of old", state="failed", ended_ago_s=1.0)
    state = state_of(search, other, ended=(ended,))
    for text, found in {
        "AGENT": ["Agent"],
        "trip-": ["Agent"],
        "in web": ["Agent"],
        "acme": ["other"],
        "engine-1": ["other"],
        "none": [],
    }.items():
        assert names(Choice(text=text), state) == found
    assert names(Choice(text="agent", with_ended=True), state) == ["Agent", "agent of old"]


@pytest.mark.parametrize("terminal", [80, 88, 95, 108, 113, 124, 200])
def test_the_columns_fit_the_terminal(terminal: int) -> None:
    """A terminal of 80 columns has the most important ones, and a space follows each."""
    columns = columns_for(terminal)
    assert sum(column.width + 1 for column in columns) <= max(terminal, 80)
    assert {"name", "state", "queue", "service", "wait", "kv", "calls", "in", "out"} <= {each.key for each in columns}
    text = str(programs(state_of(PROGRAM), Choice(), terminal))
    assert max(map(len, text.splitlines())) <= terminal


@pytest.mark.parametrize(
    "name", ["\x1b[2J\x1b]0;owned\x07", "[bold red]x[/]", "a\nb\rc\td", "\u202eevil", "n" * 10_000, "日本語" * 100]
)
def test_a_hostile_name_stays_in_its_cell(name: str) -> None:
    """Control characters become spaces, a long name is cut off, and no line is added."""
    hostile = replace(PROGRAM, name=name, state="tool", tools=(name,), tenant=name, engine_ids=(name,))
    text = str(programs(state_of(hostile), Choice(), 200))
    assert len(text.splitlines()) == 4, "summary, headings, rule, program"
    assert all(character.isprintable() for character in text.replace("\n", ""))
    assert len(text) < 1000


def test_the_summary_counts_programs() -> None:
    """Of many programs it says how many are shown."""
    running = replace(PROGRAM, state="running")
    tool = replace(PROGRAM, state="tool")
    assert summary(state_of(running, running, tool)) == "3 programs: 2 running, 1 in a tool"
    assert summary(state_of(running, total=900)) == "900 programs (the 1 that were used last): 1 running"
    assert summary(state_of()) == "0 programs"


def test_a_program_that_nobody_has_named_shows_its_id() -> None:
    """Clients that send no ids would all have one name."""
    nameless = replace(PROGRAM, name="program")
    assert label(nameless) == "prog-1"
    assert label(PROGRAM) == "agent"
    for blank in ("", "  "):
        assert label(replace(PROGRAM, name=blank)) == PROGRAM.program_id, "a row without a name would look broken"


def test_the_replicas_show_their_queues() -> None:
    """A scheduler that does not answer is a question mark."""
    silent = replace(REPLICA, engine_id="engine-1", state="down", running=None, waiting=None, kv_used=None, deaths=2)
    silent = replace(silent, stolen=5)
    first, second = str(replicas([REPLICA, silent])).splitlines()[2:]
    assert first.split() == ["engine-0", "ready", "1", "2", "3", "█████░░░░░", "50%", "0", "0", "m"]
    assert "0%" in str(replicas([replace(REPLICA, kv_used=math.inf)])), "a strange server ends nothing"
    assert second.split() == ["engine-1", "down", "?", "?", "3", "?", "2", "5", "m"]


def test_numbers_are_short() -> None:
    """Durations take six letters and counts five, however large they are."""
    shown = {0.516: "0.52", 75.04: "75.0", 750.0: "12m30s", 11_100.0: "3h05m", 400_000.0: "4d", math.inf: "?"}
    assert {value: seconds(value) for value in shown} == shown
    counts = {9999: "9999", 12_340: "12.3k", 123_456: "123k", 1_200_000: "1.2M", 2_000_000_000: "2.0G"}
    assert {value: count(value) for value in counts} == counts


def test_the_calls_of_a_program_are_listed() -> None:
    """The latest first, with their threads. A hostile label stays in its cell, and of very many calls 50 are listed."""
    made = think_and_sum()
    rows = str(calls(timeline(made, now_s=116.0))).splitlines()
    assert rows[0] == "calls, the latest first; * on the critical path"
    assert [row.split()[0] for row in rows[3:]] == ["1*", "2*", "1", "1*"]
    assert rows[3].split() == ["1*", "label", "of", "sum", "finished", "12.0", "1.00", "3.00", "10", "3"]
    for number in range(60):
        run(made, f"\x1b[2J{number}" * 1000, (120.0 + number, 121.0 + number))
    rows = str(calls(timeline(made, now_s=200.0))).splitlines()
    assert (rows[0][:34], len(rows)) == ("the latest 50 calls, and 14 before", 53)
    assert "\x1b" not in "".join(rows)
