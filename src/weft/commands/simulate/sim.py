"""`weft sim`: simulate engines that serve the programs of a trace."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from weft.commands.progress import Bars
from weft.commands.shared import BalancerOption, GateOption, JsonOption, KvPolicyOption, StealingOption, one_of, show
from weft.core.errors import PolicyError, SimulationError
from weft.core.files import writing
from weft.core.kv_cache.config import AUTO_TIMES
from weft.core.kv_cache.policies import KvPolicyConfig
from weft.core.policies import DEFAULT_POLICY, SIMULATED_POLICIES, PolicyConfig, registration, registrations
from weft.core.routing import DEFAULT_BALANCER, BalancerConfig, StealingConfig
from weft.core.sim.result import SimResult
from weft.core.sim.settings import SimSettings
from weft.core.sim.simulator import simulate
from weft.core.sim.study.load import with_load
from weft.core.tables import Table
from weft.core.trace.format import TraceProgram

_SHOWN: Final = 20  # programs in the table


def sim(  # noqa: PLR0917  typer reads options off the signature
    files: Annotated[
        list[Path],
        typer.Argument(
            help="A program trace (docs/reference/trace-format.md); `weft trace` makes some. With --leaderboard, one "
            "or more.",
            metavar="FILE...",
            show_default=False,
        ),
    ],
    policy: Annotated[
        str,
        one_of(
            SIMULATED_POLICIES,
            help="The scheduling policy. priority serves programs in order of arrival; srpt knows the future.",
        ),
    ] = DEFAULT_POLICY,
    batch_size: Annotated[int, typer.Option(help="Calls that an engine runs at once.")] = 64,
    queue_bounds: Annotated[
        str | None,
        typer.Option(help="Inner bounds of the queues, such as 2,3; for rr its quantum (default: calibrated)."),
    ] = None,
    beta: Annotated[
        float | None,
        typer.Option(help="Promote a call at this ratio of wait to service; inf means never (default: 8)."),
    ] = None,
    unit_steps: Annotated[
        bool,
        typer.Option(
            "--unit-steps",
            help="For small examples: a call generates one token a unit of time, and prompts take no time.",
        ),
    ] = False,
    gate: GateOption = None,
    replicas: Annotated[int, typer.Option(help="Number of engines.")] = 1,
    balancer: BalancerOption = DEFAULT_BALANCER,
    stealing: StealingOption = False,
    kv_tokens: Annotated[int, typer.Option(help="Tokens that an engine's KV cache holds.")] = 262_144,
    kv_policy: KvPolicyOption = None,
    host_kv_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of host memory for contexts between calls; 0: none. With --kv-policy lru it is filled as "
            "vLLM's kv_offloading_size is. (default: four times the KV cache, as engines have if their host has room)"
        ),
    ] = None,
    preemption: Annotated[
        Literal["recompute", "swap"], typer.Option(help="What happens to the KV of a preempted call.")
    ] = "recompute",
    load: Annotated[
        float | None,
        typer.Option(
            help="Stretch the arrivals to this multiple of what the engines can serve, which is measured first. "
            "Programs that all arrive at once get random arrivals."
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(help="Run so many programs at once: the next one arrives when one ends, whatever its time."),
    ] = None,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay", help="Compare the KV policies and Bélády's rule on the same accesses to the KV cache."
        ),
    ] = False,
    leaderboard: Annotated[
        bool,
        typer.Option(
            "--leaderboard",
            help="Compare all policies with the plain rivals: order of arrival, a gate, host memory with LRU.",
        ),
    ] = False,
    gantt: Annotated[Path | None, typer.Option(help="Draw which call ran when into this .svg file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate engines that serve the programs of a trace."""
    from weft.core.trace.format import read
    from weft.views.gantt import MOST_CALLS
    from weft.views.gantt import gantt as draw

    by_default = 0 if unit_steps or replay else AUTO_TIMES * kv_tokens  # as an engine has it if its host has room
    settings = SimSettings(
        policy=_policy(policy, queue_bounds, beta, gate=gate),
        batch_size=batch_size,
        replicas=replicas,
        balancer=BalancerConfig(balancer),
        stealing=StealingConfig() if stealing else None,
        kv_tokens=kv_tokens,
        chunk_tokens=max(2048, batch_size),
        kv_policy=None if kv_policy is None else KvPolicyConfig(kv_policy),
        host_kv_tokens=by_default if host_kv_tokens is None else host_kv_tokens,
        preemption=preemption,
        concurrency=concurrency,
        unit_steps=unit_steps,
    )
    if load is not None and concurrency is not None:
        raise SimulationError("--load and --concurrency both say when programs arrive; give one of them.")
    if leaderboard:
        from weft.commands.simulate.leaderboard import leaderboard as compare

        given = {"--policy": policy != DEFAULT_POLICY, "--gate": gate is not None, "--kv-policy": kv_policy is not None}
        given |= {"--replay": replay, "--gantt": gantt is not None}
        for option in (name for name, is_given in given.items() if is_given):
            raise SimulationError(f"--leaderboard compares all policies and draws nothing; leave out {option}.")
        compare(files, settings, load, as_json=as_json)
        if host_kv_tokens is None and not as_json:
            typer.echo(_said(settings))
        return
    if len(files) > 1:
        raise SimulationError(f"{len(files)} traces are given; name one, or compare on several with --leaderboard.")
    (file,) = files
    programs = read(file) if load is None else with_load(read(file), load, settings)
    if replay and (kv_policy is not None or gantt is not None):
        option = "--gantt" if kv_policy is None else "--kv-policy"
        raise SimulationError(f"--replay compares all KV policies and draws nothing; leave out {option}.")
    if replay:
        _replay(programs, settings, as_json=as_json)
        return
    if gantt is not None and (gantt.suffix != ".svg" or sum(len(p.calls) for p in programs) > MOST_CALLS):
        raise SimulationError(f"{gantt} cannot be drawn: name an .svg file, and simulate up to {MOST_CALLS} calls.")
    with Bars("simulating", len(programs)) as bars:
        result = simulate(programs, settings, progress=bars.set, runs=gantt is not None)
    if gantt is not None:
        with writing(gantt, "--gantt"):
            gantt.write_text(draw(result), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps({**result.to_dict(), "host_kv_tokens": settings.host_kv_tokens}))
    else:
        _print(result, unit="" if unit_steps else " s")
        if host_kv_tokens is None and settings.host_kv_tokens:
            _print_without_host(programs, settings, kv_policy)


