"""Runs vLLM's engines in this process instead of in processes of their own."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from weft.bench.baselines import baseline_of
from weft.bench.load import CLOSED, Prompts, RoundPrograms
from weft.bench.replay import Replay
from weft.bench.results.records import Journal, Measurement, Round
from weft.bench.rounds import programs_of_round, unloaded_steps
from weft.bench.settings import BLOCK_TOKENS, BenchSettings
from weft.core.trace.format import read
from weft.engine.vllm_compat.versions.version import require_vllm


def run_in_this_process(*, one_thread: bool = False) -> None:
    """Make vLLM run its engines in this process, without log output. Call this before anything imports vLLM.

    Args:
        one_thread: use one thread on a CPU, unless the environment sets another number. Two threads, each bound to a
            core, wait for each other many times a step. When another process occupied one of the cores, a step of the
            tiny model took 400 ms instead of 3 ms.

    Raises:
        UnsupportedVllmError, VllmUnavailableError: see `weft.core.errors`.
    """
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CONFIGURE_LOGGING="0")
    os.environ.update(TORCH_CPP_LOG_LEVEL="ERROR", TORCH_LOGS="-torch._library", HF_HUB_DISABLE_PROGRESS_BARS="1")
    if one_thread:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # vLLM's own warnings
    require_vllm()


# Many models use the ids below for special tokens, and do not have the ids above.
_FIRST_TOKEN: Final = 10
_END_TOKEN: Final = 32_000
_WARM_UP_PROGRAMS: Final = 3


class BaselineEngines:
    """One engine for each baseline, started and warmed up. `on_start` is called after each engine has started.

    Raises:
        VllmUnavailableError, UnsupportedVllmError, ModelNotFoundError, EngineStartError: the engines cannot start.
    """

    def __init__(self, settings: BenchSettings, folder: Path, on_start: Callable[[], object]) -> None:
        run_in_this_process(one_thread=settings.model == "tiny")
        from weft.bench.stepper import EngineCapacity, Stepper, model_limits

        self._settings = settings
        model = model_folder(settings.model, folder)
        capacity = EngineCapacity(
            batch_size=settings.batch_size,
            kv_blocks=settings.kv_capacity_tokens // BLOCK_TOKENS,
            chunk_tokens=settings.chunk_tokens,
            engines=len(settings.baselines),
        )
        self._max_call_tokens, vocabulary = model_limits(model, capacity)
        self._token_ids = token_ids(vocabulary)
        self._engines: dict[str, Stepper] = {}
        for name in settings.baselines:
            self._engines[name] = Stepper(
                model, baseline_of(name), capacity, self._max_call_tokens, counts_steps=settings.clock == "steps"
            )
            on_start()
        warm_up = replace(settings, programs=_WARM_UP_PROGRAMS)
        self._measure(programs_of_round(warm_up, CLOSED, 0, self._max_call_tokens), 0, lambda: None)

    def replay(self, load: str, number: int, on_program_end: Callable[[], object]) -> Round:
        """Replay one round of a load on all engines.

        `on_program_end` is called whenever a program has ended on one of the engines.
        """
        round_ = programs_of_round(self._settings, load, number, self._max_call_tokens)
        measurements = self._measure(round_, number, on_program_end)
        return Round(load, number, self._max_call_tokens, round_.truncated_calls, measurements)

    def _measure(
        self, round_: RoundPrograms, number: int, on_program_end: Callable[[], object]
    ) -> dict[str, Measurement]:
        prompts = Prompts(f"{self._settings.seed} {number}", self._token_ids)
        unloaded = unloaded_steps(self._settings, round_.programs)
        replays = {}
        for name, engine in self._engines.items():
            engine.reset()
            replays[name] = Replay(engine, round_.programs, unloaded, prompts)
        names = [*replays]
        first = number % len(names)  # The order rotates, so that each baseline is first in some round.
        for _ in lockstep([replays[name].steps() for name in names[first:] + names[:first]]):
            on_program_end()
        return {
            name: Measurement(
                programs=replays[name].outcomes,
                steps=engine.clock.steps,
                seconds=engine.clock.seconds,
                counts=replace(engine.meter.counts, swapped_tokens=replays[name].swapped_tokens),
                samples=engine.meter.samples,
            )
            for name, engine in self._engines.items()
        }


def replay_missing(
    settings: BenchSettings,
    journal: Journal,
    rounds: Sequence[tuple[str, int]],
    begin: Callable[[str, int, int], object],
    advance: Callable[[], object],
) -> None:
    """Replay the rounds that the journal does not have yet, and add each of them to it.

    Args:
        rounds: load and number of all rounds, in their order.
        begin: called with a part of the work, its steps, and those that were made in an earlier session.
        advance: called after each step.

    Raises:
        VllmUnavailableError, UnsupportedVllmError, ModelNotFoundError, EngineStartError: the engines cannot start.
    """
    missing = [key for key in rounds if key not in journal.rounds]
    if not missing:
        return
    with tempfile.TemporaryDirectory() as folder:
        begin("starting engines", len(settings.baselines), 0)
        engines = BaselineEngines(settings, Path(folder), advance)
        programs = min(settings.programs, len(read(Path(settings.source)))) if settings.is_file else settings.programs
        ends_per_round = programs * len(settings.baselines)
        begin("replaying", len(rounds) * ends_per_round, (len(rounds) - len(missing)) * ends_per_round)
        for load, number in missing:
            journal.add(engines.replay(load, number, advance))


def lockstep(replays: Sequence[Iterator[int]]) -> Iterator[None]:
    """Run several replays in lockstep: one step of each, then the next step of each, until all have ended.

    Other load on the machine then affects all replays alike.

    Args:
        replays: each yields after a step, with the number of programs that have ended so far (`Replay.steps`).

    Yields:
        Once for each program that ends.
    """
    ended = [0] * len(replays)
    running = dict(enumerate(replays))
    while running:
        for index, replay in list(running.items()):
            count = next(replay, None)
            if count is None:
                del running[index]
            else:
                yield from (None for _ in range(count - ended[index]))
                ended[index] = count


def token_ids(vocabulary: int) -> range:
    """The tokens that prompts are made of, for a vocabulary of this size."""
    return range(_FIRST_TOKEN, min(vocabulary, _END_TOKEN))


def model_folder(name: str, folder: Path) -> Path:
    """The folder of a model.

    Args:
        name: "tiny", "embedded", or a folder or hub name.
    """
    if name == "tiny":
        from weft.engine.models.tiny import make_tiny_llama

        return make_tiny_llama(folder / "tiny")
    from weft.engine.vllm.start import resolve_model

    return Path(resolve_model(None if name == "embedded" else name))
