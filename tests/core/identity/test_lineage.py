"""Programs that are found by their messages."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weft.core.identity import Evidence, Source
from weft.core.identity.items import items_of_answer
from weft.core.identity.lineage import Lineage, Placed

Messages = list[dict[str, Any]]


class Server:
    """Requests and answers as a server sees them. A peer is a host with one connection, or a host and a port."""

    def __init__(self, most_states: int = 1000, **options: Any) -> None:
        self.lineage = Lineage(most_states, **options)

    def send(self, messages: Messages, scope: str = "-", peer: str = "", **evidence: Any) -> Placed:
        connection = f"{peer}:1" if peer and ":" not in peer else peer
        return self.lineage.place(Evidence(**evidence), {"messages": messages}, scope, connection)

    def answer(self, placed: Placed, *texts: str, scope: str = "-", response_id: str | None = None) -> None:
        body = {"choices": [{"message": {"content": text}} for text in texts]}
        self.lineage.answered(placed, items_of_answer(body), scope, response_id)

    def call(self, messages: Messages, text: str, scope: str = "-", peer: str = "", **evidence: Any) -> str:
        placed = self.send(messages, scope, peer, **evidence)
        self.answer(placed, text, scope=scope)
        return placed.identity.program_id


def said(*texts: Any) -> Messages:
    """A conversation of a user and the model in turns."""
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]


def test_a_conversation_is_one_program() -> None:
    """Each request begins with what was said before."""
    server = Server()
    first = server.call(said("a"), "b")
    assert server.call(said("a", "b", "c"), "d") == first
    assert server.call(said("a", "b", "c", "d", "e"), "f") == first


def test_an_answer_with_nothing_in_it_is_gone_on_from() -> None:
    """A model may end at once, or only think. The client sends the answer back as an empty text, or as none at all."""
    for nothing in ("", None, "<think>\nWhat may that be?\n</think>\n", [{"type": "thinking", "thinking": "Hm."}]):
        server = Server()
        first = server.call(said("a"), "")
        assert server.call(said("x"), "") != first
        assert server.call(said("a", nothing, "c"), "d") == first
        assert server.call(said("a", nothing, "c", "d", "e"), "f") == first


def test_an_answer_of_json_that_is_written_anew_is_gone_on_from() -> None:
    """Clients read it, and write it with other keys first, other white space, or 4.0 for 4. Other values are another
    answer."""
    answer = '{"city": "Oslo", "days": 4, "is_open": true}'
    server = Server()
    first = server.call(said("a"), answer)
    assert server.call(said("a", answer.replace("Oslo", "Rome"), "c"), "d") != first
    again = '{\n  "days": 4.0,\n  "is_open": true,\n  "city": "Oslo"\n}'
    assert server.call(said("a", again, "c"), "d") == first
    assert server.call(said("a", again, "c", "d", "e"), "f") == first
    server = Server()
    twins = {server.call(said("a"), each) for each in (answer, again)}
    assert len(twins) == 2
    assert server.call(said("a", again, "c"), "d") not in twins


def test_an_empty_answer_of_twins_is_not_guessed() -> None:
    """It tells no more than any other answer that both got."""
    server = Server()
    one, two = server.call(said("a"), ""), server.call(said("a"), "")
    assert one != two
    assert server.call(said("a", "", "c"), "d") not in (one, two)


def test_an_empty_message_behind_the_question_is_the_place_of_the_answer() -> None:
    """Some clients send it with each request. It is not in their history."""
    server = Server()
    first = server.call(said("a", ""), "b")
    assert server.call(said("a", "b", "c", ""), "d") == first


def test_equal_questions_are_two_programs() -> None:
    """Two clients with the same first words get two programs, which go on separately."""
    server = Server()
    one, two = server.call(said("a"), "b", peer="1"), server.call(said("a"), "b", peer="2")
    assert one != two
    assert server.call(said("a", "b", "c"), "d", peer="2") == two
    assert server.call(said("a", "b", "x"), "d", peer="1") == one


def test_another_answer_is_another_program() -> None:
    """A request that quotes an answer that was never given begins a program."""
    server = Server()
    first = server.call(said("a"), "b")
    assert server.call(said("a", "another", "c"), "d") != first


def test_a_fork_stays_in_its_program() -> None:
    """Sub-agents that quote the conversation at once belong to it, and so does a turn that is edited."""
    server = Server()
    first = server.call(said("a"), "b")
    forks = {server.send(said("a", "b", text)).identity.program_id for text in ("c", "d", "e")}
    assert forks == {first}


def test_a_request_that_may_be_each_of_twins_begins_a_program() -> None:
    """No connection tells which one goes on, and a guess could join the calls of two clients."""
    server = Server()
    known = {server.call(said("a"), "b"), server.call(said("a"), "b")}
    found = [server.call(said("a", "b", text), "y") for text in ("c", "d")]
    assert len({*known, *found}) == 4
    assert server.call(said("a", "b", "d", "y", "e"), "z") == found[1]


def test_a_request_that_is_sent_again_stays() -> None:
    """Also where the program has a twin, because the messages say whose it is: both have gone on, with other words."""
    server = Server()
    found = [server.call(said("a"), "b", peer=peer) for peer in "12"]
    assert [server.call(said("a", "b", text), "y", peer=peer) for text, peer in ("c1", "d2")] == found
    assert [server.call(said("a", "b", text), "y", peer="3") for text in "cd"] == found


def test_a_request_is_not_sent_again_while_a_twin_waits() -> None:
    """The twin may ask the same as the program that has gone on."""
    server = Server()
    found = [server.call(said("a"), "b", peer=peer) for peer in "12"]
    assert server.call(said("a", "b", "c"), "y", peer="1") == found[0]
    assert server.call(said("a", "b", "c"), "y", peer="3") not in found


def test_twins_of_one_host_are_not_guessed_by_their_connections() -> None:
    """They may share a pool, of which each had a connection of its own until now: greedy agents with the same texts."""
    server = Server()
    known = {server.call(said("a"), "b", peer=f"host:{port}") for port in (1, 2)}
    found = [server.call(said("a", "b", "c"), "d", peer=f"host:{port}") for port in (1, 2)]
    assert len({*known, *found}) == 4
    alone = server.call(said("x"), "y", peer="host:1")
    assert server.call(said("x", "y", "z"), "z", peer="host:2") == alone


def test_a_first_turn_that_says_it_is_sent_again_belongs_to_the_one_whose_client_left() -> None:
    """Once, and only if that is one: the same words from somebody else begin a program."""
    server = Server()
    first = server.send(said("a"))
    server.lineage.left(first, "-")
    assert server.call(said("a"), "b") != first.identity.program_id
    again = server.send(said("a"), is_retry=True)
    assert again.identity.program_id == first.identity.program_id
    assert server.call(said("a"), "b", is_retry=True) != first.identity.program_id
    assert server.call(said("c"), "b", is_retry=True) != first.identity.program_id
    for _ in range(2):
        server.lineage.left(server.send(said("d")), "-")
    known = {server.send(said("a")).identity.program_id for _ in range(2)}
    assert server.call(said("d"), "b", is_retry=True) not in known


def test_a_first_request_that_failed_is_sent_again_without_saying_so() -> None:
    """The next one with the same messages belongs to its program, and so does the one after that if it fails, too."""
    server = Server()
    first = server.send(said("a"))
    for _ in range(3):
        server.lineage.left(first, "-", has_failed=True)
        assert server.send(said("b")).identity.program_id != first.identity.program_id
        again = server.send(said("a"))
        assert again.identity.program_id == first.identity.program_id
        first = again
    server.answer(again, "b")
    assert server.call(said("a", "b", "c"), "d") == first.identity.program_id


def test_a_request_that_failed_is_sent_again_once() -> None:
    """Another program may begin alike, while the one that failed has an answer coming."""
    server = Server()
    first = server.send(said("a"))
    server.lineage.left(first, "-", has_failed=True)
    assert server.send(said("a"), scope="other").identity.program_id != first.identity.program_id
    assert server.send(said("a")).identity.program_id == first.identity.program_id
    assert server.send(said("a")).identity.program_id != first.identity.program_id


def test_what_names_a_program_counts_more_than_a_request_that_failed() -> None:
    """Another program says the same as the one that failed, and an id says whose it is."""
    server = Server()
    other = server.send(said("a"), trace_id="t")
    server.answer(other, "b", response_id="r")
    for named in ({"previous_response_id": "r"}, {"trace_id": "t"}):
        failed = server.send(said("Hi"))
        server.lineage.left(failed, "-", has_failed=True)
        assert server.send(said("Hi"), **named).identity.program_id == other.identity.program_id
        assert server.send(said("Hi")).identity.program_id == failed.identity.program_id


def test_a_later_request_that_failed_is_no_evidence() -> None:
    """Its program has more than that, and somebody else may say the same."""
    server = Server()
    first = server.send(said("a"))
    server.answer(first, "b", response_id="r")
    later = server.send(said("c"), previous_response_id="r")
    server.lineage.left(later, "-", has_failed=True)
    assert later.identity.program_id == first.identity.program_id
    assert server.send(said("c")).identity.program_id != first.identity.program_id


def test_a_retry_of_a_system_prompt_alone_belongs_to_the_one_whose_client_left() -> None:
    """A model may be asked by a system prompt, without a user's word."""
    server = Server()
    first = server.send(prompted("Say something of ships."))
    server.lineage.left(first, "-")
    assert (
        server.send(prompted("Say something of ships."), is_retry=True).identity.program_id == first.identity.program_id
    )


CODER = "You are a coding agent, and work in the folder of the lighthouse, where the keeper's notes are."


@pytest.mark.parametrize(
    "resumed",
    [
        [*said("Talk."), *said("Go on from there.", "Nothing was asked.", "And now?")],
        [*said("Talk."), *said("I have stopped you.", "", "And now?")],
        said("Talk.", "", "And now?"),
        [{"role": "user", "content": [{"type": "text", "text": text} for text in ("Talk.", "Go on.")]}],
    ],
    ids=["claude-code", "a message", "opencode", "parts"],
)
def test_a_first_turn_whose_client_left_goes_on(resumed: Messages) -> None:
    """Clients keep nothing of the answer that they left, but tell more behind all that they told before. They do so
    once: what others tell may begin alike."""
    server = Server()
    first = server.send(prompted(CODER, "Talk."))
    resumed = [*prompted(CODER), *resumed]
    assert server.send(resumed).identity.program_id != first.identity.program_id
    server.lineage.left(first, "-")
    assert server.send(resumed).identity.program_id == first.identity.program_id
    assert server.send(resumed).identity.program_id != first.identity.program_id


