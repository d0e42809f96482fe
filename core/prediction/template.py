"""What a program name's execution graph lets expect: the next steps and what is left (SAGA §3.2 and §3.3)."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Final, NamedTuple

from weft.core.prediction.execution_graph import ANY, ExecutionGraph, Step
from weft.core.prediction.remaining import Left
from weft.core.prediction.static_graph import StaticGraph

COLD_PROGRAMS: Final = 30  # SAGA §3.3: the first 30 tasks of a type are served as plain requests
_MOST_WEIGHT: Final = 512  # programs that are counted; then the counts are halved
_TRUST: Final = 4.0  # visits that the estimate of the coarser step is worth
_SEEN: Final = 3.0  # visits from which on the counts of a step say more than a static graph


class Tier(StrEnum):
    """What forecasts of a program name rest on (SAGA §3.3)."""

    HINTS = "hints"  # a static graph that the user handed over, until 30 programs have ended
    INFERRED = "inferred"  # what 30 programs or more did
    COLD = "cold"  # nothing: no forecast is made


class Successor(NamedTuple):
    """A call that may come next."""

    step: Step
    chance: float
    pause_s: float  # the expected time until it arrives: tools, humans, the program's code; nan: unknown


class Forecast(NamedTuple):
    """What a thread does next."""

    successors: tuple[Successor, ...]  # the likeliest first; of equal chances, in the order of their steps
    end: float  # the chance that no call follows

    @property
    def likeliest(self) -> Step | None:
        """The likeliest next step; None: the end."""
        first = self.successors[0] if self.successors else None
        return first.step if first is not None and first.chance > self.end else None


class _Fit(NamedTuple):
    """The counts at one time, from fine to coarse: by step and age, by step, and of all steps together."""

    graphs: tuple[ExecutionGraph, ...]
    left: tuple[dict[Step, Left], ...]
    after_any: dict[Step | None, float]  # the chances of what follows any call


class Template:
    """What is known of the programs of one name.

    Few calls of a step and age are weighed against those of the step at any age, and these against all calls: with n
    visits, the finer one has the weight n / (n + 4).
    """

    def __init__(self) -> None:
        self.ended = 0  # programs, also those that the counts no longer hold
        self.graph = ExecutionGraph()
        self.hint: StaticGraph | None = None
        self._weight = 0.0  # programs in the counts
        self._fit: tuple[int, _Fit] | None = None  # and of how many programs that had ended
        self._hinted: tuple[int, ExecutionGraph, dict[Step, Left]] | None = None

    @property
    def tier(self) -> Tier:
        """What forecasts rest on."""
        if self.ended >= COLD_PROGRAMS:
            return Tier.INFERRED
        return Tier.COLD if self.hint is None else Tier.HINTS

    @property
    def weight(self) -> float:
        """The programs that the counts hold."""
        return self._weight

    def learn(self, counts: ExecutionGraph) -> None:
        """A program has ended, and did this."""
        if not counts.nodes:
            return
        self.graph.add(counts)
        self.ended += 1
        self._weight += 1
        if self._weight >= _MOST_WEIGHT:
            self.graph, self._weight = self.graph.halved(), self._weight / 2

    def restore(self, graph: ExecutionGraph, ended: int, weight: float) -> None:
        """Take over what an earlier run learned."""
        self.graph, self.ended, self._weight = graph, ended, weight
        self._fit = self._hinted = None

    def use_hint(self, hint: StaticGraph) -> None:
        """The user has handed over the static graph of the programs."""
        if hint != self.hint:
            self.hint, self._hinted = hint, None

    # -- forecasts

    def forecast(self, step: Step) -> Forecast | None:
        """What follows a call of this step; None: nothing is known."""
        if self.tier is Tier.COLD:
            return None
        if self.tier is Tier.HINTS and not self._has_seen(step):
            return self._hinted_forecast(step)
        fit = self._fitted()
        chances = dict(fit.after_any)
        for graph, each in ((fit.graphs[1], step.ageless), (fit.graphs[0], step)):
            finer = graph.chances(each)
            if finer:
                weight = _weight(graph, each)
                chances = {target: (1 - weight) * chance for target, chance in chances.items()}
                for target, chance in finer.items():
                    ageless = target.ageless if target is not None else None
                    chances[ageless] = chances.get(ageless, 0.0) + weight * chance
        end = chances.pop(None, 0.0)
        if not chances and not end:
            return None
        means = fit.graphs[1].nodes
        found = [
            Successor(each, chance, means[each].mean.pause_s) for each, chance in chances.items() if each is not None
        ]
        return Forecast(tuple(sorted(found, key=lambda each: (-each.chance, each.step))), end)

    def left(self, step: Step) -> Left | None:
        """What is left of a thread at a step; None: nothing is known."""
        if self.tier is Tier.COLD:
            return None
        if self.tier is Tier.HINTS and not self._has_seen(step):
            return self._hint_fit()[1].get(Step(step.label))
        fit, left = self._fitted(), None
        for graph, lefts, each in reversed(list(zip(fit.graphs, fit.left, _coarser(step), strict=True))):
            finer = lefts.get(each)
            if finer is not None and left is not None:
                weight = _weight(graph, each)
                left = Left(left.after.toward(finer.after, weight), left.with_call.toward(finer.with_call, weight))
            else:
                left = finer or left
        return left

    def _has_seen(self, step: Step) -> bool:
        ageless = self._fitted().graphs[1].nodes.get(step.ageless)
        return ageless is not None and ageless.visits >= _SEEN

    def _fitted(self) -> _Fit:
        """The fit, made again when a sixteenth more programs have ended."""
        if self._fit is None or self.ended > self._fit[0] + self._fit[0] // 16:
            from weft.core.prediction.expectation import left_by_step

            ageless = self.graph.lumped(lambda step: step.ageless)
            fine = ExecutionGraph()
            fine.add(self.graph)  # as it is now
            graphs = (fine, ageless, _one_step(ageless))
            self._fit = self.ended, _Fit(graphs, tuple(map(left_by_step, graphs)), _after_any(ageless))
        return self._fit[1]

    def _hint_fit(self) -> tuple[ExecutionGraph, dict[Step, Left]]:
        if self._hinted is None or self._hinted[0] != self.ended:
            from weft.core.prediction.expectation import left_by_step

            hint = self.hint or StaticGraph()
            labels = {step.label for step in self.graph}
            if self.ended >= _SEEN:  # nodes that make no call, such as those that only route
                hint = hint.without([name for name in hint.nodes if name not in labels])
            graph = hint.counts(_one_step(self.graph).nodes.get(ANY))
            self._hinted = self.ended, graph, left_by_step(graph) if self.ended else {}
        return self._hinted[1], self._hinted[2]

    def _hinted_forecast(self, step: Step) -> Forecast | None:
        chances = self._hint_fit()[0].chances(Step(step.label))
        end = chances.pop(None, 0.0)
        if not chances and not end:
            return None
        found = (Successor(each, chance, float("nan")) for each, chance in chances.items() if each is not None)
        return Forecast(tuple(sorted(found, key=lambda each: (-each.chance, each.step))), end)


def _one_step(graph: ExecutionGraph) -> ExecutionGraph:
    return graph.lumped(lambda _step: ANY)


def _after_any(graph: ExecutionGraph) -> dict[Step | None, float]:
    visits, found = sum(node.visits for node in graph.nodes.values()), dict[Step | None, float]()
    for step, node in graph.nodes.items():
        for target, chance in graph.chances(step).items():
            found[target] = found.get(target, 0.0) + chance * node.visits / visits
    return found


def _coarser(step: Step) -> Iterator[Step]:
    yield from (step, step.ageless, ANY)


def _weight(graph: ExecutionGraph, step: Step) -> float:
    visits = graph.nodes[step].visits
    return visits / (visits + _TRUST)
