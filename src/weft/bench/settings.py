"""The settings of a session of `weft bench`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from weft.bench import load
from weft.bench.baselines import DEFAULT_BASELINES, check_baselines
from weft.bench.results.records import FORMAT
from weft.core.errors import BenchError
from weft.core.trace.workloads import WORKLOADS

# The sizes of `weft sim`. `scale` multiplies them, as it multiplies the lengths of calls.
_KV_TOKENS_PER_SLOT: Final = 4096
_CHUNK_TOKENS: Final = 2048
# vLLM shares full blocks only, and calls are scaled down, so blocks are small. vLLM on CPU requires a multiple of 32.
BLOCK_TOKENS: Final = 32


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """Everything that decides the result of a round. Only rounds of equal settings are combined.

    Args:
        programs: The number of programs in a round; of a trace, the most of its programs.
        seed: The same seed draws the same programs, arrivals and prompts.
        scale: A factor for all lengths and times, and for the tokens of a step.
        baselines: The schedulers to compare, of which the first is the base of all ratios.
        batch_size: The number of calls that an engine runs at once.
        kv_tokens: The tokens that an engine's KV cache holds, by default 4,096 a call, times the scale.
        clock: The clock that decides when calls arrive; with steps, results repeat to the digit.
        model: "tiny" (random), "embedded", or a folder in Hugging Face format or a name of the hub.

    Raises:
        BenchError: a value is out of range.
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
        if self.source not in WORKLOADS and not Path(self.source).is_file():
            raise BenchError(
                f"{self.source} is neither a trace file nor a workload; name a file, or one of {', '.join(WORKLOADS)}."
            )

    @property
    def is_file(self) -> bool:
        return self.source not in WORKLOADS

    @property
    def kv_capacity_tokens(self) -> int:
        """The size of an engine's KV cache in tokens, a whole number of blocks."""
        tokens = self.kv_tokens or round(_KV_TOKENS_PER_SLOT * self.batch_size * self.scale)
        return max(1, tokens // BLOCK_TOKENS) * BLOCK_TOKENS

    @property
    def chunk_tokens(self) -> int:
        """The most tokens that a step computes."""
        return max(round(_CHUNK_TOKENS * self.scale), self.batch_size)

    def to_json(self) -> dict[str, Any]:
        """Returns all settings, the version of the format, and for a trace file a checksum of its content."""
        settings: dict[str, Any] = {"format": FORMAT} | asdict(self) | {"baselines": list(self.baselines)}
        if self.is_file:
            settings["source"] = Path(self.source).name
            settings["source_sha256"] = hashlib.sha256(Path(self.source).read_bytes()).hexdigest()
        return settings


def names_of_loads(settings: BenchSettings, rates: Sequence[float], *, closed: bool) -> list[str]:
    """The names of the loads to replay, in their order: each rate, or a trace file's own arrivals; then a closed batch.

    Raises:
        BenchError: a rate is out of range or given twice, or there is nothing to replay.
    """
    if not all(0 < rate < math.inf for rate in rates) or len(set(rates)) < len(rates):
        raise BenchError(f"--rates are {', '.join(map(str, rates))}; give different numbers above 0, such as 0.5,1,2.")
    names = [load.rate_name(rate) for rate in sorted(rates)]
    if not rates and settings.is_file:
        names = [load.AS_RECORDED]
    if closed:
        names.append(load.CLOSED)
    if not names:
        raise BenchError("there is nothing to replay: give --rates, such as 0.5,1,2, or --closed.")
    return names
