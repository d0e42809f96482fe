"""What each part of the host process costs at sizes that no test reaches: CPU time a call, and memory a program.

    python benchmarks/bench_scale.py --out build/scale.json

Each part is measured alone, with what it would hold at that size: the process table with all programs open, the default
balancer with all of them assigned, the identification of requests without ids with its tables full, and the exchange of
tenants' service between replicas. Only the thread's own CPU time counts, so other processes disturb little.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, cast

import psutil
import typer
from common import machine
from rich.console import Console
from rich.progress import track
from rich.table import Table

from weft.core.accounts import Account
from weft.core.identity.items import items_of_answer
from weft.core.identity.lineage import Lineage
from weft.core.identity.sources import Evidence
from weft.core.ids import CallId, EngineId, ProgramId, SessionId, ThreadId
from weft.core.policies.fair_shares.stride import OverEngines
from weft.core.process_rows import CallIdentity, ProgramInfo
from weft.core.process_table import ProcessTable
from weft.core.routing import Arrival, BalancerConfig
from weft.core.routing.replicas import ReplicaSet

PROGRAMS: Final = (1_000, 100_000, 1_000_000)
CONVERSATIONS: Final = (1_000, 10_000, 100_000)
REPLICAS: Final = (16, 256, 1_000)
TENANTS: Final = 100
CALLS: Final = 10  # of a program
SAMPLES: Final = 20_000
WORDS: Final = ("harbour", "keeper", "counted", "ships", "night", "train", "river", "plant", "light", "gull")


class Row(NamedTuple):
    """A measurement."""

    what: str
    size: str
    median: float
    p99: float
    unit: str
    bytes_each: float | None = None  # resident memory of a program or conversation


def cpu_us(work: Callable[[], object]) -> float:
    """Microseconds of this thread's CPU time."""
    before_ns = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - before_ns) / 1000


def row(what: str, size: str, taken_us: list[float], bytes_each: float | None = None) -> Row:
    """The row of many calls."""
    return Row(what, size, statistics.median(taken_us), statistics.quantiles(taken_us, n=100)[-1], "µs", bytes_each)


def resident_bytes() -> int:
    """The process's memory, garbage left out."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def table(programs: int) -> Iterator[Row]:
    """A call's arrival, assignment and end with so many programs open, each of which has had some calls."""
    rows, before_bytes = ProcessTable(), resident_bytes()
    engines = [EngineId(f"e{number}") for number in range(16)]

    def one_call(program: int, number: int) -> None:
        identity = CallIdentity(ProgramId(f"p{program}"), ThreadId(f"t{program}"), CallId(f"c{program}-{number}"))
        call, _ = rows.arrive(identity, None, float(number))
        rows.assign(call, engines[program % len(engines)])
        call.account = Account(service_s=1.0, output_tokens=10)
        rows.leave(call, number + 0.5)

    for program in range(programs):
        name = f"p{program}"
        rows.open(ProgramInfo(ProgramId(name), SessionId(name), "agent"), 0.0)
        for number in range(CALLS):
            one_call(program, number)
    bytes_each = (resident_bytes() - before_bytes) / programs
    rng = random.Random(0)
    taken = [cpu_us(partial(one_call, rng.randrange(programs), n)) for n in range(CALLS, CALLS + SAMPLES)]
    yield row("process table: a call", f"{programs:,} programs", taken, bytes_each)
    lost_ms = [cpu_us(partial(rows.lose_engine, each)) / 1000 for each in engines]
    yield Row("process table: a replica dies", f"{programs:,} programs", statistics.median(lost_ms), max(lost_ms), "ms")


def balancer(replicas: int, programs: int) -> Iterator[Row]:
    """A choice of the default balancer and an end of a call. Ten calls for each replica are in flight."""
    rng, states, in_flight = random.Random(0), ReplicaSet(BalancerConfig().make(), max_calls=64), list[EngineId]()
    for number in range(replicas):
        states.add(EngineId(f"e{number}"))
        states.ready(EngineId(f"e{number}"), 0.0)

    def choose(program: int) -> None:
        arrival = Arrival(ProgramId(f"p{program}"), SessionId(f"p{program}"), rng.choice((100, 1_000, 10_000)))
        in_flight.append(cast("EngineId", states.dispatch(arrival)))
        if len(in_flight) > 10 * replicas:
            leaver = rng.randrange(len(in_flight))
            in_flight[leaver], in_flight[-1] = in_flight[-1], in_flight[leaver]
            states.leave(in_flight.pop())

    for program in range(programs):
        choose(program)
    taken = [cpu_us(partial(choose, rng.randrange(programs))) for _ in range(SAMPLES)]
    size = f"{replicas:,} replicas, {programs:,} programs"
    yield row("balancer: a call", size, taken)
    lost_ms = [cpu_us(partial(states.down, EngineId(f"e{n}"), "test", 0.0)) / 1000 for n in range(5)]
    yield Row("balancer: a replica dies", size, statistics.median(lost_ms), max(lost_ms), "ms")


