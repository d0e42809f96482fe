"""Multilevel queues: Algorithm 1 of Autellix, line by line."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from weft.core.accounts import Attained
from weft.core.errors import PolicyError
from weft.core.policies import Atlas, Call, Fcfs, MultilevelPolicy, Plas, Policy, ProgramView
from weft.core.policies.view import ProgramChanged

BOUNDS = (1.0, 3.0)  # Q_1 [0, 1), Q_2 [1, 3), Q_3 [3, oo): quanta of 1, 2 and no end


def arrived(policy: Policy, key: str = "c", service_s: float = 0.0, *, wait_s: float = 0.0, now_s: float = 0.0) -> Call:
    """A call that has just arrived. Its program has attained `service_s` and waited `wait_s`."""
    call = Call(key, ProgramView(key, attained=Attained(service_s, service_s, wait_s, wait_s)))
    policy.arrive(call, now_s)
    return call


def started(policy: Policy, key: str = "c", service_s: float = 0.0, now_s: float = 0.0) -> Call:
    call = arrived(policy, key, service_s, now_s=now_s)
    policy.start(call, now_s)
    return call


def waiting(policy: Policy) -> list[str]:
    return [call.key for call in policy.waiting]


# -- lines 11-13: the queue of an arriving call


@pytest.mark.parametrize(
    ("service_s", "level"), [(0.0, 0), (0.999, 0), (1.0, 1), (1.001, 1), (2.999, 1), (3.0, 2), (1e9, 2)]
)
def test_queues_are_half_open(service_s: float, level: int) -> None:
    """A call whose program's service equals a bound enters the queue of lower priority (lines 11, 12)."""
    call = arrived(Plas(BOUNDS), service_s=service_s)
    assert call.rank.level == level
    assert call.service_s == service_s


@pytest.mark.parametrize(("service_s", "quantum_s"), [(0.0, 1.0), (1.0, 2.0), (2.5, 2.0), (3.0, math.inf)])
def test_a_quantum_is_as_long_as_its_queue_is_wide(service_s: float, quantum_s: float) -> None:
    """A call gets the whole quantum of its queue. That of the last queue is infinite (line 13)."""
    assert arrived(Plas(BOUNDS), service_s=service_s).quantum_s == quantum_s


def test_a_queue_is_first_come_first_served() -> None:
    """Calls of one queue are in the order of arrival, whatever their service inside the queue's range."""
    policy = Plas(BOUNDS)
    for key, service_s in [("b2", 2.0), ("a1", 0.9), ("b1", 1.0), ("c", 7.0), ("a2", 0.0)]:
        arrived(policy, key, service_s)
    assert waiting(policy) == ["a1", "a2", "b2", "b1", "c"]


def test_an_arriving_call_keeps_the_service_it_arrived_with() -> None:
    """Service that the program attains later affects its next call, not a call that waits already."""
    policy = Plas(BOUNDS)
    call = arrived(policy)
    call.program.attained.fold(Attained(), 5.0, 0.0)
    assert (call.service_s, call.rank.level) == (0.0, 0)


# -- lines 20-23: demotion


@pytest.mark.parametrize(("charges", "level"), [([0.999], 0), ([1.0], 1), ([0.5, 0.5], 1), ([0.5, 0.4], 0), ([2.5], 1)])
def test_a_call_is_demoted_when_its_quantum_is_used_up(charges: list[float], level: int) -> None:
    """A call is demoted by one queue exactly at the end of its quantum, and gets the whole quantum of that queue."""
    policy = Plas(BOUNDS)
    call = started(policy)
    for charge in charges:
        policy.charge(call, charge, 0.0)
    assert call.rank.level == level
    assert call.quantum_s == (2.0 if level == 1 else 1.0 - sum(charges))
    assert call.model_time_s == sum(charges)


def test_demotion_is_to_the_tail() -> None:
    """A demoted call is behind the calls that are in the next queue already, and before calls that arrive later."""
    policy = Plas(BOUNDS)
    before = arrived(policy, "before", 1.0)
    call = started(policy)
    policy.charge(call, 1.0, 1.0)
    after = arrived(policy, "after", 1.0)
    assert before.rank < call.rank < after.rank


def test_the_last_queue_has_no_end() -> None:
    """A call in the last queue keeps its rank, however long it runs."""
    policy = Plas(BOUNDS)
    call = started(policy, service_s=3.0)
    rank = call.rank
    for _ in range(100):
        policy.charge(call, 1e6, 0.0)
    assert call.rank == rank


def test_a_preempted_call_can_be_demoted() -> None:
    """A call is charged for a step that ends after the call's preemption, and its rank in the queue follows."""
    policy = Plas(BOUNDS)
    call = started(policy)
    policy.preempt(call, 1.0)
    arrived(policy, "other", 1.0)
    policy.charge(call, 1.0, 1.0)
    assert waiting(policy) == ["other", "c"]
    assert call.waiting_since_s == 1.0