@pytest.mark.parametrize(
    ("system", "messages"),
    [
        (CODER, said("Talk.")),
        (CODER, said("Talk.", "Of what?", "Of ships.")),
        (CODER.replace("lighthouse", "harbour"), said("Talk.", "", "And now?")),
        (CODER, said("Talk now.", "", "And now?")),
    ],
    ids=["the same words", "an answer of another server", "another folder", "other words"],
)
def test_another_first_turn_is_not_that_of_a_client_that_left(system: str, messages: Messages) -> None:
    """It began elsewhere, or anew."""
    server = Server()
    first = server.send(prompted(CODER, "Talk."))
    server.lineage.left(first, "-")
    assert server.send([*prompted(system), *messages]).identity.program_id != first.identity.program_id


FILLER = "No response requested."  # Claude Code's


@pytest.mark.parametrize(
    ("history", "is_known"),
    [
        (("Talk.", FILLER, "Talk more.", FILLER, "Go on."), True),
        (("Talk.", FILLER, "Talk more.", "Of ships.", "Go on."), False),
        (("Talk.", FILLER, "Talk less.", FILLER, "Go on."), False),
    ],
    ids=["a filler again", "an answer of another server", "other words"],
)
def test_a_later_turn_whose_client_left_goes_on(history: tuple[str, ...], *, is_known: bool) -> None:
    """Its client has put the filler in place of an answer that it had put in place of another one before. It goes on
    once: what others tell may begin alike."""
    server = Server()
    first = server.send(prompted(CODER, "Talk.", FILLER, "Talk more."))
    assert server.send(prompted(CODER, *history)).identity.program_id != first.identity.program_id
    server.lineage.left(first, "-")
    again = server.send(prompted(CODER, *history)).identity.program_id
    assert (again == first.identity.program_id) == is_known
    assert server.send(prompted(CODER, *history)).identity.program_id != first.identity.program_id


def test_a_later_turn_that_several_programs_had_is_gone_on_by_none() -> None:
    """Their clients left, and which one goes on is not known."""
    server = Server()
    both = [server.send(prompted(CODER, "Talk.", FILLER, "Talk more.")) for _ in range(2)]
    for each in both:
        server.lineage.left(each, "-")
    again = server.send(prompted(CODER, "Talk.", FILLER, "Talk more.", FILLER, "Go on.")).identity.program_id
    assert again not in {each.identity.program_id for each in both}


def test_a_first_turn_that_several_programs_had_is_gone_on_by_none() -> None:
    """One client left, and which one goes on is not known. Short words are anybody's."""
    server = Server()
    left = server.send(prompted(CODER, "Talk."))
    server.lineage.left(left, "-")
    other = server.send(prompted(CODER, "Talk."))
    known = {each.identity.program_id for each in (left, other)}
    assert server.send(prompted(CODER, "Talk.", "", "And now?")).identity.program_id not in known
    short = server.send(said("Talk."))
    server.lineage.left(short, "-")
    assert server.send(said("Talk.", "", "And now?")).identity.program_id != short.identity.program_id


def test_hundreds_of_twins_stay_apart() -> None:
    """A program that found no more room at a state must not take the place of one that waits there."""
    server = Server()
    first = [server.call(said("a"), "b", peer=str(number)) for number in range(600)]
    second = [server.call(said("a", "b", "c"), "d", peer=str(number)) for number in range(600)]
    assert all(two == one or two not in first for one, two in zip(first, second, strict=True))


def test_an_edited_history_does_not_take_its_twins_place() -> None:
    """One of two twins goes on, and then changes what the model said. The other twin's next call is still its own."""
    server = Server()
    one, two = server.call(said("a"), "b", peer="1"), server.call(said("a"), "b", peer="2")
    assert server.call(said("a", "b", "c"), "d", peer="1") == one
    assert server.call(said("a", "b", "c", "edited", "e"), "f", peer="1") != two
    assert server.call(said("a", "b", "c"), "d", peer="2") == two


def test_an_edited_turn_does_not_take_its_twins_place() -> None:
    """One of two twins goes on and edits what it asked. That it has the connection of its latest request tells so."""
    server = Server()
    one, two = server.call(said("a"), "b", peer="1"), server.call(said("a"), "b", peer="2")
    assert server.call(said("a", "b", "c"), "d", peer="1") == one
    assert server.call(said("a", "b", "c please"), "e", peer="1") == one
    assert server.call(said("a", "b", "f"), "g", peer="2") == two


def test_a_connection_that_others_have_used_since_tells_nothing() -> None:
    """Agents that share a pool of connections come by any of them."""
    server = Server()
    one, two = server.call(said("a"), "b", peer="1"), server.call(said("a"), "b", peer="2")
    server.call(said("x"), "y", peer="1")
    assert server.call(said("a", "b", "c"), "d", peer="1") not in (one, two)


def test_twins_one_after_the_other_stay_apart() -> None:
    """A client runs the same agent again, by the connection that it has."""
    server = Server()
    for _run in range(3):
        program = server.call(said("a"), "b", peer="1")
        assert server.call(said("a", "b", "c"), "d", peer="1") == program
        assert server.call(said("a", "b", "c", "d", "e"), "f", peer="1") == program


def test_twins_one_after_the_other_with_reminders_stay_apart() -> None:
    """Each request is the same, byte by byte. Its newest question has an addition that the next history lacks. The
    program that has gone on is not the one that waits. Two that wait at once are not guessed."""
    server = Server()
    reminder = "\nAnswer in the language of the user, and never in more than a hundred words, whatever you are asked."
    texts = [f"This is the answer number {number}, which both of them are given by the model." for number in range(3)]
    questions = [f"What is the name of the street number {number} in the city of Ulm?" for number in range(3)]

    def turn(number: int) -> str:
        earlier = [text for pair in zip(questions[:number], texts, strict=False) for text in pair]
        return server.call(said(*earlier, questions[number] + reminder), texts[number])

    first = {turn(number) for number in range(3)}
    second = {turn(number) for number in range(3)}
    assert (len(first), len(second), len(first | second)) == (1, 1, 2)
    waiting = {turn(0), turn(0)}
    assert len(waiting) == 2
    assert turn(1) not in waiting


def test_twins_in_turns_by_one_connection_are_not_guessed() -> None:
    """A gateway sends the calls of many clients by one connection."""
    server = Server()
    known = [server.call(said("a"), "b", peer="1"), server.call(said("a"), "b", peer="1")]
    assert server.call(said("a", "b", "c"), "d", peer="1") not in known


def test_a_connection_that_carries_programs_in_turns_tells_nothing() -> None:
    """A program that comes back by a connection after another one shows that the clients share it."""
    server = Server()
    server.call(said("x"), "y", peer="1")
    one, two = server.call(said("a"), "b", peer="1"), server.call(said("a"), "b", peer="2")
    server.call(said("x", "y", "z"), "y", peer="1")
    third = server.call(said("a"), "b", peer="1")
    assert server.call(said("a", "b", "c"), "d", peer="1") not in (one, two, third)


def test_a_changed_answer_stays_in_its_program() -> None:
    """The client cut it, or the stream was left. Its program has asked what stands before the answer."""
    server = Server()
    first = server.call(said("a"), "b")
    assert server.call(said("a", "b", "c"), "d") == first
    assert server.call(said("a", "b", "c", "changed", "e"), "f") == first


def test_answers_of_another_server_are_no_fork() -> None:
    """Everybody is greeted with the same words. Who has gone on elsewhere since is not the program that is known."""
    server = Server()
    first = server.call(said("hi"), "hello")
    assert server.call(said("hi", "hello", "c"), "d") == first
    assert server.call(said("hi", "hello", "x", "from elsewhere", "y"), "z") != first
    assert server.call(said("more", "from elsewhere", "hi", "hello", "x", "from elsewhere", "y"), "z") != first


def test_a_prompt_that_begins_its_answer_stays() -> None:
    """The last message is the beginning of the answer, which comes back as a whole."""
    server = Server()
    first = server.call(said("a"), "b")
    assert server.call(said("a", "b", "c", "d"), "e") == first
    assert server.call(said("a", "b", "c", "de", "f"), "g") == first


def test_a_shortened_history_stays_in_its_program() -> None:
    """The oldest messages are dropped, or a summary stands for them. The exchanges that are left tell the program."""
    server = Server()
    first = server.call(said("a"), "b")
    assert server.call(said("a", "b", "c"), "d") == first
    assert server.call(said("c", "d", "e"), "f") == first
    assert server.call(said("In short: a.", "I see.", "e", "f", "g"), "h") == first


def test_an_exchange_that_several_programs_had_tells_nothing() -> None:
    """A greeting is answered with the same words everywhere. The latest exchange that only one program had counts."""
    server = Server()
    one, two = server.call(said("hi"), "hello", peer="1"), server.call(said("hi"), "hello", peer="2")
    assert server.call(said("hi", "hello", "c"), "d", peer="1") == one
    assert server.call(said("short", "ok", "hi", "hello", "x"), "y") not in (one, two)
    assert server.call(said("c", "d", "hi", "hello", "x"), "y") == one


def test_a_reminder_of_the_system_is_no_part_of_an_exchange() -> None:
    """Some clients put it last, and leave it out later."""
    server = Server()
    remind = {"role": "system", "content": "Be brief."}
    first = server.call([*said("a", "b", "c"), remind], "d")
    assert server.call([*said("c", "d", "e"), remind], "f") == first


TASK = "Find out how many people live in each city of the north, and write a table with the source of each figure."


def delegate(server: Server, messages: Messages, task: str, call_id: str = "1", **evidence: Any) -> str:
    """A call that the model answers by a call of a tool with a task."""
    placed = server.send(messages, **evidence)
    function = {"name": "delegate", "arguments": json.dumps({"to": "researcher", "task": task})}
    answer = {"choices": [{"message": {"content": None, "tool_calls": [{"id": call_id, "function": function}]}}]}
    server.lineage.answered(placed, items_of_answer(answer), "-", None)
    return placed.identity.program_id


ANSWER = "Thought: I need the weather.\nAction: weather"
TOOL_CALL: Any = {"id": "chatcmpl-tool-5f8a", "function": {"name": "weather", "arguments": "{}"}}


def ask(server: Server, messages: Messages, **answer: Any) -> str:
    placed = server.send(messages)
    server.lineage.answered(placed, items_of_answer({"choices": [{"message": answer}]}), "-", None)
    return placed.identity.program_id


def test_an_answer_with_what_the_agent_observed_stays() -> None:
    """ReAct agents write the result of a tool behind the model's words, into the same message."""
    server = Server()
    first = ask(server, said("a"), content=ANSWER)
    observed = f"{ANSWER}\nObservation: It rains."
    assert ask(server, said("a", observed, "go on"), content="Final answer: rain in Rome") == first
    later = said("a", observed, "go on", "Final answer: rain in Rome, said the agent", "b")
    assert ask(server, later, content="c") == first


def test_a_tool_call_that_is_written_as_text_stays() -> None:
    """smolagents does so, with the call's id."""
    server = Server()
    first = ask(server, said("a"), content=None, tool_calls=[TOOL_CALL])
    text = f"Calling tools:\n[{{'id': '{TOOL_CALL['id']}', 'type': 'function'}}]"
    assert ask(server, said("a", text, "Observation: rain"), content="b") == first


