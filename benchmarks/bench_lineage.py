"""How often lineage finds the right program of a call, on tau-bench's and BFCL's agents replayed without ids.

Clients take programs one after the other and send their calls at random times, so that calls of all clients interleave.
The answer of a call is the assistant's message of the trace. Clients may have a habit, such as to shorten their
history. A call is right if it is in the program that got the most calls of its true program, and if no call of another
one is there. A merge is a program that lineage made of calls of several ones.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.core.identity.lineage import Lineage
from weft.core.identity.messages import items_of_answer, items_of_request
from weft.core.identity.sources import Evidence

CONNECTIONS = ("each", "shared", "pool")  # each client has one; all share one; each call comes by one of a pool
HABITS = {
    "plain": "the history comes back unchanged",
    "regenerate": "one call of five is sent twice",
    "edit": "half of the later turns are edited and sent again",
    "parallel": "before one call of five, three sub-agents quote the conversation, for two calls each",
    "clock": "the system prompt changes with every call",
    "window": "only the system prompt and the latest six messages are sent",
    "compaction": "a summary stands for all but the latest four messages",
    "delegate": "before one call of five, the model hands a task to an agent without history, for two calls",
    "text": "tool calls and their results come back as text",
}
Message = dict[str, Any]
Call = tuple[list[Message], Message]  # the messages of a request, and the answer


def read(trace: Path, answers: Path | None, rng: random.Random) -> list[list[Message]]:
    """The conversations of a file of tau-bench, or of BFCL with its answers. BFCL's have no results: each is "ok"."""
    if answers is None:
        return [program["traj"] for program in json.loads(trace.read_text())]
    truth = {task["id"]: task["ground_truth"] for task in map(json.loads, answers.read_text().splitlines())}
    return [_of_bfcl(task, truth[task["id"]], rng) for task in map(json.loads, trace.read_text().splitlines())]


def _of_bfcl(task: dict[str, Any], truth: list[list[str]], rng: random.Random) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": "You are an agent with tools."}]
    for question, calls in zip(task["question"], truth, strict=True):
        messages += question
        for call in calls:
            name, _, arguments = call.partition("(")
            function = {"name": name, "arguments": json.dumps({"arguments": arguments[:-1]})}
            call_id = _call_id(rng)
            messages.append({"role": "assistant", "tool_calls": [{"id": call_id, "function": function}]})
            messages.append({"role": "tool", "tool_call_id": call_id, "content": "ok"})
        messages.append({"role": "assistant", "content": "Done."})
    return messages


def _call_id(rng: random.Random) -> str:
    return f"chatcmpl-tool-{rng.getrandbits(64):016x}"


def _as_text(message: Message) -> Message:
    text = message.get("content") or ""
    if message.get("tool_calls"):
        return {"role": "assistant", "content": f"{text}\nCalling tools:\n{message['tool_calls']}"}
    return {"role": "user", "content": f"Observation:\n{text}"} if message["role"] == "tool" else message


def _delegated(prompt: list[Message], rng: random.Random) -> Iterator[list[Call]]:
    task = f"Find out what is known of sub-task {_call_id(rng)}, and report it with the source of each figure."
    function = {"name": "delegate", "arguments": json.dumps({"task": task})}
    asked = {"role": "user", "content": "Let another agent do a part."}
    yield [([*prompt, asked], {"role": "assistant", "tool_calls": [{"id": _call_id(rng), "function": function}]})]
    fresh = [{"role": "system", "content": "You help another agent."}, {"role": "user", "content": task}]
    said = {"role": "assistant", "content": f"done {_call_id(rng)}"}
    yield [(fresh, said)]
    yield [([*fresh, said, {"role": "user", "content": "Go on"}], {"role": "assistant", "content": "done"})]


