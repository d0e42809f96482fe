"""Programs and calls under way in a simulation."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from weft.core.ids import ProgramId, SessionId
from weft.core.policies import Call, ProgramView
from weft.core.process_table import Attained
from weft.core.sim.kv import Segment
from weft.core.trace.format import TraceCall, TraceProgram


@dataclass(eq=False, slots=True)
class SimCall(Call):
    """A call under way: what its policy sees, and what its engine and its ledger know.

    While it decodes, one token a step, nothing of it is touched; `Replica` brings it up to date when something happens.
    """

    spec: TraceCall = field(kw_only=True)
    owner: SimProgram = field(kw_only=True)
    index: int = field(kw_only=True)  # which of its program's calls
    inherited: Attained = field(kw_only=True)  # line 11
    running: bool = False
    resumed: bool = False  # it has run before, and has not got further yet
    given: int = 0  # tokens, as of `seen_step`
    prefill_left: int = 0  # tokens to compute before the next one is given
    computed: int = 0  # the most tokens that it ever had in the KV cache
    swapped: int = 0  # tokens in host memory
    segment: Segment | None = None  # its own part of the KV cache
    seen_step: int = 0  # the engine's step count and meter when the call was last brought up to date
    seen_meter: float = 0.0
    end_step: int = -1  # the step with which it ends; -1 unless it decodes
    ran_s: float = 0.0  # its account
    queued_s: float = 0.0
    queued_since_s: float = math.nan
    started_s: float = math.nan

    @property
    def context(self) -> int:
        """Tokens of its prompt, and those it has given."""
        return self.spec.prompt_tokens + self.given

    @property
    def kv_key(self) -> Hashable:
        """Under which its KV is found."""
        return self.owner.number, self.index

    @property
    def prefix_key(self) -> Hashable:
        """Under which is found what it shares."""
        return self.owner.prefix_key(self.spec)

    def prefixes(self) -> Iterator[tuple[Hashable, int]]:
        """Where its prefix may be found: its own KV, that of its first parent, of that one's first parent, ..."""
        yield self.kv_key, self.context
        shared, spec = self.context, self.spec
        while shared := min(shared, spec.shared_prefix_tokens):
            yield self.owner.prefix_key(spec), shared
            if not spec.parents:
                return
            spec = self.owner.spec.calls[self.owner.index_of[spec.parents[0]]]


@dataclass(eq=False, slots=True)
class SimProgram:
    """A program under way."""

    spec: TraceProgram
    number: int  # in the trace
    view: ProgramView = field(init=False)  # what policies see of it
    index_of: dict[str, int] = field(default_factory=dict)  # of each call, by id
    missing: list[int] = field(default_factory=list)  # how many parents of each call have not ended
    children: list[list[int]] = field(default_factory=list)
    left: int = 0  # calls to end
    finish_s: float = math.nan
    # Set by `foresee` for policies that know the future.
    prefill_weight: float = 0.0  # work of a prompt token that is not shared; an output token is 1
    paths: list[float] = field(default_factory=list)  # of each call, the work on the longest chain that begins with it

    def prefix_key(self, call: TraceCall) -> Hashable:
        """Under which is found what a call shares: the KV of its first parent, or what programs of this name begin
        with."""
        return (self.number, self.index_of[call.parents[0]]) if call.parents else ("name", self.spec.name)

    def __post_init__(self) -> None:
        name = self.spec.program
        self.view = ProgramView(ProgramId(name), self.spec.name or "", self.spec.tenant, SessionId(name))

    def open(self, now_s: float, arrival_order: int) -> None:
        """The program arrives, after `arrival_order` others."""
        self.view.arrival_s, self.view.arrival_order = now_s, arrival_order
        calls = self.spec.calls
        self.index_of = {call.call_id: index for index, call in enumerate(calls)}
        self.missing = [len(call.parents) for call in calls]
        self.children = [[] for _ in calls]
        for index, call in enumerate(calls):
            for parent in call.parents:
                self.children[self.index_of[parent]].append(index)
        self.left = len(calls)

    def close(self, now_s: float) -> None:
        """Its last call has ended."""
        self.finish_s = now_s
        self.missing, self.children, self.paths = [], [], []

    def foresee(self, prefill_weight: float) -> None:
        """Work out what is ahead, once, for srpt.

        Args:
            prefill_weight: work of a prompt token that is not shared, where a token given is 1.
        """
        self.prefill_weight = prefill_weight
        work = [call.output_tokens + self.prefill_work(call) for call in self.spec.calls]
        self.view.predicted_tokens = sum(work)
        self.paths = [0.0] * len(work)
        missing = [len(children) for children in self.children]
        free = [index for index, count in enumerate(missing) if not count]
        while free:
            index = free.pop()
            self.paths[index] = work[index] + max((self.paths[child] for child in self.children[index]), default=0.0)
            for parent in self.spec.calls[index].parents:
                before = self.index_of[parent]
                missing[before] -= 1
                if not missing[before]:
                    free.append(before)

    def prefill_work(self, call: TraceCall) -> float:
        """The part of a call's work that is done when it ends, not token by token."""
        return self.prefill_weight * (call.prompt_tokens - call.shared_prefix_tokens)
