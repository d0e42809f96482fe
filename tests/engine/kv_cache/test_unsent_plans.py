"""What is planned and not sent yet is dropped with the state that it was made from. A refused copy loses nothing."""

from __future__ import annotations

import torch

from weft.core.kv_cache.config import SwapChoice
from weft.core.kv_cache.policies import Context
from weft.core.prediction import KnownTime
from weft.engine.kv_cache.slot_plans import Executed, SwapBatch, SwapPlan
from weft.engine.kv_cache.store import HostStore, StoreEvents
from weft.engine.kv_cache.worker import SwapWorker

CHAIN = ["a", "b", "c", "d"]


class Voided(StoreEvents):
    """Notes what is still to be fetched whenever fetches are void."""

    def __init__(self, store: HostStore) -> None:
        self._store = store
        self.told: list[set[int]] = []
        store.events = self

    def let_go(self) -> None:
        self.told.append(self._store.to_fetch)


def kept(context: Context) -> HostStore:
    """A store whose host memory has the blocks of one context."""
    store = HostStore(8, 4, SwapChoice(0, 1.0))
    store.keep(context, CHAIN, dict(enumerate([1, 2, 3, 4])))
    plan = store.take_plan()
    assert plan is not None
    store.executed(Executed(plan.number))
    return store


def make_context() -> Context:
    return Context("p", "", 0.0, KnownTime(0.0))


def test_a_reset_drops_a_fetch_that_is_not_sent() -> None:
    """No plan reads slots after the reset, and whoever has taken blocks for it is told."""
    store = kept(make_context())
    told = Voided(store).told
    store.fetch(CHAIN, 0, [5, 6])
    assert store.to_fetch == {5, 6}
    store.reset()
    assert (told, store.to_fetch, store.stats().used) == ([set()], set(), 0)
    assert store.take_plan() is None
    assert not store.awaits_report
    store.check_integrity()


def test_a_copy_that_is_lost_is_not_fetched() -> None:
    """A report says that a slot could not be read, after a fetch from it was planned. The plan is sent without it."""
    store = kept(make_context())
    told = Voided(store).told
    _, slots = store.fetch(CHAIN, 0, [5, 6])
    store.executed(Executed(1, unread=(slots[1],)))
    assert told
    assert store.take_plan() is None
    store.check_integrity()


def test_what_a_fetch_has_pinned_is_given_up_when_the_fetch_is_withdrawn() -> None:
    """The program ends while the fetch is planned. After the next step its slots are free, though nothing was sent."""
    context = make_context()
    store = kept(context)
    store.fetch(CHAIN, 0, [5, 6])
    store.tier.drop(context)
    store.withdraw_fetches(list(store._fetch))
    assert store.awaits_report, "the engine steps once more"
    assert store.take_plan() is None
    assert (store.stats().used, store.awaits_report) == (0, False)


def test_a_copy_made_again_in_the_same_slot_is_not_the_one_that_was_read() -> None:
    """The copy is lost and made again while a fetch of it is under way, so what the fetch has read may be void."""
    context = make_context()
    store = kept(context)
    number, slots = store.fetch(CHAIN, 0, [5])
    assert store.take_plan() is not None
    assert store.has_kept(CHAIN[:1], slots, number)
    store.tier.lose("a")
    assert not store.has_kept(CHAIN[:1], slots, number)
    store.keep(context, CHAIN, {0: 1})
    assert store.tier.slots["a"] == slots[0]
    assert not store.has_kept(CHAIN[:1], slots, number)


def test_a_fetch_that_the_kernel_refuses_loses_no_copy() -> None:
    """The copies stay where they are and can be loaded, the fetch is void, and the blocks are counted."""
    store = kept(make_context())
    told = Voided(store).told
    number, slots = store.fetch(CHAIN, 0, [5, 6, 7, 8])
    assert store.take_plan() is not None
    store.executed(Executed(number))
    store.copied_beside(Executed(number, refused=tuple(slots)))
    assert told
    assert store.ready(CHAIN) == 4
    assert (store.stats().used, store.stats().failed) == (4, 4)


def test_reports_of_two_workers_join_what_was_refused() -> None:
    """A slot that one worker refused to read was not read."""
    report = Executed(3, lost=(1,), refused=(2,)).together(Executed(3, unread=(4,), refused=(2, 5)))
    assert (report.lost, report.unread, set(report.refused)) == ((1,), (4,), {2, 5})


