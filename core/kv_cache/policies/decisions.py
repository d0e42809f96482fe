"""The contract of a KV policy: what happens to a program's KV between two calls, and what is evicted first.

A policy is written once, for engines and for the simulator. It gets all that it may know as arguments and reads no
clock. It changes only the order of eviction: a block that it holds is evicted last, but is never pinned. So no decision
can stop an engine.
"""

from __future__ import annotations

import enum
import math
from abc import ABC
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final, NamedTuple

from weft.core.errors import KvPolicyError
from weft.core.prediction import TimeEstimate, Waits
from weft.core.registries import Registered, Registry, check_number

MOST_HOLD_S = 300.0  # a tool that has run for longer is expected never to return
MOST_SOON_S = 30.0  # a call that was announced longer ago is not expected any more


class Action(enum.Enum):
    """What to do with a context."""

    KEEP = "keep"  # hold it: evict it after all contexts that are not held
    LEAVE = "leave"  # evict it in its turn
    SPILL = "spill"  # copy it to host memory, then evict it before all others of open programs


class Decision(NamedTuple):
    """What happens to a context until the next decision."""

    action: Action
    until_s: float = math.inf  # the time until which the context is held at most


LEAVE = Decision(Action.LEAVE)


class Memory(NamedTuple):
    """The engine's memory, and its speeds."""

    used_share: float  # the share of the KV cache, 0 to 1, that running and held contexts take
    running_tokens: int  # contexts of the running calls
    prefill_token_s: float  # seconds to compute a prompt token
    copy_token_s: float = math.inf  # seconds that steps wait for a token copied one way; infinite without host memory
    # Of the contexts that are compared, where the policy compares each with all others (`KvPolicy.compares_with_all`):
    oldest_s: float = math.inf  # when the one was used last that was used longest ago; inf if there is none
    largest_tokens: int = 0  # the tokens of the largest one

    def among(self, contexts: Iterable[Context]) -> Memory:
        """The same memory, with what is compared of these contexts. O(n)."""
        oldest_s, largest_tokens = math.inf, 0
        for context in contexts:
            oldest_s = min(oldest_s, context.used_s)
            largest_tokens = max(largest_tokens, context.cached_tokens)
        return self._replace(oldest_s=oldest_s, largest_tokens=largest_tokens)


@dataclass(eq=False, slots=True)
class Context:
    """The KV that one thread of an open program leaves between two calls. Compared by identity."""

    program: Hashable
    name: str  # of the program
    used_s: float  # when its last call ended, on the scheduler's clock
    pause: TimeEstimate  # how long after `since_s` the next call comes
    tokens: int = 0  # its tokens that are still cached
    tool: str | None = None  # the tool that runs now, once its name is known
    since_s: float | None = None  # when that tool began, or the latest tool ended; None: `used_s` counts instead
    soon_s: float | None = None  # when its program announced the next call
    new_tokens: float = 0.0  # the tokens that the next prompt is expected to add
    chance: float = 1.0  # the chance that a call continues it
    age: int = 0  # the calls that its program has started since
    called_s: float | None = None  # when the next call arrived, which waits now
    turn_s: float | None = None  # when that call's turn comes, by its place in the queue; None: not known
    waits: Waits = field(default_factory=Waits)  # in the queue where the next call will wait
    level: int = 0  # the index of that queue
    on_host: bool = False  # all of its KV is in host memory as well
    host_tokens: int = 0  # its tokens up to its end in host memory
    is_needed: bool = True  # False: only a second preemption, or another program, would use its copy in host memory
    is_fetched: bool = False  # it was copied back for its next call
    ask_s: float = -math.inf  # until then it is not due for a copy back, unless something happens to it
    decision: Decision = field(default=LEAVE)

    @property
    def cached_tokens(self) -> int:
        """Its tokens that the next call finds, on the device or in host memory."""
        return max(self.tokens, self.host_tokens)

    def expected_s(self, memory: Memory, now_s: float) -> float:
        """The time until the next call runs, if one comes: the rest of the pause, and the wait in the queue."""
        if self.pause.is_oracle:
            return self.pause.remaining_s(self.elapsed_s(now_s))
        if self.turn_s is not None:
            return max(0.0, self.turn_s - now_s)
        if self.called_s is not None:
            return max(0.0, self.called_s + self.waits.mean_s - now_s)
        if self.is_announced(now_s):
            return self.waits.median_s
        return self.pause.remaining_s(self.elapsed_s(now_s)) + self.waits.median_s

    def elapsed_s(self, now_s: float) -> float:
        """How long `pause` has lasted."""
        return now_s - (self.used_s if self.since_s is None else self.since_s)

    def is_announced(self, now_s: float) -> bool:
        """Whether the program has announced its next call within the last `MOST_SOON_S`."""
        return self.soon_s is not None and now_s < self.soon_s + MOST_SOON_S


