"""The contract of a KV policy: what happens to a program's KV cache between two calls, and what is evicted first.

A policy is written once, for engines and for the simulator. It gets what it may know as arguments, keeps no clock, and
changes an order only: a block that it holds is evicted last, and never pinned. So no decision can stop an engine.
"""

from __future__ import annotations

import enum
import math
from abc import ABC
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from weft.core.prediction import TimeEstimate, Waits
from weft.core.registry import Registered

MOST_HOLD_S = 300.0  # after this long a tool is taken for one that never returns
MOST_SOON_S = 30.0  # after this long a call that was announced is not expected any more


class Action(enum.Enum):
    """What to do with a context."""

    KEEP = "keep"  # evict it after all that is not held
    LEAVE = "leave"  # evict it in its turn
    SPILL = "spill"  # copy it to host memory, then evict it before all others of open programs


class Decision(NamedTuple):
    """What happens to a context, until another decision."""

    action: Action
    until_s: float = math.inf  # on the scheduler's clock: a context is not held any longer than this


LEAVE = Decision(Action.LEAVE)


class Memory(NamedTuple):
    """The engine's memory, and its speeds."""

    used_share: float  # of the KV cache: running and held contexts; cached blocks that nobody holds do not count
    running_tokens: int  # contexts of the running calls
    prefill_token_s: float  # to compute a prompt token
    copy_token_s: float = math.inf  # to copy a token one way, as far as steps wait for it; infinite: no host memory


@dataclass(eq=False, slots=True)
class Context:
    """The KV that one thread of an open program leaves between two calls. Compared by identity."""

    program: Hashable
    name: str  # of the program
    used_s: float  # when its last call ended, on the scheduler's clock
    pause: TimeEstimate  # how long after `since_s` the next call comes
    tokens: int = 0  # that are cached yet
    tool: str | None = None  # that runs now, once its name is known
    since_s: float | None = None  # when that tool began, or the latest one ended; None: neither is known, so `used_s`
    soon_s: float | None = None  # when its program announced the next call
    new_tokens: float = 0.0  # that the next prompt is expected to add
    chance: float = 1.0  # that a call continues it
    age: int = 0  # calls that its program has started since
    called_s: float | None = None  # when the next call arrived, which waits since
    turn_s: float | None = None  # when that call's turn comes, by its place in the queue; None: not known
    waits: Waits = field(default_factory=Waits)  # of calls in the queue where the next call is going to wait
    level: int = 0  # the index of that queue
    on_host: bool = False  # its KV is in host memory as well
    host_tokens: int = 0  # that host memory has, less gaps
    is_fetched: bool = False  # it came back from there, for its next call
    decision: Decision = field(default=LEAVE)

    def expected_s(self, memory: Memory, now_s: float) -> float:
        """The time until the next call runs, if there is one: what remains of the pause, and the wait in the queue."""
        if self.pause.is_oracle:
            return self.pause.remaining_s(self.elapsed_s(now_s))
        if self.turn_s is not None:
            return max(0.0, self.turn_s - now_s)
        if self.called_s is not None:
            return max(0.0, self.called_s + self.waits.wait_s - now_s)
        if self.is_announced(now_s):
            return self.waits.median_s
        return self.pause.remaining_s(self.elapsed_s(now_s)) + self.waits.median_s

    def elapsed_s(self, now_s: float) -> float:
        """How long `pause` has lasted."""
        return now_s - (self.used_s if self.since_s is None else self.since_s)

    def is_announced(self, now_s: float) -> bool:
        """Whether the program has announced its next call, so lately that it may yet come."""
        return self.soon_s is not None and now_s < self.soon_s + MOST_SOON_S


class KvPolicy(Registered, ABC):
    """Decides on contexts, and orders them for eviction."""

    evicts_ended_first: ClassVar[bool] = True  # contexts of programs that have ended go before all others
    follows_use: ClassVar[bool] = False  # open programs' contexts go as in stock vLLM, which needs no other order
    decides: ClassVar[bool] = False  # `decide` does more than leave contexts
    changes_with_time: ClassVar[bool] = False  # `worth` of two contexts changes order though nothing happens

    def decide(self, context: Context, memory: Memory, now_s: float) -> Decision:
        """Decide on a context when its call has ended, again when the tool's name is known, and in each epoch."""
        del context, memory, now_s
        return LEAVE

    def worth(self, context: Context, memory: Memory, now_s: float) -> float:
        """What a context is worth, in any unit. Of those with the same kind of decision the least worth is evicted
        first. By default the one that was used longest ago, as vLLM does."""
        del memory, now_s
        return context.used_s

    def worth_together(self, worths: Iterable[float]) -> float:
        """What blocks are worth that several contexts share. By default as much as the best of them."""
        return max(worths)

    def worth_of_nobody(self, used_s: float, memory: Memory, now_s: float) -> float:
        """What blocks are worth that no open program owns. They are compared with contexts only if several programs had
        them, such as a system prompt.

        Args:
            used_s: When they were last used.
            memory: As in `worth`.
            now_s: As in `worth`.
        """
        del memory, now_s
        return used_s
