"""The wire format: what is written is read again, and whatever a client sends is read without an error."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weft.core.accounts import Account, Attained
from weft.core.class_rows import Branch, ClassRow
from weft.core.errors import InvalidIdError, InvalidRequestError, PolicyError
from weft.core.ids import MAX_ID_LENGTH, CallId, ProgramId, SessionId, ThreadId
from weft.core.kv_cache.policies import KvPolicyConfig
from weft.core.kv_cache.stats import KvStats, SwapStats, ToolStats
from weft.core.policies import PolicyConfig
from weft.core.policies.history import ProgramEnd
from weft.core.policies.queues import LevelStats, ScheduleStats
from weft.core.process_rows import CallIdentity
from weft.core.show import LiveCall, ProgramKv, SchedulerState
from weft.engine.wire.call_header import (
    FIELDS,
    SCOPE_LENGTH,
    CallHeader,
    check_call,
    decode_call,
    encode_call,
    program_of_request,
    sent_later,
)
from weft.engine.wire.control import (
    AbortedCalls,
    Control,
    EventKind,
    ExchangeService,
    ProgramEvent,
    ProgramEvents,
    ProgramsEnded,
    SpillProgram,
    TakeBack,
    TakeKvStats,
    TakeLearned,
    TakeScheduleStats,
    TakeState,
    UseHistory,
    decode_control,
    encode_control,
)
from weft.engine.wire.reports import (
    LearnedReport,
    attach,
    decode_account,
    encode_aborted,
    encode_account,
    encode_answer,
    read_aborted,
    read_answer,
    read_report,
)
from weft.engine.wire.scheduler_config import SchedulerConfig, decode_config, encode_config
from weft.engine.wire.values import MAX_FIGURE

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
    st.just(math.inf) | st.just(0.0) | st.floats(1e-3, 1e6),
    seconds,
    st.booleans(),
    st.just("") | ids,
    st.just("") | ids,
    st.just("") | ids,
    st.booleans(),
)
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 2).map(lambda sign: sign * 10**400)
    | st.floats()
    | st.text(max_size=5)
    | st.text("a", min_size=250, max_size=300)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5) | st.integers() | st.binary(max_size=2), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(headers)
def test_a_header_survives_its_journey(header: CallHeader) -> None:
    """A call's header is the same after `extra_args`, JSON and the scheduler's reader. The server's check passes it."""
    args = json.loads(json.dumps(encode_call(header)))
    check_call(args, header.session_id)
    assert decode_call(args, "request", header.session_id, is_trusted=True) == as_a_scheduler_sees(header)


@given(headers, seconds)
def test_a_header_that_is_sent_later_has_waited(header: CallHeader, later_s: float) -> None:
    """The wait grows, and deadlines are nearer. A deadline that has passed meanwhile stays one."""
    read = decode_call(sent_later(encode_call(header), later_s), "request", header.session_id, is_trusted=True)
    changes: dict[str, Any] = {
        "waited_s": header.waited_s + later_s,
        "time_left_s": max(0.001, header.time_left_s - later_s),
        "program_time_left_s": max(0.0, header.program_time_left_s - later_s),
    }
    assert read == replace(as_a_scheduler_sees(header), **changes)


def as_a_scheduler_sees(header: CallHeader) -> CallHeader:
    """The header without what no scheduler reads: the call's place in the graph of its program."""
    program_id, call_id = header.identity.program_id, header.identity.call_id
    return replace(header, identity=CallIdentity(program_id, ThreadId(program_id), call_id))


def test_a_call_carries_nothing_that_no_scheduler_reads() -> None:
    """Its thread and its parents, up to 64 ids, stay with the host. They draw the graph, and rank nothing."""
    parents = tuple(CallId(f"parent-{number}") for number in range(64))
    identity = CallIdentity(ProgramId("p"), ThreadId("t"), CallId("c"), parents)
    assert {"thread_id", "parents"}.isdisjoint(encode_call(CallHeader(identity)))


def test_a_default_takes_no_room() -> None:
    """A header without name, tenant, count and deadline sends none of them."""
    header = CallHeader(CallIdentity(ProgramId("p"), ThreadId("t"), CallId("c")))
    sent = {"program_id", "call_id", "service_s", "total_service_s", "wait_s", "total_wait_s"}
    assert set(encode_call(header)) == sent


