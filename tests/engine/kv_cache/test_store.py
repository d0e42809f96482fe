"""The scheduler's side of the swap, against a naive model of the device, the host memory and the calls."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.core.kv_cache.config import SwapChoice
from weft.engine.kv_cache.slot_plans import Executed, SwapPlan
from weft.engine.kv_cache.store import HostStore

BLOCK = 4


def make_store(slots: int, min_tokens: int = 0) -> HostStore:
    return HostStore(slots, BLOCK, SwapChoice(min_tokens, 1.0))


def planned(store: HostStore) -> SwapPlan:
    """What the workers copy now; they report at once."""
    plan = store.take_plan() or SwapPlan()
    if plan.number:
        store.executed(Executed(plan.number))
    return plan


def content(tokens: list[int], index: int, known: int) -> tuple[int, ...]:
    """What block `index` holds after the first `known` tokens have been computed."""
    return tuple(tokens[index * BLOCK : min(known, (index + 1) * BLOCK)])


def hashes_of(tokens: list[int]) -> list[Any]:
    """Stand-ins for vLLM's block hashes: the hash of a full block is the tuple of all tokens up to its end."""
    return [tuple(tokens[: end + BLOCK]) for end in range(0, len(tokens) - BLOCK + 1, BLOCK)]


class SwapMachine(RuleBasedStateMachine):
    """Calls are preempted, resumed, extended and ended in any order. A load must bring what had been computed."""

    @initialize(slots=st.integers(1, 30), caching=st.booleans(), min_tokens=st.sampled_from([0, 0, 6]))
    def start(self, slots: int, caching: bool, min_tokens: int) -> None:
        self.store = make_store(slots, min_tokens)
        self.caching = caching
        self.min_tokens = min_tokens
        self.host: dict[int, tuple[int, ...]] = {}
        self.tokens: dict[str, list[int]] = {}  # of each call; all of them are computed
        self.running: set[str] = set()
        self.names = iter(range(10**6))
        self.blocks = iter(range(10**9))  # the device never uses a block twice

    @rule(length=st.integers(1, 30), prefix=st.integers(0, 2))
    def arrive(self, length: int, prefix: int) -> None:
        """The first nine tokens are one of three prefixes, because prompts share prefixes."""
        name = f"call-{next(self.names)}"
        self.tokens[name] = [prefix] * min(length, 9) + [int(name[5:]) + 10] * max(0, length - 9)
        self.running.add(name)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.integers(1, 9))
    def compute(self, data: st.DataObject, more: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.tokens[name] += [int(name[5:]) + 10] * more

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Some running calls are preempted, some waiting ones resume, and the workers carry the plan out."""
        victims = data.draw(st.lists(st.sampled_from(sorted(self.running)), unique=True)) if self.running else []
        device: dict[int, tuple[int, ...]] = {}
        for name in victims:
            self.running.discard(name)
            tokens = self.tokens[name]
            blocks = [next(self.blocks) for _ in range(-(-len(tokens) // BLOCK))]
            device |= {block: content(tokens, index, len(tokens)) for index, block in enumerate(blocks)}
            saved = self.store.save(name, blocks, len(tokens), hashes_of(tokens) if self.caching else [])
            if saved:
                assert self.store.match(name, [], 0, len(tokens) + 1) == len(tokens) >= self.min_tokens
        waiting = sorted(self.tokens.keys() - self.running)
        resuming = data.draw(st.lists(st.sampled_from(waiting), unique=True)) if waiting else []
        loads: list[tuple[str, int, int, list[int]]] = []
        for name in resuming:
            tokens = self.tokens[name]
            local = BLOCK * data.draw(st.integers(0, len(tokens) // BLOCK))
            more = self.store.match(name, [], local, len(tokens) + data.draw(st.integers(0, 1)))
            blocks = [next(self.blocks) for _ in range(-(-(local + more) // BLOCK))]
            self.store.resume(name, [], blocks, local, local + more)
            assert self.store.loaded_tokens(name) == more
            loads.append((name, local, local + more, blocks))
            self.running.add(name)
        self.carry_out(device)
        for name, start, end, blocks in loads:
            for index in range(start // BLOCK, -(-end // BLOCK)):
                wanted = content(self.tokens[name], index, end)
                assert self.loaded[blocks[index]][: len(wanted)] == wanted

    def carry_out(self, device: dict[int, tuple[int, ...]]) -> None:
        plan = planned(self.store)
        plan.check_integrity()
        for block, slot in zip(plan.out.blocks, plan.out.slots, strict=True):
            self.host[slot] = device[block]
        self.loaded = {
            block: self.host[slot] for load in plan.loads for block, slot in zip(load.blocks, load.slots, strict=True)
        }

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        del self.tokens[name]
        self.running.discard(name)
        self.store.release(name)

    @rule()
    def reset(self) -> None:
        self.store.reset()
        assert self.store.stats().used == 0

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "store"):
            self.store.check_integrity()
            if not self.tokens:
                assert self.store.stats().used == 0


TestSwapMachine = SwapMachine.TestCase
TestSwapMachine.settings = settings(max_examples=150, stateful_step_count=30)


def test_a_second_preemption_copies_only_what_is_new() -> None:
    """Ten tokens, then sixteen: the first two blocks of the second copy are in host memory already."""
    store = make_store(100)
    store.save("a", [1, 2, 3], 10, [])
    assert planned(store).out.blocks == [1, 2, 3]
    store.resume("a", [], [11, 12, 13], 0, 10)
    (load,) = planned(store).loads
    assert load.blocks == [11, 12, 13]
    store.save("a", [11, 12, 13, 14], 16, [])
    assert planned(store).out.blocks == [13, 14]


def test_the_last_token_is_left_to_compute() -> None:
    """Only a run of the model gives the next token, even if every token has its KV in host memory."""
    store = make_store(100)
    store.save("a", [1, 2, 3], 10, [])
    assert [store.match("a", [], 0, count) for count in (9, 10, 11, 99)] == [8, 9, 10, 10]
    assert store.match("a", [], 8, 99) == 2
    assert store.match("b", [], 0, 99) == 0


def test_a_copy_that_is_being_loaded_is_not_given_up() -> None:
    """A step copies out before it copies in, so the slots of a load must not be written in the same step."""
    store = make_store(4)
    store.save("a", [1, 2, 3], 12, [])
    planned(store)
    store.resume("a", [], [4, 5, 6], 0, 12)
    assert not store.save("longer", [7, 8, 9, 10], 16, [])
    planned(store)
    assert store.save("longer", [7, 8, 9, 10], 16, [])


def test_calls_that_share_a_prefix_share_its_copy() -> None:
    """The blocks of a common prefix are copied once, and stay as long as one of the calls needs them."""
    store = make_store(100)
    store.save("a", [1, 2, 3], 12, ["x", "y", "a"])
    store.save("b", [1, 2, 4], 12, ["x", "y", "b"])
    assert planned(store).out.blocks == [1, 2, 3, 4]
    store.release("a")
    assert store.match("b", [], 0, 13) == 12
    store.release("b")
    assert store.stats().used == 0


def test_a_full_memory_gives_up_copies_for_a_longer_call() -> None:
    """First copies of running calls go, then the shortest, from their ends. What fits of a call is kept."""
    store = make_store(8)
    store.save("again", [1, 2], 8, [])
    store.resume("again", [], [3, 4], 0, 8)
    store.save("short", [5], 4, [])
    store.save("long", [6, 7, 8, 9], 16, [])
    planned(store)
    assert store.save("middle", [10, 11, 12], 12, [])
    planned(store)
    assert [store.match(name, [], 0, 99) for name in ("again", "short", "middle", "long")] == [0, 4, 12, 16]
    assert not store.save("little", [13, 14], 8, [])
    planned(store)
    assert [store.match(name, [], 0, 99) for name in ("short", "little", "middle", "long")] == [0, 4, 12, 16]
    assert store.save("longest", [15, 16, 17, 18, 19], 20, [])
    planned(store)
    assert [store.match(name, [], 0, 99) for name in ("little", "middle", "long", "longest")] == [0, 0, 12, 20]
    assert (store.stats().too_full, store.stats().evicted) == (1, 8)


def test_a_copy_given_up_in_the_same_step_is_not_made() -> None:
    """Two calls are preempted in one step, and host memory holds the longer one only."""
    store = make_store(4)
    store.save("short", [1, 2], 8, [])
    store.save("long", [3, 4, 5, 6], 16, [])
    assert planned(store).out.blocks == [3, 4, 5, 6]


def test_random_traffic_leaks_nothing() -> None:
    """A thousand preemptions, with memory for a third of the calls; when all calls have ended, no slot is in use."""
    rng = random.Random(0)
    store = make_store(60)
    lengths = {f"call-{n}": rng.randrange(10, 60) for n in range(30)}
    for _ in range(1000):
        name = rng.choice(list(lengths))
        lengths[name] += 1
        store.save(name, list(range(-(-lengths[name] // BLOCK))), lengths[name], [])
        store.resume(name, [], list(range(99)), 0, store.match(name, [], 0, lengths[name]))
        planned(store)
        store.check_integrity()
    assert store.stats().evicted > 0
    for name in lengths:
        store.release(name)
    assert store.stats().used == 0
