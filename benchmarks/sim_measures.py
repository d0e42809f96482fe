"""What is measured of a simulation beside the times of its programs: deadlines, fairness, and its execution graphs."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from weft.core.ids import CallId, ThreadId
from weft.core.prediction import ExecutionGraphs
from weft.core.process_rows import CallIdentity
from weft.core.sim import SimResult
from weft.core.sim.sim_programs import SimCall


def attainment(
    result: SimResult, alone: Mapping[str, float], multiple: float = 1.5, programs: Collection[str] | None = None
) -> float:
    """SLO attainment: the share of programs that end within a multiple of the time that they take alone.

    Args:
        result: What the programs did together.
        alone: The latency of each program on an idle engine.
        multiple: The multiple of that latency.
        programs: The ids of the programs that count, at least one. None: all.
    """
    names = result.programs if programs is None else programs
    return sum(result.programs[name].latency <= multiple * alone[name] for name in names) / len(names)


def fairness(result: SimResult, alone: Mapping[str, float], tenants: Mapping[str, str]) -> float:
    """Jain's index over tenants of the mean of latency alone / latency: 1 if all tenants are served alike.

    Args:
        result: What the programs did together.
        alone: The latency of each program on an idle engine.
        tenants: The tenant of each program.
    """
    speeds: dict[str, list[float]] = {}
    for name, row in result.programs.items():
        speeds.setdefault(tenants[name], []).append(alone[name] / row.latency)
    means = [sum(values) / len(values) for values in speeds.values()]
    return sum(means) ** 2 / (len(means) * sum(mean * mean for mean in means))


def begin_in(graphs: ExecutionGraphs, call: SimCall, now_s: float) -> None:
    """Tell execution graphs that a simulated call begins. Its program counts as one thread."""
    program_id, spec = call.owner.view.program_id, call.spec
    parents = tuple(map(CallId, spec.parents))
    identity = CallIdentity(program_id, ThreadId(program_id), CallId(spec.call_id), parents)
    graphs.arrive(call.owner.view.name, identity, tools=[spec.tool] if spec.tool else [], now_s=now_s)