@example({"service_s": 10**400, "time_left_s": -(10**400), "program_calls": 10**400}, None, True)
@example({"program_id": "p" * 1_000_000, "parents": ["c" * 1_000_000]}, "s" * 1_000_000, True)
@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), anything) | anything, anything, st.booleans())
def test_the_scheduler_reads_whatever_comes(args: object, session_id: object, is_trusted: bool) -> None:
    """Nothing that JSON or msgpack can carry raises in the scheduler. Every field of the result is within its bounds,
    so that a client can make the scheduler neither hold long strings nor calculate with infinite figures."""
    header = decode_call(args, "request", session_id, is_trusted=is_trusted)
    identity, attained = header.identity, header.attained
    texts = [*identity.parents, header.program_name, header.fingerprint, header.tenant or "", header.session_id or ""]
    assert all(len(text) <= MAX_ID_LENGTH + SCOPE_LENGTH for text in texts)
    for text in (identity.program_id, identity.thread_id, identity.call_id):
        assert 0 < len(text) <= len("session\t") + MAX_ID_LENGTH + SCOPE_LENGTH
    figures = [attained.service_s, attained.total_service_s, attained.wait_s, attained.total_wait_s]
    assert all(type(figure) is float and 0 <= figure <= MAX_FIGURE for figure in figures)
    assert attained.total_service_s >= attained.service_s
    assert 0 <= header.program_calls <= MAX_FIGURE
    assert 0 <= header.waited_s <= MAX_FIGURE
    assert 0 < header.time_left_s <= MAX_FIGURE or header.time_left_s == math.inf
    assert 0 <= header.program_time_left_s <= MAX_FIGURE or header.program_time_left_s == math.inf


@given(headers)
def test_figures_of_a_sender_without_trust_are_unknown(header: CallHeader) -> None:
    """Such a sender still names its program, but says nothing about what the program has attained."""
    read = decode_call(encode_call(header), "request", header.session_id, is_trusted=False)
    unknown = {"attained": Attained(), "program_calls": 0, "time_left_s": math.inf, "program_time_left_s": math.inf}
    unknown["waited_s"] = 0.0
    assert read == replace(as_a_scheduler_sees(header), **unknown)  # type: ignore[arg-type]


def test_ids_fall_back_to_the_session_and_then_to_the_request() -> None:
    """A client without programs gets a program of its own for each session, or else for each request."""

    def program(args: object, request_id: str, session_id: str | None) -> str:
        return decode_call(args, request_id, session_id, is_trusted=False).identity.program_id

    assert program(None, "a", None) == program_of_request("a") != program(None, "b", None)
    assert program({"program_id": 7}, "a", "s") == program(None, "b", "s") != program(None, "a", "t")
    identity = decode_call({"program_id": "p"}, "request", "session", is_trusted=False).identity
    assert (identity.program_id, identity.thread_id) == ("p", "p")


@given(ids, ids)
def test_a_named_program_is_no_session_and_no_request(name: str, other: str) -> None:
    """No program id that a client may choose is the program of a session or of a request, whatever their ids are."""

    def program(args: object, session_id: str | None) -> str:
        return decode_call(args, other, session_id, is_trusted=False).identity.program_id

    derived = {program(None, None), program(None, other)}
    assert len(derived) == 2
    for chosen in (name, other, *derived, *(each.replace("\t", " ") for each in derived)):
        named = decode_call({"program_id": chosen}, "this request", None, is_trusted=False).identity.program_id
        assert named not in derived


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
        ({"prefetch": 0.5}, InvalidRequestError, "prefetch must be 1 if the next call comes soon"),
        ({"tool_started": ""}, InvalidIdError, "tool_started"),
        ({"tool_ended": ["search"]}, InvalidIdError, "tool_ended"),
    ],
)
def test_a_server_refuses_what_makes_no_sense(args: dict[str, Any], error: type[Exception], said: str) -> None:
    """Where a client can be told of a mistake, it is told."""
    with pytest.raises(error, match=said):
        check_call(args)


@pytest.mark.parametrize("name", ["program_id", "service_s", "program_calls", "program_end"])
def test_an_error_about_a_huge_value_is_short(name: str) -> None:
    """A number of 5,000 digits has no text in Python, and a list of 5,000 levels no representation."""
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    for value in (-(10**5000), nested):
        with pytest.raises((InvalidIdError, InvalidRequestError), match=f"^{name} must be ") as caught:
            check_call({name: value})
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("weft", "expected"),
    [
        ({"policy": "atlas"}, (False, False)),
        ({"policy": "atlas", "trust_clients": True}, (False, True)),
        ({"policy": {"name": "atlas"}, "one_client": True}, (True, True)),
    ],
)
def test_only_weft_itself_is_trusted_by_default(weft: dict[str, Any], expected: tuple[bool, bool]) -> None:
    """The figures of an engine's own front end count. Under a server they count if the operator says so."""
    config = decode_config({"weft": weft})
    assert (config.one_client, config.trust_clients) == expected
    assert config.policy == PolicyConfig("atlas")
    assert decode_config({"weft": encode_config(config)}) == config


