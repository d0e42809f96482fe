"""Host memory behind the device, whatever happens in whatever order: a machine of random events with a naive model."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.core.kv_cache.host_tier import HostTier
from weft.core.kv_cache.policies import KV_POLICIES, KvPolicyConfig, Memory
from weft.core.kv_cache.retention import ProgramGone, RunningCall, TieredRetention, ToolEnded, ToolStarted

BLOCK_TOKENS = 16
SLOTS = 6
PROMPTS = st.builds(lambda text, tokens: text[:tokens], st.sampled_from(["aaaaaa", "aabbbb"]), st.integers(1, 6))
PROGRAMS = st.sampled_from("pqrs")
MEMORY = Memory(0.5, 100, 1e-3, copy_token_s=1e-5)


class TieredMachine(RuleBasedStateMachine):
    """Plays an engine: calls, copies out and back, evictions on both sides, ends, and workers that fail.

    A key names a block and all before it. Here the device is a set of keys, and host memory a dictionary of slots with
    what the workers have written there.
    """

    @initialize(policy=st.sampled_from([name for name in KV_POLICIES if name not in ("lru", "ended-first")]))
    def begin(self, policy: str) -> None:
        self.now_s = 0.0
        self.free = list(range(SLOTS))
        self.written: dict[int, Hashable] = {}  # what the workers have copied into each slot
        self.on_way: dict[int, Hashable] = {}  # what a plan copies that they have not confirmed
        make = KvPolicyConfig(policy).make
        self.host = HostTier(make(), BLOCK_TOKENS, MEMORY, self._free)
        self.tiered = TieredRetention(make(), BLOCK_TOKENS, MEMORY, self.host)
        self.device: set[Hashable] = set()  # what can be found there
        self.running: list[tuple[RunningCall, list[str]]] = []
        self.ended: set[str] = set()

    def _free(self, slot: int) -> None:
        assert slot not in self.free, "a slot is freed twice"
        self.free.append(slot)
        self.written.pop(slot, None)
        self.on_way.pop(slot, None)

    def _chain(self, tokens: str) -> list[str]:
        return [tokens[: end + 1] for end in range(len(tokens))]

    def _contexts(self) -> list[Any]:
        return self.tiered.contexts_anywhere()

    # -- what happens

    @rule(seconds=st.sampled_from([0.01, 1.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(program=PROGRAMS, tokens=PROMPTS)
    def call_begins(self, program: str, tokens: str) -> None:
        """Prompts are the beginnings of two texts, so programs share blocks and go on where they were."""
        chain = self._chain(tokens)
        self.tiered.call_arrived(program, chain, self.now_s)
        self.running.append((self.tiered.call_began(program, program, chain, self.now_s), chain))
        self.device.update(chain)
        self.ended.discard(program)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.text("ab", max_size=3), how=st.sampled_from(["ends", "ends", "preempted", "aborted"]))
    def call_leaves(self, data: Any, more: str, how: str) -> None:
        call, chain = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.tiered.call_grew(call, self._chain(chain[-1] + more), self.now_s)
        self.device.update(self._chain(chain[-1] + more))
        leave = {
            "ends": self.tiered.call_ended,
            "preempted": self.tiered.call_preempted,
            "aborted": self.tiered.call_aborted,
        }
        leave[how](call, self.now_s)

    @rule(program=PROGRAMS, tool=st.sampled_from(["search", "run"]))
    def tool_runs(self, program: str, tool: str) -> None:
        self.tiered.happened(program, ToolStarted(tool, 1), self.now_s)

    @rule(program=PROGRAMS)
    def tool_returns(self, program: str) -> None:
        self.tiered.happened(program, ToolEnded(1), self.now_s)

    @rule(program=PROGRAMS)
    def program_ends(self, program: str) -> None:
        """No context of it is left, on the device or in host memory."""
        self.tiered.happened(program, ProgramGone(), self.now_s)
        self.ended.add(program)
        assert not self.tiered.contexts_of(program)
        assert not self.host.tree.contexts_of(program)

    @rule()
    def epoch_passes(self) -> None:
        for each in self.tiered.to_revisit():
            self.tiered.revisit(each, self.now_s)

    @precondition(lambda self: self._contexts())
    @rule(data=st.data(), first=st.integers(0, 3))
    def blocks_are_copied_out(self, data: Any, first: int) -> None:
        """A context's blocks from `first` on, or as many as have room once others of less worth made way."""
        context = data.draw(st.sampled_from(self._contexts()))
        chain = self.tiered.chain_of(context)
        end = self.host.put(context, chain, self.now_s)
        missing = [key for key in chain[first:] if key not in self.host.slots]
        if len(missing) > len(self.free):
            self.host.evict(len(missing) - len(self.free), self.host.rank_of(context, self.now_s), self.now_s)
        for key in missing[: len(self.free)]:
            slot = self.host.slots[key] = self.free.pop()
            self.on_way[slot] = key
        self.host.unpin(end)
        self.tiered.spills.pop(context, None)

    @precondition(lambda self: self._contexts())
    @rule(data=st.data())
    def a_context_is_copied(self, data: Any) -> None:
        """Without a step between, so that much is in host memory."""
        self.blocks_are_copied_out(data, 0)
        self.workers_report(fails=False)

    @rule(count=st.integers(1, 3))
    def host_makes_room(self, count: int) -> None:
        """For contexts of more worth than all others."""
        self.host.evict(count, None, self.now_s)
        self.tiered.host_changed()

    @precondition(lambda self: self.on_way)
    @rule(fails=st.booleans())
    def workers_report(self, *, fails: bool) -> None:
        """What they could not write is lost. Of the others, a context that is complete is in host memory."""
        done, self.on_way = self.on_way, {}
        for slot, key in done.items():
            if fails and self.host.slots.get(key) == slot:
                self.host.lose(key)
            elif not fails:
                self.written[slot] = key
        for context in self._contexts():
            chain = self.tiered.chain_of(context)
            if chain and context.host_tokens >= len(chain) * BLOCK_TOKENS and self._confirmed(chain):
                self.tiered.copied(context)
        self.tiered.host_changed()

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def copy_cannot_be_read(self, data: Any) -> None:
        """A worker says so of a slot that it has written before."""
        slot = data.draw(st.sampled_from(sorted(self.written)))
        self.host.lose(self.written[slot])
        self.tiered.host_changed()

    @rule()
    def device_evicts(self) -> None:
        block = self.tiered.order.evict(self.now_s)
        assert block is None or not block.pins
        self.device.discard(block and block.key)

    @precondition(lambda self: self._contexts())
    @rule(data=st.data())
    def context_comes_back(self, data: Any) -> None:
        """Only what the workers have confirmed is fetched, so only that is found on the device."""
        context = data.draw(st.sampled_from(self._contexts()))
        chain = self.host.tree.chain(self.host.tree.end_of(context))
        there = 0
        while there < len(chain) and (chain[there] in self.tiered.tree or self._confirmed(chain[there : there + 1])):
            there += 1
        if there:
            self.tiered.fetched(context, chain[:there], self.now_s)
            self.device.update(chain[:there])

    def _confirmed(self, keys: list[Any]) -> bool:
        return all(self.written.get(self.host.slots.get(key, -1)) == key for key in keys)

    # -- what always holds

    @invariant()
    def sums_agree(self) -> None:
        if hasattr(self, "tiered"):
            self.tiered.check_integrity()

    @invariant()
    def the_device_has_what_was_put_there(self) -> None:
        """Calls and confirmed copies put it there, and eviction takes it away. Nothing else can be found."""
        if hasattr(self, "tiered"):
            assert all(key in self.tiered.tree for key in self.device)
            assert len(self.tiered.tree) == len(self.device)

    @invariant()
    def every_slot_has_one_block(self) -> None:
        """And no more are in use than there are. What is in a slot, or on the way there, is its block's."""
        if hasattr(self, "tiered"):
            slots = list(self.host.slots.values())
            assert len(set(slots)) == len(slots)
            assert sorted(slots + self.free) == list(range(SLOTS))
            by_slot = {slot: key for key, slot in self.host.slots.items()}
            assert by_slot == self.written | self.on_way

    @invariant()
    def every_block_in_host_memory_is_somebodys(self) -> None:
        """A context of an open program ends in it or behind it."""
        if hasattr(self, "tiered"):
            needed = {key for c in self.host.tree.contexts() for key in self.host.tree.chain(self.host.tree.end_of(c))}
            assert self.host.slots.keys() <= needed
            assert not self.ended & {context.program for context in self.host.tree.contexts()}

    @invariant()
    def what_is_called_in_host_memory_is_there(self) -> None:
        """A context that may be evicted as if that cost nothing has all of its blocks there, or on the way."""
        if hasattr(self, "tiered"):
            for context in self._contexts():
                if context.on_host:
                    assert all(key in self.host.slots for key in self.tiered.chain_of(context)), context

    def teardown(self) -> None:
        """When all programs have ended, nothing is left."""
        if hasattr(self, "tiered"):
            for program in "pqrs":
                self.tiered.happened(program, ProgramGone(), self.now_s)
            assert not self.host.slots
            assert sorted(self.free) == list(range(SLOTS))
            assert len(self.host.tree) == 0


TieredMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, suppress_health_check=list(HealthCheck)
)
TestTiered = TieredMachine.TestCase
