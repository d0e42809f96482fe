"""How often lineage finds the right program of a call, on tau-bench's and BFCL's agents replayed without ids.

Clients take programs one after the other and send their calls at random times, so that calls of all clients interleave.
The answer of a call is the assistant's message of the trace. Clients may have a habit, such as to shorten their
history. A call is right if it is in the program that got the most calls of its true program, and if no call of another
one is there. A merge is a program that lineage made of calls of several ones.
"""

from __future__ import annotations

import html
import json
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.core.identity.items import items_of_answer
from weft.core.identity.lineage import Lineage
from weft.core.identity.sources import Evidence

CONNECTIONS = ("each", "shared", "pool")  # each client has its host; all share a connection; each call by one of a pool
HABITS = {
    "plain": "the history comes back unchanged",
    "regenerate": "one call of five is sent twice",
    "retried": "the client of one call of five leaves, and says that it sends it again, as SDKs do",
    "edit": "half of the later turns are edited and sent again",
    "parallel": "before one call of five, three sub-agents quote the conversation, for two calls each",
    "clock": "the system prompt changes with every call",
    "window": "only the system prompt and the latest six messages are sent",
    "compaction": "a summary stands for all but the latest four messages",
    "delegate": "before one call of five, the model hands a task to an agent without history, for two calls",
    "text": "tool calls and their results come back as text",
    "traced": "each request has a trace of its own",
    "clock, traced": "the system prompt changes with every call, and each has a trace of its own",
    "reminder": "a reminder stands behind the newest question, and not in the history",
    "retrieved": "the newest question comes with a retrieved document, and the history has the question alone",
    "dropped": "the text beside a tool call is dropped from the history",
    "interleaved": "an answer with two calls comes back as call, result, call, result",
    "reordered": "an answer with two calls comes back with its calls and results in the other order",
    "canned": "canned exchanges stand before the history, and others move behind it with each call",
    "shortened": "each answer comes back cut at two thirds",
    "react": "everything so far is in one user's message, inside a template",
    "transcript": "agents in turns get all that was said in one template, each with a system prompt of its own",
    "prefixed": "agents in turns get each message as a user's, behind the speaker's name",
    "examples": "each request has two examples, which other clients ask as well",
    "cleared": "results of tools are replaced by a note, but for the latest",
    "renamed": "calls are left out, and their results are a user's texts",
    "texts": "calls and their results are left out once their turn is over",
    "whitespace": "each run of white space comes back as one blank",
    "gateway": "ids of calls are drawn anew for each request, and arguments are written in another form",
    "alternating": "calls and results are texts, messages of one role are joined, the system prompt is in the first",
    "dumped": "everything so far is in one message, as JSON",
    "xml": "everything so far is in one message, as escaped XML",
    "unformatted": "marks of Markdown are cut out of answers, and quotation marks are other ones",
    "stamped": "each text of the history has a time in front",
    "middle": "of more than eight messages, those in the middle are left out",
    "newest": "only the system prompt and the latest three messages are sent",
    "twins": "each agent runs twice at once, and the model answers both with the same texts and ids of its own",
}
_DOCUMENT_WORDS = 120
_AS_USER = {"tool": "user"}
_CANNED = ("Here are the files of the repository.", "Ok.")
Message = dict[str, Any]
Call = tuple[list[Message], Message | None]  # the messages of a request, and the answer; None: its client leaves


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


def _clock(prompt: list[Message], rng: random.Random) -> list[Message]:
    if prompt[0]["role"] != "system":
        return prompt
    return [{**prompt[0], "content": f"{prompt[0]['content']} The time is {rng.getrandbits(40)}."}, *prompt[1:]]


def _to_newest(prompt: list[Message], add: Callable[[str], str]) -> list[Message]:
    """What a client adds to the newest message that is a user's."""
    place = max((place for place, each in enumerate(prompt) if each["role"] == "user"), default=None)
    if place is None:
        return prompt
    return [*prompt[:place], {**prompt[place], "content": add(prompt[place]["content"])}, *prompt[place + 1 :]]


def _document(rng: random.Random) -> str:
    """A document that several agents may retrieve."""
    words = random.Random(rng.randrange(50))
    return " ".join(
        f"{words.choice(('fare', 'seat', 'gate', 'bag'))}{words.randrange(99)}" for _ in range(_DOCUMENT_WORDS)
    )


def _dropped(prompt: list[Message]) -> list[Message]:
    return [{**each, "content": None} if each.get("tool_calls") else each for each in prompt]