def rounds(messages: list[Message], habit: str, rng: random.Random) -> Iterator[list[Call]]:
    """The calls of a program: those of a list are sent at once. An assistant's message answers all before it."""

    def other(answer: Message, text: str) -> Message:
        calls = [{**call, "id": _call_id(rng)} for call in answer.get("tool_calls") or ()]
        return {**answer, "content": f"{answer.get('content') or ''} {text}", "tool_calls": calls}

    for index, answer in enumerate(messages):
        if answer["role"] != "assistant":
            continue
        prompt = messages[:index]
        is_later = any(message["role"] == "assistant" for message in prompt)
        if habit == "regenerate" and rng.random() < 0.2:
            yield [(prompt, other(answer, "once more"))]
        elif habit == "edit" and is_later and prompt[-1]["role"] == "user" and rng.random() < 0.5:
            edited = {**prompt[-1], "content": prompt[-1]["content"] + " please"}
            yield [([*prompt[:-1], edited], other(answer, "to that"))]
        elif habit == "parallel" and is_later and rng.random() < 0.2:
            tasks = [[*prompt, {"role": "user", "content": f"Sub-task {number}"}] for number in range(3)]
            first = [(each, {"role": "assistant", "content": f"done {_call_id(rng)}"}) for each in tasks]
            yield list(first)  # the caller takes calls out
            more = {"role": "user", "content": "Go on"}
            yield [([*each, said, more], {"role": "assistant", "content": "done"}) for each, said in first]
        elif habit == "delegate" and is_later and rng.random() < 0.2:
            yield from _delegated(prompt, rng)
        elif habit == "text":
            prompt = [_as_text(message) for message in prompt]
        elif habit == "clock" and prompt[0]["role"] == "system":
            system = {**prompt[0], "content": f"{prompt[0]['content']} The time is {rng.getrandbits(40)}."}
            prompt = [system, *prompt[1:]]
        elif habit == "window" and index > 7:
            prompt = [prompt[0], *prompt[-6:]]
        elif habit == "compaction" and index > 9:
            prompt = [prompt[0], {"role": "user", "content": f"So far: {index}"}, *prompt[-4:]]
        yield [(prompt, answer)]


def replay(programs: list[list[Message]], clients: int, seed: int, connections: str, habit: str) -> dict[str, Any]:
    """Replay the programs, and count. Deterministic for a seed."""
    rng, lineage = random.Random(seed), Lineage()
    waiting = list(enumerate(programs))
    rng.shuffle(waiting)
    running: dict[int, tuple[int, Iterator[list[Call]]]] = {}
    to_send: dict[int, list[Call]] = defaultdict(list)
    in_flight: list[tuple[Any, Message, int]] = []
    found: dict[int, list[str]] = defaultdict(list)
    spent_s = 0.0
    while waiting or running or in_flight:
        while waiting and len(running) < clients:
            number = next(each for each in range(clients) if each not in running)
            index, messages = waiting.pop()
            running[number] = (index, rounds(messages, habit, random.Random(f"{seed} {index}")))
        busy = {number for _placed, _answer, number in in_flight}
        free = [number for number in running if number not in busy or to_send[number]]
        if in_flight and (not free or rng.random() < 0.5):
            placed, answer, number = in_flight.pop(rng.randrange(len(in_flight)))
            began_s = time.process_time()
            lineage.answered(placed, items_of_answer({"choices": [{"message": answer}]}), "-", None)
            spent_s += time.process_time() - began_s
            continue
        number = rng.choice(free)
        index, left = running[number]
        if not to_send[number]:
            to_send[number] = next(left, [])
        if not to_send[number]:
            del running[number]
            continue
        prompt, answer = to_send[number].pop()
        request = json.loads(json.dumps({"messages": prompt}))
        peer = {"each": str(number), "shared": "", "pool": str(rng.randrange(clients))}[connections]
        began_s = time.process_time()
        placed = lineage.place(Evidence(), items_of_request(request), "-", peer)
        spent_s += time.process_time() - began_s
        found[index].append(placed.identity.program_id)
        in_flight.append((placed, answer, number))
    owners = defaultdict(set)
    for index, ids in found.items():
        for each in ids:
            owners[each].add(index)
    total = sum(map(len, found.values()))
    most = {index: Counter(ids).most_common(1)[0][0] for index, ids in found.items()}
    right = sum(each == most[index] and len(owners[each]) == 1 for index, ids in found.items() for each in ids)
    return {
        "habit": habit,
        "connections": connections,
        "seed": seed,
        "clients": clients,
        "calls": total,
        "right": right,
        "right_share": round(right / total, 5),
        "merged_programs": sum(len(each) > 1 for each in owners.values()),
        "ms_a_call": round(1e3 * spent_s / total, 3),
    }


def main(
    trace: Annotated[Path, typer.Argument(help="tau_bench_airline_gpt4o.json, or bfcl_v4_multi_turn_base.jsonl")],
    answers: Annotated[Path | None, typer.Option(help="BFCL's file of answers.")] = None,
    clients: Annotated[int, typer.Option(help="Clients at once.")] = 50,
    seeds: Annotated[int, typer.Option(help="Replays of each kind.")] = 5,
) -> None:
    """Replay the trace with each habit and each kind of connections, and print a line of JSON for each replay."""
    for habit in HABITS:
        for connections in CONNECTIONS:
            for seed in range(seeds):
                programs = read(trace, answers, random.Random(seed))
                typer.echo(json.dumps(replay(programs, clients, seed, connections, habit)))


if __name__ == "__main__":
    typer.run(main)