def identity(conversations: int) -> Iterator[Row]:
    """A request without ids and its answer, the third turn of one of so many conversations that differ."""
    rng, lineage, before_bytes = random.Random(0), Lineage(), resident_bytes()
    system = {"role": "system", "content": " ".join(rng.choices(WORDS, k=100))}
    talks: list[list[dict[str, Any]]] = []

    def turn(messages: list[dict[str, Any]]) -> None:
        placed = lineage.place(Evidence(), {"messages": messages}, "-", ":1")
        text = " ".join([*rng.choices(WORDS, k=20), f"{rng.getrandbits(64):x}"])
        answer = {"role": "assistant", "content": text}
        lineage.answered(placed, items_of_answer({"choices": [{"message": answer}]}), "-", None)
        messages += [answer, {"role": "user", "content": f"go on {rng.getrandbits(32):x}"}]

    for number in range(conversations):
        talks.append([system, {"role": "user", "content": f"task {number} {' '.join(rng.choices(WORDS, k=30))}"}])
        turn(talks[-1])
        turn(talks[-1])
    bytes_each = (resident_bytes() - before_bytes) / conversations
    latest = talks[-1_000:]  # the others may be forgotten
    taken = [cpu_us(partial(turn, rng.choice(latest))) for _ in range(SAMPLES // 10)]
    yield row("requests without ids: a turn", f"{conversations:,} conversations", taken, bytes_each)


def shares(replicas: int) -> Iterator[Row]:
    """An epoch of 100 ms in which each replica tells of all tenants, and is told of what the others did."""
    names, sums = [EngineId(f"e{number}") for number in range(replicas)], OverEngines()
    served = {f"tenant-{number}": 10.0 for number in range(TENANTS)}

    def epoch() -> None:
        sums.keep(names)
        for name in names:
            sums.take(name)
            sums.add(name, served)

    epoch()
    taken_ms = [cpu_us(epoch) / 1000 for _ in range(5)]
    size = f"{replicas:,} replicas, {TENANTS} tenants"
    yield Row("fair shares: an epoch", size, statistics.median(taken_ms), max(taken_ms), "ms")


def measured(part: tuple[Any, ...]) -> list[Row]:
    """The rows of a part: a function with its arguments."""
    return list(part[0](*part[1:]))


def main(
    most: Annotated[int, typer.Option(help="Leave out sizes above this.")] = 1_000_000,
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
) -> None:
    """Measure, and print a table. A million programs take some minutes and six gigabytes."""
    parts: list[tuple[Any, ...]] = [(table, size) for size in PROGRAMS if size <= most]
    parts += [(balancer, replicas, size) for replicas in REPLICAS for size in PROGRAMS[-1:] if size <= most]
    parts += [(identity, size) for size in CONVERSATIONS if size <= most]
    parts += [(shares, replicas) for replicas in REPLICAS]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:  # a part finds nothing of another in memory
        found = pool.map(measured, parts)
        rows = [each for part in track(found, "Measuring", len(parts), console=Console(stderr=True)) for each in part]
    shown = Table(title="CPU time of a thread")
    for heading in ("what", "size", "median", "p99", "bytes each"):
        shown.add_column(heading, justify="left" if heading in ("what", "size") else "right")
    for each in rows:
        bytes_each = "" if each.bytes_each is None else f"{each.bytes_each:,.0f}"
        shown.add_row(
            each.what, each.size, f"{each.median:,.1f} {each.unit}", f"{each.p99:,.1f} {each.unit}", bytes_each
        )
    Console().print(shown)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"machine": machine(), "rows": [each._asdict() for each in rows]}, indent=1))


if __name__ == "__main__":
    typer.run(main)
