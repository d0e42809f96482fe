"""What is compared, and how."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from weft.bench import load
from weft.bench.baselines import DEFAULT_BASELINES, check_baselines
from weft.core.errors import BenchError
from weft.core.trace.workloads import WORKLOADS

# At full length; with `scale`, the same of everything. Those of `weft sim`.
_KV_TOKENS_A_SLOT: Final = 4096
_CHUNK_TOKENS: Final = 2048
# Small, as lengths are scaled: vLLM shares full blocks only. vLLM on CPU asks for a multiple of 32.
BLOCK_TOKENS: Final = 32


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What makes a round what it is; rounds of the same settings may be put together.

    Args:
        source: a workload of `weft trace`, or a trace file.
        programs: in a round; of a file, at most.
        seed: of programs, arrivals and prompts.
        scale: of all lengths and times.
        baselines: names; the first is the base of ratios.
        batch_size: calls that an engine runs at once.
        kv_tokens: that its KV cache holds; None: 4,096 a slot, times `scale`.
        clock: by which calls arrive.
        model: "tiny", "embedded", or a folder or hub name.

    Raises:
        BenchError: values that make no sense.
    """

    source: str
    programs: int = 40
    seed: int = 0
    scale: float = 0.1
    baselines: tuple[str, ...] = DEFAULT_BASELINES
    batch_size: int = 8
    kv_tokens: int | None = None
    clock: Literal["steps", "seconds"] = "steps"
    model: str = "tiny"

    def __post_init__(self) -> None:
        check_baselines(self.baselines)
        if not 0 < self.scale < math.inf:
            raise BenchError(f"--scale is {self.scale}; give a number above 0, such as 0.1.")
        for name, value in (("programs", self.programs), ("batch-size", self.batch_size)):
            if value < 1:
                raise BenchError(f"--{name} is {value}; give at least 1.")
        if self.kv_tokens is not None and self.kv_tokens < 1:
            raise BenchError(f"--kv-tokens is {self.kv_tokens}; give at least 1.")
        if self.source not in WORKLOADS and not Path(self.source).is_file():
            raise BenchError(f"{self.source} is neither a trace file nor one of {', '.join(WORKLOADS)}.")

    @property
    def is_file(self) -> bool:
        return self.source not in WORKLOADS

    @property
    def room_tokens(self) -> int:
        """Tokens of KV, in whole blocks."""
        tokens = self.kv_tokens or round(_KV_TOKENS_A_SLOT * self.batch_size * self.scale)
        return max(1, tokens // BLOCK_TOKENS) * BLOCK_TOKENS

    @property
    def chunk_tokens(self) -> int:
        """The most tokens that a step computes."""
        return max(round(_CHUNK_TOKENS * self.scale), self.batch_size)

    def to_json(self) -> dict[str, Any]:
        """All of it, and of a trace file what was in it."""
        found: dict[str, Any] = asdict(self) | {"baselines": list(self.baselines)}
        if self.is_file:
            found["source"] = Path(self.source).name
            found["source_sha256"] = hashlib.sha256(Path(self.source).read_bytes()).hexdigest()
        return found


def loads(settings: BenchSettings, rates: Sequence[float], *, closed: bool) -> list[str]:
    """What is played, in its order: rates, or a file as it was recorded, and a closed batch.

    Raises:
        BenchError: a rate that makes no sense, or nothing to play.
    """
    if not all(0 < rate < math.inf for rate in rates) or len(set(rates)) < len(rates):
        raise BenchError(f"--rates are {', '.join(map(str, rates))}; give different numbers above 0, such as 0.5,1,2.")
    named = [load.label(rate) for rate in sorted(rates)]
    if not rates and settings.is_file:
        named = [load.AS_RECORDED]
    if closed:
        named.append(load.CLOSED)
    if not named:
        raise BenchError("there is nothing to play: give --rates, such as 0.5,1,2, or --closed.")
    return named
