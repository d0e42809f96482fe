"""How often lineage finds the right program of a call, on tau-bench's airline agents replayed without ids.

Clients take programs one after the other and send their calls at random times, so that calls of all clients interleave.
The answer of a call is the assistant's message of the trace. A call is right if its program got no call of another true
program, and all earlier calls of its true program. A merge is a program that lineage made of calls of several ones.
"""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.core.identity.lineage import Lineage
from weft.core.identity.messages import items_of_answer, items_of_request
from weft.core.identity.sources import Evidence

CONNECTIONS = {"each": "each client has a connection", "shared": "all share one"}


def calls(program: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each call's request and answer: one for each assistant's message, with everything before it as the prompt."""
    messages = program["traj"]
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            yield {"messages": messages[:index]}, {"choices": [{"message": message}]}


def replay(programs: list[dict[str, Any]], clients: int, seed: int, *, share: bool) -> dict[str, Any]:
    """Replay the programs, and count. Deterministic for a seed."""
    rng, lineage = random.Random(seed), Lineage()
    waiting = list(enumerate(programs))
    rng.shuffle(waiting)
    running: dict[int, tuple[int, Iterator[tuple[dict[str, Any], dict[str, Any]]]]] = {}
    in_flight: list[tuple[Any, dict[str, Any], int]] = []
    found: dict[int, list[str]] = defaultdict(list)
    total, spent_s = 0, 0.0
    while waiting or running or in_flight:
        while waiting and len(running) < clients:
            number = next(each for each in range(clients) if each not in running)
            index, program = waiting.pop()
            running[number] = (index, calls(program))
        busy = {number for _placed, _answer, number in in_flight}
        free = [number for number in running if number not in busy]
        if in_flight and (not free or rng.random() < 0.5):
            placed, answer, number = in_flight.pop(rng.randrange(len(in_flight)))
            began_s = time.perf_counter()
            lineage.answered(placed, items_of_answer(answer), "-", None)
            spent_s += time.perf_counter() - began_s
            continue
        if not free:
            continue
        number = rng.choice(free)
        index, left = running[number]
        call = next(left, None)
        if call is None:
            del running[number]
            continue
        request, answer = call
        request = json.loads(json.dumps(request))
        began_s = time.perf_counter()
        placed = lineage.place(Evidence(), items_of_request(request), "-", "" if share else str(number))
        spent_s += time.perf_counter() - began_s
        found[index].append(placed.identity.program_id)
        in_flight.append((placed, answer, number))
        total += 1
    owners = defaultdict(set)
    for index, ids in found.items():
        for each in ids:
            owners[each].add(index)
    right = sum(each == ids[0] and len(owners[each]) == 1 for ids in found.values() for each in ids)
    return {
        "connections": CONNECTIONS["shared" if share else "each"],
        "seed": seed,
        "clients": clients,
        "calls": total,
        "right": right,
        "right_share": round(right / total, 5),
        "merged_programs": sum(len(each) > 1 for each in owners.values()),
        "ms_a_call": round(1e3 * spent_s / total, 3),
    }


def main(
    trace: Annotated[Path, typer.Argument(help="tau_bench_airline_gpt4o.json")],
    clients: Annotated[int, typer.Option(help="Clients at once.")] = 50,
    seeds: Annotated[int, typer.Option(help="Replays.")] = 5,
) -> None:
    """Replay the trace for some seeds, and print a line of JSON for each replay."""
    programs = json.loads(trace.read_text())
    for share in (False, True):
        for seed in range(seeds):
            typer.echo(json.dumps(replay(programs, clients, seed, share=share)))


if __name__ == "__main__":
    typer.run(main)
