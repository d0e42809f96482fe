"""A real vLLM engine stepped by hand, playing programs: the engine's side of `bench_live.py`.

Arrivals and tool times are counted in engine steps, so that every rival gets the same load however fast the machine is
at the moment.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import random
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.core.ids import CallId, EngineId, ProgramId, SessionId, ThreadId
from weft.core.process_table import CallIdentity, CallRow, ProcessTable, ProgramInfo, ProgramState
from weft.core.swap import SwapConfig
from weft.engine.wire import decode_account, encode_call

MAX_PROMPT_TOKENS = 1900
STEP_S = 0.01  # what a step counts as, where the scheduler's clock counts steps


@dataclass(frozen=True)
class CallSpec:
    """One call of a program."""

    parents: tuple[int, ...]  # calls of the same program, by index, that must have ended
    prompt: tuple[int, ...]  # its own tokens, behind the history of its first parent
    output_tokens: int
    gap_steps: int  # from the end of its last parent to its arrival: a tool at work


@dataclass(frozen=True)
class ProgramSpec:
    """One program."""

    kind: str
    arrival_step: int
    calls: tuple[CallSpec, ...]


@dataclass(frozen=True)
class Rival:
    """How an engine schedules: vLLM's own policy, or one of Weft's."""

    stock: str | None = None
    weft: dict[str, Any] = field(default_factory=dict)
    swaps: bool = False  # the KV of preempted calls to host memory; else it is computed again

    def engine_args(self, stepper: Stepper, *, steps_clock: bool) -> dict[str, Any]:
        """vLLM's arguments, with the clock of Weft's scheduler: seconds that its engine is at work, or steps."""
        if self.stock is not None:
            return {"scheduling_policy": self.stock}
        from weft.engine.scheduler import WeftScheduler

        class Clocked(WeftScheduler):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.set_clock(lambda: time.perf_counter() - stepper.elsewhere_s)

        class Stepped(WeftScheduler):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self._executed = 0
                self.set_clock(lambda: (stepper.steps + self._executed) * STEP_S)

            def schedule(self, *args: Any, **kwargs: Any) -> Any:
                self._executed = 0
                output = super().schedule(*args, **kwargs)
                self._executed = 1
                return output

        arguments = {"scheduler_cls": Stepped if steps_clock else Clocked, "additional_config": {"weft": self.weft}}
        if self.swaps:
            from weft.engine.swap.connector import transfer_config

            arguments["kv_transfer_config"] = transfer_config(SwapConfig(space_gib=1.0))
        return arguments


@dataclass(frozen=True)
class Outcome:
    """What became of one program."""

    kind: str
    steps: int  # from its arrival to its end
    seconds: float
    tokens: int


@dataclass(frozen=True)
class Round:
    """One play of all programs."""

    programs: list[Outcome]
    steps: int
    seconds: float
    step_s: float  # the median step, which outliers of a busy machine do not move
    preemptions: int


def run_in_this_process() -> None:
    """Have vLLM, which is yet to be imported, run its engines here, and quietly."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CONFIGURE_LOGGING="0")
    os.environ.update(TORCH_CPP_LOG_LEVEL="ERROR", TORCH_LOGS="-torch._library")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # vLLM's own


