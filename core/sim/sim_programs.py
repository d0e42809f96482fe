"""Programs and calls in progress in a simulation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weft.core.accounts import Attained
from weft.core.ids import ProgramId, SessionId
from weft.core.policies import Call, ProgramView
from weft.core.sim.kv_cache.blocks import BlockNode
from weft.core.sim.kv_cache.cache import Segment
from weft.core.trace.format import TraceCall, TraceProgram

if TYPE_CHECKING:
    from weft.core.sim.kv_cache.host import KvElsewhere


@dataclass(eq=False, slots=True)
class SimCall(Call):
    """A call in progress: a policy's view of it, its progress on the replica, and its account.

    The fields do not change with each step in which the call decodes. They are updated when the call is charged: when
    it ends, is preempted, has used its quantum, or is due by `charge_at_tokens`.
    """

    spec: TraceCall = field(kw_only=True)
    owner: SimProgram = field(kw_only=True)
    index: int = field(kw_only=True)  # in its program's list of calls
    inherited: Attained = field(kw_only=True)  # its program's attained service on arrival (Algorithm 1 line 11)
    running: bool = False
    stalled: bool = False  # it runs, but gets no tokens in the present step
    resumed: bool = False  # it was preempted, and has generated nothing since it started again
    ready_s: float = 0.0  # when its copies from host memory are done, for which no step waits
    prefill_left: int = 0  # tokens to compute before the next one is generated
    computed: int = 0  # the most tokens that it ever had in the KV cache
    known_tokens: int = 0  # of its prompt, whose KV an earlier call of its program has left, cached still or not
    swapped: int = 0  # tokens in host memory
    elsewhere: KvElsewhere | None = None  # what it can read of another replica's host memory
    end_node: BlockNode | None = None  # with which its known blocks end; None if its program has no hash ids
    prompt_nodes: list[tuple[BlockNode, int]] | None = None  # of its prompt, for `prefixes`; None until somebody asks
    segment: Segment | None = None  # the tokens in the KV cache that it does not share with the calls before it
    charged_step: int = 0  # steps of its replica when it was last charged
    charged_clock_s: float = 0.0  # decode clock of its replica when it was last charged
    end_step: int = -1  # the step with which it ends; -1 unless it decodes
    charge_step: int = -1  # the step after which the policy wants it charged; -1 for none
    total_service_s: float = 0.0  # since arrival, for its account
    total_wait_s: float = 0.0  # since arrival, for its account, without the current wait
    queued_since_s: float = math.nan  # start of the current or the last wait; promotion does not change it
    started_s: float = math.nan  # when it last started

    @property
    def context_tokens(self) -> int:
        """Tokens of its prompt, and of its output so far."""
        return self.spec.prompt_tokens + self.output_tokens

    def tokens_to_compute(self, hit: int) -> int:
        """Tokens to compute before the next one is generated, if the call starts and finds a prefix of `hit` tokens.

        At least the last token is computed again, because the next one follows from its output.
        """
        return max(1, self.context_tokens - max(hit, self.swapped))

    @property
    def kv_key(self) -> Hashable:
        return self.owner.number, self.index

    def shared_prefixes(self) -> Iterator[tuple[Hashable, int]]:
        """Yield the keys of the KV that it shares with other calls once it runs, the longest prefix first.

        Each comes with the length of the prefix in tokens.
        """
        if self.end_node is not None:
            prompt_tokens = self.spec.prompt_tokens
            yield from (each for each in self._known_prefixes(self.end_node) if each[1] <= prompt_tokens)
        elif self.spec.shared_prefix_tokens:
            yield self.owner.prefix_key(self.spec), self.spec.shared_prefix_tokens

    def output_prefixes(self) -> Iterator[tuple[Hashable, int]]:
        """Yield the keys of the KV that it shares once it has generated it, the longest prefix first."""
        if self.end_node is not None:
            first, last = self.spec.prompt_tokens, self.context_tokens
            known = itertools.takewhile(lambda each: each[1] > first, self._known_prefixes(self.end_node))
            yield from (each for each in known if each[1] <= last)

    def _known_prefixes(self, end: BlockNode) -> Iterator[tuple[BlockNode, int]]:
        """Yield the nodes of its known blocks, the last one first, each with the tokens up to its end."""
        block_tokens = self.owner.block_tokens
        return ((node, node.end * block_tokens) for node in end.path())

    def prefixes(self) -> Iterator[tuple[Hashable, int]]:
        """Return the keys under which a prefix of the call may be cached, each with the number of tokens shared.

        The call's own key comes first, then that of its first parent, then that of the parent's first parent, and so
        on. The last one is the key of the prompt that programs of one name share. With hash ids, the blocks of the
        prompt follow its own key.
        """
        own = (self.kv_key, self.context_tokens)
        if self.end_node is None:
            return itertools.chain((own,), self._parents())
        if self.prompt_nodes is None:
            block_tokens, prompt_tokens = self.owner.block_tokens, self.spec.prompt_tokens
            self.prompt_nodes = [
                (node, min(node.end * block_tokens, prompt_tokens))
                for node in self.end_node.path()
                if node.begin * block_tokens < prompt_tokens
            ]
        return itertools.chain((own,), self.prompt_nodes)

    def _parents(self) -> Iterator[tuple[Hashable, int]]:
        """Yield the keys of the calls before it, without hash ids, each with the number of tokens shared."""
        shared, spec = self.context_tokens, self.spec
        while shared := min(shared, spec.shared_prefix_tokens):
            yield self.owner.prefix_key(spec), shared
            if not spec.parents:
                return
            spec = self.owner.spec.calls[self.owner.index_of[spec.parents[0]]]


@dataclass(eq=False, slots=True)
class SimProgram:
    """A program in progress."""

    spec: TraceProgram
    number: int  # position in the trace
    shown_name: str | None = None  # the name that policies see; None: its own
    end_nodes: Sequence[BlockNode] = ()  # by index: with which the known blocks of a call end; empty without hash ids
    view: ProgramView = field(init=False)  # what policies see of the program
    index_of: dict[str, int] = field(default_factory=dict)  # by the id of a call: its index
    unfinished_parents: list[int] = field(default_factory=list)  # by index: how many parents have not ended
    children: list[list[int]] = field(default_factory=list)  # by index: the indices of the calls that follow
    unfinished_calls: int = 0
    calls_in_flight: int = 0
    replica: int | None = None  # that got its latest call
    start_s: float = math.nan  # its arrival
    finish_s: float = math.nan
    # Of a program whose end nobody tells: how often it has been idle, how often it was taken to have ended, since when
    # it is idle, and after which time without a call it counts as ended.
    pauses: int = 0
    abandoned: int = 0
    idle_since_s: float = math.nan
    idle_timeout_s: float = math.inf
    # Set by `predict_work`, for policies that know the future.
    prefill_weight: float = 0.0  # work for each prompt token that is not shared; an output token is 1
    path_work: list[float] = field(default_factory=list)  # by index: on the longest chain that begins there

    def __post_init__(self) -> None:
        self._show()

    def _show(self) -> None:
        """Show policies a program that they have not seen."""
        spec = self.spec
        name = spec.name or "" if self.shown_name is None else self.shown_name
        program_id = f"{spec.program}#{self.abandoned}" if self.abandoned else spec.program
        self.view = ProgramView(ProgramId(program_id), name, spec.tenant, SessionId(spec.program), spec.fingerprint)

    @property
    def block_tokens(self) -> int:
        """The tokens of a block with a hash id."""
        return self.spec.block_tokens or 1

    def prefix_key(self, call: TraceCall) -> Hashable:
        """The key of the KV that a call shares: the key of its first parent. If the call has no parents, it is the key
        of the prompt with which all programs of this name begin."""
        return (self.number, self.index_of[call.parents[0]]) if call.parents else ("name", self.spec.name)

    @property
    def keys(self) -> list[Hashable]:
        """The keys of the KV that its calls leave."""
        return [(self.number, index) for index in range(len(self.spec.calls))]

    def open(self, now_s: float, arrival_order: int) -> None:
        """The program arrives. `arrival_order` programs have arrived before."""
        self.start_s = self.view.arrival_s = now_s
        self.view.arrival_order = arrival_order
        if self.spec.deadline_s is not None:
            self.view.deadline_s = now_s + self.spec.deadline_s
        calls = self.spec.calls
        self.index_of = {call.call_id: index for index, call in enumerate(calls)}
        self.unfinished_parents = [len(call.parents) for call in calls]
        self.children = [[] for _ in calls]
        for index, call in enumerate(calls):
            for parent in call.parents:
                self.children[self.index_of[parent]].append(index)
        self.unfinished_calls = len(calls)

    def abandon(self) -> None:
        """The program was idle for so long that it is taken to have ended. Its next call begins another one."""
        self.abandoned += 1
        before = self.view
        self._show()
        self.view.arrival_order, self.view.deadline_s = before.arrival_order, before.deadline_s

    def close(self, now_s: float) -> None:
        """The program's last call has ended."""
        self.finish_s = now_s
        self.unfinished_parents, self.children, self.path_work = [], [], []

    def predict_work(self, prefill_weight: float) -> None:
        """Compute the program's remaining work, and the work of the longest chain that begins with each call.

        Args:
            prefill_weight: Work for each prompt token that is not shared; an output token is 1.
        """
        self.prefill_weight = prefill_weight
        work = [call.output_tokens + self.prefill_work(call) for call in self.spec.calls]
        self.view.predicted_tokens = sum(work)
        self.path_work = [0.0] * len(work)
        unfinished_children = [len(children) for children in self.children]
        ready = [index for index, count in enumerate(unfinished_children) if not count]
        while ready:
            index = ready.pop()
            longest_after = max((self.path_work[child] for child in self.children[index]), default=0.0)
            self.path_work[index] = work[index] + longest_after
            for parent_id in self.spec.calls[index].parents:
                parent = self.index_of[parent_id]
                unfinished_children[parent] -= 1
                if not unfinished_children[parent]:
                    ready.append(parent)

    def prefill_work(self, call: TraceCall) -> float:
        """The work for a call's prompt. It counts as done when the call ends, not token by token."""
        return self.prefill_weight * (call.prompt_tokens - call.shared_prefix_tokens)
