"""The agents of a program: told apart by system prompts, and named after the calls that start them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.core.identity import Evidence, Identity, Source
from weft.core.identity.families import Families, starts_agents
from weft.core.identity.items import items_of_answer
from weft.core.identity.lineage import Lineage, Placed
from weft.core.ids import ProgramId, ThreadId

RULES = " Read what the others have said before you say anything, and never say more than you know." * 3
TASK = "Please look up how many ships the keeper of the lighthouse has counted since the spring of last year."


def place(lineage: Lineage, system: str, *messages: Any) -> Placed:
    sent = [{"role": "system", "content": system}, *messages]
    return lineage.place(Evidence(program_name="client"), {"messages": sent}, "-")


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def call_of(tool: str, **arguments: str) -> dict[str, Any]:
    """An answer that calls a tool."""
    return {"tool_calls": [{"id": "call_0123456789ab", "function": {"name": tool, "arguments": json.dumps(arguments)}}]}


def answer(lineage: Lineage, placed: Placed, message: dict[str, Any]) -> dict[str, Any]:
    lineage.answered(placed, items_of_answer({"choices": [{"message": message}]}), "-", None)
    return {"role": "assistant", **message}


def talk(lineage: Lineage, systems: list[str]) -> list[tuple[int, str | None]]:
    """Agents that speak in turns in one conversation. Returns the number and the label of each one's call."""
    messages, found, programs = [user("Write about the ships that pass the lighthouse.")], [], set()
    for number, system in enumerate(systems):
        placed = place(lineage, system, *messages)
        text = f"This is what number {number} says of the ships, and it is longer than what was said before."
        messages += [answer(lineage, placed, {"content": text}), user("Go on.")]
        found.append((placed.identity.agent, placed.identity.label))
        programs.add(placed.identity.program_id)
    assert len(programs) == 1
    return found


def test_agents_of_a_team_are_told_apart_by_their_system_prompts() -> None:
    """Each has a number, in the order in which they come, and gets it again."""
    systems = [f"You are the {name}." for name in ("chief", "writer", "chief", "editor", "writer")]
    assert [number for number, _label in talk(Lineage(), systems)] == [0, 1, 0, 2, 1]


def test_a_system_prompt_with_a_clock_is_one_agent() -> None:
    """Digits do not count, nor does a tenth of the prompt."""
    days = ("Monday", "Tuesday", "Friday")
    systems = [f"It is {day}, 12:0{number}. You are the keeper.{RULES}" for number, day in enumerate(days)]
    assert {number for number, _label in talk(Lineage(), systems)} == {0}


def test_a_system_prompt_that_always_changes_has_a_bounded_number_of_agents() -> None:
    """They are no agents, and would fill the program's threads and the memory."""
    names = [f"{chr(97 + number % 26)}{chr(97 + number // 26)}" * 20 for number in range(40)]
    assert max(number for number, _label in talk(Lineage(), names)) == 15


def test_a_sub_agent_is_named_after_the_call_that_hands_it_its_task() -> None:
    """Its next calls, too. The agent that calls it has no name."""
    lineage = Lineage()
    first = place(lineage, "You are the chief.", user("Count the ships."))
    called = answer(lineage, first, call_of("task", description="Count", prompt=TASK, subagent_type="Explore"))
    helper = place(lineage, "You are a helper.", user(TASK))
    said = answer(lineage, helper, {"content": "He has counted as many as there are days."})
    again = place(lineage, "You are a helper.", user(TASK), said, user("Are you sure?"))
    returned = {"role": "tool", "tool_call_id": "call_0123456789ab", "content": "As many as days."}
    last = place(lineage, "You are the chief.", user("Count the ships."), called, returned)
    identities = [each.identity for each in (first, helper, again, last)]
    assert len({each.program_id for each in identities}) == 1
    assert [each.agent for each in identities] == [0, 1, 1, 0]
    assert [each.label for each in identities] == [None, "client/Explore", "client/Explore", None]


def thread(name: str | None, program: str = "-/claude-code:s") -> Identity:
    thread_id = ThreadId(name) if name else None
    return Identity(Source.CLAUDE_CODE, ProgramId(program), thread_id=thread_id, program_name="claude-code")


def label(families: Families, identity: Identity, *texts: str) -> str | None:
    """The label of a request whose first message has these texts."""
    parts = [{"type": "text", "text": text} for text in texts]
    return families.named(identity, {"messages": [{"role": "user", "content": parts}]}, "-").label


def test_a_thread_is_named_after_the_call_that_hands_it_its_task() -> None:
    """Claude Code puts a reminder before the task. Another program's thread with the same task is not meant."""
    families = Families()
    assert label(families, thread("early"), TASK) is None
    called = {"content": [{"type": "tool_use", "id": "t", "name": "Agent", "input": {}}]}
    called["content"][0]["input"] = {"description": "Count", "prompt": TASK, "subagent_type": "Explore"}
    families.answered(thread(None), items_of_answer(called), "-")
    assert label(families, thread("a"), "<system-reminder>Today</system-reminder>", TASK) == "claude-code/Explore"
    assert label(families, thread("a"), "And then?") == "claude-code/Explore"
    assert label(families, thread("b"), "Something else.") is None
    assert label(families, thread(None), TASK) is None
    assert label(families, thread("a", "-/claude-code:other"), TASK) is None
    assert label(families, thread("early"), TASK) is None, "its first request had no name"


def test_words_of_a_prompt_are_no_name() -> None:
    """What is shown may be seen by others than the client."""
    families = Families()
    message = call_of("task", prompt=TASK, subagent_type="the one that knows my password")
    families.answered(thread(None), items_of_answer({"choices": [{"message": message}]}), "-")
    assert label(families, thread("a"), TASK) is None


SCHEMA = {"type": "object", "properties": {"prompt": {}, "subagent_type": {}}}
CODEX = {"name": "spawn_agent", "parameters": {"properties": {"agent_type": {}}}}


@pytest.mark.parametrize(
    ("tool", "starts"),
    [
        ({"name": "Agent", "input_schema": SCHEMA}, True),
        ({"type": "function", "function": {"name": "task", "parameters": SCHEMA}}, True),
        ({"type": "namespace", "tools": [CODEX]}, True),
        ({"name": "Read", "input_schema": {"properties": {"path": {}}}}, False),
        ({"name": "Read", "input_schema": "none"}, False),
        ("Read", False),
    ],
)
def test_a_request_whose_model_may_start_agents_has_a_tool_for_it(tool: Any, starts: bool) -> None:
    """Only then its answers are read."""
    assert starts_agents([{"name": "other"}, tool]) is starts
    assert not starts_agents(None)


def test_tools_inside_tools_are_read_to_a_depth() -> None:
    """A client may send any JSON."""
    nested: Any = CODEX
    for _ in range(2_000):
        nested = {"tools": [nested]}
    assert not starts_agents([nested])
