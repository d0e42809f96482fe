"""One conversation has one form, whichever API carries it, and however clients write it down."""

from __future__ import annotations

import json
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.identity.items import MOST_ITEMS, Item, chain, digest_of, item_keys, items_of_answer
from weft.core.identity.readings import Readings


def items_of_request(body: dict[str, Any]) -> list[Item]:
    """The conversation in a request that nothing was read before."""
    return Readings().read(body, "-", b"").items


CHAT: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is the Nile?"},
    {
        "role": "assistant",
        "content": "I look it up.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"q": "Nile", "n": 1}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "Africa"},
]
RESPONSES: Any = {
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Where is the Nile?"}]},
        {"type": "reasoning", "content": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look it up."}]},
        {"type": "function_call", "call_id": "c1", "name": "search", "arguments": '{"n":1,"q":"Nile"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "Africa"},
    ],
}
ANTHROPIC: Any = {
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: 17"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {"role": "user", "content": "Where is the Nile?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm"},
                {"type": "text", "text": "I look it up. "},
                {"type": "tool_use", "id": "c1", "name": "search", "input": {"q": "Nile", "n": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "Africa"}]},
    ],
}


def test_three_apis_have_one_form() -> None:
    """Reasoning, marks for caches, white space and the order of arguments do not count."""
    items = items_of_request({"messages": CHAT})
    assert len(items) == 5
    assert items_of_request(RESPONSES) == items
    assert items_of_request(ANTHROPIC) == items


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{"message": {"content": "In Africa.", "reasoning": "hm"}}]},
        {
            "output": [
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "In Africa."}]}
            ]
        },
        {"content": [{"type": "text", "text": "In Africa."}]},
    ],
)
def test_an_answer_is_what_the_next_request_quotes(answer: dict[str, Any]) -> None:
    """The prompt's items and the answer's are the beginning of the next request's."""
    told = [*CHAT, {"role": "assistant", "content": "In Africa."}]
    assert items_of_request({"messages": CHAT}) + items_of_answer(answer)[0] == items_of_request({"messages": told})


@pytest.mark.parametrize(
    ("answer", "quoted"),
    [
        ("<think>hm</think>\n\nyes", "yes"),
        ("hm\n</think>\n\nyes", "yes"),
        ("one\ntwo", "one\r\ntwo"),
        ("caf\u00e9", "cafe\u0301"),
    ],
)
def test_clients_write_an_answer_down_in_their_way(answer: str, quoted: str) -> None:
    """Without thoughts that the model's template began, with other ends of lines, or another form of an accent."""
    found = items_of_answer({"choices": [{"message": {"content": answer}}]})[0]
    assert found == items_of_request({"messages": [{"role": "assistant", "content": quoted}]})


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<system-reminder>do</system-reminder>a<system-reminder>\nit\n</system-reminder>b", "ab"),
        ("a <system-reminder>", "a <system-reminder>"),
        ("</system-reminder>a<system-reminder>b</system-reminder>", "</system-reminder>a"),
    ],
)
def test_reminders_do_not_count(text: str, left: str) -> None:
    """Claude Code puts them into messages, and leaves them out later. What is no whole reminder counts."""
    first, second = ({"messages": [{"role": "user", "content": each}]} for each in (text, left))
    assert items_of_request(first) == items_of_request(second)


IMAGE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}},
        {"type": "input_image", "image_url": "data:image/png;base64,iVBO"},
        {"type": "image", "source": {"type": "url", "url": "data:image/png;base64,iVBO"}},
    ],
)
def test_an_image_counts_in_whatever_form_it_is_sent(part: dict[str, Any]) -> None:
    """OpenAI's two APIs and Anthropic's have forms of their own. Another image makes another conversation."""
    first, second, other = (
        items_of_request({"messages": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, each]}]})
        for each in (IMAGE, part, {**IMAGE, "source": {**IMAGE["source"], "data": "AAAA"}})
    )
    assert first == second != other


def test_a_refusal_is_what_the_next_request_quotes() -> None:
    """As a field beside the content, where a client may write it down as a part."""
    told = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}
    found = items_of_answer({"choices": [{"message": {"content": None, "refusal": "I will not."}}]})[0]
    assert found == items_of_request({"messages": [told]})


