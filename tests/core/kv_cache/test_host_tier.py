"""Host memory's blocks, compared with lists of blocks and owners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.core.kv_cache.host_tier import HostTier, Longest
from weft.core.kv_cache.policies import Context, Memory
from weft.core.prediction import KnownTime

MEMORY = Memory(0.0, 0, 1e-3, copy_token_s=1e-5)
BLOCK = 16
PROGRAMS = "pqr"
CHAINS = st.text("ab", min_size=1, max_size=5)


def keys(chain: str) -> list[str]:
    """A block's key is the text up to its end, so chains with a common beginning share its blocks."""
    return [chain[: end + 1] for end in range(len(chain))]


class HostTierMachine(RuleBasedStateMachine):
    """Contexts are put, claimed, dropped and evicted, copies begin and fail, in any order. The reference keeps the
    chain of each context and the set of blocks that have a copy, and looks among all of them."""

    @initialize()
    def make(self) -> None:
        self.now_s = 0.0
        self.free: list[int] = []
        self.tier = HostTier(Longest(), BLOCK, MEMORY, self.free.append)
        self.next_slot = 0
        self.contexts: list[Context] = []  # that ever were
        self.chains: dict[Context, str] = {}  # up to the last block that somebody may read
        self.copied: dict[str, int] = {}  # by key: its slot
        self.pinned: list[tuple[Any, str]] = []  # ends of chains that a copy reads or writes

    def new(self, program: str) -> Context:
        self.contexts.append(Context(program, program, self.now_s, KnownTime(1.0)))
        return self.contexts[-1]

    def needed(self) -> set[str]:
        """What is in a context, or is pinned."""
        chains = [*self.chains.values(), *(chain for _, chain in self.pinned)]
        return {key for chain in chains for key in keys(chain)}

    def settle(self) -> None:
        """What nobody needs is gone; a context ends at its last block that has a copy, or that another keeps."""
        held = set(self.copied)
        pins = {key for _, chain in self.pinned for key in keys(chain)}
        while True:
            ends = {key for chain in self.chains.values() for key in keys(chain)} | pins
            self.copied = {key: slot for key, slot in self.copied.items() if key in ends}
            for context, chain in list(self.chains.items()):
                behind = any(key.startswith(chain) and key != chain for key in ends)
                if chain not in self.copied and not behind and chain not in pins:
                    self.chains[context] = chain[:-1]
                    if not chain[:-1]:
                        del self.chains[context]
                    break
            else:
                break
        assert set(self.copied) <= held

    def put(self, context: Context, chain: str, indices: Sequence[int]) -> None:
        """As `HostStore.keep` does: blocks get slots while the chain is pinned."""
        before = self.chains.get(context, "")
        end = self.tier.put(context, keys(chain), self.now_s)
        for index in indices:
            key = chain[: index + 1]
            if index < len(chain) and key not in self.copied:
                self.tier.slots[key] = self.copied[key] = self.next_slot
                self.next_slot += 1
        self.tier.unpin(end)
        if not before.startswith(chain):
            older = [
                each for each, left in self.chains.items() if each.program == context.program and chain.startswith(left)
            ]
            for each in older:
                del self.chains[each]
            self.chains[context] = chain

    @rule(
        program=st.sampled_from(PROGRAMS), chain=st.text("ab", min_size=1, max_size=5), gaps=st.sets(st.integers(0, 4))
    )
    def keep(self, program: str, chain: str, gaps: set[int]) -> None:
        """A new context, of which some blocks are copied."""
        self.now_s += 1
        self.put(self.new(program), chain, [index for index in range(len(chain)) if index not in gaps])
        self.settle()

    @precondition(lambda self: self.chains)
    @rule(data=st.data(), indices=st.sets(st.integers(0, 4)))
    def copy_more(self, data: Any, indices: set[int]) -> None:
        """More blocks of a context are copied."""
        self.now_s += 1
        context = data.draw(st.sampled_from(list(self.chains)))
        self.put(context, self.chains[context], sorted(indices))
        self.settle()

    @precondition(lambda self: self.chains)
    @rule(data=st.data(), chain=CHAINS)
    def move(self, data: Any, chain: str) -> None:
        """A call is preempted again: what it had is of no use where its last block was not full."""
        self.now_s += 1
        self.put(data.draw(st.sampled_from(list(self.chains))), chain, range(len(chain)))
        self.settle()

    @rule(program=st.sampled_from(PROGRAMS), chain=CHAINS)
    def claim(self, program: str, chain: str) -> None:
        """A call has left a context: what is there of its chain is its own, and its program's older ones on it end."""
        self.now_s += 1
        context = self.new(program)
        known = max((key for key in keys(chain) if key in self.needed()), key=len, default="")
        self.tier.claim(context, keys(chain), self.now_s)
        if known:
            for each, left in list(self.chains.items()):
                if each.program == program and known.startswith(left):
                    del self.chains[each]
            self.chains[context] = known
            assert context.on_host == all(key in self.copied for key in keys(chain))
        self.settle()

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def drop(self, data: Any) -> None:
        """A program gives a context up, with all that no other needs."""
        context = data.draw(st.sampled_from(list(self.chains)))
        self.tier.drop(context)
        del self.chains[context]
        self.settle()
        assert (context.host_tokens, context.on_host) == (0, False)

    @precondition(lambda self: self.copied)
    @rule(data=st.data())
    def lose(self, data: Any) -> None:
        """A copy has failed. Its block is a gap, unless nothing is behind it."""
        key = data.draw(st.sampled_from(sorted(self.copied)))
        self.tier.lose(key)
        del self.copied[key]
        self.settle()

    @precondition(lambda self: self.copied)
    @rule(data=st.data())
    def read(self, data: Any) -> None:
        """A step reads a chain, which nothing evicts meanwhile."""
        key = data.draw(st.sampled_from(sorted(self.copied)))
        block = self.tier.tree.get(key)
        self.tier.tree.pin(block)
        self.pinned.append((block, key))

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def have_read(self, data: Any) -> None:
        block, _ = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.tier.unpin(block)
        self.settle()

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        """Slots are given up from the ends of chains, and none that a copy reads."""
        before, pins = dict(self.copied), {key for _, chain in self.pinned for key in keys(chain)}
        freed = self.tier.evict(count, None, self.now_s)
        gone = before.keys() - self.tier.slots.keys()
        assert len(gone) == freed
        assert not gone & pins
        assert freed >= count or set(self.tier.slots) <= pins, "nothing else could be given up"
        for key in gone:
            del self.copied[key]
        for key in gone:
            behind = [other for other in self.copied if other.startswith(key)]
            assert not behind, "a chain goes from its end"
        self.cut(gone)
        self.settle()

    def cut(self, gone: set[str]) -> None:
        """Contexts end before the first block that was given up."""
        for context, chain in list(self.chains.items()):
            kept = next((key[:-1] for key in keys(chain) if key in gone), chain)
            if kept:
                self.chains[context] = kept
            else:
                del self.chains[context]

    @invariant()
    def same(self) -> None:
        """The same blocks in the same slots, nothing is leaked, and each context is as long as it says."""
        if not hasattr(self, "tier"):
            return
        assert self.tier.slots == self.copied
        assert sorted([*self.free, *self.copied.values()]) == list(range(self.next_slot))
        self.tier.check_integrity()
        tree = self.tier.tree
        found = {context: tree.chain(tree.end_of(context))[-1] for context in tree.contexts()}
        assert found == self.chains
        assert all(context.host_tokens == len(self.chains.get(context, "")) * BLOCK for context in self.contexts)


HostTierMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestHostTier = HostTierMachine.TestCase
