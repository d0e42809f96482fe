"""The parts of random programs, and the truth about their calls."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

INPUTS: Final = 2  # of one batch
# The styles of each kind of part.
STYLES: Final[Mapping[str, tuple[str, ...]]] = {
    "call": ("model", "bound", "tools", "own config", "bound own config", "stream", "openai", "autogen", "callbacks"),
    "sequence": ("expression", "code", "code with config", "own config", "graph", "branch", "entrypoint", "task"),
    "parallel": ("map keys", "each", "batch", "gather", "branches", "entrypoints", "graph", "send", "assign"),
    "judge": ("first", "second", "default"),  # the judge's answer and the branch that it leads to
    "retry": ("with_retry", "loop", "policy", "fallbacks"),
    "agent": ("agent", "bound agent", "own config"),
    "bind": ("config", "bind", "passthrough", "types"),
    "inner": ("program", "entrypoint"),
}
# Later kinds and styles are apart, so that the seeds of programs without them make the same programs as before.
ALL_STYLES: Final[Mapping[str, tuple[str, ...]]] = {
    **STYLES,
    "call": (*STYLES["call"], "thread", "outer thread", "branch thread"),
    "parallel": (*STYLES["parallel"], "mixed", "mixed"),
    "retry": (*STYLES["retry"], "named fallbacks", "bound fallbacks"),
    "inputs": ("map", "batch", "abatch", "own config"),
    "team": ("round robin", "flow", "tools", "tools without reflection"),
}
WORKER_STYLES: Final[Mapping[str, tuple[str, ...]]] = {
    **ALL_STYLES,
    "call": (*STYLES["call"], *("worker", "new worker", "branch worker", "callbacks worker") * 3),
    "sequence": (*STYLES["sequence"], "left streams", "left streams"),
}
_WEIGHTS: Final = {
    "call": 5,
    "sequence": 5,
    "parallel": 4,
    "judge": 2,
    "retry": 2,
    "agent": 1,
    "bind": 2,
    "inner": 1,
    "inputs": 1,
    "team": 1,
}


@dataclass
class Part:
    """A part of a program.

    A judge is a call that chooses between branches, and its parts are the judge and the branch. A retry makes its part
    twice, because it fails the first time after its last call. An agent calls its model, its tools, which are the
    parts, and its model again. An inner part is a program of its own. Inputs are those of one batch, which go through
    the parts. A team is one of AutoGen.
    """

    kind: str
    style: str
    name: str
    parts: list[Part] = field(default_factory=list)
    passes_text: bool = True  # the input reaches the calls, so that lineage says something
    pauses: int = 0  # of the event loop before a call, so that calls overlap in many ways

    @property
    def has_calls(self) -> bool:
        """Whether the part makes calls in the program in which it is."""
        own = self.kind in ("call", "agent", "team")
        return own or (self.kind != "inner" and any(part.has_calls for part in self.parts))

    def __str__(self) -> str:
        text = "" if self.passes_text else "-"
        return f"{text}{self.style} {self.kind} {self.name}" + (
            f"({', '.join(map(str, self.parts))})" if self.parts else ""
        )


def random_part(rng: random.Random, styles: Mapping[str, tuple[str, ...]] = ALL_STYLES) -> Part:
    """A random part of up to some twenty calls."""
    names = iter(range(1_000_000))

    def make(depth: int) -> Part:
        choice = [kind for kind in _WEIGHTS if kind in styles and (depth > 0 or kind == "call")]
        kind = rng.choices(choice, [_WEIGHTS[each] if depth < 3 or each != "call" else 0 for each in choice])[0]
        count = {"call": 0, "sequence": rng.randint(2, 3), "parallel": rng.randint(2, 3), "agent": rng.randint(1, 2)}
        if kind == "inputs":
            parts = [make(0) for _ in range(rng.randint(1, 3))]
        else:
            parts = [make(depth - 1) for _ in range(count.get(kind, 1 if kind != "team" else 0))]
        if kind == "judge":
            parts = [make(0), *parts]
        return Part(
            kind,
            rng.choice(styles[kind]),
            f"c{next(names)}",
            parts,
            passes_text=rng.random() < 0.5,
            pauses=rng.choice((0, 0, 1, 3)),
        )

    return make(rng.randint(2, 3))


# -- the truth


class Truth:
    """The parents of each call, by program. A call is named by its label and its number among the calls with it."""

    def __init__(self, part: Part) -> None:
        self.programs: dict[str, dict[str, frozenset[str]]] = {"": {}}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._pasts: dict[str, frozenset[str]] = {}  # the names of calls are unique within a program
        self._visit(part, "", frozenset())

    def past(self, call: str) -> frozenset[str]:
        """The ancestors of a call."""
        return self._pasts[call]

    def _call(self, name: str, program: str, before: frozenset[str]) -> frozenset[str]:
        self._counts[program, name] += 1
        call = f"{name}.{self._counts[program, name]}"
        self.programs[program][call] = before
        self._pasts[call] = before.union(*(self._pasts[each] for each in before))
        return frozenset({call})

    def _visit(self, part: Part, program: str, before: frozenset[str]) -> frozenset[str]:
        if part.kind == "call":
            return self._call(part.name, program, before)
        if part.kind == "parallel":
            return self._join(self._visit(each, program, before) for each in part.parts)
        if part.kind == "agent":
            asked = self._call(part.name, program, before)
            return self._call(part.name, program, self._join(self._visit(each, program, asked) for each in part.parts))
        if part.kind in ("inputs", "team"):
            return (self._inputs if part.kind == "inputs" else self._team)(part, program, before)
        if part.kind == "inner":
            inner = f"{part.name}.{sum(name.startswith(f'{part.name}.') for name in self.programs)}"
            self.programs[inner] = {}
            self._visit(part.parts[0], inner, frozenset())
            return before
        for each in part.parts * (2 if part.kind == "retry" else 1):
            before = self._visit(each, program, before)
        return before

    def _inputs(self, part: Part, program: str, before: frozenset[str]) -> frozenset[str]:
        ends = []
        for number in range(INPUTS):
            end = before
            for each in part.parts:
                end = self._call(f"{each.name}#{number}", program, end)
            ends.append(end)
        return self._join(ends)

    def _team(self, part: Part, program: str, before: frozenset[str]) -> frozenset[str]:
        def call(agent: str, after: frozenset[str]) -> frozenset[str]:
            return self._call(f"{part.name}_{agent}", program, after)

        if part.style == "round robin":
            return call("a", call("b", call("a", before)))
        first = call("a", before)
        sides = self._join(call(agent, first) for agent in "bc")
        return sides if part.style == "tools without reflection" else call("d" if part.style == "flow" else "a", sides)

    def _join(self, ends: Any) -> frozenset[str]:
        calls: frozenset[str] = frozenset().union(*ends)
        return calls - frozenset().union(*(self._pasts[call] for call in calls))
