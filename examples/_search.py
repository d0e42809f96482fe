"""The game of 24 and the search tree over it: what `mcts_langgraph.py` needs besides LangGraph and a model."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

GOAL: Final = 24
_EXPLORATION: Final = math.sqrt(2)  # the constant of UCT


class Number(NamedTuple):
    """A number of the game, and how it came about."""

    value: int
    text: str


Numbers = tuple[Number, ...]  # the largest first


def start(values: Iterable[int]) -> Numbers:
    """The numbers that a game begins with."""
    return tuple(Number(value, str(value)) for value in sorted(values, reverse=True))


def moves(numbers: Numbers) -> dict[str, Numbers]:
    """Every legal move, as `24 = 6 * 4`, with the numbers that it leaves. Numbers stay whole and not negative."""
    found: dict[str, Numbers] = {}
    for one, other in itertools.combinations(range(len(numbers)), 2):
        a, b = numbers[one], numbers[other]
        rest = [number for n, number in enumerate(numbers) if n not in (one, other)]
        results = {"+": a.value + b.value, "-": a.value - b.value, "*": a.value * b.value}
        if b.value and a.value % b.value == 0:
            results["/"] = a.value // b.value
        for sign, value in results.items():
            made = Number(value, f"({a.text} {sign} {b.text})")
            left = sorted([*rest, made], key=lambda number: number.value, reverse=True)
            found.setdefault(f"{value} = {a.value} {sign} {b.value}", tuple(left))
    return found


def is_solved(numbers: Numbers) -> bool:
    """Whether one number is left, and is the goal."""
    return len(numbers) == 1 and numbers[0].value == GOAL


def formula(numbers: Numbers) -> str:
    """How the last number came about, such as `(1 + 3) * 6 = 24`."""
    last = numbers[0]
    return f"{last.text.removeprefix('(').removesuffix(')')} = {last.value}"


@dataclass(eq=False)
class Node:
    """A position in the search tree. What it is worth is the mean of what the model and the rollouts said of it."""

    numbers: Numbers
    parent: Node | None = None
    visits: int = 0
    total: float = 0.0
    children: list[Node] = field(default_factory=list)
    untried: dict[str, Numbers] = field(init=False)

    def __post_init__(self) -> None:
        self.untried = moves(self.numbers)

    def child(self, move: str) -> Node:
        """The position after a move that has not been tried."""
        return Node(self.untried.pop(move), parent=self)

    def deal(self, hands: int, rng: random.Random) -> list[list[str]]:
        """The untried moves, shuffled and shared out, so that those who choose at once choose differently."""
        cards = list(self.untried)
        rng.shuffle(cards)
        return [cards[n::hands] for n in range(min(hands, len(cards)))]

    def add(self, value: float) -> None:
        """Say what this position is worth, which also tells of the positions that lead to it."""
        node: Node | None = self
        while node is not None:
            node.visits += 1
            node.total += value
            node = node.parent

    @property
    def is_dead(self) -> bool:
        """Whether there is nothing left to try below."""
        return not self.untried and all(child.is_dead for child in self.children)

    @property
    def uct(self) -> float:
        """Upper confidence bound for trees: the mean, and more the less often this was tried among its siblings."""
        around = self.parent.visits if self.parent is not None else self.visits
        return self.total / self.visits + _EXPLORATION * math.sqrt(math.log(around) / self.visits)

    def select(self, width: int) -> Node:
        """The position to expand next: down by the best bound, as far as positions have enough children.

        How many are enough grows with the visits (progressive widening), so that a bad choice of children is mended.

        Args:
            width: how many children one expansion adds.
        """
        node = self
        while living := [child for child in node.children if not child.is_dead]:
            rounds = node.visits / (width + 1)  # an expansion visits it once for each child, and once by its rollout
            if node.untried and len(node.children) < width * math.sqrt(rounds):
                break
            node = max(living, key=lambda child: child.uct)
        return node