def test_an_answer_that_only_looks_alike_is_another_program() -> None:
    """It begins otherwise, it is too short to tell, another prompt is before it, or two programs were given it."""
    server = Server()
    first = ask(server, said("a"), content=ANSWER)
    assert ask(server, said("a", f"So: {ANSWER}", "go on"), content="b") != first
    assert ask(server, said("x", f"{ANSWER}\nObservation: rain", "go on"), content="b") != first
    short = ask(server, said("s"), content="Yes")
    assert ask(server, said("s", "Yes, but", "go on"), content="b") != short
    second = ask(server, said("a"), content=ANSWER)
    assert ask(server, said("a", f"{ANSWER}\nObservation: rain", "go on"), content="b") not in (first, second)


def test_an_agent_that_is_handed_a_task_is_in_the_program() -> None:
    """It starts with a fresh history, whose first message is what the other agent's model wrote."""
    server = Server()
    first = delegate(server, prompted("You delegate.", "Compare the cities."), TASK)
    assert server.call(prompted("You search.", TASK), "b") == first
    assert server.call(prompted("You search.", TASK, "b", "c"), "d") == first
    assert server.call(prompted("You search.", TASK.upper()), "b") != first


def agents_started(*tasks: str) -> dict[str, Any]:
    """An answer that starts sub-agents of one kind."""
    texts = [json.dumps({"subagent_type": "Explore", "prompt": task}) for task in tasks]
    functions = [{"name": "Agent", "arguments": text} for text in texts]
    return {
        "tool_calls": [
            {"id": f"toolu_{task[-9:]}", "function": each} for task, each in zip(tasks, functions, strict=True)
        ]
    }


def test_each_agent_that_a_tool_call_starts_is_a_thread() -> None:
    """Several at once have one system prompt, which may be nearly that of the agent that starts them. Later messages
    of the system are no other agent's, and so are agents that it starts itself."""
    server = Server()
    tasks = [f"Count the ships in harbour {number}." for number in range(3)]
    ask(server, prompted("You search.", "Count all ships."), **agents_started(*tasks))
    found = [server.send(prompted("You search.", task)) for task in tasks]
    assert [placed.identity.thread_id for placed in found] == ["agent-1", "agent-2", "agent-3"]
    for placed in found:
        server.answer(placed, "Seven.")
    later = [
        *prompted("You search.", tasks[1], "Seven."),
        {"role": "system", "content": "These agents are there: " * 9},
    ]
    placed = server.send([*later, {"role": "user", "content": "Go on."}])
    assert placed.identity.thread_id == "agent-2"
    server.lineage.answered(
        placed, items_of_answer({"choices": [{"message": agents_started("Count the gulls there.")}]}), "-", None
    )
    nested = server.send(prompted("You search.", "Count the gulls there.")).identity
    assert (nested.thread_id, nested.parent_thread_id) == ("agent-4", "agent-2")
    assert server.send(prompted("You search.", "Count all ships.")).identity.thread_id is None


def test_agents_that_tool_calls_start_at_once_are_threads() -> None:
    """Codex starts agents without a kind, with its own system prompt. An agent in another role, whose caller has gone
    on, has its thread again."""
    server = Server()
    messages = prompted("You code.", "Count all ships.")
    threads = []
    for call_id, task in ((CALL_ID, SHORT_TASK), (CALL_ID[::-1], "Count the gulls of the north.")):
        call = {"id": call_id, "function": {"name": "spawn", "arguments": json.dumps({"message": task})}}
        ask(server, messages, tool_calls=[call])
        systems = ("You code.", "You code.", "You search.", "You search.")
        threads += [server.send(prompted(system, task)).identity.thread_id for system in systems]
        result = {"role": "tool", "tool_call_id": call_id, "content": "Seven."}
        messages = [*messages, {"role": "assistant", "tool_calls": [call]}, result]
    assert threads[:4] == ["agent-1", "agent-2", "agent-3", "agent-4"]
    assert threads[4:] == ["agent-5", "agent-6", "agent-3", "agent-4"]
    assert server.send(messages).identity.thread_id is None


def test_an_agent_that_starts_before_its_answer_has_ended_is_in_the_program() -> None:
    """Claude Code calls a tool as soon as the model has written that call, while it writes the next one."""
    server = Server()
    placed = server.send(prompted("You delegate.", "Count all ships."))
    answer = agents_started("Count the ships in the north.")
    part = items_of_answer({"choices": [{"message": answer}]})
    server.lineage.answered(placed, part, "-", None, is_part=True)
    assert server.call(prompted("You search.", "Count the ships in the north."), "b") == placed.identity.program_id


def test_a_conversation_goes_on_although_another_agent_of_the_program_has_its_answer() -> None:
    """Qwen Code asks itself what is worth remembering, in another role, and begins anew with the state of the folder.
    If the same agent has gone on from a single exchange, then it is an example."""
    memory = "What you know of your user stands in these files. " * 30
    extractor, coder = (each + memory for each in ("You extract. " * 40, "You code. " * 90))
    for system, is_program in ((extractor, True), (coder, False)):
        server = Server()
        first = server.call(prompted(coder, "Folder: empty", "Got it.", "Say hi."), "Hi")
        assert server.call(prompted(system, "Folder: empty", "Got it.", "Say hi.", "Hi", "Remember?"), "No") == first
        resumed = prompted(coder, "Folder: notes", "Got it.", "Say hi.", "Hi", "Thank you.")
        assert (server.call(resumed, "Bye") == first) is is_program


def test_an_agent_that_is_handed_an_answer_is_in_the_program() -> None:
    """A critic gets the writer's text as a user's message."""
    server = Server()
    first = server.call(prompted("You write.", "A poem, please."), TASK)
    assert server.call(prompted("You judge.", "A poem, please.", TASK)[:2], "b") != first
    critic = [*prompted("You judge.", "A poem, please."), {"role": "user", "name": "writer", "content": TASK}]
    assert server.call(critic, "c") == first


def test_a_text_that_the_model_was_told_is_no_evidence() -> None:
    """Many users ask the same, and a model that hands the question on has not made it its program's own."""
    server = Server()
    first = delegate(server, prompted("You delegate.", f"Please: {TASK}"), TASK)
    assert server.call(prompted("You delegate.", TASK), "b") != first


def test_a_text_that_several_models_wrote_is_no_evidence() -> None:
    """It may be handed on by each of them."""
    server = Server()
    known = {delegate(server, prompted("You delegate.", text), TASK) for text in ("a", "b")}
    assert server.call(prompted("You search.", TASK), "b") not in known


SHORT_TASK = "Find out how big the city of Rome is."
CALL_ID = "chatcmpl-tool-1f2e3d4c5b6a7988"


def test_a_short_task_is_in_the_program_until_its_call_returns() -> None:
    """Anybody may ask the same later."""
    server = Server()
    first = delegate(server, prompted("You delegate.", "a"), SHORT_TASK, CALL_ID)
    assert server.call(prompted("You search.", SHORT_TASK), "b") == first
    assert server.call([*prompted("You delegate.", "a"), *returned(CALL_ID)], "c") == first
    assert server.call(prompted("You search.", SHORT_TASK), "b") != first


@pytest.mark.parametrize("body_bytes", [0, 1 << 20])
def test_a_short_task_that_the_model_was_told_is_no_evidence(body_bytes: int) -> None:
    """Whether the prompt is searched as one text, or as a large one is, part by part."""
    server = Server()
    told = [*prompted("You delegate.", f"Please: {SHORT_TASK}"), *said("a", "b")[::-1]]
    first = delegate(server, told, SHORT_TASK, CALL_ID, body_bytes=body_bytes)
    assert server.call(prompted("You search.", SHORT_TASK), "b") != first


@pytest.mark.parametrize("body_bytes", [0, 1 << 20])
def test_a_short_task_of_a_long_prompt_is_in_the_program(body_bytes: int) -> None:
    """The model has made it up."""
    server = Server()
    first = delegate(server, prompted("You delegate.", "a"), SHORT_TASK, CALL_ID, body_bytes=body_bytes)
    assert server.call(prompted("You search.", SHORT_TASK), "b") == first


def test_a_short_task_of_two_programs_is_no_evidence() -> None:
    """It may be handed on by each of them. Words of one or two syllables are none either."""
    server = Server()
    known = {delegate(server, prompted("You delegate.", text), SHORT_TASK, f"{CALL_ID}{text}") for text in "ab"}
    assert server.call(prompted("You search.", SHORT_TASK), "b") not in known
    first = delegate(server, prompted("You delegate.", "c"), "Go on.", CALL_ID)
    assert server.call(prompted("You search.", "Go on."), "b") != first


def test_a_text_of_a_program_that_has_ended_is_no_evidence() -> None:
    """Somebody has kept it, and asks about it later."""
    ended: set[str] = set()
    server = Server(is_open=lambda program_id: program_id not in ended)
    first = server.call(prompted("You write.", "A poem, please."), TASK)
    assert server.call(prompted("You judge.", TASK), "b") == first
    ended.add(first)
    assert server.call(prompted("You count.", TASK), "b") != first


