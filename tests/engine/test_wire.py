"""The wire format: what is written is read again, and whatever a client sends is read without an error."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import InvalidIdError, InvalidRequestError
from weft.core.ids import CallId, ProgramId, SessionId, ThreadId
from weft.core.kv_cache.stats import SwapStats
from weft.core.process_table import Account, Attained, CallIdentity
from weft.engine.wire import (
    CallHeader,
    ProgramsEnded,
    attach_account,
    attach_engine_report,
    check_call,
    decode_call,
    decode_control,
    encode_account,
    encode_call,
    encode_control,
    read_report,
)

seconds = st.floats(0, 1e6)
ids = st.text("abc-/é", min_size=1, max_size=8)
headers = st.builds(
    CallHeader,
    st.builds(CallIdentity, ids, ids, ids, st.lists(ids, max_size=3).map(tuple)),
    st.tuples(seconds, seconds, seconds, seconds).map(
        lambda drawn: Attained(min(drawn[:2]), max(drawn[:2]), min(drawn[2:]), max(drawn[2:]))
    ),
    st.none() | ids,
    st.just("") | ids,
    st.none() | ids,
    st.integers(0, 1000),
    st.just(math.inf) | st.floats(1e-3, 1e6),
    st.booleans(),
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
WHOLE = CallHeader(
    CallIdentity(ProgramId("p"), ThreadId("t"), CallId("c")),
    program_name="n",
    tenant="t",
    program_calls=1,
    time_left_s=1.0,
    ends_program=True,
)
KEYS = list(encode_call(WHOLE))


@given(headers)
def test_a_header_survives_its_journey(header: CallHeader) -> None:
    """A call's header is the same after `extra_args`, JSON and the scheduler's reader. The server's check passes it."""
    args = json.loads(json.dumps(encode_call(header)))
    check_call(args, header.session_id)
    assert decode_call(args, "request", header.session_id) == header


def test_a_default_takes_no_room() -> None:
    """A header without name, tenant, count and deadline sends none of them."""
    assert not {"program_name", "tenant", "program_calls", "time_left_s", "program_end"} & set(
        encode_call(CallHeader(CallIdentity(ProgramId("p"), ThreadId("t"), CallId("c"))))
    )


@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), anything), st.none() | ids)
def test_the_scheduler_reads_whatever_comes(args: dict[str, Any], session_id: str | None) -> None:
    """Nothing that a client sends raises in the scheduler, and every field of the result makes sense."""
    header = decode_call(args, "request", session_id)
    assert header.identity.program_id
    assert header.identity.call_id
    for value in (header.attained.service_s, header.attained.wait_s, header.time_left_s):
        assert value >= 0
    assert header.attained.total_service_s >= header.attained.service_s
    assert header.program_calls >= 0
    assert header.session_id == session_id


def test_ids_fall_back_to_the_session_and_then_to_the_request() -> None:
    """A client without programs gets a program of its own for each session, or else for each request."""
    assert decode_call(None, "request", None).identity.program_id == "request"
    assert decode_call({"program_id": 7}, "request", "session").identity.program_id == "session"
    assert decode_call({"program_id": "p"}, "request", "session").identity.thread_id == "p"


@pytest.mark.parametrize(
    ("args", "error", "said"),
    [
        ({"program_id": 7}, InvalidIdError, "program_id must be a string"),
        ({"program_name": ""}, InvalidIdError, "program_name must be 1 to 256"),
        ({"tenant": "a\nb"}, InvalidIdError, "tenant must be 1 to 256 printable"),
        ({"parents": "c"}, InvalidIdError, "parents must be a list"),
        ({"parents": [3]}, InvalidIdError, "each of parents must be a string"),
        ({"service_s": -1}, InvalidRequestError, "service_s must be a number of seconds"),
        ({"time_left_s": True}, InvalidRequestError, "time_left_s must be a number of seconds"),
        ({"program_calls": 1.5}, InvalidRequestError, "program_calls must be a number of calls"),
        ({"program_calls": -1}, InvalidRequestError, "program_calls must be a number of calls"),
        ({"program_end": "yes"}, InvalidRequestError, "program_end must be 1 on a program's last call"),
        ({"program_end": []}, InvalidRequestError, "program_end must be 1 on a program's last call"),
    ],
)
def test_a_server_refuses_what_makes_no_sense(args: dict[str, Any], error: type[Exception], said: str) -> None:
    """Where a client can be told of a mistake, it is told."""
    with pytest.raises(error, match=said):
        check_call(args)


def test_an_account_comes_back() -> None:
    """The scheduler's part of an account survives the journey back."""
    account = Account(1.5, 2.5, 3, swapped_tokens=4, recomputed_tokens=5)
    report = read_report(attach_account(None, encode_account(account)))
    assert report.account is not None
    assert Account(**report.account) == account
    assert (report.aborted, report.swap) == ({}, None)


def test_an_engine_report_comes_back_with_an_account() -> None:
    """Accounts of aborted calls and the swap's figures share an output with its own account."""
    account, swap = encode_account(Account(1.0)), SwapStats(*range(14))
    params = attach_account({"other": 1}, account)
    report = read_report(attach_engine_report(params, {CallId("gone"): account}, swap))
    assert report.aborted == {"gone": Account(1.0)}
    assert report.swap == swap
    assert report.account == account
    assert params["other"] == 1


@pytest.mark.parametrize("params", [None, {}, {"other": 1}])
def test_an_output_without_a_report_has_none(params: dict[str, Any] | None) -> None:
    """An output of another scheduler, or another connector's, carries nothing of Weft's."""
    assert read_report(params) == (None, {}, None)


def test_ended_programs_reach_the_scheduler() -> None:
    """The control message survives msgpack, which turns tuples into lists."""
    message = ProgramsEnded((ProgramId("a"), ProgramId("b")))
    assert decode_control(json.loads(json.dumps(encode_control(message)))) == message


@given(anything)
def test_a_strange_control_message_is_ignored(message: object) -> None:
    """The scheduler reads whatever comes on the control channel without an error."""
    assert decode_control(message) is None
    assert decode_control({"type": "programs_ended", "program_ids": message}) is not None


def test_a_session_travels_as_vllms_own() -> None:
    """The session is not among the arguments, because vLLM carries it."""
    header = CallHeader(CallIdentity(ProgramId("p"), ThreadId("t"), CallId("c")), session_id=SessionId("session-7"))
    assert "session-7" not in encode_call(header).values()