class KvPolicy(Registered, ABC):
    """Decides on contexts, and orders them for eviction."""

    evicts_ended_first: ClassVar[bool] = True  # blocks of programs that have ended go before all others
    follows_use: ClassVar[bool] = False  # blocks of open programs go by their last use, as in stock vLLM
    decides: ClassVar[bool] = False  # `decide` does more than leave contexts
    changes_with_time: ClassVar[bool] = False  # two worths may change their order without an event
    compares_with_all: ClassVar[bool] = False  # a worth depends on all contexts, so all are ranked at one instant

    def decide(self, context: Context, memory: Memory, now_s: float) -> Decision:
        """Decide on a context when its call has ended, again when the tool's name is known, and in each epoch."""
        return LEAVE

    def worth(self, context: Context, memory: Memory, now_s: float) -> float:
        """What a context is worth, in any unit. Of contexts with the same action, the least worth is evicted first.

        By default that is the context that was used longest ago, as in vLLM.
        """
        return context.used_s

    def worth_together(self, worths: Iterable[float]) -> float:
        """What blocks are worth that contexts of these worths share. By default the largest of them."""
        return max(worths)

    def worth_of_nobody(self, used_s: float, memory: Memory, now_s: float) -> float:
        """What blocks are worth that are in no context of an open program.

        They compete with contexts only if several programs have used them, as a system prompt. If the policy
        `evicts_ended_first`, the others go before all contexts, in the order of their last use.

        Args:
            used_s: When they were last used.
        """
        return used_s


# A KV policy's module must be imported in `weft.core.kv_cache.policies`. Nothing else names it.
REGISTRY: Final = Registry[KvPolicy]("KV policy", KvPolicyError)

register = REGISTRY.register
registration = REGISTRY.registration
registrations = REGISTRY.registrations


def check_range(what: str, value: object, low: float, high: float) -> float:
    """Return a parameter's value, or raise KvPolicyError unless it is a number from `low` to `high`."""
    number = check_number(value, what, KvPolicyError)
    if not low <= number <= high:
        raise KvPolicyError(f"{what} must be from {low:g} to {high:g}, not {value!r}.")
    return number


@dataclass(frozen=True, slots=True, init=False)
class KvPolicyConfig:
    """A KV policy by name, with parameters: `KvPolicyConfig("ttl", quantile=0.9)`.

    Args:
        name: One of `weft.core.kv_cache.policies.KV_POLICIES`.
        **parameters: The policy's own parameters.

    Raises:
        KvPolicyError: The name is unknown, the policy does not have a parameter, or it refuses a value.
    """

    name: str
    parameters: Any  # the policy's own frozen dataclass

    def __init__(self, name: str = "ended-first", **parameters: Any) -> None:
        object.__setattr__(self, "parameters", REGISTRY.parameters(name, parameters))
        object.__setattr__(self, "name", name)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON scalars."""
        own = {each.name: getattr(self.parameters, each.name) for each in fields(self.parameters)}
        return {"name": self.name, **own}

    @property
    def follows_use(self) -> bool:
        """Whether the policy predicts nothing: see `KvPolicy.follows_use`."""
        return registration(self.name).kind.follows_use

    def make(self) -> KvPolicy:
        """Make a policy that has seen nothing yet."""
        return registration(self.name).kind.from_parameters(self.parameters)


def as_kv_config(given: object) -> KvPolicyConfig | None:
    """The KV policy of an engine or of its scheduler's settings, given as a name, a configuration or its `to_dict`;
    None for None. Anything else raises KvPolicyError."""
    if given is None or isinstance(given, KvPolicyConfig):
        return given
    if isinstance(given, str):
        return KvPolicyConfig(given)
    if isinstance(given, Mapping) and isinstance(given.get("name"), str):
        return KvPolicyConfig(**{str(key): value for key, value in given.items()})
    raise KvPolicyError(f'a KV policy is a name, such as "next-use", or a KvPolicyConfig, not {given!r:.80}.')
