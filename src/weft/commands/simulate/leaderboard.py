"""`weft sim --leaderboard`: every policy beside every plain rival on the same traces."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, Final

import typer

from weft.commands.progress import Bars
from weft.commands.shared import show
from weft.core.errors import SimulationError
from weft.core.sim.result import SimResult
from weft.core.sim.settings import SimSettings
from weft.core.sim.simulator import simulate
from weft.core.sim.study.leaderboard import DEFAULT, Rival, Score, alone, best_plain, ranked, rivals, score
from weft.core.sim.study.load import with_load
from weft.core.tables import Cell, Table
from weft.core.trace.format import TraceProgram, read

_FEW: Final = 20  # programs with which a p99 says little


def leaderboard(files: Sequence[Path], base: SimSettings, load: float | None, *, as_json: bool) -> None:
    """Print how all rivals serve each trace, those first that come closest to the best plain rival or are ahead of it.

    Args:
        load: A multiple of what the engine can serve; None: programs arrive as their trace says.

    Raises:
        SimulationError: The engine makes unit steps, in which a KV cache has no effect.
    """
    if base.unit_steps:
        raise SimulationError("--leaderboard compares KV caches; leave out --unit-steps.")
    boards = {}
    for file in files:
        programs = read(file) if load is None else with_load(read(file), load, base)
        boards[str(file)] = list(_scores(file.name, programs, base))
        if not as_json:
            _print(file.name, programs, boards[str(file)])
    if as_json:
        typer.echo(json.dumps({name: [_row(*each) for each in ranked(scores)] for name, scores in boards.items()}))
    elif len(files) > 1:
        _print_means(list(boards.values()))


def _scores(name: str, programs: list[TraceProgram], base: SimSettings) -> Iterator[Score]:
    found = rivals(host=base.host_kv_tokens > 0)
    alone_s = alone(programs, base)
    results = simulate_all(name, programs, [rival.settings(base) for rival in found])
    for rival, result in zip(found, results, strict=True):
        yield score(rival, result, programs, alone_s)


def _row(each: Score, ratio: float) -> dict[str, Any]:
    rival = each.rival
    return {
        "name": rival.name,
        **rival._asdict(),
        "is_default": rival.is_default,
        "is_plain": rival.is_plain,
        "is_oracle": rival.is_oracle,
        "to_best_plain": ratio,
        **each.measures,
    }


def _print(name: str, programs: Sequence[TraceProgram], scores: Sequence[Score]) -> None:
    few = ", too few for a p99" if len(programs) < _FEW else ""
    calls = sum(len(program.calls) for program in programs)
    title = f"{name}: {len(programs)} programs{few}, {calls} calls"
    rows = []
    for each, ratio in ranked(scores):
        texts = (
            each.rival.name,
            f"{ratio:.2f}",
            f"{each.mean_s:.1f}",
            f"{each.p99_s:.1f}",
            f"{each.token_mean_s * 1000:.0f}",
            f"{each.prefix_hits:.0%}",
            f"{each.recomputed_tokens / 1e6:.1f} M",
        )
        style = "bold" if each.rival.is_default else "dim" if each.rival.is_oracle else ""
        rows.append([Cell(text, style) for text in texts])
    headings = ("served by", "ratio", "mean s", "p99 s", "ms/token", "hits", "again")
    show(Table(title, headings, rows, frozenset(range(1, 7)), widest=41))
    for sentence in _verdicts(scores):
        typer.echo(sentence)
    typer.echo()


def _verdicts(scores: Sequence[Score]) -> Iterator[str]:
    """A sentence about the default, and one about what it is without host memory."""
    by_rival = {each.rival: each for each in scores}
    if DEFAULT in by_rival:
        yield _verdict(by_rival[DEFAULT], best_plain(scores), "the best plain rival")
    best = best_plain(scores, host=False)
    yield _verdict(by_rival[DEFAULT.without_host()], best, "the best plain rival without host memory")


def _verdict(ours: Score, best: Score, what: str) -> str:
    change = ours.mean_s / best.mean_s - 1
    words = f"{abs(change):.0%} {'slower' if change > 0 else 'faster'} than" if abs(change) >= 0.01 else "level with"
    return f"{ours.rival.name} is {words} {what}, {best.rival.name}, in the mean."


def _print_means(boards: Sequence[Sequence[Score]]) -> None:
    """The geometric means over several traces."""
    logs: dict[Rival, list[float]] = {}
    for scores in boards:
        for each, ratio in ranked(scores):
            logs.setdefault(each.rival, []).append(math.log(ratio))
    typer.echo(f"over {len(boards)} traces, geometric mean and worst, to the best plain rival of each:")
    for rival, values in sorted(logs.items(), key=lambda item: sum(item[1])):
        mean, worst = math.exp(sum(values) / len(values)), math.exp(max(values))
        typer.echo(f"  {mean:.2f}  worst {worst:.2f}  {rival.name}")


_programs: list[TraceProgram] = []  # of a worker process


def simulate_all(what: str, programs: Sequence[TraceProgram], engines: Sequence[SimSettings]) -> Iterator[SimResult]:
    """Simulate the engines, and yield their results in order, with a bar.

    At Ctrl-C and after an error the workers end at once and silently, with any other process that multiprocessing has
    started here.
    """
    workers = min(len(engines), os.cpu_count() or 1)
    with (
        Bars(what, len(engines), "count") as bars,
        ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin, initargs=(programs,)) as pool,
    ):
        try:
            with _interrupts_later():
                # Not map(), which cancels what is left; Python 3.11 prints a traceback if workers die after that.
                results = [pool.submit(_simulate, engine) for engine in engines]
            for each in results:
                result = each.result()
                bars.advance()
                yield result
        except BaseException:
            for worker in active_children():
                worker.terminate()
            raise


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Raise KeyboardInterrupt after the block. Workers that start in it are not interrupted before `_begin`. Where
    Ctrl-C is ignored, as in the background of a script, they ignore it, too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    pressed: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _frame: pressed.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # of this thread, and so of processes that it starts
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        signal.signal(signal.SIGINT, handler)
        if pressed:  # also if a worker has died of it meanwhile, which breaks the pool
            raise KeyboardInterrupt


def _begin(programs: Sequence[TraceProgram]) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # not a traceback
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    _programs.extend(programs)


def _simulate(engine: SimSettings) -> SimResult:
    return simulate(_programs, engine)