def returned(call_id: str, result: str = "It rains.", *, text: str | None = None, with_id: bool = True) -> Any:
    """A tool call and its result in a history."""
    call = {"id": call_id if with_id else "x", "function": {"name": "weather", "arguments": "{}"}}
    return [
        {"role": "assistant", "content": text, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": result},
    ]


def asked_for_tools(server: Server, messages: Messages, *call_ids: str) -> str:
    """A call that the model answers by a text and calls of a tool."""
    calls = [{"id": call_id, "function": {"name": "weather", "arguments": "{}"}} for call_id in call_ids]
    return ask(server, messages, content="I look it up.", tool_calls=calls)


def test_a_tool_call_that_comes_back_is_its_programs() -> None:
    """Whatever became of the text beside it, of the system prompt, and of the messages before."""
    for history in (
        [*said("a"), *returned(CALL_ID)],
        [*prompted("another", "summary", "Ok."), *returned(CALL_ID)],
        returned(CALL_ID)[1:],
    ):
        server = Server()
        first = asked_for_tools(server, said("a"), CALL_ID)
        assert server.call([*history, *said("go on")], "b") == first


def test_tool_calls_come_back_in_any_order() -> None:
    """Call, result, call, result; or the latter ones first."""
    other = f"{CALL_ID}00"
    for ids in ((CALL_ID, other), (other, CALL_ID)):
        server = Server()
        first = asked_for_tools(server, said("a"), CALL_ID, other)
        history = [*said("a"), *(each for call_id in ids for each in returned(call_id))]
        assert server.call(history, "b") == first


def test_an_id_of_several_programs_tells_nothing() -> None:
    """A model that counts its calls gives the same ids to all."""
    server = Server()
    known = {asked_for_tools(server, said(text), CALL_ID) for text in "ab"}
    assert server.call([*said("x"), *returned(CALL_ID)], "c") not in known


def test_what_is_added_to_the_newest_question_is_not_in_the_history() -> None:
    """Retrieved documents and reminders stand before or behind it, or around it."""
    question, document = "What is the weather in Rome?", "Rome is the capital of Italy. " * 9
    for asked in (f"{document}{question}", f"{question}\n{document}", f"{document}\n{question}\n{document}"):
        server = Server()
        first = server.call(prompted("s", asked), "sunny")
        again = f"{document} And in Oslo, what is it there?"
        assert server.call(prompted("s", question, "sunny", again), "rain") == first
        history = (question, "sunny", "And in Oslo, what is it there?", "rain", "Which one is warmer?")
        assert server.call(prompted("s", *history), "c") == first
        assert server.call(prompted("s", "What is the weather in Bonn?", "sunny", again), "c") != first


def test_an_answer_that_nobody_gave_is_no_evidence_against() -> None:
    """Clients begin with a greeting of their own, and move such exchanges behind the history."""
    server = Server()
    question, answer = (
        "How do I sort a list of names by their length?",
        "Call sorted with len as its key: sorted(names, key=len).",
    )
    first = server.call(prompted("s", "hi", "Hello!", question), answer)
    moved = prompted("s", question, answer, "These are the files.", "Ok.", "And backwards?")
    assert server.call(moved, "reverse=True") == first


def test_examples_that_others_asked_merge_nothing() -> None:
    """The exchanges of two programs stand in a third one's prompt."""
    server = Server()
    one, two = server.call(prompted("s", "What is two and two?"), "4"), server.call(prompted("s", "And 3 + 3?"), "6")
    examples = ("What is two and two?", "4", "And 3 + 3?", "6")
    found = [server.call(prompted("s", *examples, f"And {number}?"), "x") for number in range(3)]
    assert len({one, two, *found}) == 5


def test_an_example_that_is_asked_later_merges_nothing() -> None:
    """All prompts have the same example, and then a client asks it, and gets the same answer."""
    server = Server()
    question, answer = "How far is it from here to the lighthouse?", "It is two hours on foot along the coast path."
    found = [server.call(prompted("s", question, answer, "And 0?"), "x")]
    found.append(server.call(prompted("s", question, answer, question), answer))
    found += [server.call(prompted("s", question, answer, f"And {number}?"), "x") for number in (1, 2)]
    assert len(set(found)) == 4


def test_a_first_exchange_that_a_program_has_gone_on_from_is_an_example() -> None:
    """It stands in another agent's prompt, and the program itself had another example or none before it. An answer that
    comes back behind the same prompt, or that was the latest one, is the program's."""
    question, answer = "How far is it from here to the lighthouse?", "It is two hours on foot along the coast path."
    example = ("When does the ferry to the island leave?", "At seven, from the pier behind the fish market." * 2)
    for examples in ((), example):
        server = Server()
        first = server.call(prompted("s", *examples, question), answer)
        assert server.call(prompted("s, now", *examples, question, answer, "Is it steep?"), "no") == first
        assert server.call(prompted("s, now", *examples, question, answer, "Is it steep?"), "no") == first
        others = [server.call(prompted("s.", question, answer, f"Where is quay {each}?"), "x") for each in range(2)]
        assert len({first, *others}) == 3


def test_a_first_exchange_without_the_examples_before_it_is_an_example() -> None:
    """Its program has not gone on from it yet, but it would send its own examples again."""
    server = Server()
    question, answer = "How far is it from here to the lighthouse?", "It is two hours on foot along the coast path."
    example = ("When does the ferry to the island leave?", "At seven, from the pier behind the fish market." * 2)
    first = server.call(prompted("s", *example, question), answer)
    assert server.call(prompted("s", question, answer, "Where is the post office?"), "x") != first
    assert server.call(prompted("s, later", *example, question, answer, "Is it steep?"), "no") == first


def test_an_example_that_is_like_an_answer_is_no_evidence() -> None:
    """Models begin their answers alike, and nobody asked the question of that answer here."""
    server = Server()
    polite = (
        "I can help you with that. Could you please tell me your name and the number of your booking, so that I find"
    )
    first = server.call(prompted("s", "I would like to move my trip to Naples to the autumn."), f"{polite} the trip?")
    example = ("My suitcase has not come with the train from Bern.", f"{polite} the suitcase?")
    assert server.call(prompted("s", *example, "When is lunch served?"), "x") != first
    moved = ("I would like to move my trip to Naples to the autumn. It is 10:05.", f"10:06 {polite} the trip?")
    assert server.call(prompted("s", *moved, "My name is Ann."), "x") == first


def test_the_same_answer_to_another_question_is_an_example() -> None:
    """Two agents may be answered with the same words. A question too short to tell anything does not tell that."""
    server = Server()
    same = "I can do that. Could you please tell me your name and the number of your booking, so that I find the trip?"
    first = server.call(prompted("s", "I would like to move my trip to Naples to the autumn."), same)
    example = ("My suitcase has not come with the train from Bern.", same)
    assert server.call(prompted("s", *example, "When is lunch served?"), "x") != first
    assert server.call(prompted("Another agent.", "Hm?", same, "Is this polite?"), "x") == first


def test_a_ledger_behind_the_users_question_is_no_example() -> None:
    """A team's manager, as Agent Framework's Magentic has it, begins anew with the user's question and what its model
    said of it, in a template that stands as an answer. The model was asked that question within a longer one."""
    server = Server()
    task = "Which ships are in the harbour of Naples?"
    facts = "The facts are that ships carry fish, that gulls follow ships, and that the market is near the harbour."
    first = server.call(prompted("Manage.", f"Here is a request.\n\n{task}\n\nPlease list the facts first."), facts)
    ledger = f"We work on this:\n{task}\n\nThe facts:\n{facts}\n\nThe plan:\nAsk the writer."
    assert server.call(prompted("Manage.", task, ledger, "Who speaks next?"), "writer") == first


def test_an_example_of_which_one_of_two_programs_is_known_is_no_evidence() -> None:
    """A client's example is asked later by two agents, and one of them adds to the question. It is neither's."""
    server = Server()
    question, answer = "How far is it from here to the lighthouse?", "It is two hours on foot along the coast path."
    found = [server.call(prompted("s", question, answer, "And 0?"), "x")]
    found += [server.call(prompted("s", f"{question}{more}"), answer) for more in ("", " Be brief.")]
    found.append(server.call(prompted("s, later", question, answer, "And 1?"), "x"))
    assert len(set(found)) == 4


def test_what_a_program_went_on_with_may_have_had_an_addition() -> None:
    """A reminder that is gone in the next request. The answer behind it tells that the program goes on."""
    server = Server()
    question, answer = "How far is it from here to the lighthouse?", "It is two hours on foot along the coast path." * 2
    first = server.call(prompted("s", question), answer)
    assert server.call(prompted("s", question, answer, "Yes.\n\nDo not forget: umbrella 5."), "Bring water.") == first
    later = (question, answer, "Yes.", "Bring water.", "And?\n\nDo not forget: umbrella 6.")
    assert server.call(prompted("s", *later), "x") == first


def test_an_example_that_stands_behind_another_ones_as_in_its_own_program_is_an_example() -> None:
    """The exchange before it is a third program's, and no second one of the program's own."""
    server = Server()
    example = ("When does the ferry to the island leave?", "At seven, from the pier behind the fish market." * 2)
    question, answer = "How far is it from here to the lighthouse?", "It is two hours on foot along the coast path."
    own = (
        "Which bus goes to the old harbour?",
        "Number seven, from the stop across the street." * 2,
        *example,
        question,
    )
    found = [server.call(prompted("s", *example[:1]), example[1]), server.call(prompted("s", *own), answer)]
    assert server.call(prompted("s", *own, answer, "Is it steep there?"), "no") == found[1]
    found.append(server.call(prompted("s", *example, question, answer, "Where is the post office?"), "x"))
    assert len(set(found)) == 3


def test_an_example_that_is_like_what_a_program_has_gone_on_from_is_no_evidence() -> None:
    """Its question is that program's with an addition, but the program was told something else behind the answer."""
    server = Server()
    question = "My train to Naples has been late for hours. Can you tell me what is going on?"
    same = "I recommend that you look at the timetable on the website, or ask the people at the counter in the station."
    first = server.call(prompted("s", question), f"I do not know. {same}")
    assert server.call(prompted("s", question, f"I do not know. {same}", "Who pays for my hotel?"), "no") == first
    example = (f"Hello. {question}", f"Nobody has told me anything. {same}")
    assert server.call(prompted("s", *example, "When is lunch served on Sundays?"), "x") != first


def test_an_example_quoted_as_text_is_no_evidence_once_its_program_has_gone_on() -> None:
    """The end of its question stands before it, whatever the program's client had put at the beginning. A part of an
    answer is as little evidence then. What the client quotes with what the program went on with is the program's."""
    question = "How far is it from here to the lighthouse, and is there a road?"
    answer = "There is none. It is two hours on foot along the coast path, or one hour by boat if the sea is calm."
    asked, later = f"Be brief, and say how long it takes. {question}", "And is there a bus that goes there?"
    exchange = f"user: {question}\nassistant: {answer}"
    server = Server()
    first = server.call(prompted("s", asked), answer)
    assert server.call(prompted("s", asked, answer, later), "No.") == first
    assert server.call(prompted("s", f"Examples:\n{exchange}\nNow:\nWhere is the post office?"), "x") != first
    assert server.call(prompted(f"Examples:\n{exchange}", "Where is the station?"), "x") != first
    assert server.call(prompted("Judge.", f"They said: {answer[:83]}"), "x") != first
    assert server.call(prompted("Judge.", f"{exchange}\nuser: {later}"), "x") == first


def test_a_short_answer_that_only_one_model_gave_is_found_in_a_template() -> None:
    """As where an agent of a crew gets its own task and the answer of the one before it."""
    asked, answer = prompted("Report.", "Find the weather in Rome."), "Warm in Rome, and no wind."
    edit = prompted("Edit.", f"Make it shorter.\n\nThe context you're working with:\n{answer}\n\nBegin!")
    server = Server()
    first = server.call(asked, answer)
    assert server.call(edit, "Warm.") == first


def test_a_short_answer_says_nothing_if_others_have_it() -> None:
    """Another model gave it, or the model has it from its prompt. With the question before it, it may be an example."""
    asked, answer = prompted("Report.", "Find the weather in Rome."), "Warm in Rome, and no wind."
    edit = prompted("Edit.", f"Make it shorter.\n\nThe context you're working with:\n{answer}\n\nBegin!")
    server = Server()
    known = {server.call(each, answer) for each in (prompted("s", "How windy is it?"), asked)}
    assert server.call(edit, "Warm.") not in known
    server = Server()
    first = server.call(prompted("s", f"Say this again: {answer}"), answer)
    assert server.call(edit, "Warm.") != first
    server = Server()
    first = server.call(asked, answer)
    example = f"An example:\nuser: Find the weather in Rome.\nassistant: {answer}\nNow find it in Oslo."
    assert server.call(prompted("Report.", example), "Cold.") != first


def test_a_short_answer_is_found_in_an_answer_that_nobody_gave() -> None:
    """As where an agent gets its plan as its own answer, inside a template. A line of the task must stand before it:
    the ends of answers that another server gave are the same for many."""
    plan = "Ask the weather tool, and report."
    asked = said("Here is your task:\n```\nHow is the weather in Rome?\n```\nWrite a plan for it.")
    for task, joins in (("New task:\nHow is the weather in Rome?", True), ("New task:\nHow is the train?", False)):
        server = Server()
        first = server.call(asked, plan)
        step = said(task, f"This is the plan that I will follow:\n{plan}", "Now go on.")
        assert (server.call(step, "It is warm.") == first) is joins
    server = Server()
    first, template = server.call(asked, plan), f"This is the plan that I will follow:\n{plan}"
    server.call(said("Which plan do you follow?"), template)
    step = said("New task:\nHow is the weather in Rome?", template, "Now go on.")
    assert server.call(step, "It is warm.") != first  # a model gave that answer, to another question


def test_a_line_of_an_answer_is_found_in_an_answer_that_nobody_gave() -> None:
    """As where an agent that plans its next steps gets its calls without what it thought. A line of the task must stand
    before it. As a line of its own it may be another model's, as in an example, and so it may if several gave it."""
    step, ferry = "Thought: look.\n<code>\nprint(tide(port='Bergen'))\n</code>", "New task:\nWhen can the ferry leave?"
    plan = ("Calling tools: [{'arguments': \"print(tide(port='Bergen'))\"}]", "Observation: ebb. Now plan again.")
    server = Server()
    first = server.call(prompted("You write code.", ferry, "I look first.", "Now go on."), step)
    assert server.call(prompted("You plan.", "New task:\nWhere is the mill?", *plan), "x") != first
    assert server.call(prompted("You plan.", ferry, "print(tide(port='Bergen'))", plan[1]), "x") != first
    assert server.call(prompted("You plan.", ferry, *plan), "Wait for the flood.") == first
    twin = server.call(prompted("You write code.", "Code for a port, please."), step)
    assert twin != first
    assert server.call(prompted("You plan again.", ferry, *plan), "Wait for the flood.") not in (first, twin)


def test_a_short_answer_before_its_question_at_the_end_is_no_example() -> None:
    """As where a question is written anew for a search, and the agent that answers gets both. In an example the answer
    stands behind the question."""
    asked, anew = "When did the ferries leave Bergen?", "ferries Bergen departure times"
    results = f"Results for '{anew}':\n1. A timetable of 1907\n\nQuestion: {asked}"
    example = f"{asked}\n{anew}\nAnd when did the trains leave?"
    for found, joins in ((results, True), (example, False), (f"{results}\n{example}", False)):
        server = Server()
        first = server.call(prompted("Write the question for a search engine.", asked), anew)
        assert (server.call(prompted("Answer from the documents.", found), "At dawn.") == first) is joins
    server = Server()
    known = {server.call(prompted(system, asked), anew) for system in ("Write it anew.", "Write the question anew.")}
    assert server.call(prompted("Answer from the documents.", results), "At dawn.") not in known


def test_an_agent_gets_its_question_with_its_latest_answer_alone() -> None:
    """As where a client sends an answer that is not valid back, without the attempts before it. Under another system
    prompt it may be an example, and an answer that several were given is nobody's."""
    asked, again = "When does the ferry leave?", "That is no JSON. Again, please."
    server = Server()
    first = server.call(prompted("JSON only.", asked), "At six.")
    assert server.call(prompted("JSON only.", asked, "At six.", again), "At 6:00.") == first
    assert server.call(prompted("You judge.", asked, "At 6:00.", again), "x") != first
    assert server.call(prompted("JSON only.", asked, "At 6:00.", again), "6") == first
    server = Server()
    known = {server.call(prompted("JSON only.", asked), each) for each in ("At six.", "At seven.")}
    for each in ("At six.", "At seven."):
        known.add(server.call(prompted("JSON only.", asked, each, again), "At 6:00."))
    assert server.call(prompted("JSON only.", asked, "At 6:00.", again), "6") not in known


def test_an_answer_of_which_a_client_keeps_a_part_is_in_the_program() -> None:
    """Such as the code in it. It follows the messages to which it was given."""
    asked, code = prompted("You write code.", "What is the mean of x?"), "print(df.x.mean())"
    server = Server()
    first = server.call(asked, f"I look.\n```python\n{code}\n```\nThen I tell you.")
    assert server.call([*asked, *said("x", code, "4.2")[1:]], "It is 4.2.") == first
    assert server.call([*asked, *said("x", "print(df.y.mean())", "4.2")[1:]], "It is 4.2.") != first


def test_a_short_answer_at_the_end_behind_its_question_is_in_the_program() -> None:
    """As where it is to be judged, or gets a title. Behind an example stands another question."""
    asked, answer = "What is the capital of Australia?", "Canberra."
    chat = f"<chat>\nUSER: {asked}\nASSISTANT: {answer}\n</chat>"
    server = Server()
    first = server.call(prompted("s", asked), answer)
    assert server.call(prompted("Be brief.", f"{chat}\nAnd what is that of New Zealand?"), "Wellington.") != first
    assert server.call(prompted("Be brief.", f"Is it right?\n{chat}".replace(asked, "What is it?")), "No.") != first
    assert server.call(prompted("Find a title.", chat), "Capitals") == first
    assert server.call(prompted("Judge.", f"Question: {asked}\nAnswer: {answer}"), "It is right.") == first
    server = Server()
    known = {server.call(prompted(system, asked), answer) for system in ("Be brief.", "Be polite, and say it briefly.")}
    assert server.call(prompted("Find a title.", chat), "Capitals") not in known


def test_two_exchanges_in_a_text_are_in_the_program_whatever_stands_behind_them() -> None:
    """As where a short conversation gets a title, a summary or a verdict, with the instruction at the end. One exchange
    may be an example, and so may two if another program had one of them."""
    server, turns = (
        Server(),
        ("What is the capital of Australia?", "Canberra.", "And that of New Zealand?", "Oh, dear."),
    )
    first = server.call(prompted("s", turns[0]), turns[1])
    assert server.call(prompted("s", *turns[:3]), turns[3]) == first

    def summary(count: int) -> Messages:
        lines = (f"{('Human', 'AI')[at % 2]}: {turn}" for at, turn in enumerate(turns[:count]))
        return prompted(
            "You sum up.", "\n".join(["Sum this up.", *lines, "Answer with the summary, and nothing else."])
        )

    assert server.call(summary(2), "Capitals.") != first
    assert server.call(summary(4), "Capitals.") == first
    assert server.call(prompted("t", turns[0]), turns[1]) != first
    assert server.call(summary(4), "Capitals.") != first


@pytest.mark.parametrize(("count", "is_known"), [(500, True), (5_000, False)])
def test_short_answers_are_not_looked_for_in_long_requests(count: int, is_known: bool) -> None:
    """That takes too long. Behind 500 words the answer is found, and behind 5,000 words it is not."""
    server = Server()
    first = server.call(prompted("You search.", "How long was the bridge?"), "It was all of 412 metres long.")
    words = " ".join(f"word{number}" for number in range(count))
    assert (server.call(prompted("You write.", f"{words}\nIt was all of 412 metres long."), "x") == first) == is_known


def test_a_short_answer_before_the_latest_is_found_in_a_template() -> None:
    """As where an outline is checked first, and then written out. If another model gave it too, it tells nothing."""
    outline = "Ships, eels and gulls."
    server = Server()
    first = server.call(prompted("Write an outline.", "A book on boats."), outline)
    assert server.call(prompted("Is this good?", f"An outline: {outline}"), "It is good.") == first
    assert server.call(prompted("Write it out.", f"By this: {outline}\nBegin!"), "Ships come first.") == first
    known = {first, server.call(prompted("Write another outline.", "A book on ports."), outline)}
    assert server.call(prompted("Write it out again.", f"By this: {outline}\nBegin!"), "x") not in known


@pytest.mark.parametrize(
    "task", ["Find jokes on gulls", "\u67e5\u4e00\u67e5\u5929\u6c14\u5427"], ids=["words", "chinese"]
)
def test_a_short_task_of_a_tool_call_is_in_the_program(task: str) -> None:
    """Also behind a label, as long as the call has not returned. Its length counts in bytes, because a Chinese
    character says as much as a few letters."""
    for wrapped in (task, f"Please do this: {task}"):
        server = Server()
        first = delegate(server, prompted("You are the chief.", "Please help me with this."), task)
        assert server.call(prompted("You are the helper.", wrapped), "x") == first


def test_an_agent_goes_on_from_what_another_one_of_its_program_answered() -> None:
    """As where a summary stands for the conversation, with the question to which it was given. An exchange that the
    program has gone on from is an example, and so is one for an agent that the program does not have."""
    talk = ("Where is the lighthouse?", "It is north of here.", "And the mill?")
    summary = ("Sum up.", "They look for a lighthouse.", "And the ferry?")
    server = Server()
    first = server.call(prompted("You are the guide.", *talk[:1]), talk[1])
    assert server.call(prompted("You are the guide.", *talk), "By the river.") == first
    assert server.call([*prompted("Make it short.", *talk), *said("Sum up.")], summary[1]) == first
    assert server.call(prompted("Sell boats to them, with a smile.", *summary), "x") != first
    assert server.call(prompted("You are the guide.", *summary), "At the quay.") == first
    assert server.call(prompted("You are the guide.", *summary[:2], "What is new?"), "x") != first


def test_a_word_behind_the_task_is_in_the_program() -> None:
    """However short the task and the answer are, if two runs with that task were answered in other words. If both said
    the same, nobody can say whose it is; nor is it an answer if the model had it as its own."""
    task = "Shall the boat sail now?"
    server = Server()
    one, two = (server.call(prompted("You decide.", task), each) for each in ("Yes.", "No."))
    assert server.call(prompted("Find a reason against it.", task, "Yes.", "Is that right?"), "Why?") not in (one, two)
    assert server.call(prompted("Find a reason against it.", task) + said("Yes."), "Why?") == one
    assert server.call(prompted("Find a reason against it.", task) + said("No"), "Why?") == two
    assert server.call(prompted("Find a reason against it.", task) + said("Yes, it may."), "Why?") not in (one, two)
    server = Server()
    known = {server.call(prompted("You decide.", task), "42") for _run in range(2)}
    assert server.call(prompted("Find a reason against it.", task) + said("42"), "Why?") not in known


def test_another_agent_gets_the_task_with_an_answer_of_the_program() -> None:
    """A judge gets the conversation, a writer only its latest draft; a summary stands for what was before it."""
    task, drafts, server = (
        "Write an outline on eels.",
        ("Eels: two parts, no gills.", "Eels: gills and two fins."),
        Server(),
    )
    first = server.call(prompted("Write.", task), drafts[0])
    judge = [*prompted("Judge.", task), {"role": "assistant", "content": drafts[0]}]
    assert server.call(judge, "More on gills.") == first
    assert server.call(prompted("Write.", task, drafts[0], "More on gills."), drafts[1]) == first
    assert server.call(prompted("Sum up.", task, drafts[1], "Sum up."), "An outline on eels is written.") == first
    summed = [*prompted("Write."), {"role": "assistant", "content": "An outline on eels is written."}, *said("Go on.")]
    assert server.call(summed, "Eels: fins.") == first
    assert server.call(prompted("s", "What is in the sea?", drafts[0], "Which?"), "x") != first


def test_the_task_says_nothing_with_an_answer_of_a_word() -> None:
    """As it is given to many: another agent may have been asked the same first."""
    server = Server()
    first = server.call(prompted("s", "Book the flight to Oslo."), "Done.")
    assert server.call(prompted("t", "Book the flight to Oslo.", "Done.", "And a hotel in Bergen."), "Done.") != first


def test_canned_answers_hide_no_short_answer_in_a_users_message() -> None:
    """As where Aider's editor gets what its architect said, behind exchanges that no model had."""
    server = Server()
    first = server.call(prompted("Architect.", "Make the bell ring twice."), "Call ring() twice in bell.py.")
    edit = prompted("Edit.", "Trust these files: bell.py", "Ok.", "Call ring() twice in bell.py.\n\nAlways edit.")
    assert server.call(edit, "It is done.") == first


def test_an_answer_is_found_wherever_it_stands() -> None:
    """In a template, behind a name, cut, split, or in a system prompt. Quotes and line breaks may have changed."""
    text = f"{TASK}\nThe figures must be of this year."
    quoted = json.dumps(text)
    for messages in (
        prompted("You choose.", f"This was said:\nuser: hi\nwriter: {text}\nWho speaks next?"),
        prompted("You judge.", f"writer: {text}"),
        prompted("You judge.", f"Arguments: {quoted}"),
        prompted("You judge.", text[:95]),
        prompted("You judge.", f"> {text}".replace("\n", "\n> ")),
        prompted(f"You judge this: {text}", "Go on."),
        prompted("You judge.", "hi", text, "Is this right?"),
        [*said("hi"), *returned("y", f"The agent said: {text}")],
    ):
        server = Server()
        first = server.call(prompted("You write.", "A task, please."), text)
        assert server.call(messages, "b") == first, messages


def test_a_text_that_others_were_told_before_is_no_evidence() -> None:
    """A model that quotes what many have, such as a document, has not made it its program's own."""
    server = Server()
    server.call(prompted("s", f"Document: {TASK}", "ok", "x"), "y")
    first = server.call(prompted("You write.", "A task, please."), TASK)
    assert server.call(prompted("You judge.", f"Document: {TASK}"), "b") != first


def test_a_template_that_grows_is_one_program() -> None:
    """All is in one message, with short answers. A second agent with the same task is another program."""
    server = Server()

    def template(*steps: str) -> Messages:
        return prompted(
            "s", "You have tools.\nQuestion: who was born in Ulm in 1879?\n" + "\n".join(steps) + "\nBegin!"
        )

    first = server.call(template(), "look up Ulm")
    assert server.call(template("look up Ulm", "Ulm is a city."), "look up 1879") == first
    second = server.call(template(), "look up Ulm")
    assert second != first
    assert server.call(template("look up Ulm", "Ulm is a city."), "look up 1879") not in (first, second)


def test_an_answer_that_was_cut_at_its_end_stays() -> None:
    """Replays shorten answers to the tokens that were recorded, and a voice that was interrupted ends with a dash."""
    for end in ("", "…", " —"):
        server = Server()
        first = server.call(prompted("s", "a"), ANSWER)
        assert server.call(prompted("s", "a", ANSWER[:25] + end, "b"), "c") == first


def test_a_step_of_a_plan_is_in_the_program() -> None:
    """An agent gets a whole line of what the model wrote, or a text of its JSON, and nothing else."""
    steps = ["Look up when the boats came back to Rome today.", "Write a whole sentence about all of the boats."]
    for plan in (f"1. {steps[0]}\n2. {steps[1]}", json.dumps({"steps": steps})):
        server = Server()
        first = server.call(prompted("You plan.", "a"), plan)
        assert server.call(prompted("You do one thing.", steps[0][:-1]), "b") != first
        assert {server.call(prompted("You do one thing.", step), step[:9]) for step in steps} == {first}
    server = Server()
    found = [server.call(prompted("You plan.", text), steps[0]) for text in "ab"]
    assert server.call(prompted("You do one thing.", steps[0]), "b") not in found
    server = Server()
    first = server.call(prompted("You plan.", f"Say again: {steps[0]}"), steps[0])
    assert server.call(prompted("You do one thing.", steps[0]), "b") != first


@pytest.mark.parametrize("plan", ["1. {}\n2. {}", '{{"steps": ["{}", "{}"]}}', "Here it is:\n- {}\n* {}"])
def test_a_step_of_a_plan_may_stand_in_a_template(plan: str) -> None:
    """Also if it is too short to be found wherever it stands."""
    steps = "Look up when the boats came to Rome.", "Write a sentence about the boats."
    asked = prompted("You plan.", "Tell me about the boats of Rome, please.")
    server = Server()
    first = server.call(asked, plan.format(*steps))
    found = [server.call(prompted("Do it.", f"Step: {step}\nSo far: nothing"), step[:9]) for step in steps]
    assert found == [first, first]
    assert server.call(prompted("Do it.", f"Now:\n{steps[1]}\nGo on."), "In May.") == first


@pytest.mark.parametrize(
    "prompt", ["Write one paragraph about: {}", "写一段\uff1a{}", "Write a joke about {}", "Topic: {}\nGo on.", "{}"]
)
def test_a_line_of_a_list_without_marks_may_stand_in_a_template(prompt: str) -> None:
    """Short lines that follow each other are a list, and no letter or code. A line is found behind a label, or at the
    end of the only line."""
    one, two = "Of the boats that came to Rome again.", "Of the men who had built them all."
    asked = prompted("Name some topics, one a line.", "Tell me about the boats of Rome, please.")
    server = Server()
    first = server.call(asked, f"{one}\n{two}")
    assert [server.call(said(prompt.format(each)), each[7:12]) for each in (one, two)] == [first, first]
    for other in (
        f"Dear Ann,\n{one}\n{two}",
        f"{one}\n\n{two}",
        f"{one}\nsay(two)",
        f"{one}\n{two * 5}",
        f"{one}\nx = 1",
    ):
        server = Server()
        first = server.call(asked, other)
        assert server.call(said(prompt.format(one)), "b") != first, other
    server = Server()
    found = [server.call(prompted(str(number), f"What is it about? {number}"), f"{one}\n{two}") for number in (1, 2)]
    assert server.call(said(prompt.format(one)), "b") not in found


def test_what_an_agent_that_answers_in_code_passes_on_is_in_the_program() -> None:
    """In several words, inside a template. Alone it may be another user's question. Other code has such words, too."""
    asked = prompted("You answer in code.", "How many people live in the land of Ann?")
    task = "You are the web agent.\nTask:\nPeople of Peru in 1990\nBe brief."
    for argument in ("'People of Peru in 1990'", 'task="People of Peru in 1990"'):
        server = Server()
        first = server.call(asked, f"I ask.\n<code>\nprint(web({argument}))\n</code>")
        assert server.call(prompted("s", "People of Peru in 1990"), "b") != first
        assert server.call(prompted("You search.", task), "It was a lot.") == first
    for answer in ("<code>\nweb('PeopleOfPeruIn1990')\n</code>", "Run web('People of Peru in 1990')."):
        server = Server()
        first = server.call(asked, answer)
        assert server.call(prompted("You search.", task.replace(" of P", "OfP")), "b") != first
        assert server.call(prompted("You search.", task), "b") != first


def test_a_field_of_dspy_is_found_behind_the_mark_of_a_field() -> None:
    """It may be too short to be found elsewhere, and then it is no evidence there. Nor is what the model was told."""
    end = "Respond with the corresponding output fields, and then end with the marker for `[[ ## completed ## ]]`."
    query, note = "ferries of Rome in May", "It leaves Ostia at nine."
    answer = "[[ ## reasoning ## ]]\nI look.\n\n[[ ## {} ## ]]\n{}\n\n[[ ## completed ## ]]"

    def asked(**fields: str) -> Messages:
        texts = (f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in fields.items())
        return prompted(" ".join(fields), "".join(texts) + end)

    server = Server()
    first = server.call(asked(question="When does it leave?", notes="[]"), answer.format("query", query))
    assert server.call(prompted("s", f"Tell me of {query}, please."), "b") != first
    assert server.call(asked(text=f"Of the {query}"), "b") != first
    assert server.call(asked(context="Nine.", query=query), answer.format("note", note)) == first
    assert server.call(asked(question="When does it leave?", notes=f'["{note}"]'), answer.format("query", "x")) == first
    server = Server()
    first = server.call(asked(question=f"What are the {query}?"), answer.format("query", query))
    assert server.call(asked(query=query), "b") != first


def test_a_sub_question_is_in_the_program_whatever_stands_behind_the_question() -> None:
    """The prompt may end with a mark, such as where to answer: what counts is the last line that says something. A text
    that another program's model wrote, too, is nobody's, also if that one had been told it."""
    asked = "<Question>\nCompare the ferries of 1901 and 1903.\n<Output>\n"
    split = json.dumps({"items": [{"q": f"When did the ferry of {year} leave?"} for year in (1901, 1903)]})
    query = "Some context.\nAnswer the query.\nQuery: When did the ferry of 1903 leave?\nAnswer: "
    server = Server()
    other = server.send(said(f"Say this again: {split}"))
    first = server.call(said(asked), split)
    assert server.call(prompted("You answer.", f"Compare the ferries of 1901 and 1903.\n{query}"), "x") != first
    assert server.call(prompted("You answer.", query), "At nine.") == first
    server.answer(other, split)
    assert server.call(prompted("You answer again.", query), "At nine.") != first


def test_a_step_of_a_plan_in_a_template_may_be_no_evidence() -> None:
    """As where it stands in an example or in a list, or where several programs or nobody's question explain it."""
    step = "Look up when the boats came to Rome."
    plan, question = f"1. {step}\n2. Write about them.", "Tell me about the boats of Rome, please."
    server = Server()
    first = server.call(prompted("You plan.", question), plan)
    assert server.call(prompted("s", f"An example:\n{question}\nStep: {step}\nNow of Oslo."), "a") != first
    assert server.call(prompted("s", f"What is this?\n1. {step}"), "b") != first
    assert server.call(prompted("s", f"Step: {step}"), "d") == first
    server.call(prompted("You plan.", "How did the boats come to Rome?"), plan)
    assert server.call(prompted("t", f"Step: {step}"), "e") != first
    server = Server()
    first = server.call(prompted("You plan.", "Boats?"), plan)
    assert server.call(prompted("s", f"Step: {step}"), "f") != first


def test_a_draft_that_was_mended_is_found_in_a_template() -> None:
    """Most of it is the earlier draft's, and what was said about that does not come back."""
    server, asked = Server(), prompted("You write.", "Write an essay on moss.")
    drafts = [f"Moss is green, draft {n}; it likes shade and rain, and it has no roots, only threads." for n in "123"]
    programs = [server.call(asked, drafts[0])]
    for before, draft in pairwise(drafts):
        complaint = f"{draft[15:22]} is too short, and where are the spores?"
        programs.append(server.call(prompted("You grade.", f"Grade this ({before}) from one to ten."), complaint))
        programs.append(server.call([*asked, *said("", before, complaint)[1:]], draft))
    programs.append(server.call(prompted("You grade.", f"Grade this ({drafts[-1]}) from one to ten."), "Ten."))
    assert set(programs) == {programs[0]}


def test_an_answer_that_is_to_be_judged_stands_at_the_end() -> None:
    """However short it is. Once its program has gone on, or if two were given it, nobody can say whose it is."""
    server, question = Server(), "Name a fish."
    judge = [*prompted("Judge.", question), {"role": "assistant", "content": "An eel."}]
    first = server.call(prompted("Write.", question), "An eel.")
    assert server.call([*judge[:-1], {"role": "assistant", "content": "An owl."}], "Bad.") != first
    assert server.call(judge, "Good.") == first
    assert server.call(prompted("Write.", question, "An eel.", "Another one."), "A cod.") == first
    other = [*prompted("Rate.", question), {"role": "assistant", "content": "An eel."}]
    assert server.call(other, "Good.") != first
    server = Server()
    known = {server.call(prompted(system, question), "An eel.") for system in ("Write.", "Say.")}
    assert server.call(judge, "Good.") not in known


def test_an_exchange_that_was_never_had_is_another_program() -> None:
    """The same answer to another question, or another answer to the same question, is no evidence."""
    server = Server()
    first = server.call(said("a"), "b")
    assert server.call(said("x", "b", "c"), "d") != first
    assert server.call(said("short", "ok", "a", "another", "c"), "d") != first
    assert server.call(said("short", "ok", "a", "b", "c"), "d", scope="k2") != first


def prompted(system: str, *texts: str) -> Messages:
    return [{"role": "system", "content": system}, *said(*texts)]


def test_a_system_prompt_may_change_from_call_to_call() -> None:
    """It has the time, for example. A sub-agent that quotes the conversation under another one stays, too."""
    server = Server()
    first = server.call(prompted("it is 10:01", "a"), "b")
    assert server.call(prompted("it is 10:02", "a", "b", "c"), "d") == first
    assert server.call(prompted("it is 10:03", "a", "b", "c", "d", "e"), "f") == first
    assert server.call(prompted("sum up", "a", "b", "c", "d", "e"), "g") == first


def test_another_system_prompt_before_any_answer_is_another_program() -> None:
    """The first words of a user say nothing about the program."""
    server = Server()
    assert server.call(prompted("for Ann", "hi"), "hello") != server.call(prompted("for Ben", "hi"), "hello")


def test_system_prompts_tell_programs_with_the_same_words_apart() -> None:
    """As long as they do not change. If one does, the request may be either's, and so it is neither's."""
    server = Server()
    ann = server.call(prompted("for Ann", "hi"), "hello")
    ben = server.call(prompted("for Ben", "hi"), "hello")
    assert server.call(prompted("for Ben", "hi", "hello", "c"), "d") == ben
    assert server.call(prompted("for Ann", "hi", "hello", "c"), "d") == ann
    assert server.call(prompted("for Eve", "hi", "hello", "c"), "d") not in (ann, ben)


def test_a_trace_counts_more_than_messages_under_another_system_prompt() -> None:
    """It is what the client says of the request."""
    server = Server()
    first = server.call(prompted("1", "a"), "b")
    traced = server.call(prompted("2", "x"), "y", trace_id="t")
    assert server.call(prompted("3", "a", "b", "c"), "d", trace_id="t") == traced != first


def test_keys_never_share_a_program() -> None:
    """The same conversation under another key is another program."""
    server = Server()
    first = server.call(said("a"), "b", scope="k1")
    second = server.send(said("a", "b", "c"), scope="k2").identity
    assert second.program_id != first
    assert second.source is Source.NEW


def test_each_choice_may_be_continued() -> None:
    """A request for several answers is continued from any of them."""
    server = Server()
    placed = server.send(said("a"))
    server.answer(placed, "b1", "b2")
    for text in ("b1", "b2"):
        assert server.send(said("a", text, "c")).identity.program_id == placed.identity.program_id


def test_a_response_is_continued_by_its_id() -> None:
    """Responses' `previous_response_id` needs no messages; an id of another key finds nothing."""
    server = Server()
    placed = server.send(said("a"))
    server.answer(placed, "b", response_id="resp_1")
    again = server.send(said("c"), previous_response_id="resp_1").identity
    assert (again.program_id, again.source) == (placed.identity.program_id, Source.PREVIOUS_RESPONSE)
    assert server.send(said("c"), scope="k2", previous_response_id="resp_1").identity.source is Source.NEW


def test_a_trace_joins_what_messages_do_not() -> None:
    """The calls of one trace are one program. A conversation goes on from trace to trace."""
    server = Server()
    first = server.call(said("a"), "b", trace_id="t1")
    assert server.call(said("x"), "y", trace_id="t1") == first
    assert server.call(said("a", "b", "c"), "d", trace_id="t2") == first
    assert server.call(said("z"), "z", trace_id="t3") != first


def test_a_known_correlation_id_joins() -> None:
    """AIPerf sends recorded answers instead of those that it got, and one id with all turns of a conversation."""
    server = Server()
    first = server.call(said("a"), "b", correlation_id="1")
    assert server.call(said("a", "recorded", "c"), "d", correlation_id="1") == first
    assert server.call(said("a"), "b", correlation_id="2") != first


def test_a_new_correlation_id_separates_nothing() -> None:
    """Many clients draw one for each request: then the messages decide, as if there were none."""
    server = Server()
    first = server.call(said("a"), "b", correlation_id="1")
    assert server.call(said("a", "b", "c"), "d", correlation_id="2") == first
    written = "Find out how many lighthouses there are on the coast, and write down the height of each of them."
    server.call(said("x"), written, correlation_id="3")
    assert server.send(said(written), correlation_id="4").identity.source is Source.LINEAGE


def test_the_key_of_a_prompt_cache_separates() -> None:
    """Programs with two keys are two, whatever they say; one key alone joins nothing."""
    server = Server()
    first = server.call(said("a"), "b", prompt_cache_key="1")
    assert server.call(said("a", "b", "c"), "d", prompt_cache_key="2") != first
    assert server.call(said("a", "b", "c"), "d", prompt_cache_key="1") == first
    assert server.call(said("q"), "r", prompt_cache_key="1") != first


def test_a_plain_completion_ends_with_its_request() -> None:
    """It has no messages, so nothing can continue it."""
    assert Server().lineage.place(Evidence(), {}, "-").identity.ends
    assert not Server().lineage.place(Evidence(correlation_id="1"), {}, "-").identity.ends


def test_memory_is_bounded() -> None:
    """The states, exchanges, traces, connections and responses used last are kept."""
    server = Server(most_states=10)
    for number in range(100):
        placed = server.send(said(str(number)), peer=str(number), trace_id=str(number))
        server.answer(placed, f"answer {number}, that is long enough", response_id=str(number))
    assert len(server.lineage) == 60
    assert server.send(said("99", "answer 99, that is long enough", "c")).identity.source is Source.LINEAGE
    assert server.send(said("0", "answer 0, that is long enough", "c")).identity.source is Source.NEW


def test_tasks_are_forgotten_with_all_that_finds_them() -> None:
    """The pieces of a long task lead to its program as long as the task is kept, and to nothing afterwards. An answer
    that comes later is no longer kept with it."""
    server = Server(most_states=10)
    late = server.send(said("the first task " + text_of_words(0)))
    for number in range(1, 50):
        server.call(said(f"task {number} " + text_of_words(number)), f"answer {number}, that is long enough")
    server.answer(late, "an answer that is long enough and that nobody remembers the task of")
    prompts = values(server.lineage._prompts)
    assert late.prompt is not None
    assert late.prompt.is_forgotten
    assert len(server.lineage._prompts) == sum(prompt.size() for prompt in prompts) <= 10
    assert {id(each) for group in server.lineage._asked._found.values() for each in group} == set(map(id, prompts))


def text_of_words(seed: int) -> str:
    return " ".join(f"w{seed}x{number * seed % 97}" for number in range(60))


def test_a_key_that_sends_much_forgets_its_own() -> None:
    """A flood of one key's conversations must not break those of another key."""
    server = Server(most_states=10)
    theirs = server.call(said("quiet"), "b", scope="quiet")
    for number in range(100):
        server.call(said(str(number)), f"b{number}", scope="loud")
    assert server.call(said("quiet", "b", "c"), "d", scope="quiet") == theirs
    assert len(server.lineage) == 30


def test_a_state_with_many_programs_counts_for_as_many() -> None:
    """Or a request for hundreds of answers, made hundreds of times, would take gigabytes. Forks count as well."""
    server = Server(most_states=100)
    for number in range(50):
        placed = server.send(prompted("s", "a"), peer=str(number))
        server.answer(placed, *(f"b{answer}" for answer in range(20)))
    for number in range(200):
        server.send(prompted("s", "a", "b19", f"c{number}"))
    states = values(server.lineage._states)
    assert sum(len(state.owners) for state in states) <= 100
    assert sum(len(state.prompts) for state in states) <= 100


def values(table: Any) -> list[Any]:
    return [value for of_scope in table._of_scope.values() for value in of_scope.values()]


class LineageMachine(RuleBasedStateMachine):
    """Programs with connections of their own talk at once. The naive model knows which program sent each request."""

    def __init__(self) -> None:
        super().__init__()
        self.server = Server()
        self.talks: list[Messages] = []
        self.found: list[set[str]] = []
        self.open: dict[int, Placed] = {}

    @rule(text=st.sampled_from("ab"))
    def begin(self, text: str) -> None:
        """A program asks its first question, perhaps the same as others."""
        self.talks.append(said(text))
        self.found.append(set())
        self._send(len(self.talks) - 1)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), text=st.sampled_from("xy"))
    def answer(self, data: st.DataObject, text: str) -> None:
        """A program gets its answer, perhaps the same as others."""
        number = data.draw(st.sampled_from(sorted(self.open)))
        self.server.answer(self.open.pop(number), text)
        self.talks[number].append({"role": "assistant", "content": text})

    @precondition(lambda self: len(self.open) < len(self.talks))
    @rule(data=st.data(), text=st.sampled_from("ab"))
    def go_on(self, data: st.DataObject, text: str) -> None:
        """A program asks its next question."""
        number = data.draw(st.sampled_from([each for each in range(len(self.talks)) if each not in self.open]))
        self.talks[number].append({"role": "user", "content": text})
        self._send(number)

    def _send(self, number: int) -> None:
        placed = self.server.send(self.talks[number], peer=str(number))
        self.open[number] = placed
        self.found[number].add(placed.identity.program_id)

    @invariant()
    def sizes_are_counted(self) -> None:
        """What a table counts is the size of what it holds."""
        lineage = self.server.lineage
        for table in (lineage._states, lineage._answers, lineage._prompts):
            assert len(table) == sum(each.size() for each in values(table))

    @invariant()
    def each_program_is_found(self) -> None:
        """No program is split, and no two are merged."""
        assert all(len(each) == 1 for each in self.found)
        assert len(set().union(*self.found)) == len(self.found)


