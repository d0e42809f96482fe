"""Load balancers on two real replicas, two of them also with stealing: latency, prefix-cache hits, recomputed tokens.

    python benchmarks/bench_balancer.py --out bench_balancer.json    # and a picture, bench_balancer.svg
    python benchmarks/bench_balancer.py --programs 6 --rounds 1      # a quick look, a minute

Every round has new programs, which arrive at random (Poisson). The balancers serve them one after the other, in an
order that rotates from round to round, and before each of them the prefix caches are emptied. Latencies are ratios to
round robin in the same round. The model is the tests' tiny random Llama on CPU. There, decoding costs more than
prefill, so a cache hit saves less time than on a GPU: hit rates and recomputed tokens say more than latencies.

- `conversation`: turns that append to one history.
- `search`: a tree, in which the calls of a level run in parallel and share the path above them.

The prompts of both begin with a system prompt that all programs share.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from common import TINY_ENGINE_ARGS, balancer_config, machine, pyplot, spread
from rich.console import Console
from rich.table import Table

import weft
from weft.core.ids import EngineId
from weft.core.routing import BALANCERS, Arrival, Balancer, Loads
from weft.engine.models.tiny import make_tiny_llama
from weft.engine.replicas.stealer import Stealer

BASE = "round_robin"
CASES = [(balancer, False) for balancer in BALANCERS] + [("adaptive_locality", True), ("affinity", True)]
RATIOS = ("mean_s", "p95_s", "p99_s")  # to the base
COLUMNS = (*RATIOS, "hit_rate", "recomputed_tokens", "busiest_share", "moved")

WORDS = ["one", "two", "three", "four", "hello", "thanks", "tools", "answer", "weather", "city"]
BLOCK_TOKENS = 128  # the block size of vLLM on CPU; the prefix cache keeps whole blocks
OUTPUT_TOKENS = 24
SYSTEM_WORDS, TURN_WORDS, NODE_WORDS = 120, 140, 250
TURNS, LEVELS, WIDTH = 8, 4, 4

Message = dict[str, str]
Results = dict[str, dict[str, list[dict[str, float]]]]  # summaries of rounds, by workload and case
app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    programs: int
    programs_per_s: float
    rounds: int
    threshold_tokens: int
    kv_mib: int
    seed: int


@dataclass
class Measurement:
    """One balancer in one round."""

    latencies_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0  # in whole blocks that an earlier call of the same program had in its prompt
    calls: Counter[str] = field(default_factory=Counter)  # number of calls by replica
    moved: int = 0  # calls that were stolen

    def summary(self) -> dict[str, float]:
        latencies = sorted(self.latencies_s)
        quantiles = statistics.quantiles(latencies, n=100, method="inclusive") if len(latencies) > 1 else latencies * 99
        return {
            "hit_rate": self.cached_tokens / self.prompt_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "mean_s": statistics.fmean(latencies),
            "p95_s": quantiles[94],
            "p99_s": quantiles[98],
            "busiest_share": max(self.calls.values()) / self.calls.total(),
            "moved": self.moved,
        }


class Agent:
    """A program whose words are random, from a seed of its own."""

    def __init__(self, engine: weft.AsyncMultiLLMEngine, measurement: Measurement, seed: int) -> None:
        self.engine = engine
        self.measurement = measurement
        self.rng = random.Random(seed)

    def words(self, count: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=count))

    async def call(
        self, program: weft.Program, key: str, messages: list[Message], known_tokens: int
    ) -> tuple[str, int]:
        """Make one call; returns its answer and the number of its prompt tokens.

        Args:
            known_tokens: the number of its first prompt tokens that were an earlier call's prompt.
        """
        request = {"messages": messages, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0}
        identity = program.reports.start_call(key)
        answer = await self.engine.chat(request, program, identity)
        program.reports.end_call(key, identity)
        account = answer["weft"]
        self.measurement.prompt_tokens += account["prompt_tokens"]
        self.measurement.cached_tokens += account["cached_tokens"]
        whole_blocks = known_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        self.measurement.recomputed_tokens += max(0, whole_blocks - account["cached_tokens"])
        return answer["choices"][0]["message"]["content"], account["prompt_tokens"]

    async def conversation(self, program: weft.Program, system: str) -> None:
        messages, known_tokens = [{"role": "system", "content": system}], 0
        for _ in range(TURNS):
            messages.append({"role": "user", "content": self.words(TURN_WORDS)})
            answer, known_tokens = await self.call(program, "talk", messages, known_tokens)
            messages.append({"role": "assistant", "content": answer})
            await asyncio.sleep(self.rng.expovariate(1 / 0.2))  # The user reads the answer.

    async def search(self, program: weft.Program, system: str) -> None:
        path, known_tokens = [{"role": "system", "content": system}], 0
        for level in range(LEVELS):
            path.append({"role": "user", "content": self.words(NODE_WORDS)})
            children = [[*path, {"role": "user", "content": self.words(20)}] for _ in range(WIDTH)]
            results = await asyncio.gather(
                *(self.call(program, f"{level}-{n}", child, known_tokens) for n, child in enumerate(children))
            )
            best = self.rng.randrange(WIDTH)
            path = [*children[best], {"role": "assistant", "content": results[best][0]}]
            known_tokens = results[best][1]


def count_choices(balancer: Balancer, calls: Counter[str]) -> Balancer:
    """Make a balancer count the calls that it assigns to each replica; returns the balancer."""
    choose = balancer.choose

    def choose_and_count(arrival: Arrival, loads: Loads) -> EngineId:
        engine_id = choose(arrival, loads)
        calls[engine_id] += 1
        return engine_id

    balancer.choose = choose_and_count  # type: ignore[method-assign]
    return balancer


async def serve(
    engine: weft.AsyncMultiLLMEngine, workload: str, case: tuple[str, bool], seed: int, options: Options
) -> Measurement:
    """Serve all programs of a round under one balancer, with or without stealing."""
    group = engine._groups[engine.model]  # noqa: SLF001  users cannot change the balancer of a running engine
    measurement, rng = Measurement(), random.Random(seed)
    balancer, steals = case
    group.states.balancer = count_choices(balancer_config(balancer, options.threshold_tokens).make(), measurement.calls)
    stealer = next(part for part in group._parts if isinstance(part, Stealer))  # noqa: SLF001  nor stealing
    engine._loop.submit(_restart(stealer, steals)).result()  # noqa: SLF001
    stolen = sum(each.stolen for each in group.states.health(0.0))
    for replica in group.supervisor._replicas.values():  # noqa: SLF001
        await asyncio.wrap_future(engine._loop.submit(replica.llm.reset_prefix_cache()))  # noqa: SLF001
    system = " ".join(rng.choices(WORDS, k=SYSTEM_WORDS))

    async def one(number: int, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        agent = Agent(engine, measurement, seed * 1000 + number)
        began_s = time.perf_counter()
        with weft.Program(f"{workload}-{number}") as program:
            await getattr(agent, workload)(program, system)
        measurement.latencies_s.append(time.perf_counter() - began_s)

    arrivals_s, now_s = [], 0.0
    for _ in range(options.programs):
        arrivals_s.append(now_s)
        now_s += rng.expovariate(options.programs_per_s)
    await asyncio.gather(*(one(number, delay_s) for number, delay_s in enumerate(arrivals_s)))
    measurement.moved = sum(each.stolen for each in group.states.health(0.0)) - stolen
    return measurement


async def _restart(stealer: Stealer, steals: bool) -> None:
    await stealer.stop()
    if steals:
        stealer.watch()


def case_name(case: tuple[str, bool]) -> str:
    return f"{case[0].replace('_', ' ')}{' + stealing' if case[1] else ''}"


async def measure(workloads: list[str], options: Options) -> Results:
    """Measure all cases in turn, in every round.

    Returns:
        A summary of each round, by workload and case.
    """
    results: Results = {workload: {case_name(case): [] for case in CASES} for workload in workloads}
    with tempfile.TemporaryDirectory() as folder:
        arguments = {**TINY_ENGINE_ARGS, "max_model_len": 4096, "kv_cache_memory_bytes": options.kv_mib << 20}
        engine = await weft.AsyncMultiLLMEngine.create(
            make_tiny_llama(Path(folder)), swap=None, stealing=weft.StealingConfig(), **arguments
        )
        async with engine:
            for number in range(options.rounds):
                for workload in workloads:
                    first = number % len(CASES)
                    for case in CASES[first:] + CASES[:first]:
                        measurement = await serve(engine, workload, case, options.seed + number, options)
                        summary = measurement.summary()
                        results[workload][case_name(case)].append(summary)
                        Console(stderr=True).print(f"round {number + 1} {workload} {case_name(case)}: {summary}")
    for cases in results.values():
        bases = [dict(each) for each in cases[case_name((BASE, False))]]
        for rounds in cases.values():
            for summary, base in zip(rounds, bases, strict=True):
                summary.update({f"{key}_ratio": summary[key] / base[key] for key in RATIOS})
    return results


def show(results: Results) -> None:
    for workload, cases in results.items():
        table = Table("balancer", title=f"{workload}: medians over rounds; latencies ÷ round robin")
        for column in COLUMNS:
            table.add_column(column, justify="right")
        for name, rounds in cases.items():
            ratios = [spread([each[f"{key}_ratio"] for each in rounds]) for key in RATIOS]
            others = [statistics.median(each[key] for each in rounds) for key in COLUMNS[len(RATIOS) :]]
            table.add_row(name, *ratios, *(f"{value:.0f}" if value >= 10 else f"{value:.2f}" for value in others))
        Console(width=150).print(table)


def draw(results: Results, path: Path) -> None:
    """One panel for each workload: the latency ratios, median and range over rounds, and the hit rates."""
    plt = pyplot()
    figure, axes = plt.subplots(1, len(results), figsize=(6 * len(results), 4), squeeze=False, layout="constrained")
    for panel, (workload, cases) in zip(axes[0], results.items(), strict=True):
        for offset, (key, label) in enumerate(zip(RATIOS, ("mean", "p95", "p99"), strict=True)):
            values = [[each[f"{key}_ratio"] for each in rounds] for rounds in cases.values()]
            middle = [statistics.median(each) for each in values]
            low = [value - min(each) for value, each in zip(middle, values, strict=True)]
            high = [max(each) - value for value, each in zip(middle, values, strict=True)]
            places = [place + 0.22 * (offset - 1) for place in range(len(values))]
            panel.errorbar(middle, places, xerr=[low, high], fmt="o", capsize=3, label=label)
        hits = [statistics.median(each["hit_rate"] for each in rounds) for rounds in cases.values()]
        names = [f"{name}\n{100 * hit:.0f} % cached" for name, hit in zip(cases, hits, strict=True)]
        panel.set_yticks(range(len(cases)), names)
        panel.invert_yaxis()
        panel.axvline(1, color="gray", linewidth=0.8)
        panel.set_title(workload)
        panel.set_xlabel("program latency ÷ round robin")
    axes[0][0].legend()
    figure.savefig(path, metadata={"Date": None})


@app.command()
def main(
    workload: Annotated[str, typer.Option(help="conversation, search or both.")] = "both",
    programs: Annotated[int, typer.Option(help="Programs in a round.")] = 16,
    programs_per_s: Annotated[float, typer.Option(help="Programs that arrive per second.")] = 2.0,
    rounds: Annotated[int, typer.Option(help="Number of rounds, each with new programs.")] = 3,
    threshold_tokens: Annotated[int, typer.Option(help="Algorithm 2 (locality) treats longer prompts as long.")] = 2048,
    kv_mib: Annotated[int, typer.Option(help="KV cache of each replica in MiB, at 2 KiB per token.")] = 24,
    seed: Annotated[int, typer.Option(help="Seed of programs and arrivals.")] = 1,
    out: Annotated[Path | None, typer.Option(help="JSON file for all rounds; a picture is next to it.")] = None,
) -> None:
    """Compare load balancers on two real replicas."""
    options = Options(programs, programs_per_s, rounds, threshold_tokens, kv_mib, seed)
    workloads = ["conversation", "search"] if workload == "both" else [workload]
    results = asyncio.run(measure(workloads, options))
    show(results)
    if out is not None:
        out.write_text(json.dumps({"options": asdict(options), "machine": machine(), "results": results}, indent=1))
        draw(results, out.with_suffix(".svg"))


if __name__ == "__main__":
    app()