# -- starting, preemption, leaving


def test_wait_lasts_from_arrival_to_start() -> None:
    """When a call starts, its wait is added up and the call leaves the queue."""
    policy = Plas(BOUNDS)
    call = arrived(policy, now_s=2.0)
    policy.start(call, 5.0)
    assert call.wait_s == 3.0
    assert math.isnan(call.waiting_since_s)
    assert waiting(policy) == []


def test_a_preempted_call_keeps_its_rank_and_its_quantum() -> None:
    """A preempted call waits with its old rank and the rest of its quantum."""
    policy = Plas(BOUNDS)
    first, second = started(policy, "first", 1.0), started(policy, "second", 1.0)
    third = arrived(policy, "third", 1.0)
    policy.charge(second, 0.5, 0.5)
    policy.charge(first, 0.5, 0.5)
    policy.preempt(second, 0.5)
    policy.preempt(first, 0.5)
    assert waiting(policy) == ["first", "second", "third"]
    assert (first.quantum_s, third.quantum_s) == (1.5, 2.0)
    policy.start(first, 4.5)
    assert first.wait_s == 4.0


@pytest.mark.parametrize("running", [False, True])
def test_a_call_that_leaves_is_forgotten(running: bool) -> None:
    """A call that has left while it waited or ran is neither in the queue nor promoted (line 18)."""
    policy = Plas(BOUNDS, beta=1.0)
    call = arrived(policy, service_s=1.0)
    if running:
        policy.start(call, 0.0)
    policy.leave(call)
    policy.leave(call)
    assert waiting(policy) == []
    assert policy.promote(1e9) == []


# -- lines 24-30: promotion


@pytest.mark.parametrize(("now_s", "promoted"), [(5.999, False), (6.0, True), (7.0, True)])
def test_promotion_exactly_at_beta(now_s: float, promoted: bool) -> None:
    """(program wait + call wait) / (program service + call service) >= beta, and not before: (2 + 6) / 4 = 2."""
    policy = Plas(BOUNDS, beta=2.0)
    call = arrived(policy, service_s=4.0, wait_s=2.0)
    assert policy.promote(now_s) == ([call] if promoted else [])
    assert call.rank.level == (0 if promoted else 2)


def test_the_calls_own_wait_and_service_count() -> None:
    """The call's own wait and service are part of the ratio: (0 + 3 + 5) / (2 + 2) = 2."""
    policy = Plas(BOUNDS, beta=2.0)
    call = arrived(policy, service_s=2.0)
    policy.start(call, 3.0)
    policy.charge(call, 2.0, 5.0)
    policy.preempt(call, 5.0)
    assert policy.promote(9.999) == []
    assert policy.promote(10.0) == [call]


def test_only_the_calls_own_times_are_reset() -> None:
    """Promotion sets c.wait and c.model_time to zero, and changes neither the program's row nor c.service (line 29)."""
    policy = Plas(BOUNDS, beta=1.0)
    call = arrived(policy, service_s=2.0, wait_s=1.0)
    policy.start(call, 0.5)
    policy.charge(call, 0.5, 1.0)
    policy.preempt(call, 1.0)
    [promoted] = policy.promote(50.0)
    assert promoted is call
    assert (call.wait_s, call.model_time_s, call.waiting_since_s) == (0.0, 0.0, 50.0)
    assert call.service_s == 2.0
    assert call.program.attained == Attained(2.0, 2.0, 1.0, 1.0)
    policy.start(call, 51.0)
    assert call.wait_s == 1.0, "the wait before the promotion is forgotten"


def test_a_promoted_call_goes_to_the_tail_of_q1_with_its_quantum() -> None:
    """A promoted call is behind the calls in Q_1, may run for Q_1's quantum, and is then demoted like other calls."""
    policy = Plas(BOUNDS, beta=1.0)
    call = arrived(policy, "starved", 3.0)
    arrived(policy, "in q1")
    assert policy.promote(3.0) == [call]
    assert waiting(policy) == ["in q1", "starved"]
    assert call.quantum_s == 1.0
    policy.start(call, 3.0)
    policy.charge(call, 1.0, 4.0)
    assert call.rank.level == 1


def test_calls_in_q1_are_not_promoted() -> None:
    """A call in Q_1 keeps its rank, however long it waits."""
    policy = Plas(BOUNDS, beta=1.0)
    call = arrived(policy, service_s=0.5)
    rank = call.rank
    assert policy.promote(1e6) == []
    assert call.rank == rank


