"""What a span costs: without a processor, with Weft's outside a program, and with Weft's inside one.

    python benchmarks/bench_spans.py

A round makes an agent's spans, `invoke_agent` with one tool in turn after the other, in each of the three ways, one way
after the other. Given are microseconds of CPU time a span: the median of the rounds, and the least and the most.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Annotated

import typer
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from rich.console import Console

import weft
from weft.integrations.otel import WeftSpanProcessor


def agent_us(tracer: trace.Tracer, spans: int) -> float:
    """Microseconds of CPU time for each of an agent's spans."""
    begin_s = time.process_time()
    with tracer.start_as_current_span("invoke_agent a"):
        for _ in range(spans):
            with tracer.start_as_current_span("execute_tool t"):
                pass
    return (time.process_time() - begin_s) / spans * 1e6


def main(rounds: Annotated[int, typer.Option()] = 40, spans: Annotated[int, typer.Option()] = 1000) -> None:
    """Measure."""
    plain, watched = TracerProvider(), TracerProvider()
    watched.add_span_processor(WeftSpanProcessor())
    trace.set_tracer_provider(watched)
    found: dict[str, list[float]] = {"no processor": [], "outside a program": [], "inside a program": []}
    for _ in range(rounds):
        found["no processor"].append(agent_us(plain.get_tracer("a"), spans))
        found["outside a program"].append(agent_us(watched.get_tracer("a"), spans))
        program = weft.Program()
        with program.attach():
            found["inside a program"].append(agent_us(watched.get_tracer("a"), spans))
        program.end()
    for way, each_us in found.items():
        Console().print(f"{way}: {median(each_us):.1f} µs ({min(each_us):.1f} to {max(each_us):.1f})")


if __name__ == "__main__":
    typer.run(main)
