"""CPU time of one LLM call in its caller: Weft's LangChain and AutoGen clients compared with those of OpenAI's SDK.

    python benchmarks/bench_frontend.py --out bench_frontend.json

All baselines call the same engine inside a program. The engine has a tiny random Llama that answers with 8 tokens. The
baselines on OpenAI's SDK use `weft.integrations.openai.AsyncTransport`, so there is no socket, and vLLM's chat serving
layer, on the engine's own thread, is the same for all baselines.

- *caller* is the CPU time of the thread that makes the calls: framework, client, and for OpenAI's SDK its HTTP code and
  JSON.
- *process* is the CPU time of the whole host process, including the serving layer, but not vLLM's other processes.

The baselines alternate (A B C A B C ...). The result is the ratio of medians to the baseline of the same framework.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import httpx2
import typer
from autogen_core.models import ModelInfo, SystemMessage, UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from common import TINY_ENGINE_ARGS, machine, pyplot
from langchain_core.runnables import RunnableConfig
from langchain_openai import ChatOpenAI
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import weft
from weft.engine.models.tiny import make_tiny_llama
from weft.integrations.langchain import ChatWeft
from weft.integrations.openai import AsyncTransport, openai_client

SYSTEM, QUESTION = "You answer questions about ships.", "How many ships passed the lighthouse in the night?"
TOKENS = 8
SAMPLING: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS}
ENDLESS: dict[str, Any] = {"ignore_eos": True}  # Every answer has 8 tokens.
AT_ONCE = 64

Ask = Callable[[bool], Awaitable[object]]  # one call, streamed or not


def engine_alone(engine: weft.Engine, program: weft.Program) -> Ask:
    """No framework: the cost of a call without a client's objects."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    body = {"messages": messages, **SAMPLING, **ENDLESS}

    async def ask(stream: bool) -> None:
        key = object()
        identity = program.reports.start_call(key)
        if stream:
            async for _ in engine.chat_stream(body, program, identity):
                pass
        else:
            await engine.chat(body, program, identity)
        program.reports.end_call(key, identity)

    return ask


def openai_sdk(engine: weft.Engine, program: weft.Program) -> Ask:
    """`weft.openai_client`, without a framework."""
    completions = openai_client(engine, program).chat.completions
    messages: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    request: dict[str, Any] = {"model": engine.model, "messages": messages, **SAMPLING, "extra_body": ENDLESS}

    async def ask(stream: bool) -> None:
        if stream:
            async for _ in await completions.create(stream=True, stream_options={"include_usage": True}, **request):
                pass
        else:
            await completions.create(**request)

    return ask


def _langchain(model: Any, config: dict[str, Any]) -> Ask:
    messages, run_config = [("system", SYSTEM), ("user", QUESTION)], cast("RunnableConfig", config)

    async def ask(stream: bool) -> None:
        if stream:
            async for _ in model.astream(messages, run_config):
                pass
        else:
            await model.ainvoke(messages, run_config)

    return ask


def chat_weft(engine: weft.Engine, program: weft.Program) -> Ask:
    """LangChain on Weft, with its callback handler."""
    return _langchain(ChatWeft(engine=engine, model_kwargs=ENDLESS, **SAMPLING), program.config())


def chat_openai(engine: weft.Engine, program: weft.Program) -> Ask:
    """LangChain on OpenAI's SDK, without callbacks."""
    model = ChatOpenAI(
        model=engine.model,
        base_url="http://weft/v1",
        api_key=cast("Any", "none"),
        http_async_client=httpx2.AsyncClient(transport=AsyncTransport(engine, program), timeout=None),
        stream_usage=True,  # as ChatWeft does
        max_retries=0,
        extra_body=ENDLESS,
        **SAMPLING,
    )
    return _langchain(model, {})


def _autogen(client: Any, **stream_options: Any) -> Ask:
    messages = [SystemMessage(content=SYSTEM), UserMessage(content=QUESTION, source="user")]

    async def ask(stream: bool) -> None:
        if stream:
            async for _ in client.create_stream(messages, **stream_options):
                pass
        else:
            await client.create(messages)

    return ask


def autogen_weft(engine: weft.Engine, program: weft.Program) -> Ask:
    """AutoGen on Weft, bound to a program and an agent."""
    from weft.integrations.autogen import WeftChatCompletionClient  # vLLM reads its settings when it is imported.

    return _autogen(WeftChatCompletionClient(engine, **SAMPLING, **ENDLESS).bind(program, agent="keeper"))


def autogen_openai(engine: weft.Engine, program: weft.Program) -> Ask:
    """AutoGen on OpenAI's SDK."""
    info = ModelInfo(vision=False, function_calling=True, json_output=True, structured_output=True, family="unknown")
    client = OpenAIChatCompletionClient(
        model=engine.model,
        base_url="http://weft/v1",
        api_key="none",
        http_client=httpx2.AsyncClient(transport=AsyncTransport(engine, program), timeout=None),
        model_info=info,
        max_retries=0,
        extra_body=ENDLESS,
        **SAMPLING,
    )
    return _autogen(client, include_usage=True)  # as Weft's client does


class Baseline(NamedTuple):
    """One client."""

    make: Callable[[weft.Engine, weft.Program], Ask]
    base: str  # the baseline with which it is compared


