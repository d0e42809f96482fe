"""What a policy may see of calls and programs, what it hears of them, and the ranks that it gives to calls.

Both drivers, vLLM's scheduler and the simulator, fill these objects in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.core.accounts import Attained
from weft.core.ids import ProgramId, SessionId


class Rank(NamedTuple):
    """The position of a call. Calls sorted by rank are queues Q_1 to Q_K one after another, each in its own order."""

    level: int  # index of the queue, 0 is Q_1
    order: float  # position inside the queue
    tie: int = 0  # position among calls of one order


@dataclass(eq=False, slots=True)
class ProgramView:
    """What a policy may see of a program. All calls of the program on one engine share it. Compared by identity."""

    program_id: ProgramId
    name: str = ""  # programs of one name are runs of the same entrypoint; "" where the client sent none
    tenant: str | None = None
    session_id: SessionId | None = None
    fingerprint: str = ""  # of the system prompt and the tools of its first call; "" if unknown
    attained: Attained = field(default_factory=Attained)  # pt[c.pid] of Algorithm 1
    arrival_s: float = math.nan  # of the program's first call at this engine
    arrival_order: int = 0  # position among the programs of this engine by first arrival, 0 is the earliest
    calls: int = 0  # calls that have arrived so far on all engines, including the present one
    deadline_s: float = math.inf  # the time by which the program should have ended
    predicted_tokens: float = math.nan  # predicted work left, in output tokens; nan while nothing predicts it


@dataclass(eq=False, slots=True)
class Call:
    """A call as a policy sees it (`c` in Algorithm 1). Compared by identity."""

    key: str  # the driver's name for the call
    program: ProgramView
    prompt_tokens: int = 0  # of the whole prompt
    cached_tokens: int = 0  # prompt tokens found in the prefix cache when the call started; 0 before
    deadline_s: float = math.inf  # the time until which the call must finish
    # Prompt tokens that were computed for the first time, so far. What an earlier call of the program had computed is
    # not among them if it was evicted and is computed again: that is no work that the program needs.
    computed_tokens: int = 0
    output_tokens: int = 0  # generated when the call was last charged
    charge_at_tokens: float = math.inf  # the output tokens at which the driver charges the call at the latest
    predicted_path_tokens: float = math.nan  # predicted work on the longest chain of calls that begins with this one
    predicted_own_tokens: float = math.nan  # predicted work of this call alone, in output tokens: an oracle's
    predicted_service_s: float = math.nan  # predicted service of this call, by the policy
    service_s: float = 0.0  # c.service: the attained service that ranked the call on arrival (line 11)
    model_time_s: float = 0.0  # c.model_time: time run since arrival or since the last promotion (line 29)
    served_s: float = 0.0  # time run since arrival
    wait_s: float = 0.0  # c.wait: time waited since arrival or the last promotion, without the current wait
    waiting_since_s: float = math.nan  # start of the current wait, nan while the call runs
    quantum_s: float = math.inf  # c.quanta: run time left in this queue
    rank: Rank = field(default=Rank(0, 0))


class ProgramChanged(NamedTuple):
    """A program's view has changed: one of its calls left, or a call arrived with newer figures."""

    program: ProgramView


class ProgramEnded(NamedTuple):
    """No further call of a program comes. It may still have calls that are being aborted."""

    program: ProgramView
    is_known: bool = True  # False: nobody has reported its end, but no call of it has come for a long time


class KvSize(NamedTuple):
    """How many tokens of contexts the KV cache and host memory hold."""

    tokens: float  # of the KV cache; inf: there is no bound
    host_tokens: float = 0.0