TestLineageMachine = LineageMachine.TestCase
TestLineageMachine.settings = settings(max_examples=60, stateful_step_count=40)


TEAM_TASK = "Write about the ships of Rome."


def test_a_speaker_that_is_chosen_by_a_word_is_in_the_program() -> None:
    """It gets the user's task alone. The word is in its system prompt, or in its name."""
    server = Server()
    asked = f"These can speak: writer, editor.\n{TEAM_TASK}\nWho speaks next?"
    first = server.call(prompted("You choose.", asked), "Writer.")
    assert server.call(prompted("You are a writer of news.", TEAM_TASK), "b") == first
    assert server.call(prompted("You are a writer of news.", f"{TEAM_TASK} Now!"), "b") != first


@pytest.mark.parametrize("answer", ["Archive", "archive.", '{"next": "archive", "sure": true}'])
def test_an_agent_that_a_router_chose_by_a_word_gets_the_question_again(answer: str) -> None:
    """The word is in its system prompt. The question alone, or another agent's word, is no evidence."""
    route = prompted("Who is to answer? Say archive or repairs, and nothing else.", TEAM_TASK)
    server = Server()
    first = server.call(route, answer)
    assert server.call(prompted("You mend what is broken.", TEAM_TASK), "a") != first
    assert server.call(prompted("You work in the archive of a town.", "Write about the ships of Oslo."), "a") != first
    assert server.call(prompted("You work in the archive of a town.", TEAM_TASK), "a") == first