def test_a_running_call_is_not_promoted() -> None:
    """Only a call that waits can starve."""
    policy = Plas(BOUNDS, beta=1.0)
    call = arrived(policy, service_s=1.0, wait_s=50.0)
    policy.start(call, 50.0)
    assert policy.promote(100.0) == []
    assert call.rank.level == 1


def test_starved_calls_are_promoted_in_rank_order() -> None:
    """Calls that are promoted together keep their order (line 15)."""
    policy = Plas(BOUNDS, beta=1.0)
    calls = [arrived(policy, key, service_s) for key, service_s in [("z", 9.0), ("y", 3.0), ("x", 1.0)]]
    assert policy.promote(20.0) == [calls[2], calls[0], calls[1]]
    assert waiting(policy) == ["x", "z", "y"]


def test_no_promotion_without_beta() -> None:
    """If beta is None, no call is ever promoted."""
    policy = Plas(BOUNDS, beta=None)
    arrived(policy, service_s=1.0, wait_s=1e9)
    assert policy.promote(1e12) == []


def test_a_siblings_wait_brings_promotion_forward() -> None:
    """When a sibling leaves after a long wait, a waiting call of the program is promoted earlier."""
    policy = Plas(BOUNDS, beta=2.0)
    call = arrived(policy, service_s=4.0)
    assert policy.promote(1.0) == []
    call.program.attained.fold(Attained(4.0, 4.0), 1.0, 9.0)
    policy.on_event(ProgramChanged(call.program))
    assert policy.promote(0.999) == []
    assert policy.promote(1.0) == [call], "(9 + 1) / (5 + 0) = 2"


def test_a_wide_program_does_not_starve_by_a_branch_that_waited_and_was_not_served() -> None:
    """Wait and service are of one chain: (2 + 14) / 8 = 2. The other branch's wait would make it (9 + 14) / 8."""
    policy = Atlas(BOUNDS, beta=2.0)
    call = arrived(policy, service_s=4.0)
    call.program.attained.fold(Attained(4.0, 4.0), 1.0, 9.0)
    call.program.attained.fold(Attained(4.0, 4.0), 4.0, 2.0)
    policy.on_event(ProgramChanged(call.program))
    assert policy.promote(13.999) == []
    assert policy.promote(14.0) == [call]


def test_a_siblings_service_delays_promotion() -> None:
    """When a sibling leaves after long service, a waiting call of the program is promoted later."""
    policy = Plas(BOUNDS, beta=2.0)
    call = arrived(policy, service_s=4.0)
    call.program.attained.fold(Attained(4.0, 4.0), 4.0, 0.0)
    policy.on_event(ProgramChanged(call.program))
    assert policy.promote(15.999) == []
    assert policy.promote(16.0) == [call]


def test_threads_of_a_program_are_promoted_together() -> None:
    """Calls of one program that have waited equally long are promoted at the same time."""
    policy = Plas(BOUNDS, beta=1.0)
    program = ProgramView("p", attained=Attained(4.0, 4.0, 2.0, 2.0))
    calls = [Call(key, program) for key in "abc"]
    for call in calls:
        policy.arrive(call, 0.0)
    assert policy.promote(1.999) == []
    assert policy.promote(2.0) == calls


@pytest.mark.parametrize(("policy", "served_s"), [(Plas(BOUNDS, 1.0), 6.0), (Atlas(BOUNDS, 1.0), 2.0)])
def test_the_ratio_uses_the_service_that_ranks(policy: MultilevelPolicy, served_s: float) -> None:
    """PLAS divides the wait by the total service, and ATLAS by the service on the critical path."""
    call = Call("c", ProgramView("p", attained=Attained(service_s=2.0, total_service_s=6.0)))
    policy.arrive(call, 0.0)
    assert policy.promote(served_s - 0.001) == []
    assert policy.promote(served_s) == [call]


@pytest.mark.parametrize(("policy", "promoted_s"), [(Plas(BOUNDS, 1.0), 2.0), (Atlas(BOUNDS, 1.0), 1.0)])
def test_wait_covers_the_same_calls_as_service(policy: MultilevelPolicy, promoted_s: float) -> None:
    """PLAS sums wait and service over all calls of a wide program, and ATLAS takes both from its critical path. So a
    program does not starve only because it is wide."""
    attained = Attained(service_s=2.0, total_service_s=6.0, wait_s=1.0, total_wait_s=4.0)
    call = Call("c", ProgramView("p", attained=attained))
    policy.arrive(call, 0.0)
    assert policy.promote(promoted_s - 0.001) == []
    assert policy.promote(promoted_s) == [call]


# -- lines 32-39: the next batch


def batch(policy: Policy, *services: float) -> list[Call]:
    """Running calls r0, r1, ... whose programs have attained these services."""
    return [started(policy, f"r{number}", service_s) for number, service_s in enumerate(services)]


def names(calls: Sequence[Call]) -> list[str]:
    return [call.key for call in calls]