def test_a_scheduler_is_told_its_kv_policy() -> None:
    """With its parameters, and nothing is sent if the engine has none."""
    config = SchedulerConfig(PolicyConfig("atlas"), kv_policy=KvPolicyConfig("ttl", quantile=0.5))
    assert decode_config({"weft": json.loads(json.dumps(encode_config(config)))}) == config
    assert decode_config({"weft": {"kv_policy": "lru"}}).kv_policy == KvPolicyConfig("lru")
    assert "kv_policy" not in encode_config(SchedulerConfig(PolicyConfig("atlas")))


def test_a_scheduler_is_told_the_name_of_its_model() -> None:
    """It begins with the history of this model."""
    config = SchedulerConfig(PolicyConfig("atlas"), model="my/model")
    assert decode_config({"weft": encode_config(config)}) == config


@pytest.mark.parametrize("weft", ["atlas", {"trust_clients": "yes"}, {"one_client": 1}, {"policy": 1}, {"model": 1}])
def test_settings_that_are_no_settings_are_refused(weft: object) -> None:
    """The server does not start, and the error shows the value."""
    with pytest.raises(PolicyError, match=r"not ('atlas'|'yes'|1)\.$"):
        decode_config({"weft": weft})


def test_a_policys_parameters_have_a_mapping_of_their_own() -> None:
    """So that no parameter can be taken for a setting of the scheduler; the error shows the form."""
    assert decode_config({"weft": {"policy": {"name": "atlas", "beta": 4}}}).policy == PolicyConfig("atlas", beta=4)
    with pytest.raises(PolicyError, match=r"'name' is no setting .*\{\"policy\": \"atlas\"\}"):
        decode_config({"weft": {"name": "atlas"}})


def test_an_account_comes_back() -> None:
    """The scheduler's part of an account survives the journey back."""
    account = Account(1.5, 2.5, 3, swapped_tokens=4, recomputed_tokens=5, waits=((0.0, 1.0), (2.0, 1.5)))
    report = read_report(attach(None, encode_account(account)))
    assert report.account is not None
    assert decode_account(report.account) == account
    assert decode_account(encode_account(Account(1.0)), output_tokens=3) == Account(1.0, output_tokens=3)
    assert report.swap is None


def test_the_swaps_figures_come_back_with_an_account() -> None:
    """An output carries both, and what a connector of the user's own put there."""
    account, swap = encode_account(Account(1.0)), SwapStats(*range(15))
    params = attach({"other": 1}, account)
    report = read_report(attach(params, swap))
    assert report.swap == swap
    assert report.account == account
    assert params["other"] == 1


@pytest.mark.parametrize("params", [None, {}, {"other": 1}])
def test_an_output_without_a_report_has_none(params: dict[str, Any] | None) -> None:
    """An output of another scheduler, or another connector's, carries nothing of Weft's."""
    assert read_report(params) == (None, None)


@pytest.mark.parametrize(
    "message",
    [
        ProgramsEnded((ProgramId("a"), ProgramId("b")), (ProgramId("c"),), (ProgramId("a"),), (ProgramId("b"),)),
        AbortedCalls(((ProgramId("p"), CallId("c")), (ProgramId("q"), CallId("c")))),
        ProgramEvents(
            (
                ProgramEvent(EventKind.TOOL_STARTED, ProgramId("a"), "search", 7),
                ProgramEvent(EventKind.TOOL_ENDED, ProgramId("a"), "search", 7, 2.5),
                ProgramEvent(EventKind.PREFETCH, ProgramId("b")),
            )
        ),
        UseHistory("{}"),
        TakeLearned(),
        TakeKvStats(),
        TakeScheduleStats(),
        TakeState(),
        TakeBack(((ProgramId("p"), CallId("c")),), 3, 512),
        SpillProgram(ProgramId("p"), begins=True),
        SpillProgram(None, begins=False),
        ExchangeService({"acme": 12.5, "": -3.0}),
    ],
)
def test_control_messages_reach_the_scheduler(message: Control) -> None:
    """They survive msgpack, which turns tuples into lists."""
    assert decode_control(json.loads(json.dumps(encode_control(message)))) == message


