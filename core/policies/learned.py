"""`learned`: ranks that are learned from programs of the same name.

A program's age a is the work that it has had: 1 for each output token, and ω for each prompt token that was newly
computed. Its class is its tenant and name. With S for the work of a program of the class, the rank is

    r(a) = λ a + (1 - λ) G(a)        λ = min(1, n / (n + 8) Var log S)^1.5

n programs of the class have ended. A few ends make the variance too large, which the factor n / (n + 8) corrects. G is
the Gittins index (`weft.core.policies.service.distribution`). If all programs need the same work, G is constant, and
they go first come, first served. If their work varies by orders of magnitude, λ is 1, which is least attained service.
In between, a program that has had little work goes a little before those that have had much. That lowers the latency
per token of short programs, and costs little completion time.

The rank gives a program a bounded boost, by which it counts as having arrived earlier than it did
(`Boost`). docs/reference/policies.md#learned-ranks describes the policy for users.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Collection, Iterable
from typing import ClassVar, Final

from weft.core.class_rows import Branch, ClassRow
from weft.core.policies.history import ModelHistory, ProgramEnd
from weft.core.policies.policy import Policy, PolicyEvent, register
from weft.core.policies.service.classes import ClassBook, Counted, OpenProgramWork, ServiceClass
from weft.core.policies.steps import StepCosts
from weft.core.policies.view import Call, ProgramEnded, ProgramView, Rank

_RERANKS_AT_ONCE: Final = 64  # calls that one decision ranks again, unless the boost has changed
_LEAST_CHARGE_TOKENS: Final = 8  # output tokens between two charges of a call
# Preempting a call must outweigh this many times the work that it causes: the context that is lost is computed again.
_LOST_WORK_FACTOR: Final = 2.0


@register("learned", "ranks learned from programs of the same name: Gittins index and attained service")
class Learned(Policy):
    """Ranks all calls of a program by its age and its class.

    Programs of a class whose work is alike do not preempt each other, and keep their places at the gate by arrival.
    Otherwise they would share the engine and the KV cache, compute contexts again, and all end late.

    Attributes:
        book: The classes, and the programs that have not ended.
    """

    evicts_ended_first = True
    learns = True
    ranks_follow_time = False
    branch_of_new: ClassVar[Branch] = Branch.ALL

    def __init__(self) -> None:
        super().__init__()
        self.costs = StepCosts()
        self.book = ClassBook()
        self._numbers = itertools.count()
        self._pending: dict[OpenProgramWork, None] = {}  # programs to rank again
        self._boost = Boost()
        self._boost_changed = False  # since the latest decision

    # -- calls

    def rank(self, call: Call, now_s: float) -> Rank:
        program = self.book.programs.get(call.program)
        if program is None:
            program = self._add_program(call.program, now_s)
        elif program.calls and not program.is_wide:
            self.book.widen(program)
            self._pending[program] = None
        program.calls[call] = Counted(next(self._numbers), call.computed_tokens, call.output_tokens)
        return self._rank(program, call)

    def start(self, call: Call, now_s: float) -> None:
        super().start(call, now_s)
        program = self.book.programs.get(call.program)
        if program is not None:
            counted = program.calls.get(call)
            if counted is None:  # its program had ended, and a new call has brought it back
                return
            program.running += 1
            counted.is_running = True
            self._set_charge(program, call)

    def preempt(self, call: Call, now_s: float) -> None:
        self._leave_batch(call)
        super().preempt(call, now_s)

    def leave(self, call: Call) -> None:
        super().leave(call)
        self._leave_batch(call)
        program = self.book.programs.get(call.program)
        if program is not None:
            program.calls.pop(call, None)

    def charge(self, call: Call, model_time_s: float, now_s: float, *, recomputed: bool = False) -> None:
        if 0 < call.output_tokens < call.charge_at_tokens:  # the prompt is computed: most steps of most calls
            return
        program = self.book.programs.get(call.program)
        counted = program.calls.get(call) if program is not None else None
        if program is None or counted is None:
            return
        if call.computed_tokens > counted.computed_tokens:
            self._count(program, call, counted)
        elif call.output_tokens >= call.charge_at_tokens:
            self._count(program, call, counted)
            self._set_charge(program, call)

    # -- programs and the engine

    def on_event(self, event: PolicyEvent) -> None:
        match event:
            case ProgramEnded(view, is_known):
                self._end(view, is_known=is_known)
            case StepCosts():
                self._use_costs(event)
            case ModelHistory():
                self._learn(event)

    def _use_costs(self, costs: StepCosts) -> None:
        """Weigh prompt tokens by new costs. A program's rank follows when it is ranked again."""
        self.costs = costs

    def _learn(self, past: ModelHistory) -> None:
        """Begin with the work of programs of earlier runs. A thousand classes take some 0.3 s, once."""
        for each in self.book.precede(past):
            self._fit(each)

    def _end(self, view: ProgramView, *, is_known: bool) -> None:
        """A program is gone. If it still has calls, they are being aborted."""
        program = self.book.programs.get(view)
        if program is not None:
            for call, counted in program.calls.items():
                self._count(program, call, counted)
            self._pending.pop(program, None)
            self.book.close(program, is_known=is_known)

    # -- ranks that change

    def rerank(self, now_s: float) -> Iterable[tuple[Call, Rank]]:
        if self.book.due or now_s >= self.book.refit_s:
            due = self.book.next_due(now_s)
            if due is not None:  # one at a time: a fit takes some 0.2 ms
                self._fit(due)
        if self.book.all.remaining:
            self._update_boost(self.book.backlog_tokens, self.book.all.remaining[0])
        most, self._boost_changed = math.inf if self._boost_changed else _RERANKS_AT_ONCE, False
        count = 0
        while self._pending and count < most:
            program = next(iter(self._pending))
            del self._pending[program]
            before = program.key, program.standing
            self._set_key(program)
            if before == (program.key, program.standing):
                continue
            count += len(program.calls)
            first_tie = program.view.arrival_order << 48
            for call, counted in program.calls.items():
                yield call, Rank(0, program.key, first_tie + counted.number)

    def next_change_s(self) -> float:
        return -math.inf if self._pending else self.book.next_due_s()

    def outranks(self, call: Call, running: Call) -> bool:
        """Whether a waiting call goes before a running one, and preemption pays.

        It pays if the waiting call still goes first after `_LOST_WORK_FACTOR` times the work of the running call's
        prompt, which will be computed again, is added to its rank. Programs of a class whose work is alike do not
        preempt each other: they go by arrival, and another order would change little.
        """
        if call.rank >= running.rank:
            return False
        ours, theirs = self.book.programs.get(call.program), self.book.programs.get(running.program)
        if ours is None or theirs is None:
            return True
        if ours.ranked_by is theirs.ranked_by and ours.ranked_by.is_alike:
            return False
        lost = running.prompt_tokens * self.costs.prompt_weight  # outputs are mostly shorter, and not always known
        return self._key(ours, _LOST_WORK_FACTOR * lost) < running.rank.order

    def standing(self, calls: Collection[Call]) -> Rank:
        first = next(iter(calls))
        program = self.book.programs.get(first.program)
        return super().standing(calls) if program is None else Rank(0, program.standing, first.rank.tie)

    def classes(self) -> list[ClassRow]:
        return list(self.book.rows(self.branch_of_new))

    def take_ends(self) -> list[ProgramEnd]:
        return self.book.take_ends()

    # -- the age of a program

    def _add_program(self, view: ProgramView, now_s: float) -> OpenProgramWork:
        program = self.book.open(view, now_s)
        self._set_key(program)
        return program

    def _leave_batch(self, call: Call) -> None:
        """A call may leave the batch. If it was in the batch, count what it has done."""
        program = self.book.programs.get(call.program)
        counted = program.calls.get(call) if program is not None else None
        if program is not None and counted is not None and counted.is_running:
            counted.is_running = False
            program.running -= 1
            self._count(program, call, counted)

    def _count(self, program: OpenProgramWork, call: Call, counted: Counted) -> None:
        if self.book.add_work(program, counted.count(call, self.costs.prompt_weight)):
            self._pending[program] = None

    def _set_charge(self, program: OpenProgramWork, call: Call) -> None:
        """Have a call charged at about the time when its program enters the next bucket of ages."""
        if program.bucket + 1 == len(self.book.ages):
            call.charge_at_tokens = math.inf
            return
        left = (self.book.ages[program.bucket + 1] - program.age) / max(1, program.running)
        call.charge_at_tokens = call.output_tokens + max(_LEAST_CHARGE_TOKENS, math.ceil(left))

    # -- ranks

    def _rank(self, program: OpenProgramWork, call: Call) -> Rank:
        """All calls of a program share its key; ties go to the program that arrived first, then to the earlier call."""
        return Rank(0, program.key, (program.view.arrival_order << 48) + program.calls[call].number)

    def _set_key(self, program: OpenProgramWork) -> None:
        program.ranked_by = program.find_class()
        program.key, program.standing = self._key(program), self._standing(program)

    def _key(self, program: OpenProgramWork, more_tokens: float = 0.0) -> float:
        """The program's arrival less its boost, in seconds. The least key goes first."""
        return self._boosted(program, program.bucket, more_tokens)

    def _standing(self, program: OpenProgramWork) -> float:
        """The program's key at the gate. Programs whose work is alike keep their places there by arrival, because a
        program that closes loses its context."""
        return self._boosted(program, 0 if program.ranked_by.is_alike else program.bucket)

    def _boosted(self, program: OpenProgramWork, bucket: int, more_tokens: float = 0.0) -> float:
        ranks = self._ranks_of(program)
        return program.arrival_s - self._boost.of((ranks[bucket] if ranks else 0.0) + more_tokens)

    def _ranks_of(self, program: OpenProgramWork) -> tuple[float, ...]:
        """The ranks of a program by bucket of ages, in tokens. Empty: nothing is known of any program."""
        return program.ranked_by.ranks or self.book.all.ranks

    def _fit(self, service_class: ServiceClass) -> None:
        """Estimate the distribution of a class again, and rank its programs by it."""
        distribution, is_all = self.book.fit(service_class), service_class is self.book.all
        if distribution is not None and is_all:
            self._boost.use(distribution.share_beyond())
        ranked = list(self._ranked_by_all() if is_all else self.book.live(service_class))
        self._pending |= dict.fromkeys(ranked)
        for program in ranked:
            self.book.expect(program)

    def _ranked_by_all(self) -> Iterable[OpenProgramWork]:
        """The programs whose rank or work left follows from the distribution of all programs."""
        return (each for each in self.book.programs.values() if not (each.ranked_by.ranks and each.named_class.ranks))

    def _update_boost(self, left_tokens: float, mean_tokens: float) -> None:
        """Follow the backlog. If the boost changes, rank all programs again."""
        if self._boost.follow(left_tokens, mean_tokens, self.costs):
            self._boost_changed = True
            self._pending |= dict.fromkeys(self.book.programs.values())