def _in_pairs(prompt: list[Message], *, backwards: bool) -> list[Message]:
    """Each call beside its result, or calls and results in the other order."""
    results = {each["tool_call_id"]: each for each in prompt if each["role"] == "tool"}
    told: list[Message] = []
    for each in prompt:
        calls = each.get("tool_calls")
        if calls and backwards:
            told.append({**each, "tool_calls": calls[::-1]})
            told += [results[call["id"]] for call in calls[::-1] if call["id"] in results]
        elif calls:
            for number, call in enumerate(calls):
                told.append({**each, "tool_calls": [call], "content": None if number else each.get("content")})
                told += [results[call["id"]]] if call["id"] in results else []
        elif each["role"] != "tool":
            told.append(each)
    return told


def _canned(prompt: list[Message]) -> list[Message]:
    files, ok = ({"role": role, "content": text} for role, text in zip(("user", "assistant"), _CANNED, strict=True))
    first = [each for each in prompt if each["role"] == "system"][:1]
    last = prompt[-1:] if prompt[-1]["role"] == "user" else []
    between = prompt[len(first) : len(prompt) - len(last)]
    greeting = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi! How can I help?"}]
    return [*first, *greeting, *between, *([files, ok] if last else []), *last]


def _shortened(prompt: list[Message]) -> list[Message]:
    def cut(text: str | None) -> str | None:
        return text[: len(text) * 2 // 3] if text else text

    return [{**each, "content": cut(each.get("content"))} if each["role"] == "assistant" else each for each in prompt]


def _spoken(prompt: list[Message]) -> list[tuple[str, str]]:
    """Who said what, as a template has it."""
    spoken = []
    for each in prompt:
        text = each.get("content") or ""
        for call in each.get("tool_calls") or ():
            text += f"\nAction: {call['function']['name']} {call['function']['arguments']}"
        if each["role"] != "system":
            spoken.append((each["role"], text))
    return spoken


def _react(prompt: list[Message]) -> list[Message]:
    names = {"user": "Question", "assistant": "Thought", "tool": "Observation"}
    text = "\n".join(f"{names[role]}: {text}" for role, text in _spoken(prompt))
    return [{"role": "user", "content": f"Answer as well as you can. You have tools.\n\n{text}\n\nBegin! Thought:"}]


def _transcript(prompt: list[Message]) -> list[Message]:
    spoken = _spoken(prompt)
    text = "\n".join(f"<{role}> {text} </{role}>" for role, text in spoken)
    system = {"role": "system", "content": f"You are member {len(spoken) % 3} of a team."}
    return [system, {"role": "user", "content": f"This is the conversation so far:\n{text}\nWho speaks next?"}]


def _prefixed(prompt: list[Message]) -> list[Message]:
    spoken = _spoken(prompt)
    said = [{"role": "user", "content": f"{role} said: {text}"} for role, text in spoken]
    return [{"role": "system", "content": f"You are member {len(spoken) % 3} of a team."}, *said]


def _cleared(prompt: list[Message]) -> list[Message]:
    last = len(prompt) - 3
    note = "[Old result of a tool cleared]"
    return [
        {**each, "content": note} if each["role"] == "tool" and at < last else each for at, each in enumerate(prompt)
    ]


def _renamed(prompt: list[Message]) -> list[Message]:
    left = [each for each in prompt if each.get("content") or not each.get("tool_calls")]
    return [{"role": _AS_USER.get(each["role"], each["role"]), "content": each["content"]} for each in left]


def _without_tools(prompt: list[Message]) -> list[Message]:
    last = max((at for at, each in enumerate(prompt) if each["role"] == "user"), default=0)
    is_text = [each["role"] != "tool" and not each.get("tool_calls") for each in prompt]
    return [each for at, each in enumerate(prompt) if at >= last or is_text[at]]


def _in_texts(prompt: list[Message], change: Callable[[str], str], *roles: str) -> list[Message]:
    is_changed = [isinstance(each.get("content"), str) and (not roles or each["role"] in roles) for each in prompt]
    pairs = zip(prompt, is_changed, strict=True)
    return [{**each, "content": change(each["content"])} if changes else each for each, changes in pairs]


def _through_gateway(prompt: list[Message], rng: random.Random) -> list[Message]:
    ids: dict[str, str] = {}
    told = []
    for each in prompt:
        calls = [
            {"id": ids.setdefault(call["id"], _call_id(rng)), "function": _indented(call["function"])}
            for call in each.get("tool_calls") or ()
        ]
        told.append({**each, "tool_calls": calls} if calls else each)
        if each["role"] == "tool":
            told[-1] = {**each, "tool_call_id": ids.get(each["tool_call_id"], "")}
    return told


def _indented(function: Message) -> Message:
    arguments = json.loads(function["arguments"])
    return {**function, "arguments": json.dumps(dict(reversed(arguments.items())), indent=2)}


def _alternating(prompt: list[Message]) -> list[Message]:
    told = [{**prompt[0], "role": "user"}]
    for each in map(_as_text, prompt[1:]):
        if told[-1]["role"] == each["role"]:
            told[-1] = {**told[-1], "content": f"{told[-1]['content']}\n\n{each['content']}"}
        else:
            told.append(each)
    return told


def _dumped(prompt: list[Message]) -> list[Message]:
    text = json.dumps([each for each in prompt if each["role"] != "system"], indent=1)
    return [prompt[0], {"role": "user", "content": f"The history:\n```json\n{text}\n```\nReply as the assistant."}]


def _xml(prompt: list[Message]) -> list[Message]:
    text = "\n".join(f'<turn speaker="{role}">{html.escape(text)}</turn>' for role, text in _spoken(prompt))
    return [prompt[0], {"role": "user", "content": f"<history>\n{text}\n</history>\n<instruction>Go on.</instruction>"}]


def _unformatted(text: str) -> str:
    return re.sub("[*_`#]", "", text).replace('"', "\u201d").replace("'", "\u2019")


ADDED: dict[str, Callable[[list[Message], random.Random], list[Message]]] = {
    "clock": _clock,
    "clock, traced": _clock,
    "reminder": lambda prompt, rng: _to_newest(prompt, lambda text: f"{text}\n\nDo not forget: {_call_id(rng)}."),
    "retrieved": lambda prompt, rng: _to_newest(prompt, lambda text: f"Context:\n{_document(rng)}\n\n{text}"),
    "gateway": _through_gateway,
}
WRITTEN: dict[str, Callable[[list[Message]], list[Message]]] = {
    "dropped": _dropped,
    "interleaved": lambda prompt: _in_pairs(prompt, backwards=False),
    "reordered": lambda prompt: _in_pairs(prompt, backwards=True),
    "canned": _canned,
    "shortened": _shortened,
    "react": _react,
    "transcript": _transcript,
    "prefixed": _prefixed,
    "cleared": _cleared,
    "renamed": _renamed,
    "texts": _without_tools,
    "whitespace": lambda prompt: _in_texts(prompt, lambda text: " ".join(text.split())),
    "alternating": _alternating,
    "dumped": _dumped,
    "xml": _xml,
    "unformatted": lambda prompt: _in_texts(prompt, _unformatted, "assistant"),
    "stamped": lambda prompt: _in_texts(prompt, lambda text: f"[10:{len(text) % 60:02}] {text}", "user", "assistant"),
    "middle": lambda prompt: [*prompt[:3], *prompt[-3:]] if len(prompt) > 8 else prompt,
    "newest": lambda prompt: [prompt[0], *prompt[-3:]] if len(prompt) > 4 else prompt,
}


def _prepared(messages: list[Message], habit: str, rng: random.Random, others: list[list[Message]]) -> list[Message]:
    """A conversation whose answers are such that a habit shows."""
    if habit == "dropped":
        return [{**each, "content": "Let me look that up."} if each.get("tool_calls") else each for each in messages]
    if habit in ("interleaved", "reordered"):
        told: list[Message] = []
        for each in messages:
            calls = each.get("tool_calls")
            if calls:
                more = {"id": _call_id(rng), "function": {"name": "note", "arguments": "{}"}}
                told += [{**each, "tool_calls": [*calls, more]}]
            elif told and each["role"] == "tool":
                told += [each, {"role": "tool", "tool_call_id": told[-1]["tool_calls"][-1]["id"], "content": "noted"}]
            else:
                told.append(each)
        return told
    if habit == "examples":
        system = [each for each in messages if each["role"] == "system"][:1]
        examples = [{**each} for other in others for each in _first_exchange(other)]
        return [*system, *examples, *messages[len(system) :]]
    if habit == "twins":
        ids: dict[str, str] = {}
        renamed = json.dumps(messages)
        for each in messages:
            for call in each.get("tool_calls") or ():
                ids[call["id"]] = _call_id(rng)
        for old, new in ids.items():
            renamed = renamed.replace(old, new)
        told = json.loads(renamed)
        return told
    return messages


def _first_exchange(messages: list[Message]) -> list[Message]:
    """The first question and its answer, if that is a text."""
    first = [each for each in messages if each["role"] != "system"][:2]
    return first if len(first) == 2 and first[1].get("content") and not first[1].get("tool_calls") else []


def _delegated(prompt: list[Message], rng: random.Random) -> Iterator[list[Call]]:
    task = f"Find out what is known of sub-task {_call_id(rng)}, and report it with the source of each figure."
    function = {"name": "delegate", "arguments": json.dumps({"task": task})}
    asked = {"role": "user", "content": "Let another agent do a part."}
    yield [([*prompt, asked], {"role": "assistant", "tool_calls": [{"id": _call_id(rng), "function": function}]})]
    fresh = [{"role": "system", "content": "You help another agent."}, {"role": "user", "content": task}]
    said = {"role": "assistant", "content": f"done {_call_id(rng)}"}
    yield [(fresh, said)]
    yield [([*fresh, said, {"role": "user", "content": "Go on"}], {"role": "assistant", "content": "done"})]


def rounds(
    messages: list[Message], habit: str, rng: random.Random, others: list[list[Message]]
) -> Iterator[list[Call]]:
    """The calls of a program: those of a list are sent at once. An assistant's message answers all before it.

    Args:
        messages: Its conversation.
        habit: Of its client.
        rng: Of this program.
        others: Whose first exchanges are examples, which no model gives to this program.
    """
    # An agent whose first exchange is an example for others was given its answer all the same, and goes on from it.
    own, messages = messages, _prepared(messages, habit, rng, others)
    given = [each for each in messages if all(each is not known for known in own)] if habit == "examples" else []

    def other(answer: Message, text: str) -> Message:
        calls = [{**call, "id": _call_id(rng)} for call in answer.get("tool_calls") or ()]
        return {**answer, "content": f"{answer.get('content') or ''} {text}", "tool_calls": calls}

    for index, answer in enumerate(messages):
        if answer["role"] != "assistant" or any(answer is each for each in given):
            continue
        prompt = messages[:index]
        is_later = any(message["role"] == "assistant" for message in prompt)
        if habit == "regenerate" and rng.random() < 0.2:
            yield [(prompt, other(answer, "once more"))]
        elif habit == "retried" and rng.random() < 0.2:
            yield [(prompt, None)]
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
        elif habit == "window" and index > 7:
            prompt = [prompt[0], *prompt[-6:]]
        elif habit in ADDED:
            prompt = ADDED[habit](prompt, rng)
        elif habit in WRITTEN:
            prompt = WRITTEN[habit](prompt)
        elif habit == "compaction" and index > 9:
            prompt = [prompt[0], {"role": "user", "content": f"So far: {index}"}, *prompt[-4:]]
        yield [(prompt, answer)]


def replay(  # noqa: PLR0915  one after the other
    programs: list[list[Message]], clients: int, seed: int, connections: str, habit: str
) -> dict[str, Any]:
    """Replay the programs, and count. Deterministic for a seed."""
    rng, lineage = random.Random(seed), Lineage()
    others = [each for each in programs if _first_exchange(each)][:2]
    waiting = list(enumerate(programs))
    if habit == "twins":
        waiting = [(index + twin * len(programs), each) for index, each in waiting for twin in range(2)]
    rng.shuffle(waiting)
    if habit == "twins":
        waiting.sort(key=lambda each: each[0] % len(programs))  # so that both run at once
    running: dict[int, tuple[int, Iterator[list[Call]]]] = {}
    to_send: dict[int, list[Call]] = defaultdict(list)
    in_flight: list[tuple[Any, Message | None, int]] = []
    has_left: set[int] = set()  # clients whose next call is the latest one again
    found: dict[int, list[str]] = defaultdict(list)
    spent_s = 0.0
    while waiting or running or in_flight:
        while waiting and len(running) < clients:
            number = next(each for each in range(clients) if each not in running)
            index, messages = waiting.pop()
            running[number] = (index, rounds(messages, habit, random.Random(f"{seed} {index}"), others))
        busy = {number for _placed, _answer, number in in_flight}
        free = [number for number in running if number not in busy or to_send[number]]
        if in_flight and (not free or rng.random() < 0.5):
            placed, answer, number = in_flight.pop(rng.randrange(len(in_flight)))
            began_s = time.process_time()
            if answer is None:
                lineage.left(placed, "-")
                has_left.add(number)
                continue
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
        peer = {"each": f"{number}:1", "shared": "", "pool": f":{rng.randrange(clients)}"}[connections]
        began_s = time.process_time()
        trace_id = f"{rng.getrandbits(128):032x}" if "traced" in habit else None
        evidence = Evidence(trace_id=trace_id, is_retry=number in has_left)
        has_left.discard(number)
        placed = lineage.place(evidence, request, "-", peer)
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
    seed: Annotated[int, typer.Option(help="Of the first replay; those of the others follow it.")] = 0,
    habits: Annotated[list[str] | None, typer.Option("--habit", help="Only these habits.")] = None,
) -> None:
    """Replay the trace with each habit and each kind of connections, and print a line of JSON for each replay."""
    for habit in habits or HABITS:
        for connections in CONNECTIONS:
            for each in range(seed, seed + seeds):
                programs = read(trace, answers, random.Random(each))
                typer.echo(json.dumps(replay(programs, clients, each, connections, habit)))


if __name__ == "__main__":
    typer.run(main)
