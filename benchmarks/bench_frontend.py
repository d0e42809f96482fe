"""CPU that one LLM call costs its caller: Weft's own LangChain and AutoGen clients against those of OpenAI's SDK.

    python benchmarks/bench_frontend.py --out bench_frontend.json

All baselines call the same engine, with a tiny random Llama that answers with 8 tokens, each inside a program. Those on
OpenAI's SDK use `weft.integrations.openai.AsyncTransport`, so there is no socket, and vLLM's chat serving layer, on
the engine's own thread, is the same for all. *caller* is the CPU time of the thread that makes the calls: framework,
client, and for OpenAI's SDK its HTTP machinery and JSON. *process* is that of the whole host process, the serving layer
included, but not vLLM's other processes. The baselines take turns (A B C A B C ...); what counts is the ratio of
medians to the baseline of the same framework.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import platform
import statistics
import sys
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
from langchain_core.runnables import RunnableConfig
from langchain_openai import ChatOpenAI
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import weft
from weft.integrations.langchain import ChatWeft
from weft.integrations.openai import AsyncTransport, openai_client

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from tiny_model import ENGINE_ARGS, make_tiny_llama

SYSTEM, QUESTION = "You answer questions about ships.", "How many ships passed the lighthouse in the night?"
TOKENS = 8
SAMPLING: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS}
ENDLESS: dict[str, Any] = {"ignore_eos": True}  # so that it is 8 tokens always
AT_ONCE = 64

Ask = Callable[[bool], Awaitable[object]]  # one call, streamed or not


def engine_alone(engine: weft.Engine, program: weft.Program) -> Ask:
    """No framework: what is left of a call when nobody makes objects of it."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    body = {"messages": messages, **SAMPLING, **ENDLESS}

    async def ask(stream: bool) -> None:
        run = object()
        identity = program.start_call(run)
        if stream:
            async for _ in engine.chat_stream(body, program, identity):
                pass
        else:
            await engine.chat(body, program, identity)
        program.end_call(run, identity)

    return ask


def openai_sdk(engine: weft.Engine, program: weft.Program) -> Ask:
    """`weft.openai_client`, which the baselines below are built upon."""
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
        stream_usage=True,  # as ChatWeft
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
    from weft.integrations.autogen import WeftChatCompletionClient  # imports vLLM, which reads its settings then

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
    return _autogen(client, include_usage=True)  # as Weft's


class Baseline(NamedTuple):
    """One client, and the one it is compared with."""

    make: Callable[[weft.Engine, weft.Program], Ask]
    base: str


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
    """A collection of what others left behind is nobody's cost."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def sample(ask: Ask, at_once: int, stream: bool) -> dict[str, float]:
    """CPU milliseconds of a call, by clock; the mean, if there are several at once."""
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
                    for clock, taken_ms in (await sample(ask, at_once, stream)).items():
                        samples[mode][name][clock].append(taken_ms)
                progress.advance(total)
            for program in programs.values():
                program.end()
    return {
        mode: {
            name: {clock: summary(taken) for clock, taken in by_clock.items()} for name, by_clock in baselines.items()
        }
        for mode, baselines in samples.items()
    }


def summary(taken_ms: list[float]) -> dict[str, float]:
    """Median and spread."""
    quantiles = statistics.quantiles(taken_ms, n=100, method="inclusive")
    return {
        "median_ms": statistics.median(taken_ms),
        "iqr_ms": quantiles[74] - quantiles[24],
        "p95_ms": quantiles[94],
        "p99_ms": quantiles[98],
        "samples": len(taken_ms),
    }


def main(
    out: Annotated[Path | None, typer.Option(help="Where to write the figures (JSON) and, beside it, a plot.")] = None,
    calls: Annotated[int, typer.Option(min=2, help="Calls measured one at a time, for each baseline.")] = 40,
    batches: Annotated[int, typer.Option(min=2, help="Batches of calls at once, likewise.")] = 5,
) -> None:
    """Measure, print a table, and write JSON and a plot."""
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_llama(Path(folder) / "tiny")
        with weft.Engine(model, **{**ENGINE_ARGS, "max_num_seqs": AT_ONCE}) as engine:
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
        machine = {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "system": platform.platform(),
            "cores": os.cpu_count(),
        }
        out.write_text(json.dumps({"machine": machine, "tokens": TOKENS, "results": results}, indent=1))
        plot(results, out.with_suffix(".svg"))


def plot(results: dict[str, Any], path: Path) -> None:
    """Bars of the caller's medians, with the 95th percentile as a whisker."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 4), layout="constrained")
    width = 0.8 / len(BASELINES)
    for offset, name in enumerate(BASELINES):
        taken = [baselines[name]["caller"] for baselines in results.values()]
        medians = [each["median_ms"] for each in taken]
        tails = [max(0.0, each["p95_ms"] - each["median_ms"]) for each in taken]
        places = [place + offset * width for place in range(len(taken))]
        axes.bar(places, medians, width, yerr=[[0.0] * len(taken), tails], label=name, capsize=2)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(results))], list(results))
    axes.set_ylabel("CPU of the calling thread for a call, ms (median, p95)")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    typer.run(main)