class Stepper:
    """An engine in this process, and how many steps and seconds it has been at work."""

    def __init__(self, model: Path, rival: Rival, slots: int, *, steps_clock: bool) -> None:
        self.tells_programs = rival.stock is None
        self.elsewhere_s = 0.0  # how long other engines had their turn
        self._paused_at_s = time.perf_counter()
        run_in_this_process()
        from vllm import EngineArgs
        from vllm.distributed.kv_transfer import kv_transfer_state
        from vllm.v1.engine.llm_engine import LLMEngine

        # vLLM keeps one connector a process, in a global: each engine has its own back while it has its turn.
        self._transfer: Any = kv_transfer_state
        self._transfer._KV_CONNECTOR_AGENT = None  # noqa: SLF001
        self.steps = 0
        self.busy_s = 0.0
        self.step_times_s: list[float] = []
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model),
                dtype="float32",
                max_model_len=2048,
                max_num_seqs=slots,
                enforce_eager=True,
                kv_cache_memory_bytes=256 << 20,
                use_tqdm_on_load=False,
                **rival.engine_args(self, steps_clock=steps_clock),
            )
        )
        self._connector = self._transfer._KV_CONNECTOR_AGENT  # noqa: SLF001

    def take_turn(self) -> None:
        """Go on after another engine's turn."""
        self.elsewhere_s += time.perf_counter() - self._paused_at_s
        self._transfer._KV_CONNECTOR_AGENT = self._connector  # noqa: SLF001

    def end_turn(self) -> None:
        """Let another engine have its turn."""
        self._paused_at_s = time.perf_counter()

    def send(self, call_id: str, prompt: list[int], output_tokens: int, extra: dict[str, Any] | None) -> None:
        from weft.engine.vllm_api import SamplingParams

        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True, temperature=0, extra_args=extra)
        rendered = self.engine.renderer.render_cmpl([{"prompt_token_ids": prompt}])
        self.engine.add_request(call_id, rendered[0], params)

    def step(self) -> list[Any]:
        """The requests that finished in one step."""
        start = time.perf_counter()
        outputs = self.engine.step()
        self.step_times_s.append(time.perf_counter() - start)
        self.busy_s += self.step_times_s[-1]
        self.steps += 1
        return [output for output in outputs if output.finished]


@dataclass
class _Live:
    """A program under way."""

    program_id: ProgramId
    spec: ProgramSpec
    arrived_s: float
    histories: dict[int, list[int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)


class Play:
    """All programs, from the first arrival to the last end."""

    def __init__(self, stepper: Stepper, programs: list[ProgramSpec]) -> None:
        self._stepper = stepper
        self._programs = programs
        self._tells_programs = stepper.tells_programs
        self._table = ProcessTable()
        self._numbers = itertools.count()
        self._due: list[tuple[int, int, int, int]] = []  # step, tie breaker, program, call
        self._live: dict[int, _Live] = {}
        self._in_flight: dict[str, tuple[int, int, CallRow | None]] = {}
        self._first_step, self._first_s = stepper.steps, stepper.busy_s
        self._result = Round([], 0, 0.0, 0.0, 0)
        stepper.step_times_s.clear()

    def run(self) -> Iterator[None]:
        """Play, one engine step after another."""
        for index, spec in enumerate(self._programs):
            for number, call in enumerate(spec.calls):
                if not call.parents:
                    self._plan(spec.arrival_step, index, number)
        while self._due or self._in_flight:
            self._stepper.take_turn()
            if not self._in_flight and self._due[0][0] > self._now:
                self._stepper.steps += self._due[0][0] - self._now  # nothing to do until then
            while self._due and self._due[0][0] <= self._now:
                _, _, index, number = heapq.heappop(self._due)
                self._send(index, number)
            for output in self._stepper.step():
                self._end_call(output)
            self._stepper.end_turn()
            yield

    @property
    def result(self) -> Round:
        """What came of it, once it has run to its end."""
        return replace(
            self._result,
            steps=self._now,
            seconds=self._stepper.busy_s - self._first_s,
            step_s=statistics.median(self._stepper.step_times_s),
        )

    @property
    def _now(self) -> int:
        return self._stepper.steps - self._first_step

    def _plan(self, step: int, index: int, number: int) -> None:
        heapq.heappush(self._due, (step, next(self._numbers), index, number))

    def _send(self, index: int, number: int) -> None:
        spec = self._programs[index]
        if index not in self._live:
            program_id = ProgramId(f"p{self._first_step}-{index}")
            self._live[index] = _Live(program_id, spec, self._stepper.busy_s)
            self._table.open(ProgramInfo(program_id, SessionId(program_id), spec.kind), self._stepper.busy_s)
        program, call = self._live[index], spec.calls[number]
        history = program.histories[call.parents[0]] if call.parents else []
        program.histories[number] = prompt = [*history, *call.prompt][-MAX_PROMPT_TOKENS:]
        call_id = CallId(f"c{self._first_step}-{next(self._numbers)}")
        row, extra = None, None
        if self._tells_programs:
            identity = CallIdentity(program.program_id, ThreadId(program.program_id), call_id)
            row, attained = self._table.arrive(identity, EngineId("engine"), self._stepper.busy_s)
            extra = encode_call(identity, attained)
        self._stepper.send(call_id, prompt, call.output_tokens, extra)
        self._in_flight[call_id] = index, number, row

    def _end_call(self, output: Any) -> None:
        index, number, row = self._in_flight.pop(output.request_id)
        program = self._live[index]
        program.histories[number] = program.histories[number] + list(output.outputs[0].token_ids)
        if row is not None:
            account = decode_account(output.kv_transfer_params, 0, 0, 0)
            if account is None:
                raise AssertionError("Weft's scheduler attaches an account to every output")
            row.account = account
            self._result = replace(self._result, preemptions=self._result.preemptions + account.preemptions)
            self._table.leave(row, self._stepper.busy_s)
        program.ended.add(number)
        if len(program.ended) == len(program.spec.calls):
            self._end_program(index)
        for other, call in enumerate(program.spec.calls):
            if number in call.parents and program.ended.issuperset(call.parents):
                self._plan(self._now + call.gap_steps, index, other)

    def _end_program(self, index: int) -> None:
        program = self._live.pop(index)
        self._table.close(program.program_id, ProgramState.FINISHED, self._stepper.busy_s)
        self._result.programs.append(
            Outcome(
                kind=program.spec.kind,
                steps=self._now - program.spec.arrival_step,
                seconds=self._stepper.busy_s - program.arrived_s,
                tokens=sum(call.output_tokens for call in program.spec.calls),
            )
        )


def unloaded_steps(program: ProgramSpec) -> int:
    """Steps that a program takes alone: its longest chain of outputs and tools."""
    ends: list[int] = []
    for call in program.calls:
        begin = max((ends[parent] + call.gap_steps for parent in call.parents), default=0)
        ends.append(begin + call.output_tokens)
    return max(ends)


def mixed(rng: random.Random, programs: int, every_steps: float) -> list[ProgramSpec]:
    """Many chats and tool loops and a few tree searches; Poisson arrivals.

    Shapes follow Autellix §6.1, at a tenth of its token counts so that a CPU plays a round in a minute or two: 6.7
    calls of 28 tokens (chat), 10.8 calls of 3.4 (tools), 160 calls of 7.3 in rounds of five (search), on average.
    """
    arrival, specs = 0.0, []
    for _ in range(programs):
        arrival += rng.expovariate(1 / every_steps)
        kind = rng.choices(("chat", "tools", "search"), (0.45, 0.45, 0.1))[0]
        calls = {"chat": _chat, "tools": _tools, "search": _search}[kind](rng)
        specs.append(ProgramSpec(kind, int(arrival), tuple(calls)))
    return specs


def alone(rng: random.Random, programs: int) -> list[ProgramSpec]:
    """Chats one after the other: each arrives when the one before it must have ended."""
    at, specs = 0, []
    for _ in range(programs):
        spec = ProgramSpec("chat", at, tuple(_chat(rng)))
        at += 2 * unloaded_steps(spec) + 100
        specs.append(spec)
    return specs


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(300, 900) for _ in range(max(1, count)))