def test_the_same_choice_in_other_words_is_another_program() -> None:
    """Who compares two prompts asks the same questions under both. The second one has the other choices, too."""
    server = Server()
    found = [
        server.call(prompted("Does this sound nice? Say pleasant or hostile.", text), answer)
        for text, answer in ((TEAM_TASK, "pleasant"), ("Where are the ships of Rome?", "hostile"))
    ]
    assert server.call(prompted("Judge the tone: hostile, pleasant, unclear.", TEAM_TASK), "b") not in found
    assert (
        server.call(prompted("It is noon. Does this sound nice? Say pleasant or hostile.", TEAM_TASK), "c") not in found
    )


def test_a_task_alone_is_no_evidence() -> None:
    """Others ask the same: of another agent, with a word that was not said, or after the program has ended."""
    ended: set[str] = set()
    for system, is_ended in (("You read.", False), ("You are a writer.", True)):
        server = Server(is_open=lambda program_id: program_id not in ended)
        first = server.call(prompted("You choose.", f"Who is to {TEAM_TASK}?"), "writer")
        ended.update({first} if is_ended else ())
        assert server.call(prompted(system, TEAM_TASK), "b") != first


def test_a_context_that_all_requests_begin_with_is_no_task() -> None:
    """Two clients tell where they work, and then ask different questions, while the first one's tool runs."""
    call = {"id": CALL_ID, "function": {"name": "search", "arguments": "{}"}}
    context = "You are working in the folder /home/ann/ships."
    for answer in ({"content": None, "tool_calls": [call]}, {"content": "It was found."}):
        server = Server()
        first = ask(server, [*prompted("You can search.", context), *said("What is it?")], **answer)
        assert server.call([*prompted("You can search.", context), *said("Was it found. Is it?")], "b") != first
    server = Server()
    first = server.call(prompted("You choose.", f"{context}\nWho is to write?"), "writer")
    assert server.call([*prompted("You are a writer.", context), *said("Write about trains.")], "b") != first