# -- the boost: by how much earlier a program counts as having arrived, because of its rank
#
#     boost(r) = B * E[(X - r)+] / E[X]        B = BOOST * min(backlog, BATCHES * slots * E[X]) * seconds per token
#
# X is the work of any program, r a rank in tokens, and the backlog the work that all programs have left. A program is
# therefore never overtaken by one that arrives more than B later. With a larger B, the largest programs would wait
# until no others arrive any more.


BOOST: Final = 8.0  # the largest boost, in units of the backlog
BATCHES: Final = 3.5  # the most that the backlog counts, in full batches of programs of mean work
UNKNOWN_TOKENS: Final = 1000.0  # the assumed mean work of a program while none has ended
_LEAST_CHANGE: Final = 0.1  # B follows the backlog once it is off by this part


class Boost:
    """The boost. It changes for all programs at once, because keys under different boosts do not compare.

    Attributes:
        most_s: B, the largest boost, in seconds.
    """

    def __init__(self) -> None:
        from weft.core.policies.service.distribution import EDGES

        self.most_s = 0.0
        self._edges: tuple[float, ...] = tuple(map(float, EDGES))
        self._latest: tuple[float, ...] | None = None
        self._beyond: tuple[float, ...] | None = None  # E[(X - x)+] / E[X] at each edge x; None until a fit counts

    def use(self, share_beyond: Iterable[float]) -> None:
        """Take over a new fit: E[(X - x)+] / E[X] at each edge x. It counts from the next change of B on."""
        self._latest = tuple(map(float, share_beyond))

    def follow(self, left_tokens: float, mean_tokens: float, costs: StepCosts) -> bool:
        """Set B by the backlog, if B is off by more than a tenth.

        Args:
            left_tokens: The work that all programs have left.
            mean_tokens: E[X].

        Returns whether the boost has changed.
        """
        most_s = BOOST * min(left_tokens, BATCHES * costs.slots * mean_tokens) * costs.token_s
        if most_s <= 0 or 1 - _LEAST_CHANGE < self.most_s / most_s < 1 + _LEAST_CHANGE:
            return False
        self.most_s, self._beyond = most_s, self._latest
        return True

    def of(self, rank_tokens: float) -> float:
        """The boost of a rank, in seconds."""
        return self.most_s * self._share_beyond(rank_tokens)

    def _share_beyond(self, rank: float) -> float:
        """The share of all work that lies beyond the first `rank` tokens of each program: 1 for a rank of 0."""
        if self._beyond is None:
            return math.exp(-rank / UNKNOWN_TOKENS)
        last = len(self._edges) - 1
        cell = min(bisect_right(self._edges, rank), last) - 1
        part = min(1.0, (rank - self._edges[cell]) / (self._edges[cell + 1] - self._edges[cell]))
        return self._beyond[cell] + part * (self._beyond[cell + 1] - self._beyond[cell])