def _chain(rng: random.Random, calls: int, prompt: int, output: float, gap: int) -> list[CallSpec]:
    return [
        CallSpec(
            parents=(n - 1,) if n else (),
            prompt=_tokens(rng, round(prompt * rng.uniform(0.5, 1.5))),
            output_tokens=1 + round(rng.expovariate(1 / output)),
            gap_steps=round(gap * rng.uniform(0.2, 1.8)) if n else 0,
        )
        for n in range(calls)
    ]


def _chat(rng: random.Random) -> list[CallSpec]:
    return _chain(rng, min(40, 1 + round(rng.expovariate(1 / 5.7))), prompt=26, output=27, gap=30)


def _tools(rng: random.Random) -> list[CallSpec]:
    return _chain(rng, min(40, 1 + round(rng.expovariate(1 / 9.8))), prompt=73, output=2.4, gap=10)


def _search(rng: random.Random) -> list[CallSpec]:
    calls = _chain(rng, 1, prompt=47, output=6.3, gap=0)
    for _ in range(rng.randrange(22, 42)):  # rounds of five candidates, each after the first of the round before
        parent = max(0, len(calls) - 5)
        for branch in _chain(rng, 5, prompt=47, output=6.3, gap=8):
            calls.append(CallSpec((parent,), branch.prompt, branch.output_tokens, branch.gap_steps))
    return calls