def test_arguments_that_are_no_json_count_as_they_are() -> None:
    """A model may write such. White space around them does not count."""
    calls = [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": each} for each in ("{a", " {a\n", "{b")
    ]
    first, second, other = (items_of_request({"input": [call]}) for call in calls)
    assert first == second != other


@pytest.mark.parametrize("arguments", ["", None, "{}", " { } "])
def test_no_arguments_are_an_empty_object(arguments: str | None) -> None:
    """Models write nothing for a tool without parameters, and clients send an object back."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    assert items_of_request({"input": [call]}) == [("call", "c", "f", "{}")]


@pytest.mark.parametrize(
    ("written", "sent_back"),
    [
        ('{"a": 10.0}', '{"a":10}'),
        ('{"a": -0.0, "b": [1e3]}', '{"b":[1000],"a":0}'),
        ('{"a": 12345678901234567890}', '{"a":12345678901234567000}'),
        ('{"a": "\\u00e9", "2": 1}', '{"2":1,"a":"\u00e9"}'),
    ],
)
def test_clients_in_javascript_write_arguments_again(written: str, sent_back: str) -> None:
    """A number has no point there without a fraction, and no more digits than a double; a key may move."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": written}
    again = {"type": "tool_use", "id": "c", "name": "f", "input": json.loads(sent_back)}
    items = items_of_request({"input": [call]})
    assert items == items_of_request({"input": [{**call, "arguments": sent_back}]})
    assert items == items_of_request({"messages": [{"role": "assistant", "content": [again]}]})


def test_a_long_run_of_marks_stays_as_it_is() -> None:
    """Bringing it into another form takes the square of its length. What is before and after it has one form."""
    marks = "\u0301\u0327" * 16
    (item,) = items_of_request({"input": f"cafe\u0301 a{marks} e\u0301"})
    assert item[-1] == f"caf\u00e9 a{marks} \u00e9"


def test_a_conversation_of_too_many_messages_has_no_items() -> None:
    """Comparing it would hold up all other requests."""
    message = {"role": "user", "content": "a"}
    assert len(items_of_request({"messages": [message] * MOST_ITEMS})) == MOST_ITEMS
    assert items_of_request({"messages": [message] * (MOST_ITEMS + 1)}) == []


@pytest.mark.parametrize("change", [{"role": "user"}, {"content": "I look it up!"}, {"tool_calls": []}])
def test_what_is_said_counts(change: dict[str, Any]) -> None:
    """Another role, text or call makes another conversation."""
    changed = [*CHAT[:2], {**CHAT[2], **change}, CHAT[3]]
    assert items_of_request({"messages": changed}) != items_of_request({"messages": CHAT})


@given(st.lists(st.text()), st.lists(st.text()))
def test_two_lists_of_parts_have_two_digests(left: list[str], right: list[str]) -> None:
    """Parts cannot be moved from one into the next."""
    assert (digest_of(b"", *left) == digest_of(b"", *right)) == (left == right)


def test_a_beginning_has_the_digest_of_the_whole() -> None:
    """The digests of a conversation begin with those of its beginning."""
    keys = item_keys(items_of_request({"messages": CHAT}))
    assert chain(b"s", keys)[:2] == chain(b"s", keys[:2])
    assert chain(b"t", keys)[:2] != chain(b"s", keys[:2])


class Watched(dict[str, Any]):
    """A message of which one can see whether it is kept."""


def test_kept_requests_are_bounded_by_their_bytes() -> None:
    """What lineage does not read of a message is kept with it, and counts: 200 requests of 500 KiB are not all kept."""
    readings, seen, body_bytes = Readings(), [], 500 << 10
    for number in range(200):
        message = Watched(role="user", content=f"question {number}", page="x" * body_bytes)
        seen.append(weakref.ref(message))
        readings.read({"messages": [message]}, "-", b"", body_bytes)
    del message
    assert [each() is None for each in seen[-60:]] == [False] * 60
    assert sum(each() is not None for each in seen) * body_bytes <= 32 << 20


MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant"]),
        "content": st.sampled_from(["", "a", '{"b": 1, "c": 2}', '{"c": 2, "b": 1}', "Results of call_0123:"]),
    }
)


@given(st.lists(st.tuples(st.sampled_from(["", "s", "t"]), st.integers(0, 5), st.lists(MESSAGE, max_size=4))))
def test_a_conversation_that_goes_on_is_read_as_a_new_one(requests: list[tuple[str, int, list[Any]]]) -> None:
    """Whatever is kept of earlier requests, with other system prompts and other ends."""
    readings, messages = Readings(), list[Any]()
    for system, kept, new in requests:
        messages = [*messages[:kept], *new]
        body = {"system": system, "messages": messages}
        assert readings.read(body, "-", b"k") == Readings().read(body, "-", b"k")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda each: (
            st.lists(each)
            | st.dictionaries(
                st.sampled_from(["messages", "input", "role", "content", "type", "text", "tool_calls", "function"]),
                each,
            )
        ),
    )
)
def test_no_request_breaks_it(value: Any) -> None:
    """Whatever JSON a client sends, there is a list of items, and an answer in any form as well."""
    body = value if isinstance(value, dict) else {"messages": value}
    assert isinstance(items_of_request(body), list)
    assert isinstance(items_of_answer(body), list)
