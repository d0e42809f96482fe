"""The settings of `bench_leaderboard.py`: which programs arrive, how fast, and at which engine.

Programs for tuning and for reporting are apart: recorded programs are split in halves, and generated ones have other
seeds.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeVar

from weft.core.errors import WeftError
from weft.core.kv_cache.config import AUTO_TIMES
from weft.core.sim import SimSettings
from weft.core.sim.study.leaderboard import alone
from weft.core.sim.study.load import with_load
from weft.core.trace.format import TraceProgram
from weft.core.trace.format import read as read_trace
from weft.core.trace.format import write as write_trace
from weft.core.trace.importers import ImportOptions, TraceImport
from weft.core.trace.workloads import generate, poisson

_T = TypeVar("_T")
Part = Literal["reporting", "tuning"]
LONG_TOOLS_S: Final = 30.0
_TOOLS_S: Final = 0.5  # of the workload, in the mean
# Recorded programs: a folder under the one with the data, and the pattern of its files.
RECORDED: Final = {
    "weka, gaps to 10 s": ("weka", "**/*.json"),
    "weka, gaps to 60 s": ("weka", "**/*.json"),
    "tau-bench": ("tau-bench", "*.json"),
    "bfcl": ("bfcl", "*base.jsonl"),
    "mooncake": ("mooncake", "conversation_trace.jsonl"),
}
GENERATED: Final = {"chat": "chat", "tools": "tools", "tools of 30 s": "tools", "search": "search", "mixed": "mixed"}
# Programs of a setting as a multiple of `--programs`: more of the short ones.
_SHARE: Final = {"bfcl": 3, "tau-bench": 2, "mooncake": 10, "chat": 4, "tools": 4, "tools of 30 s": 4, "search": 0.5}


class Setting(NamedTuple):
    """Programs that arrive at an engine."""

    source: str  # a key of `RECORDED` or `GENERATED`
    slots: int
    kv_tokens: int
    load: float

    def __str__(self) -> str:
        return f"{self.source}, {self.slots} slots, KV {self.kv_tokens:,}, load {self.load:g}"

    @property
    def engine(self) -> SimSettings:
        """The engine, with as much host memory as engines take by default if their host has room."""
        return SimSettings(batch_size=self.slots, kv_tokens=self.kv_tokens, host_kv_tokens=AUTO_TIMES * self.kv_tokens)

    def count(self, programs: int) -> int:
        """How many programs there are, for so many of the mixed workload. Much KV takes many sessions to fill."""
        share = min(3.0, max(1.0, self.kv_tokens / 1e6)) if "weka" in self.source else _SHARE.get(self.source, 1)
        return round(programs * share)


def _settings() -> Iterator[Setting]:
    """All settings, by load, so that a run that is cut off has something of everything."""
    for load in (0.9, 1.1, 0.6):
        if load > 0.6:
            yield from (Setting(source, 16, 65_536, load) for source in GENERATED)
            yield from (Setting(source, 16, 32_768, load) for source in ("tau-bench", "bfcl"))
            yield Setting("mooncake", 64, 500_000, load)
        for kv_tokens in (500_000, 1_000_000, 2_000_000, 4_000_000):
            for slots in (64, 16):
                yield from (Setting(f"weka, gaps to {cap_s} s", slots, kv_tokens, load) for cap_s in (60, 10))


SETTINGS: Final = tuple(_settings())


class Data(NamedTuple):
    """Where recorded programs are, and where their traces are kept once they are imported."""

    folder: Path
    traces: Path
    part: Part

    def has(self, source: str) -> bool:
        """Whether programs of a source can be had."""
        if source in GENERATED:
            return True
        return next(iter(self._files(source)), None) is not None

    def programs(self, source: str, count: int, seed: int) -> list[TraceProgram]:
        """Programs of a source, with arrivals of no particular rate: of all recorded ones if there are not so many."""
        rng = random.Random(f"{source} {self.part} {seed}")
        arrivals = poisson(random.Random(f"arrivals {self.part} {seed}"), 1.0)
        if source in GENERATED:
            made = generate(GENERATED[source], count, arrivals, rng)
            return [_slower(each, LONG_TOOLS_S / _TOOLS_S) for each in made] if source == "tools of 30 s" else made
        found = _read(self._trace(source))
        if source == "mooncake":  # requests that follow each other share prefixes
            first = rng.randrange(max(1, len(found) - count))
            return found[first : first + count]
        chosen = rng.sample(found, min(count, len(found)))
        return [replace(each, arrival_s=next(arrivals)) for each in chosen]

    def _files(self, source: str) -> Iterable[Path]:
        folder, pattern = RECORDED[source]
        return sorted(self.folder.joinpath(folder).glob(pattern))

    def _trace(self, source: str) -> Path:
        """The imported half of the programs of a source. It is written once."""
        path = self.traces / f"{source} {self.part}.jsonl".replace(" ", "-").replace(",", "")
        if not path.exists():
            files = list(self._files(source))
            if not files:
                raise WeftError(f"{self.folder / RECORDED[source][0]} has no programs of {source}.")
            if len(files) > 1:
                files = self._half(files, shuffled=True)
            programs = list(TraceImport(files, _options(source)))
            if len(list(self._files(source))) == 1:
                programs = self._half(programs, shuffled=source != "mooncake")
            self.traces.mkdir(parents=True, exist_ok=True)
            write_trace(programs, path)
        return path

    def _half(self, items: Sequence[_T], *, shuffled: bool) -> list[_T]:
        """The first half for tuning, the second one for reporting."""
        ordered = list(items)
        if shuffled:
            random.Random(7).shuffle(ordered)
        return ordered[: len(items) // 2] if self.part == "tuning" else ordered[len(items) // 2 :]


def _options(source: str) -> ImportOptions:
    if "weka" not in source:
        return ImportOptions(max_context_tokens=128_000)
    return ImportOptions(max_context_tokens=128_000, max_turns=80, gap_cap_s=60 if "60" in source else 10)


def _slower(program: TraceProgram, times: float) -> TraceProgram:
    return replace(program, calls=tuple(replace(call, gap_s=times * call.gap_s) for call in program.calls))


@functools.lru_cache(maxsize=4)
def _read(path: Path) -> list[TraceProgram]:
    return read_trace(path)


class Arrived(NamedTuple):
    """The programs of a setting as they arrive, and how long each takes on an idle engine, in seconds."""

    programs: list[TraceProgram]
    alone_s: dict[str, float]


@functools.lru_cache(maxsize=2)
def arrived(setting: Setting, data: Data, programs: int, seed: int) -> Arrived:
    """The programs of a setting at its load.

    Args:
        programs: Those of the mixed workload; other sources have multiples of it.
        seed: Of the draw of programs and arrivals.
    """
    made = with_load(data.programs(setting.source, setting.count(programs), seed), setting.load, setting.engine)
    return Arrived(made, alone(made, setting.engine))