def test_a_refused_fetch_leaves_the_loads_of_its_step_alone() -> None:
    """A fetch with a slot twice is refused on its own. A call's load arrives, and no slot is said to be lost."""
    cache = torch.arange(8 * 2 * 4 * 2 * 8, dtype=torch.float32).view(8, 2, 4, 2, 8)
    worker = SwapWorker({"layer": cache}, 8, 6)
    before = cache.clone()
    try:
        assert not worker.swap_out(SwapPlan(out=SwapBatch([1, 2], [0, 1]), number=1))
        plan = SwapPlan(loads=[SwapBatch([5], [1])], fetch=SwapBatch([6, 7], [0, 0]), number=2)
        worker.swap_out(plan)
        assert worker.swap_in(plan) == (set(), set(), set())
        assert worker.take_done() == (Executed(2, refused=(0,)),)
    finally:
        worker.close()
    assert torch.equal(cache[5], before[2])
    assert torch.equal(cache[6:], before[6:])


def test_loads_that_the_kernel_refuses_are_computed_again() -> None:
    """A block that does not exist: the calls' blocks hold nothing, and their slots hold what they did."""
    cache = torch.zeros(8, 2, 4, 2, 8)
    worker = SwapWorker({"layer": cache}, 8, 6)
    try:
        worker.swap_out(SwapPlan(out=SwapBatch([1, 2], [0, 1]), number=1))
        plan = SwapPlan(loads=[SwapBatch([5], [1]), SwapBatch([8], [0])], number=2)
        assert worker.swap_in(plan) == ({5, 8}, set(), {0, 1})
    finally:
        worker.close()


def spilling() -> tuple[HostStore, Context]:
    """A store that copies the blocks 1 to 4 out beside steps."""
    store, context = HostStore(8, 4, SwapChoice(0, 1.0)), make_context()
    store.keep(context, CHAIN, dict(enumerate([1, 2, 3, 4])), beside=True)
    plan = store.take_plan()
    assert plan is not None
    assert (plan.out.blocks, plan.spill.blocks) == ([], [1, 2, 3, 4])
    store.executed(Executed(1))
    return store, context


def test_what_is_copied_out_beside_steps_is_there_once_all_workers_say_so() -> None:
    """The report of the step is not enough, nor that of one of two workers. What one of them has lost is not there."""
    store = HostStore(8, 4, SwapChoice(0, 1.0))
    store.workers = 2
    store.keep(make_context(), CHAIN, dict(enumerate([1, 2, 3, 4])), beside=True)
    store.take_plan()
    store.executed(Executed(1))
    store.copied_beside(Executed(1))
    assert (store.ready(CHAIN), store.copied, store.awaits_report) == (0, 0, True)
    store.copied_beside(Executed(1, lost=(store.tier.slots["c"],)))
    assert (store.ready(CHAIN), store.copied, store.awaits_report) == (2, 1, False)
    store.check_integrity()


def test_a_step_that_overwrites_what_is_being_copied_out_waits_for_the_copy() -> None:
    """It waits once. What is planned and not sent is copied before the step instead, and nothing waits for that."""
    store, context = spilling()
    store.hurry(lambda block: block == 9)
    assert store.take_plan() is None
    store.hurry(lambda block: block == 3)
    plan = store.take_plan()
    assert plan is not None
    assert plan.waits_for == 1
    store.hurry(lambda block: block == 3)
    assert store.take_plan() is None
    store.keep(context, [*CHAIN, "e", "f"], {4: 5, 5: 6}, beside=True)
    store.hurry(lambda block: block == 6)
    plan = store.take_plan()
    assert plan is not None
    assert (plan.out.blocks, plan.spill.blocks, plan.waits_for) == ([6], [5], 0)
    store.check_integrity()


def test_a_slot_that_is_given_up_while_it_is_written_is_not_written_by_two_at_once() -> None:
    """The program ends during the copy. A step whose plan writes one of its slots waits for the copy, others do not."""
    store, context = spilling()
    store.tier.drop(context)
    other = Context("q", "", 0.0, KnownTime(0.0))
    store.keep(other, ["x"], {0: 7})
    plan = store.take_plan()
    assert plan is not None
    is_reused = plan.out.slots[0] < 4
    assert plan.waits_for == (1 if is_reused else 0)
    store.copied_beside(Executed(1, lost=(0,)))
    assert store.tier.slots, "what another has in the slot since is not lost"
    store.check_integrity()
