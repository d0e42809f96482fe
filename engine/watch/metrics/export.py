"""The metrics that Weft exports: names, labels and meanings. The documentation's table is made from this one."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple


class Export(NamedTuple):
    """A metric as Prometheus has it. Every one has the label `engine` in addition."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    meaning: str


_PROGRAM: Final = ("program",)
_REPLICA: Final = ("model_name", "replica")
_LEVEL: Final = (*_REPLICA, "level")

METRICS: Final = (
    Export("weft:programs_open", "gauge", ("program", "state"), "Programs that have not ended, idle or active."),
    Export("weft:programs_ended_total", "counter", ("program", "state"), "Programs that have ended, by how."),
    Export("weft:program_duration_seconds", "histogram", _PROGRAM, "Time from a program's first call to its end."),
    Export("weft:calls_in_flight", "gauge", ("model_name",), "Calls that wait or run."),
    Export("weft:calls_limit", "gauge", ("model_name",), "How many calls may be in flight."),
    Export("weft:calls_overloaded_total", "counter", ("model_name",), "Calls that were refused because of the limit."),
    Export("weft:calls_refused_total", "counter", ("error",), "Calls that were refused inside a program, by error."),
    Export(
        "weft:requests_refused_total",
        "counter",
        ("reason", "tenant"),
        "Requests that `weft serve` refused before they made a call, by reason and the API key's tenant.",
    ),
    Export("weft:calls_total", "counter", ("program", "outcome"), "Calls that have left: finished, failed, cancelled."),
    Export("weft:call_wait_seconds", "histogram", _PROGRAM, "Wait of finished calls in the scheduler's queue."),
    Export("weft:call_service_seconds", "histogram", _PROGRAM, "Service of finished calls on the model executor."),
    Export("weft:tool_duration_seconds", "histogram", ("tool",), "How long programs waited for tools."),
    Export("weft:tools_running", "gauge", (), "Tools that programs wait for."),
    Export("weft:preemptions_total", "counter", _PROGRAM, "Preemptions of calls."),
    Export("weft:prompt_tokens_total", "counter", _PROGRAM, "Prompt tokens of calls."),
    Export("weft:generation_tokens_total", "counter", _PROGRAM, "Tokens that calls have generated."),
    Export("weft:kv_found_tokens_total", "counter", _PROGRAM, "Prompt tokens whose KV was found on the device."),
    Export("weft:kv_fetched_tokens_total", "counter", _PROGRAM, "Prompt tokens whose KV came from host memory."),
    Export("weft:kv_recomputed_tokens_total", "counter", _PROGRAM, "Tokens whose KV had to be computed again."),
    Export("weft:kv_swapped_in_tokens_total", "counter", _PROGRAM, "Tokens whose KV came back after a preemption."),
    Export("weft:tenant_service_seconds_total", "counter", ("tenant",), "Service of a tenant's calls."),
    Export("weft:tenant_wait_seconds_total", "counter", ("tenant",), "Wait of a tenant's calls."),
    Export("weft:level_running", "gauge", _LEVEL, "Requests that run, by queue level; 0 is served first."),
    Export("weft:level_waiting", "gauge", _LEVEL, "Requests that wait, by queue level."),
    Export("weft:level_starts_total", "counter", _LEVEL, "Starts of calls from a queue, preempted ones again."),
    Export("weft:level_wait_seconds_total", "counter", _LEVEL, "Wait before these starts."),
    Export("weft:level_service_seconds_total", "counter", _LEVEL, "Service of calls while they were in a queue."),
    Export("weft:promotions_total", "counter", _REPLICA, "Starving calls that were moved to the first queue."),
    Export("weft:kv_spilled_tokens_total", "counter", _REPLICA, "Tokens whose KV was copied to host memory."),
    Export("weft:kv_held_blocks", "gauge", _REPLICA, "KV blocks of contexts that are kept between calls."),
    Export("weft:kv_held_programs", "gauge", _REPLICA, "Programs whose contexts these are."),
    Export("weft:kv_host_used_bytes", "gauge", _REPLICA, "Host memory in use for KV, on one worker."),
    Export("weft:kv_host_capacity_bytes", "gauge", _REPLICA, "Host memory for KV, on one worker."),
    Export("weft:replica_state", "gauge", (*_REPLICA, "state"), "1 for the state of the replica, 0 for the others."),
    Export("weft:replica_calls", "gauge", _REPLICA, "Calls in flight on a replica."),
    Export("weft:replica_deaths_total", "counter", _REPLICA, "Deaths and failed starts; each is followed by a start."),
    Export("weft:calls_stolen_total", "counter", _REPLICA, "Calls that it has taken over from busier replicas."),
)
