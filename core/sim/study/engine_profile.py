"""What the simulator needs to know of an engine: its size and its step times, from a file or a table by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from weft.core.errors import SimulationError
from weft.core.policies import PolicyConfig
from weft.core.sim.settings import SimSettings, StepTime
from weft.core.trace.prefixes import BLOCK_TOKENS

_FORM: Final = 2  # of profile files
_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """An engine's size and step times.

    Raises:
        SimulationError: A value is out of range.
    """

    source: str  # where the values come from, as a part of a sentence
    step_time: StepTime
    kv_tokens: int  # that the KV cache holds
    kv_token_bytes: int  # the KV of one token
    batch_size: int = 64
    chunk_tokens: int = 2048  # the most tokens in a step
    block_tokens: int = BLOCK_TOKENS  # the tokens of a block of the KV cache

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "kv_token_bytes", "batch_size", "chunk_tokens", "block_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SimulationError(f"{name} of an engine must be a number from 1 on, not {value!r:.80}.")

    def settings(self, *, kv_tokens: int | None = None, batch_size: int | None = None) -> SimSettings:
        """The engine as the simulator takes it, without host memory.

        Args:
            kv_tokens: Another size of the KV cache; None: the profile's.
            batch_size: Another number of calls that run at once; None: the profile's.
        """
        calls = self.batch_size if batch_size is None else batch_size
        return SimSettings(
            policy=PolicyConfig("fcfs"),
            batch_size=calls,
            kv_tokens=self.kv_tokens if kv_tokens is None else kv_tokens,
            block_tokens=self.block_tokens,
            chunk_tokens=max(self.chunk_tokens, calls),
            step_time=self.step_time,
            kv_token_bytes=self.kv_token_bytes,
        )

    def host_tokens(self, gib: float) -> int:
        """How many tokens `gib` GiB of host memory hold."""
        return int(gib * _GIB / self.kv_token_bytes)

    def write(self, path: Path) -> None:
        """Write a profile file: one JSON object.

        Raises:
            OSError: It cannot be written.
        """
        path.write_text(json.dumps({"weft_profile": _FORM, **asdict(self)}, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> EngineProfile:
        """Read a profile file.

        Raises:
            SimulationError: The file cannot be read, or it is no profile file.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise SimulationError(
                f"{path} is no profile of an engine ({error}); make one with `weft profile`, or name one of "
                f"{', '.join(ENGINES)}."
            ) from None
        names, times = {each.name for each in fields(cls)}, {each.name for each in fields(StepTime)}
        match found:
            case {"weft_profile": 2, "step_time": dict(step_time), "source": str(), **others} if (
                {*others, "source", "step_time"} == names
                and {*step_time} == times
                and {*map(type, step_time.values())} <= {int, float}
            ):
                values: dict[str, Any] = {**found, "step_time": StepTime(**step_time)}
                del values["weft_profile"]
                return cls(**values)
        raise SimulationError(
            f"{path} is no profile of an engine; it needs weft_profile: {_FORM}, and exactly these fields: "
            f"{', '.join(sorted(names))}. Make one with `weft profile`."
        )


def _by_data_sheet(
    model: str, gpus: str, *, weights_b: float, kv_token_kib: int, gpu_tb_s: float, gpu_pflops: float, gpus_gb: float
) -> EngineProfile:
    """An engine worked out from a data sheet: weights of 16 bits are read once a step at the memory's speed, prompts
    are computed at half of the arithmetic speed, and the KV cache has nine tenths of what the weights leave.

    Args:
        gpu_tb_s: TB a second that all accelerators together read.
        gpu_pflops: Dense PFLOP/s of 16 bits of all accelerators.
    """
    token_bytes = kv_token_kib * 1024
    return EngineProfile(
        f"worked out from the data sheet of {gpus} for {model}, not measured",
        StepTime(
            fixed_s=weights_b * 2e9 / (gpu_tb_s * 1e12) + 1e-3,  # a millisecond for all that a data sheet leaves out
            decode_token_s=2e-5,
            prefill_token_s=2 * weights_b * 1e9 / (gpu_pflops * 1e15 / 2),
            context_token_s=token_bytes / (gpu_tb_s * 1e12),
            copy_token_s=token_bytes / 25e9,  # a bus of 25 GB/s
        ),
        kv_tokens=int(0.9 * (gpus_gb - 2 * weights_b) * 1e9 / token_bytes),
        kv_token_bytes=token_bytes,
    )


ENGINES: Final[Mapping[str, EngineProfile]] = {  # by name, the default first
    "8b": EngineProfile(
        "made up: they resemble a model of 8 billion weights on one mid-size GPU",
        StepTime(),
        kv_tokens=262_144,
        kv_token_bytes=128 << 10,
    ),
    "8b-h100": _by_data_sheet(
        "a model of 8 billion weights", "one H100", weights_b=8, kv_token_kib=128, gpu_tb_s=3.35, gpu_pflops=0.99,
        gpus_gb=80,
    ),
    "70b-4xh100": _by_data_sheet(
        "a model of 70 billion weights", "four H100s", weights_b=70, kv_token_kib=320, gpu_tb_s=13.4, gpu_pflops=3.96,
        gpus_gb=320,
    ),
}  # fmt: skip


def engine_named(name: str) -> EngineProfile:
    """The engine of a table by its name, or of a profile file. If there is neither, it raises SimulationError."""
    return ENGINES[name] if name in ENGINES else EngineProfile.read(Path(name))