def test_a_chosen_speaker_of_twins_is_in_neither_program() -> None:
    """Each of the two may have chosen it. When one has gone on, the next one is the other's."""
    server = Server()
    asked = prompted("You choose.", f"Who is to {TEAM_TASK}?")
    one, two = server.call(asked, "writer", peer="1"), server.call(asked, "writer", peer="2")
    assert server.call(prompted("You are a writer.", TEAM_TASK), "b") not in (one, two)
    assert server.call([*asked, *said("", "writer", "Again.")[1:]], "editor", peer="1") == one
    assert server.call(prompted("You are a writer.", TEAM_TASK), "b") == two


def test_a_task_that_a_tool_hands_on_without_a_text_is_in_the_program() -> None:
    """The next agent gets the task and a sentence of the client's own, which names it."""
    server = Server()
    call = {"id": CALL_ID, "function": {"name": "transfer_to_reporter", "arguments": "{}"}}
    first = ask(server, prompted("You receive.", TEAM_TASK), content=None, tool_calls=[call])
    handed = [*prompted("You know the news.", TEAM_TASK), *said("The Reporter takes over.")]
    assert server.call(prompted("You are the reporter.", TEAM_TASK), "b") != first
    assert server.call(handed, "b") == first


def test_a_short_answer_behind_its_question_is_in_the_program() -> None:
    """The next one of a team gets both. Another short answer to the same question is another program's."""
    server = Server()
    first = server.call(prompted("You write.", TEAM_TASK), "Ships carry fish.")
    others = [*prompted("You judge.", TEAM_TASK), *said("Ships carry wood.")]
    assert server.call(others, "b") != first
    behind = [*prompted("You judge.", TEAM_TASK), *said("writer: Ships carry fish.")]
    assert server.call(behind, "c") == first


