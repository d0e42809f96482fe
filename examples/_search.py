"""The game of 24 and a search tree over it, for `mcts_langgraph.py`. Neither needs LangGraph or a model."""

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
    """A number of the game, with the formula that made it."""

    value: int
    text: str


Numbers = tuple[Number, ...]  # the largest first


def start(values: Iterable[int]) -> Numbers:
    """Return the numbers that a game begins with."""
    return tuple(Number(value, str(value)) for value in sorted(values, reverse=True))


def moves(numbers: Numbers) -> dict[str, Numbers]:
    """Return every legal move, such as `24 = 6 * 4`, with the numbers after it. Numbers stay whole and not negative."""
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
    """Whether a single number is left, and it is the goal."""
    return len(numbers) == 1 and numbers[0].value == GOAL


def formula(numbers: Numbers) -> str:
    """Return the formula of the last number, such as `(1 + 3) * 6 = 24`."""
    last = numbers[0]
    return f"{last.text.removeprefix('(').removesuffix(')')} = {last.value}"


@dataclass(eq=False)
class Node:
    """A position in the search tree. Its value is the mean of the model's judgements and the rollouts' results."""

    numbers: Numbers
    parent: Node | None = None
    visits: int = 0
    total: float = 0.0
    children: list[Node] = field(default_factory=list)
    untried: dict[str, Numbers] = field(init=False)

    def __post_init__(self) -> None:
        self.untried = moves(self.numbers)

    def child(self, move: str) -> Node:
        """Try a move, and return the position after it."""
        return Node(self.untried.pop(move), parent=self)

    def deal(self, hands: int, rng: random.Random) -> list[list[str]]:
        """Shuffle the untried moves and divide them into hands, so that parallel choices are different moves."""
        cards = list(self.untried)
        rng.shuffle(cards)
        return [cards[n::hands] for n in range(min(hands, len(cards)))]

    def add(self, value: float) -> None:
        """Add a value of this position, which counts for all positions on the way to it as well."""
        node: Node | None = self
        while node is not None:
            node.visits += 1
            node.total += value
            node = node.parent

    @property
    def is_dead(self) -> bool:
        """Whether this position and all below it have no untried moves."""
        return not self.untried and all(child.is_dead for child in self.children)

    @property
    def uct(self) -> float:
        """Upper confidence bound for trees: the mean value, plus a bonus that shrinks with the visits."""
        visits = self.parent.visits if self.parent is not None else self.visits
        return self.total / self.visits + _EXPLORATION * math.sqrt(math.log(visits) / self.visits)

    def select(self, width: int) -> Node:
        """Return the position to expand next.

        The walk goes down to the child with the best bound, until it comes to a position with too few children. The
        number of children that is enough grows with the visits (progressive widening), so that a position whose first
        children were bad gets others.

        Args:
            width: The number of children that one expansion adds.
        """
        node = self
        while living := [child for child in node.children if not child.is_dead]:
            rounds = node.visits / (width + 1)  # An expansion adds a visit for each child, and one for the rollout.
            if node.untried and len(node.children) < width * math.sqrt(rounds):
                break
            node = max(living, key=lambda child: child.uct)
        return node
