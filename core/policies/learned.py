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
(`weft.core.policies.service.boost`). docs/reference/policies.md#learned-ranks describes the policy for users.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from typing import ClassVar, Final, cast

from weft.core.class_rows import Branch, ClassRow
from weft.core.policies.history import ClassHistory, ModelHistory, ProgramEnd
from weft.core.policies.policy import Policy
from weft.core.policies.registry import register
from weft.core.policies.service.boost import Boost
from weft.core.policies.service.classes import ServiceClass, ServiceTable
from weft.core.policies.service.live_program import Counted, OpenProgramWork
from weft.core.policies.steps import StepCosts
from weft.core.policies.view import Call, ProgramView, Rank

_MOST_ENDS: Final = 4096  # ended programs that wait until `take_ends` is called
_REFIT_S: Final = 30.0  # classes that have changed without an end are fitted again so often
_REFITS_AT_ONCE: Final = 1  # classes that one decision fits: a fit takes some 0.2 ms
_RERANKS_AT_ONCE: Final = 64  # calls that one decision ranks again, unless the boost has changed
_LEAST_CHARGE_TOKENS: Final = 8  # output tokens between two charges of a call
# Preempting a call must outweigh this many times the work that it causes: the context that is lost is computed again.
_LOST_WORK_FACTOR: Final = 2.0
# A shape is what programs of a class have shown: a fingerprint, or the following. No fingerprint has a tab.
_WIDE: Final = "\twide"  # two calls side by side
ANY_NAME: Final = "\tany\t"  # begins the shapes of programs of all names