def test_a_template_with_another_end_is_one_program() -> None:
    """A last call asks for a report of the steps. Short thoughts of two agents at once are the same."""
    server = Server()

    def template(city: str, *steps: str, end: str = "[[ next_thought ]]") -> Messages:
        question = f"[[ question ]]\nHow warm will it be in the city of {city} in the morning?"
        return prompted(
            f"Give {end}.", "\n".join([question, *steps, f"Answer with the field {end}, and nothing else."])
        )

    def step(city: str) -> tuple[str, ...]:
        return ("thought_0: look it up", f"observation_0: in {city} it is going to be warm, says the paper of the day.")

    server.call(template("Kyiv"), "x")  # so that the template is known
    known = [server.call(template(city), "[[ next_thought ]]\nlook it up") for city in ("Rome", "Oslo")]
    thought = "[[ next_thought ]]\nfinish now"
    assert [server.call(template(city, *step(city)), thought) for city in ("Oslo", "Rome")] == known[::-1]
    for city, program_id in zip(("Rome", "Oslo"), known, strict=True):
        last = template(city, *step(city), "thought_1: finish now", end="a report")
        assert server.call(last, f"warm in {city}") == program_id
    assert server.call(template("Bonn", *step("Bonn"), "thought_1: finish now", end="a report"), "x") not in known


WHICH = "I can help you with that. Could you please provide your user ID and the reservation ID of the flight?"


def test_a_task_that_is_nearly_the_same_is_no_evidence() -> None:
    """In a template, two users ask for the same in nearly the same words, and get the same answer."""
    server = Server()

    def template(task: str, *steps: str) -> Messages:
        return prompted("s", "\n".join(["You have tools.", f"Question: {task}", *steps, "Begin! Thought:"]))

    server.call(template("Hi! What is the weather?"), "x")  # so that the template is known
    tasks = (
        "Hi! I would like to change my flight reservation, please.",
        "Hi! I would like to change my flight reservation.",
    )
    one, two = (server.call(template(task), WHICH) for task in tasks)
    later = server.call(template(tasks[1], f"Thought: {WHICH}", "Question: My user ID is sara_silva_7557."), "y")
    assert one != two
    assert later != one


def test_a_task_of_two_agents_is_no_evidence() -> None:
    """They get the same task in a template, and the same answer. Their system prompts have the time."""
    server = Server()

    def template(time: str, *steps: str) -> Messages:
        return prompted(
            f"It is {time}.",
            "\n".join(["You have tools.", "Who was born in the city of Ulm in the year 1879?", *steps, "Begin!"]),
        )

    found = {server.call(template(f"{minute} past ten"), "look up Ulm") for minute in range(2)}
    later = [server.call(template(f"{minute} past ten", "look up Ulm", f"{minute}"), "x") for minute in (8, 9)]
    assert len(found | set(later)) == 4


def test_what_several_models_wrote_is_nobodys() -> None:
    """A program writes two texts that begin alike, and another program the second one."""
    welcome = "You're welcome! If you need any more assistance in the future, feel free to reach out to us."
    server = Server()
    one = server.call(said("a"), f"{welcome} Have a great trip to Seattle, and safe travels to all of you!")
    assert (
        server.call(
            said("a", f"{welcome} Have a great trip to Seattle, and safe travels to all of you!", "c"),
            f"{welcome} Bye!",
        )
        == one
    )
    assert server.call(said("b"), f"{welcome} Bye!") != one
    assert server.call(prompted("You judge.", f"Thanks.\nAnswer: {welcome} Bye!\nIs it right?"), "yes") != one


def test_ids_that_several_programs_were_given_hide_no_text() -> None:
    """Some models number their calls. All is in one message, as JSON; the answer's text still tells whose it is."""
    server = Server()
    call = {"id": "call_0000000001", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    texts = (
        "I will look for the flight of Ada in all airports of the country, and then for a hotel nearby.",
        "Bob has asked for the bill of last month, which I am going to find in the folder of the accounts.",
    )
    found = [ask(server, said(text[:40]), content=text, tool_calls=[call]) for text in texts]
    told = [json.dumps([{"role": "assistant", "content": text, "tool_calls": [call]}]) for text in texts]
    assert [server.call(prompted("s", each), "x") for each in told] == found


def test_a_client_may_keep_texts_alone() -> None:
    """Once a turn is over, its calls and their results are left out, and the answer is a word that all agents say."""
    server = Server()
    call = {"id": "chatcmpl-tool-{}", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    questions = [f"Find the file of student number {number}, please." for number in range(100)]
    found = []
    for number, question in enumerate(questions):
        calls = [{**call, "id": f"chatcmpl-tool-{number:016x}"}]
        found.append(ask(server, said(question), content=None, tool_calls=calls))
        result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "ok"}
        messages = [*said(question), {"role": "assistant", "content": None, "tool_calls": calls}, result]
        assert server.call(messages, "Done.") == found[-1]
    assert [server.call(said(each, "Done.", "And now?"), "x") for each in questions] == found
    assert server.call(said("Find the file of another student, please.", "Done.", "And now?"), "x") not in found