def _print_without_host(programs: list[TraceProgram], settings: SimSettings, kv_policy: str | None) -> None:
    """Say how much host memory was simulated, because nobody gave a size, and what would be without it."""
    without = replace(settings, host_kv_tokens=0, kv_policy=None if kv_policy is None else settings.kv_policy)
    with Bars("simulating", len(programs)) as bars:
        result = simulate(programs, without, progress=bars.set)
    typer.echo(f"{_said(settings)} Without host memory: latency {_latencies(result, ' s')}.")


def _said(settings: SimSettings) -> str:
    return (
        f"Host memory holds {settings.host_kv_tokens:,.0f} tokens, {AUTO_TIMES} times the KV cache, as engines have it "
        "by default if their host has room. --host-kv-tokens says how many yours holds; 0 is none."
    )


def _replay(programs: list[TraceProgram], settings: SimSettings, *, as_json: bool) -> None:
    from weft.core.sim.kv_cache.kv_replay import replay_all

    with Bars("replaying", 1.0) as bars:
        best, *others = results = replay_all(programs, settings, progress=bars.set)
    if as_json:
        rows = {each.rule: {**each._asdict(), "ratio": each.ratio(best)} for each in results}
        typer.echo(json.dumps({"kv_tokens": settings.kv_tokens, "rules": rows}))
        return
    title = f"{best.prompt_tokens} prompt tokens, a KV cache of {settings.kv_tokens:.0f}"
    headings, cells = ("KV policy", "found", "computed", "of these again", "to Bélády"), []
    for row in [*sorted(others, key=lambda each: each.computed_tokens), best]:
        counts = (f"{row.hit_tokens / max(row.prompt_tokens, 1):.1%}", row.computed_tokens, row.recomputed_tokens)
        cells.append([row.rule, *map(str, counts), f"{row.ratio(best):.3f}"])
    show(Table(title, headings, cells, frozenset(range(1, 5)), widest=60))


def _policy(name: str, queue_bounds: str | None, beta: float | None, *, gate: bool | None) -> PolicyConfig:
    """The policy with its parameters. An option that the policy does not have is an error."""
    options: dict[str, Any] = {}
    has = {each.name for each in fields(registration(name).parameters)}
    for option, value, parameters in (
        ("--queue-bounds", queue_bounds, {"bounds_s", "quanta_s"}),
        ("--beta", beta, {"beta"}),
    ):
        if value is not None and not has & parameters:
            with_it = [each.name for each in registrations() if {f.name for f in fields(each.parameters)} & parameters]
            raise PolicyError(f"{option} has no effect under {name}; pass --policy with one of {', '.join(with_it)}.")
    if queue_bounds is not None:
        try:
            bounds_s = tuple(float(bound) for bound in queue_bounds.split(",") if bound.strip())
        except ValueError:
            raise PolicyError(f"--queue-bounds is {queue_bounds!r}; give numbers with commas, such as 2,3.") from None
        if name == "rr" and not bounds_s:
            raise PolicyError("rr needs a quantum: give it as --queue-bounds, such as 2.")
        options |= {"quanta_s": bounds_s[:1]} if name == "rr" else {"bounds_s": bounds_s}
    if beta is not None:
        options["beta"] = None if math.isinf(beta) else beta
    return PolicyConfig(name, gate=gate, **options)


def _latencies(result: SimResult, unit: str) -> str:
    return f"{result.mean_latency:.2f}, 95 %: {result.latency(95):.2f}, 99 %: {result.latency(99):.2f}{unit}"


def _print(result: SimResult, unit: str) -> None:
    slowest = sorted(result.programs.items(), key=lambda each: -each[1].latency)[:_SHOWN]
    headings = ("program", "arrival", "finish", "wait", "service", "calls")
    cells = [[name, *(f"{value:.2f}" for value in row[:4]), str(row.calls)] for name, row in slowest]
    show(Table("programs, the slowest first", headings, cells, frozenset(range(1, 6)), widest=60))
    if len(result.programs) > len(slowest):
        typer.echo(f"and {len(result.programs) - len(slowest)} more")
    typer.echo(f"{result.policy}: latency {_latencies(result, unit)}; makespan {result.makespan:.2f}{unit}")
    typer.echo(f"wait {result.total_wait:.2f}{unit}, {result.counts.preemptions} preemptions")
    if result.counts.prompt:
        hits = f"{result.prefix_hit_rate:.1%} of prompt tokens in the prefix cache, {result.host_hit_rate:.1%} in host"
        recomputed, swapped = result.counts.recomputed, result.counts.swapped
        typer.echo(f"{hits} memory, {recomputed} tokens recomputed, {swapped} swapped out")
        if result.counts.spilled:
            typer.echo(f"{result.counts.spilled} tokens spilled to host memory, {result.counts.fetched} fetched")