@register("learned", "ranks learned from programs of the same name: Gittins index and attained service")
class Learned(Policy):
    """Ranks all calls of a program by its age and its class.

    Programs of a class whose work is alike do not preempt each other, and keep their places at the gate by arrival.
    Otherwise they would share the engine and the KV cache, compute contexts again, and all end late.
    """

    evicts_ended_first = True
    learns = True
    ranks_follow_time = False
    branch_of_new: ClassVar[Branch] = Branch.ALL

    def __init__(self) -> None:
        super().__init__()
        from weft.core.policies.service.distribution import AGES

        self.costs = StepCosts()
        self._ages: tuple[float, ...] = tuple(map(float, AGES))
        self._table = ServiceTable()
        self._all = ServiceClass()  # all programs, whatever their class
        self._classes: dict[ServiceClass, None] = {}  # classes with live programs
        self._programs: dict[ProgramView, OpenProgramWork] = {}
        self._ends: deque[ProgramEnd] = deque(maxlen=_MOST_ENDS)  # until `take_ends` is called
        self._numbers = itertools.count()
        self._due: dict[ServiceClass, None] = {}  # classes to fit again
        self._pending: dict[OpenProgramWork, None] = {}  # programs to rank again
        self._backlog_tokens = 0.0  # the work that all live programs have left
        self._boost = Boost()
        self._boost_changed = False  # since the latest decision
        self._fitted_at_s = -math.inf

    def use_costs(self, costs: StepCosts) -> None:
        """Weigh prompt tokens by new costs. A program's rank follows when it is ranked again."""
        self.costs = costs

    # -- what the driver reports

    def arrive(self, call: Call, now_s: float) -> None:
        program = self._programs.get(call.program)
        if program is None:
            program = self._add_program(call.program, now_s)
        elif program.calls and not program.is_wide:
            program.is_wide = True
            self._show_shape(program, _WIDE)
            if call.program.fingerprint:
                self._show_shape(program, call.program.fingerprint + _WIDE)
            self._pending[program] = None
        program.calls[call] = Counted(next(self._numbers), call.computed_tokens, call.output_tokens)
        call.rank = self._rank(program, call)
        call.waiting_since_s = now_s
        self.waiting.push(call)

    def start(self, call: Call, now_s: float) -> None:
        super().start(call, now_s)
        program = self._programs.get(call.program)
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
        program = self._programs.get(call.program)
        if program is not None:
            program.calls.pop(call, None)

    def charge(self, call: Call, model_time_s: float, now_s: float, *, recomputed: bool = False) -> None:
        del model_time_s, now_s, recomputed
        if 0 < call.output_tokens < call.charge_at_tokens:  # the prompt is computed: most steps of most calls
            return
        program = self._programs.get(call.program)
        counted = program.calls.get(call) if program is not None else None
        if program is None or counted is None:
            return
        if call.computed_tokens > counted.computed_tokens:
            self._count(program, call, counted)
        elif call.output_tokens >= call.charge_at_tokens:
            self._count(program, call, counted)
            self._set_charge(program, call)

    def program_ended(self, program: ProgramView) -> None:
        ended = self._remove_program(program)
        if ended is None or ended.age <= 0:
            return
        self._note_end(ended, is_known=True)
        for each in (*ended.classes, self._all):
            each.end(ended.age)
            if each.is_due:
                self._due[each] = None

    def program_forgotten(self, program: ProgramView) -> None:
        """The work of a forgotten program is at least what it has had, so it counts as censored."""
        gone = self._remove_program(program)
        if gone is not None and gone.age > 0:
            self._note_end(gone, is_known=False)
            for each in (*gone.classes, self._all):
                each.forgotten.append(gone.age)
                each.has_changed = True

    def _note_end(self, program: OpenProgramWork, *, is_known: bool) -> None:
        view = program.view
        self._ends.append(ProgramEnd(view.tenant, view.name, math.ceil(program.age), is_known))

    def learn(self, past: ModelHistory) -> None:
        """Begin with the work of programs of earlier runs. A thousand classes take some 0.3 s, once."""
        self._learn(self._all, past.all)
        for (tenant, name), each in past.items():
            self._learn(self._table.get(tenant, name), each)

    def _learn(self, service_class: ServiceClass, past: ClassHistory) -> None:
        service_class.precede(past.finished, past.forgotten, past.ended)
        self._fit(service_class)

    # -- what the driver asks

    def rerank(self, now_s: float) -> Iterable[tuple[Call, Rank]]:
        if now_s >= self._fitted_at_s + _REFIT_S and self._programs:
            self._fitted_at_s = now_s
            self._due |= dict.fromkeys(each for each in (self._all, *self._classes) if each.has_changed)
        for each in list(itertools.islice(self._due, _REFITS_AT_ONCE)):
            del self._due[each]
            self._fit(each)
        if self._all.remaining:
            self._update_boost(self._backlog_tokens, self._all.remaining[0])
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
            for call in program.calls:
                yield call, self._rank(program, call)

    def next_change_s(self) -> float:
        if self._due or self._pending:
            return -math.inf
        return self._fitted_at_s + _REFIT_S if self._programs else math.inf

    def outranks(self, call: Call, running: Call) -> bool:
        """Whether a waiting call goes before a running one, and preemption pays.

        It pays if the waiting call still goes first after `_LOST_WORK_FACTOR` times the work of the running call's
        prompt, which will be computed again, is added to its rank. Programs of a class whose work is alike do not
        preempt each other: they go by arrival, and another order would change little.
        """
        if call.rank >= running.rank:
            return False
        ours, theirs = self._programs.get(call.program), self._programs.get(running.program)
        if ours is None or theirs is None:
            return True
        if ours.ranked_by is theirs.ranked_by and ours.ranked_by.is_alike:
            return False
        lost = running.prompt_tokens * self.costs.prompt_weight  # outputs are mostly shorter, and not always known
        return self._key(ours, _LOST_WORK_FACTOR * lost) < running.rank.order

    def standing(self, call: Call) -> Rank:
        program = self._programs.get(call.program)
        return call.rank if program is None else Rank(call.rank.level, program.standing, call.rank.tie)

    def classes(self) -> list[ClassRow]:
        return [each.row(self.branch_of_new) for each in self._table if not each.shape]

    def take_ends(self) -> list[ProgramEnd]:
        taken = list(self._ends)
        self._ends.clear()
        return taken

    def live_programs(self) -> Iterable[OpenProgramWork]:
        """The programs that have not ended."""
        return self._programs.values()

    # -- the classes and the age of a program

    def _add_program(self, view: ProgramView, now_s: float) -> OpenProgramWork:
        arrival_s = now_s if math.isnan(view.arrival_s) else view.arrival_s
        named_class = self._table.get(view.tenant, view.name)
        program = self._programs[view] = OpenProgramWork(
            view=view, named_class=named_class, ranked_by=named_class, arrival_s=arrival_s
        )
        self._all.live[program] = None
        self._join(program, named_class)
        if view.fingerprint:
            self._show_shape(program, view.fingerprint)
        self._set_left(program)
        self._set_key(program)
        return program

    def _show_shape(self, program: OpenProgramWork, shape: str) -> None:
        """A program has shown a shape. It joins the programs of its name, and of all names, that have shown it, too."""
        tenant, name = program.view.tenant, program.view.name
        program.parts_of_all.append(self._table.get(tenant, "", ANY_NAME + shape))
        program.parts_of_name.append(self._table.get(tenant, name, shape))
        for each in (program.parts_of_all[-1], program.parts_of_name[-1]):
            self._join(program, each)

    def _join(self, program: OpenProgramWork, service_class: ServiceClass) -> None:
        # It changed while none of its programs lived.
        if service_class.ranks and service_class.has_changed and service_class not in self._classes:
            self._due[service_class] = None
        self._classes[service_class] = None
        service_class.live[program] = None
        service_class.has_changed |= service_class.is_exceeded(program.age, self._all)

    def _remove_program(self, view: ProgramView) -> OpenProgramWork | None:
        """Remove a program that has ended or is forgotten. If it still has calls, they are being aborted."""
        program = self._programs.pop(view, None)
        if program is None:
            return None
        for call, counted in program.calls.items():
            self._count(program, call, counted)
        self._pending.pop(program, None)
        self._backlog_tokens = self._backlog_tokens - program.left_tokens if self._programs else 0.0
        for each in (*program.classes, self._all):
            del each.live[program]
            if not each.live:
                self._classes.pop(each, None)
        return program

    def _leave_batch(self, call: Call) -> None:
        """A call may leave the batch. If it was in the batch, count what it has done."""
        program = self._programs.get(call.program)
        counted = program.calls.get(call) if program is not None else None
        if program is not None and counted is not None and counted.is_running:
            counted.is_running = False
            program.running -= 1
            self._count(program, call, counted)

    def _count(self, program: OpenProgramWork, call: Call, counted: Counted) -> None:
        self._add_work(program, counted.count(call, self.costs.prompt_weight))

    def _add_work(self, program: OpenProgramWork, work: float) -> None:
        program.age += work
        bucket = bisect_right(self._ages, program.age) - 1
        if bucket != program.bucket:
            program.bucket = bucket
            for each in (*program.classes, self._all):
                each.has_changed |= each.is_exceeded(program.age, self._all)
            self._set_left(program)
            self._pending[program] = None

    def _set_charge(self, program: OpenProgramWork, call: Call) -> None:
        """Have a call charged at about the time when its program enters the next bucket of ages."""
        if program.bucket + 1 == len(self._ages):
            call.charge_at_tokens = math.inf
            return
        left = (self._ages[program.bucket + 1] - program.age) / max(1, program.running)
        call.charge_at_tokens = call.output_tokens + max(_LEAST_CHARGE_TOKENS, math.ceil(left))

    # -- ranks

    def _rank(self, program: OpenProgramWork, call: Call) -> Rank:
        """All calls of a program share its key; ties go to the program that arrived first, then to the earlier call."""
        return Rank(0, program.key, (program.view.arrival_order << 48) + program.calls[call].number)

    def _set_key(self, program: OpenProgramWork) -> None:
        program.ranked_by = program.find_class()
        program.key, program.standing = self._key(program), self._key(program, at_gate=True)

    def _key(self, program: OpenProgramWork, more_tokens: float = 0.0, *, at_gate: bool = False) -> float:
        """The program's arrival less its boost, in seconds. The least key goes first.

        Args:
            more_tokens: Work that is added to the rank.
            at_gate: Whether the key is for the gate. There, programs whose work is alike keep their places by arrival,
                because a program that closes loses its context.
        """
        ranks = self._ranks_of(program)
        bucket = 0 if at_gate and program.ranked_by.is_alike else program.bucket
        return program.arrival_s - self._boost.of((ranks[bucket] if ranks else 0.0) + more_tokens)

    def _ranks_of(self, program: OpenProgramWork) -> tuple[float, ...]:
        """The ranks of a program by bucket of ages, in tokens. Empty: nothing is known of any program."""
        return program.ranked_by.ranks or self._all.ranks

    def _fit(self, service_class: ServiceClass) -> None:
        """Estimate the distribution of a class again, and rank its programs by it."""
        distribution = service_class.estimate(self._all)
        service_class.fit(distribution, self._ages, is_all=service_class is self._all)
        if distribution is not None and service_class is self._all:
            self._boost.use(distribution.share_beyond())
        ranked = list(self._ranked_by_all() if service_class is self._all else _live(service_class))
        self._pending |= dict.fromkeys(ranked)
        for program in ranked:
            self._set_left(program)

    def _set_left(self, program: OpenProgramWork) -> None:
        """Set the work that a program is expected to have left, which follows from its age and its class."""
        before, remaining = program.left_tokens, program.named_class.remaining or self._all.remaining
        program.left_tokens = remaining[program.bucket] if remaining else 0.0
        self._backlog_tokens += program.left_tokens - before

    def _ranked_by_all(self) -> Iterable[OpenProgramWork]:
        """The programs whose rank or work left follows from the distribution of all programs."""
        return (each for each in self._programs.values() if not (each.ranked_by.ranks and each.named_class.ranks))

    def _update_boost(self, left_tokens: float, mean_tokens: float) -> None:
        """Follow the backlog. If the boost changes, rank all programs again."""
        if self._boost.follow(left_tokens, mean_tokens, self.costs):
            self._boost_changed = True
            self._pending |= dict.fromkeys(self._programs.values())


def _live(service_class: ServiceClass) -> list[OpenProgramWork]:
    return cast("list[OpenProgramWork]", list(service_class.live))
