"""What the next step of a simulated replica has room for, if some calls started and others were preempted."""

from __future__ import annotations

from collections.abc import Hashable
from typing import cast

from weft.core.policies import Call, StepTokens
from weft.core.sim.kv_cache.cache import KvCache, Segment
from weft.core.sim.settings import SimSettings
from weft.core.sim.sim_programs import SimCall


class SimRoom:
    """The `Room` of a simulated replica. KV that another running call reads is neither needed nor given back.

    Args:
        free_tokens: The tokens of KV that calls may take.
        steps: The steps that the replica has made. A decoding call has generated a token with each step since its last
            charge.
    """

    def __init__(
        self, kv: KvCache, free_tokens: float, steps: int, step_tokens: StepTokens, settings: SimSettings
    ) -> None:
        self._kv = kv
        self._step_tokens = step_tokens
        self._free_tokens = free_tokens
        self._steps = steps
        self._settings = settings
        self._counts_blocks = settings.block_tokens > 1
        self._pins: dict[Segment, int] = {}  # the pins of segments whose number would change
        # Prefixes that starting calls would bring, with their lengths in tokens.
        self._prefixes: dict[Hashable, int] = {}
        self._call: SimCall | None = None
        self._segment: Segment | None = None
        self._hit = 0

    def offer(self, call: Call) -> bool:
        self._call = cast("SimCall", call)
        self._segment, self._hit = self._kv.find(self._call.prefixes()) if self._settings.shares_prefixes else (None, 0)
        return self._step_tokens.left_for(call) > 0

    def fits(self) -> bool:
        return self._needed_tokens() <= self._free_tokens

    def start(self) -> None:
        call = cast("SimCall", self._call)
        if not self._settings.unit_steps:
            self._step_tokens.take(call.tokens_to_compute(max(self._hit, self._brought_tokens())))
        self._free_tokens -= self._needed_tokens()
        segment = self._segment
        while segment is not None:
            pins = self._pins_of(segment)
            self._pins[segment] = pins + 1
            if pins:
                break
            segment = segment.parent
        if self._settings.shares_prefixes:
            self._prefixes.update(self._kv.shared_prefixes(call))

    def keep(self, call: Call) -> None:
        self._step_tokens.keep(call)

    def preempt(self, call: Call) -> None:
        self._step_tokens.preempt(call)
        call = cast("SimCall", call)
        own = cast("Segment", call.segment)
        segment: Segment | None = own
        is_decoding = call.end_step >= 0
        uncounted = self._steps - call.charged_step if is_decoding else 0  # tokens that its segment lacks yet
        if self._counts_blocks:
            self._free_tokens += self._blocks(call.context_tokens - call.prefill_left + uncounted) - own.end
        else:  # with the token that the call would generate in the next step
            self._free_tokens += 1 + uncounted
        while segment is not None:
            self._pins[segment] = self._pins_of(segment) - 1
            if self._pins[segment]:
                return
            self._free_tokens += segment.tokens
            segment = segment.parent

    def _needed_tokens(self) -> int:
        """The offered call's tokens that no running call has."""
        call, segment = cast("SimCall", self._call), self._segment
        while segment is not None and not self._pins_of(segment):
            segment = segment.parent
        shared = min(segment.end, self._hit) if segment is not None else 0
        return self._blocks(call.context_tokens) - max(shared, self._brought_tokens())

    def _blocks(self, tokens: int) -> int:
        """The tokens that fit into the blocks which `tokens` tokens take."""
        return -(-tokens // self._settings.block_tokens) * self._settings.block_tokens

    def _brought_tokens(self) -> int:
        """The tokens of the offered call's prefix that starting calls would bring."""
        if self._prefixes:
            for key, shared in self._kv.shared_prefixes(cast("SimCall", self._call)):
                if key in self._prefixes:
                    return min(self._prefixes[key], shared)
        return 0

    def _pins_of(self, segment: Segment) -> int:
        return self._pins.get(segment, segment.pins)