BASELINES = {
    "engine alone": Baseline(engine_alone, "ChatOpenAI"),
    "OpenAI SDK": Baseline(openai_sdk, "ChatOpenAI"),
    "ChatWeft": Baseline(chat_weft, "ChatOpenAI"),
    "ChatOpenAI": Baseline(chat_openai, "ChatOpenAI"),
    "AutoGen Weft": Baseline(autogen_weft, "AutoGen OpenAI"),
    "AutoGen OpenAI": Baseline(autogen_openai, "AutoGen OpenAI"),
}
MODES = {
    "one by one": (1, False),
    "one by one, streamed": (1, True),
    f"{AT_ONCE} at once": (AT_ONCE, False),
    f"{AT_ONCE} at once, streamed": (AT_ONCE, True),
}
CLOCKS: dict[str, Callable[[], float]] = {"caller": time.thread_time, "process": time.process_time}


@contextmanager
def no_garbage() -> Iterator[None]:
    """Collect garbage before a measurement and not in it, because earlier calls left the garbage."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def sample(ask: Ask, at_once: int, stream: bool) -> dict[str, float]:
    """CPU milliseconds of a call, by clock; of several calls at once, their mean."""
    with no_garbage():
        before = {name: clock() for name, clock in CLOCKS.items()}
        if at_once == 1:
            await ask(stream)
        else:
            await asyncio.gather(*(ask(stream) for _ in range(at_once)))
        return {name: (clock() - before[name]) * 1e3 / at_once for name, clock in CLOCKS.items()}


async def measure(engine: weft.Engine, calls: int, batches: int, console: Console) -> dict[str, Any]:
    """Samples of every baseline in every mode."""
    samples: dict[str, dict[str, dict[str, list[float]]]] = {
        mode: {baseline: {clock: [] for clock in CLOCKS} for baseline in BASELINES} for mode in MODES
    }
    with Progress(console=console, transient=True) as progress:
        total = progress.add_task("measuring", total=2 * calls + 2 * batches)
        for mode, (at_once, stream) in MODES.items():
            programs = {name: weft.Program(name) for name in BASELINES}
            asks = {name: baseline.make(engine, programs[name]) for name, baseline in BASELINES.items()}
            for ask in asks.values():
                for _ in range(3 if at_once == 1 else 1):
                    await sample(ask, at_once, stream)
            for _ in range(calls if at_once == 1 else batches):
                for name, ask in asks.items():
                    for clock, time_ms in (await sample(ask, at_once, stream)).items():
                        samples[mode][name][clock].append(time_ms)
                progress.advance(total)
            for program in programs.values():
                program.end()
    return {
        mode: {
            name: {clock: summary(times_ms) for clock, times_ms in by_clock.items()}
            for name, by_clock in baselines.items()
        }
        for mode, baselines in samples.items()
    }


def summary(times_ms: list[float]) -> dict[str, float]:
    """Median and spread."""
    quantiles = statistics.quantiles(times_ms, n=100, method="inclusive")
    return {
        "median_ms": statistics.median(times_ms),
        "iqr_ms": quantiles[74] - quantiles[24],
        "p95_ms": quantiles[94],
        "p99_ms": quantiles[98],
        "samples": len(times_ms),
    }


def main(
    out: Annotated[Path | None, typer.Option(help="JSON file for the results; a plot is written next to it.")] = None,
    calls: Annotated[int, typer.Option(min=2, help="Calls to measure one by one, for each baseline.")] = 40,
    batches: Annotated[int, typer.Option(min=2, help="Batches of calls at once to measure, for each baseline.")] = 5,
) -> None:
    """Measure, print a table, and write JSON and a plot."""
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_llama(Path(folder) / "tiny")
        with weft.Engine(model, **{**TINY_ENGINE_ARGS, "max_num_seqs": AT_ONCE}) as engine:
            results = asyncio.run(measure(engine, calls, batches, console))
    table = Table(title=f"CPU of a call of {TOKENS} tokens, milliseconds: median p95/p99, ratio of medians")
    table.add_column("", no_wrap=True)
    for clock in CLOCKS:
        table.add_column(clock, justify="right", no_wrap=True)
        table.add_column("ratio", justify="right")
    for mode, baselines in results.items():
        table.add_section()
        table.add_row(f"[bold]{mode}[/]")
        for name, figures in baselines.items():
            cells = []
            for clock, figure in figures.items():
                ratio = figure["median_ms"] / baselines[BASELINES[name].base][clock]["median_ms"]
                spread = f"{figure['p95_ms']:.1f}/{figure['p99_ms']:.1f}"
                cells += [f"{figure['median_ms']:.2f} {spread:>9}", f"{ratio:.2f}"]
            table.add_row(f"  {name}", *cells)
    console.print(table)
    if out is not None:
        out.write_text(json.dumps({"machine": machine(), "tokens": TOKENS, "results": results}, indent=1))
        plot(results, out.with_suffix(".svg"))


def plot(results: dict[str, Any], path: Path) -> None:
    """Bars of the caller's medians, with the 95th percentile as a whisker."""
    figure, axes = pyplot().subplots(figsize=(10, 4), layout="constrained")
    width = 0.8 / len(BASELINES)
    for offset, name in enumerate(BASELINES):
        rows = [baselines[name]["caller"] for baselines in results.values()]
        medians = [row["median_ms"] for row in rows]
        tails = [max(0.0, row["p95_ms"] - row["median_ms"]) for row in rows]
        positions = [group + offset * width for group in range(len(rows))]
        axes.bar(positions, medians, width, yerr=[[0.0] * len(rows), tails], label=name, capsize=2)
    axes.set_xticks([group + 0.4 - width / 2 for group in range(len(results))], list(results))
    axes.set_ylabel("CPU of the calling thread for a call, ms (median, p95)")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    typer.run(main)
