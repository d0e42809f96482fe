"""The cost of a call (`Account`), and the service and the wait that a program has attained (Autellix §4.2).

The scheduler fills in the accounts of calls. The process table and the schedulers fold them into `Attained`, by which
policies rank calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MOST_WAITS: Final = 16  # waits of a call whose starts and lengths its account keeps


@dataclass(frozen=True, slots=True)
class Account:
    """The cost of one call so far. The account travels back from the engine with the call's output."""

    service_s: float = 0.0  # seconds on the model executor, summed over the steps that the call was part of
    # Seconds in schedulers' queues: before the first step, and while the call is preempted or stalled. If the call
    # moved to another replica, all its time at the first one counts as wait. So does the time until a replica took it.
    wait_s: float = 0.0
    preemptions: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that were not computed: found in the prefix cache, or fetched
    swapped_tokens: int = 0  # tokens whose KV was copied back from host memory after preemptions
    # Tokens whose KV was computed again: full blocks of the prompt that an earlier call of the program had computed,
    # and what the call itself had computed before a preemption.
    recomputed_tokens: int = 0
    fetched_tokens: int = 0  # of `cached_tokens`, those whose KV was copied from host memory when the call began
    # The first waits of a call that waited again after it had begun to run. Each is the seconds from the call's arrival
    # to the start of the wait, and the length of the wait in seconds. Empty for other calls, and for sums of accounts.
    waits: tuple[tuple[float, float], ...] = ()

    @property
    def found_tokens(self) -> int:
        """Prompt tokens that were found on the device."""
        return max(0, self.cached_tokens - self.fetched_tokens)

    def __add__(self, other: Account) -> Account:
        return Account(
            self.service_s + other.service_s,
            self.wait_s + other.wait_s,
            self.preemptions + other.preemptions,
            self.prompt_tokens + other.prompt_tokens,
            self.output_tokens + other.output_tokens,
            self.cached_tokens + other.cached_tokens,
            self.swapped_tokens + other.swapped_tokens,
            self.recomputed_tokens + other.recomputed_tokens,
            self.fetched_tokens + other.fetched_tokens,
        )


@dataclass(slots=True)
class Attained:
    """The service that a program has attained, and its wait: the part of a row that schedulers read.

    The front end's table and each engine's scheduler keep a copy. Both change it only by `fold` and `merge`. All values
    are seconds.

    A chain is a sequence of calls of which each arrived after the one before it had left. The longest chain is the one
    with the most service. Of chains with equal service it is the one with the longest wait.
    """

    service_s: float = 0.0  # of the longest chain: the scalar of ATLAS, Alg. 1 line 4
    total_service_s: float = 0.0  # sum over all calls: PLAS, eq. 1. It equals service_s for a single thread
    # Anti-starvation compares the wait W_total with the service T_total, which must be of the same calls. The waits of
    # a wide program's parallel calls add up while its critical path does not, so it would always seem to starve.
    wait_s: float = 0.0  # of the longest chain. It falls when a chain that waited less becomes the longest
    total_wait_s: float = 0.0  # sum over all calls

    def copy(self) -> Attained:
        """The values as they are now."""
        return Attained(self.service_s, self.total_service_s, self.wait_s, self.total_wait_s)

    def fold(self, inherited: Attained, service_s: float, wait_s: float) -> None:
        """Add a call that has left the engine (Alg. 1 lines 1-7).

        Args:
            inherited: the program's values when the call arrived (line 11, `c.service`).
            service_s: the call's service, in seconds: `c.model_time`.
            wait_s: the call's wait, in seconds.
        """
        self.keep_longer_chain(inherited.service_s + service_s, inherited.wait_s + wait_s)
        self.total_service_s += service_s
        self.total_wait_s += wait_s

    def merge(self, other: Attained) -> None:
        """Take over newer values from another copy. Sums and the longest chain only grow, so the larger is newer."""
        self.keep_longer_chain(other.service_s, other.wait_s)
        self.total_service_s = max(self.total_service_s, other.total_service_s)
        self.total_wait_s = max(self.total_wait_s, other.total_wait_s)

    def keep_longer_chain(self, service_s: float, wait_s: float) -> None:
        """Take over the service and the wait of a chain if it is longer than the longest one so far."""
        self.service_s, self.wait_s = max((self.service_s, self.wait_s), (service_s, wait_s))
