"""All baselines on the same rounds, in turns of one engine step, in one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from weft.bench import load
from weft.bench.baselines import BASELINES
from weft.bench.clock import STEP_S
from weft.bench.in_process import run_in_this_process
from weft.bench.journal import Journal
from weft.bench.load import Draw, Prompts, Shape
from weft.bench.records import Round, Run
from weft.bench.replay import Play
from weft.bench.settings import BLOCK_TOKENS, BenchSettings
from weft.core.policies import PolicyConfig
from weft.core.sim import SimSettings, StepTime, TraceProgram, simulate
from weft.core.trace.format import read

# Ids below are mostly special tokens, those above many models do not have.
_FIRST_TOKEN: Final = 10
_LAST_TOKEN: Final = 32_000
_WARM_UP_PROGRAMS: Final = 3


class Progress(Protocol):
    """Where a session is."""

    def begin(self, what: str, total: int, done: int = 0) -> None: ...

    def advance(self) -> None: ...


def play_missing(
    settings: BenchSettings, journal: Journal, units: Sequence[tuple[str, int]], progress: Progress
) -> None:
    """Play the rounds that a journal does not have yet, and keep each in it.

    Args:
        units: loads and numbers of all rounds, in their order.

    Raises:
        VllmUnavailableError, EngineStartError and others: the engines cannot start.
    """
    missing = [unit for unit in units if unit not in journal.rounds]
    if not missing:
        return
    with tempfile.TemporaryDirectory() as folder:
        progress.begin("starting engines", len(settings.baselines))
        field = Field(settings, Path(folder), progress.advance)
        programs = min(settings.programs, len(read(Path(settings.source)))) if settings.is_file else settings.programs
        total = programs * len(settings.baselines)
        progress.begin("playing", len(units) * total, (len(units) - len(missing)) * total)
        for name, number in missing:
            journal.add(field.play(name, number, progress.advance))


class Field:
    """The baselines' engines, ready to play.

    Args:
        folder: an empty one, for the tiny model.
        started: told of each engine.
    """

    def __init__(self, settings: BenchSettings, folder: Path, started: Callable[[], object]) -> None:
        run_in_this_process(one_thread=settings.model == "tiny")
        from weft.bench.stepper import Room, Stepper, longest_call

        self._settings = settings
        model = _model(settings.model, folder)
        room = Room(
            settings.batch_size, settings.room_tokens // BLOCK_TOKENS, settings.chunk_tokens, len(settings.baselines)
        )
        self._longest_tokens, vocabulary = longest_call(model, room)
        self._tokens = range(_FIRST_TOKEN, min(vocabulary, _LAST_TOKEN))
        self._engines: dict[str, Stepper] = {}
        for name in settings.baselines:
            self._engines[name] = Stepper(
                model, BASELINES[name], room, self._longest_tokens, counts_steps=settings.clock == "steps"
            )
            started()
        few = draw_round(replace(settings, programs=_WARM_UP_PROGRAMS), load.CLOSED, 0, self._longest_tokens)
        self._play(few, 0, lambda: None)

    def play(self, name: str, number: int, ended: Callable[[], object]) -> Round:
        """One round of a load on all engines.

        Args:
            ended: told of each program that has ended on one of them.
        """
        draw = draw_round(self._settings, name, number, self._longest_tokens)
        return Round(name, number, self._longest_tokens, draw.cut_calls, self._play(draw, number, ended))

    def _play(self, draw: Draw, number: int, ended: Callable[[], object]) -> dict[str, Run]:
        prompts = Prompts(f"{self._settings.seed} {number}", self._tokens)
        unloaded = unloaded_steps(self._settings, draw.programs)
        plays = {}
        for baseline, engine in self._engines.items():
            engine.renew()
            plays[baseline] = Play(engine, draw.programs, unloaded, prompts)
        names = [*plays]
        turn = number % len(names)  # nobody is always first
        for _ in lockstep([plays[baseline].run() for baseline in names[turn:] + names[:turn]]):
            ended()
        runs = {}
        for baseline, engine in self._engines.items():
            counts = replace(engine.meter.counts, swapped_tokens=plays[baseline].swapped_tokens)
            clock = engine.clock
            runs[baseline] = Run(plays[baseline].outcomes, clock.steps, clock.seconds, counts, engine.meter.samples)
        return runs


def draw_round(settings: BenchSettings, name: str, number: int, longest_tokens: int) -> Draw:
    """The programs of one round of a load, the same every time.

    Args:
        longest_tokens: of a call, that the engine holds.
    """
    shape = Shape(settings.scale, longest_tokens, whole_steps=settings.clock == "steps")
    return load.draw(settings.source, name, number, shape, programs=settings.programs, seed=settings.seed)


def _model(name: str, folder: Path) -> Path:
    if name == "tiny":
        from weft.engine.models.tiny import make_tiny_llama

        return make_tiny_llama(folder / "tiny")
    from weft.engine.frontend.start import resolve_model

    return Path(resolve_model(None if name == "embedded" else name))


def lockstep(plays: Sequence[Iterator[int]]) -> Iterator[None]:
    """A step of one after a step of another, so that noise hits all alike; yields for each program that ends."""
    ended = [0] * len(plays)
    running = dict(enumerate(plays))
    while running:
        for index, play in list(running.items()):
            count = next(play, None)
            if count is None:
                del running[index]
            else:
                yield from (None for _ in range(count - ended[index]))
                ended[index] = count


def unloaded_steps(settings: BenchSettings, programs: Sequence[TraceProgram]) -> dict[str, int]:
    """Steps that each program takes alone, by the simulator."""
    alone = SimSettings(
        policy=PolicyConfig("fcfs"),
        batch_size=settings.batch_size,
        chunk_tokens=settings.chunk_tokens,
        kv_tokens=float("inf"),
        step_time=StepTime(STEP_S, 0.0, 0.0, 0.0),
    )
    steps = {}
    for program in programs:
        result = simulate([replace(program, arrival_s=0.0)], alone)
        steps[program.program] = round(result.makespan / STEP_S)
    return steps