@example({"type": "programs_ended", "program_ids": [10**400, ["a"]]})
@given(anything)
def test_a_strange_control_message_is_ignored(message: object) -> None:
    """The scheduler reads whatever comes on the control channel without an error."""
    ended = decode_control(message)
    assert ended in (None, ProgramsEnded(()))
    assert decode_control({"type": "use_history", "history": message}) in (None, UseHistory(str(message)))
    assert decode_control({"type": "programs_ended", "program_ids": message}) is not None
    assert decode_control({"type": "aborted_calls", "calls": message}) is not None
    assert decode_control({"type": "take_back", "calls": message, "most": message}) is not None
    assert decode_control({"type": "exchange_service", "elsewhere": {"a": math.nan, 1: 2.0, "b": 3}}) == (
        ExchangeService({})
    )
    assert isinstance(decode_control({"type": "exchange_service", "elsewhere": message}), ExchangeService)
    assert decode_control({"type": "spill_program", "program_id": message, "begins": message}) in (
        None,
        SpillProgram(None if message is None else ProgramId(str(message)), begins=message is True),
    )
    assert decode_control({"type": "program_events", "events": message}) == ProgramEvents(())
    assert decode_control({"type": "program_events", "events": [message]}) == ProgramEvents(())


def test_accounts_of_aborted_calls_come_back() -> None:
    """A scheduler answers with what it knows. A replica that does not run gives no answer."""
    account = Account(1.5, 2.5, 3, swapped_tokens=4, recomputed_tokens=5)
    held = {(ProgramId(program), CallId("c")): encode_account(account) for program in "pq"}
    answer = json.loads(json.dumps(encode_aborted(held)))
    assert read_aborted(answer) == {("p", "c"): account, ("q", "c"): account}
    assert read_aborted(encode_aborted({})) == read_aborted({"ended": 1}) == read_aborted(None) == {}


def test_what_a_policy_has_learned_comes_back() -> None:
    """Classes, unknown figures included, and ends survive msgpack. A replica that does not run gives no answer."""
    classes = (
        ClassRow("acme", "chat", 12, 3, 1234.4, 23_456.0, Branch.INDEX, held=2),
        ClassRow(None, "", 1, 0, 5.0, math.inf, Branch.QUEUES),
    )
    learned = LearnedReport(
        "model", classes, (ProgramEnd(None, "chat", 5, True), ProgramEnd("acme", "", 6, False)), False
    )
    assert read_answer(LearnedReport, json.loads(json.dumps(encode_answer(learned)))) == learned
    assert read_answer(LearnedReport, None) is None


def test_the_figures_of_the_kv_cache_come_back() -> None:
    """They survive msgpack. Several replicas make one: sums, and of each tool the figures with the most samples."""
    first = KvStats("ttl", 1, 2, 3, 4, 5, 6, 7, 8, (ToolStats("search", 3, 1.5, 4.5), ToolStats("run", 9, 1.0, 2.0)))
    second = KvStats("ttl", 10, 20, 30, 40, 50, 60, 70, 80, (ToolStats("search", 30, 2.5, 3.5),))
    found = [read_answer(KvStats, json.loads(json.dumps(encode_answer(each)))) for each in (first, second)]
    assert found == [first, second]
    tools = (ToolStats("search", 30, 2.5, 3.5), ToolStats("run", 9, 1.0, 2.0))
    assert KvStats.together([first, second]) == KvStats("ttl", 11, 22, 33, 44, 55, 66, 77, 88, tools)
    assert KvStats.together([]) is read_answer(KvStats, None) is None


def test_the_figures_of_queues_come_back() -> None:
    """They survive msgpack. A replica that does not run gives no answer."""
    stats = ScheduleStats((LevelStats(0, 1, 2, 3, 4.5, 5.5), LevelStats(1, 0, 0, 1, 0.5, 9.0)), 7)
    assert read_answer(ScheduleStats, json.loads(json.dumps(encode_answer(stats)))) == stats
    assert read_answer(ScheduleStats, None) is None


def test_the_state_of_a_scheduler_reaches_the_front_end() -> None:
    """It survives msgpack. A scheduler that does not run has none."""
    first = LiveCall(CallId("c"), ProgramId("p"), 2, True, 1.5, 0.5, 30, 4)
    second = LiveCall(CallId("d"), ProgramId("q"), None, False, 0.0, 2.0, 7, 0)
    state = SchedulerState(1, 1, 0.25, (first, second), (ProgramKv(ProgramId("p"), 32, 16),))
    assert read_answer(SchedulerState, json.loads(json.dumps(encode_answer(state)))) == state
    assert read_answer(SchedulerState, None) is None


def test_a_session_travels_as_vllms_own() -> None:
    """The session is not among the arguments, because vLLM carries it."""
    header = CallHeader(CallIdentity(ProgramId("p"), ThreadId("t"), CallId("c")), session_id=SessionId("session-7"))
    assert "session-7" not in encode_call(header).values()