def test_no_call_is_preempted_while_slots_are_free() -> None:
    """Waiting calls take free slots first."""
    policy = Plas(BOUNDS)
    running = batch(policy, 5.0)
    arrived(policy, "w")
    assert policy.victims(running, free_slots=1) == []
    assert names(policy.victims(running, free_slots=0)) == ["r0"]


def test_the_last_call_in_rank_is_preempted_first() -> None:
    """Each waiting call preempts the last running call, as long as that one has the lower rank."""
    policy = Plas(BOUNDS)
    running = batch(policy, 5.0, 0.0, 1.0, 6.0)
    for number in range(2):
        arrived(policy, f"w{number}")
    arrived(policy, "w2", 2.0)
    assert names(policy.victims(running, free_slots=0)) == ["r3", "r0"]
    assert names(policy.victims(running, free_slots=1)) == ["r3", "r0"]
    assert names(policy.victims(running, free_slots=2)) == ["r3"]


def test_victims_changes_nothing() -> None:
    """`victims` only proposes preemptions: it changes neither the batch nor the queue."""
    policy = Plas(BOUNDS)
    running = batch(policy, 5.0)
    arrived(policy, "w")
    assert policy.victims(running, 0) == policy.victims(running, 0) == running
    assert waiting(policy) == ["w"]


def test_calls_that_are_not_ready_preempt_no_call() -> None:
    """A waiting call that is not ready is passed over, and the calls behind it are considered."""
    policy = Plas(BOUNDS)
    running = batch(policy, 5.0, 6.0)
    for number in range(3):
        arrived(policy, f"w{number}")
    assert policy.victims(running, 0, ready=lambda _call: False) == []
    assert names(policy.victims(running, 0, ready=lambda call: call.key == "w2")) == ["r1"]
    assert policy.victims(running, 1, ready=lambda call: call.key == "w2") == []


def test_no_call_is_preempted_for_a_later_call_of_the_same_queue() -> None:
    """Of two calls in one queue, the earlier one keeps running."""
    policy = Plas(BOUNDS)
    running = batch(policy, 1.0)
    arrived(policy, "w", 1.0)
    assert policy.victims(running, 0) == []


def test_a_demoted_call_is_preempted_for_a_call_in_its_new_queue() -> None:
    """When its quantum ends, a call moves behind the calls that wait in the next queue, and is preempted for them."""
    policy = Plas(BOUNDS)
    [call] = batch(policy, 0.0)
    arrived(policy, "w", 1.0)
    assert policy.victims([call], 0) == []
    policy.charge(call, 1.0, 1.0)
    assert policy.victims([call], 0) == [call]


def test_an_empty_batch_or_queue_has_no_victims() -> None:
    """No call is preempted if none runs or none waits."""
    policy = Plas(BOUNDS)
    running = batch(policy, 1.0)
    assert policy.victims(running, 0) == []
    arrived(policy, "w")
    assert policy.victims([], 0) == []


def test_fcfs_never_preempts() -> None:
    """Under FCFS no call is preempted, not even for an earlier call that was not ready when the batch was formed."""
    policy = Fcfs()
    early = arrived(policy, "early")
    running = batch(policy, 0.0)
    policy.charge(running[0], 1e6, 1e6)
    assert early.rank < running[0].rank
    assert policy.victims(running, 0) == []
    assert policy.victims(running, 1) == []


# -- parameters


@pytest.mark.parametrize(
    "bounds", [(0.0,), (-1.0,), (1.0, 1.0), (2.0, 1.0), (1.0, math.inf), (math.nan,), (1.0, math.nan, 2.0)]
)
def test_bounds_that_make_no_queues_are_refused(bounds: tuple[float, ...]) -> None:
    """Bounds must be positive, finite and increasing. The message shows the bounds that were given."""
    with pytest.raises(PolicyError, match=r"queue bounds must be positive, finite and increasing seconds, not \["):
        Plas(bounds)


@pytest.mark.parametrize("beta", [0.0, -1.0, math.nan])
def test_a_beta_that_makes_no_ratio_is_refused(beta: float) -> None:
    """Beta must be above zero, or None. The message shows the value that was given."""
    with pytest.raises(PolicyError, match=f"beta must be > 0, or None to never promote, not {beta}"):
        Plas(BOUNDS, beta)


def test_one_queue_is_first_come_first_served() -> None:
    """Without bounds there is one queue, so no call is demoted or promoted."""
    policy = Plas((), beta=1.0)
    calls = [arrived(policy, "a", 100.0), arrived(policy, "b", 0.0)]
    policy.start(calls[0], 0.0)
    policy.charge(calls[0], 1e9, 0.0)
    policy.preempt(calls[0], 0.0)
    assert waiting(policy) == ["a", "b"]
    assert policy.promote(1e9) == []
