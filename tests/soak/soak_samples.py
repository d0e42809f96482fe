"""What a soak measures of the engine's processes and tables."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import psutil
from soak_judge import WARM_UP, Limit, Verdict, judge

import weft

# Of resident memory: a leak of 300 bytes a call, at ten calls a second, is 10 MB an hour.
_MEMORY_MB: Final = Limit(per_hour=4.0, at_least=6.0)
# vLLM's worker grew in steps, by 17 MB in an hour of 346,000 calls; why is not known. 120 bytes a call would be found.
_WORKER_MB: Final = Limit(per_hour=40.0, at_least=24.0)
_HANDLES: Final = Limit(per_hour=2.0, at_least=8.0)  # threads and files

JUDGED: Final = {"rss_mb": _MEMORY_MB, "threads": _HANDLES, "files": _HANDLES}


class Meter:
    """Reads the processes of an engine, or of a server, and the sizes of its tables.

    Args:
        host: The process that started the engine's.
        tables: Gives the sizes.

    Raises:
        RuntimeError: The engine's processes cannot be told apart by their names.
    """

    def __init__(self, host: psutil.Process, tables: Callable[[], dict[str, int]]) -> None:
        self._tables = tables
        self._processes = {"host": host}
        for process in host.children(recursive=True):
            for name, title in (("core", "VLLM::EngineCore"), ("worker", "VLLM::Worker")):
                if any(title in part for part in process.cmdline()):
                    self._processes[name] = process
        if "core" not in self._processes:
            raise RuntimeError(f"no process is called VLLM::EngineCore: {host.children(recursive=True)}")
        self._start_s = time.monotonic()

    def sample(self, calls: int) -> dict[str, Any]:
        """One sample: of each process its memory in MB, threads and open files, and the sizes of the tables."""
        figures: dict[str, dict[str, float]] = {kind: {} for kind in JUDGED}
        for name, process in self._processes.items():
            with process.oneshot():
                figures["rss_mb"][name] = round(process.memory_info().rss / 2**20, 3)
                figures["threads"][name] = process.num_threads()
                figures["files"][name] = process.num_fds()
        return {"at_s": round(time.monotonic() - self._start_s, 1), "calls": calls, **figures, "tables": self._tables()}


def table_sizes(engine: weft.Engine) -> dict[str, int]:
    """How many entries an engine's tables in the host process have. All are 0 when no program runs."""
    recorder = engine._recorder
    return {
        "rows": len(engine.table),
        "sessions": len(engine.sessions),
        "calls in flight": len(engine._in_flight),
        "messages to the scheduler": int(not engine.programs.messages.is_idle),
        "requests of vLLM's front end": engine._llm.get_num_unfinished_requests(),
        "recorded programs": len(recorder._open) if recorder is not None else 0,
    }


def read_samples(file: Path) -> list[dict[str, Any]]:
    """The samples that a soak wrote."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def judge_samples(samples: Sequence[dict[str, Any]], warm_up: float = WARM_UP) -> dict[str, Verdict]:
    """The verdict on each figure after the warm-up, such as "rss_mb of host"."""
    times_s = [sample["at_s"] for sample in samples]
    return {
        f"{kind} of {name}": judge(times_s, [sample[kind][name] for sample in samples], _limit(kind, name), warm_up)
        for kind in JUDGED
        for name in samples[0][kind]
    }


def _limit(kind: str, name: str) -> Limit:
    return _WORKER_MB if (kind, name) == ("rss_mb", "worker") else JUDGED[kind]


def plot(samples: Sequence[dict[str, Any]], file: Path) -> None:
    """Resident memory over time, a panel for each process: they differ by hundreds of MB."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    names = list(samples[0]["rss_mb"])
    figure, panels = plt.subplots(len(names) + 1, sharex=True, figsize=(9, 8), layout="constrained")
    hours = [sample["at_s"] / 3600 for sample in samples]
    for name, panel in zip(names, panels, strict=False):
        panel.plot(hours, [sample["rss_mb"][name] for sample in samples], linewidth=0.8)
        panel.set_ylabel(f"{name}, MB")
        panel.axvspan(hours[0], hours[0] + (hours[-1] - hours[0]) / 3, color="0.92")
    panels[0].set_title("Resident memory (grey: warm-up, not judged)")
    for table in samples[0]["tables"]:
        panels[-1].plot(hours, [sample["tables"][table] for sample in samples], linewidth=0.8, label=table)
    panels[-1].set(ylabel="entries", xlabel="hours")
    panels[-1].legend(fontsize="x-small", ncols=3)
    figure.savefig(file)
