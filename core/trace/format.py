"""The program trace: the calls of programs, their parents and their lengths. Each line is one program in JSON::

    {"version": 1, "program": "A", "arrival_s": 0.0, "name": null, "tenant": null, "deadline_s": null,
     "end_known": true, "block_tokens": null,
     "calls": [{"id": "a1", "parents": [], "prompt_tokens": 0, "output_tokens": 4, "gap_s": 0.0, "tool": null,
                "prompt": null, "shared_prefix_tokens": 0, "hash_ids": [], "at_s": null, "agent": null,
                "measured": null}]}

Only `program` is required, and for each call `id` and `output_tokens`. docs/reference/trace-format.md describes the
keys.
"""

from __future__ import annotations

import heapq
import json
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from weft.core.accounts import MOST_WAITS
from weft.core.errors import TraceError
from weft.core.files import write_whole
from weft.core.program.graph import CallNode, CallState, ProgramGraph

# Version 2 has `measured`, and version 3 has block hashes, request times, sub-agents and unknown ends. A program is
# written in the first version that can hold it.
VERSION: Final = 3
MOST_HASH_ID: Final = 2**63 - 1
_HEAD_BYTES: Final = 4096

_PROGRAM_KEYS: Final = (
    "version", "program", "arrival_s", "name", "tenant", "deadline_s", "end_known", "block_tokens", "calls",
)  # fmt: skip
_CALL_KEYS: Final = (
    "id", "parents", "prompt_tokens", "output_tokens", "gap_s", "tool", "prompt", "shared_prefix_tokens", "hash_ids",
    "at_s", "agent", "measured",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TraceCall:
    """A call of a program."""

    call_id: str  # unique in its program
    parents: tuple[str, ...]  # the calls that end before this one arrives; a call without parents starts its program
    output_tokens: int  # at least 1
    prompt_tokens: int = 0  # of the whole prompt, the shared prefix included
    gap_s: float = 0.0  # seconds from the end of the last parent, or the program's arrival, to the call's arrival
    tool: str | None = None  # the tool that ran in the gap
    prompt: str | None = None  # the text after the prefix that the prompt shares with the first parent
    # The length of the prompt's prefix that equals the beginning of the first parent's prompt and output. For a call
    # without parents: the length of the prefix that it shares with other programs of the same `name`.
    shared_prefix_tokens: int = 0
    measured: Measured | None = None  # what an engine measured; None if the trace was not recorded by one
    # Ids of the blocks after the shared prefix, each for `block_tokens` tokens and all tokens before them. They cover
    # the prompt, and the output as far as a later prompt repeats it. Equal ids mean equal tokens, in any program of the
    # file. `weft.core.trace.prefixes` has all of a program's.
    hash_ids: array[int] = field(default_factory=lambda: array("q"), hash=False)
    at_s: float | None = None  # when the call was made, in seconds from the program's arrival; None: not recorded
    agent: str | None = None  # the sub-agent that made it; None: the program itself


@dataclass(frozen=True, slots=True)
class TraceProgram:
    """A program."""

    program: str  # unique in its file
    calls: tuple[TraceCall, ...]  # in any order
    arrival_s: float = 0.0  # seconds from the start of the trace
    name: str | None = None  # programs of one name are runs of the same entrypoint
    tenant: str | None = None
    deadline_s: float | None = None  # seconds from its arrival within which it should end
    end_known: bool = True  # whether its client tells when it ends; False: an idle time-out ends it
    block_tokens: int | None = None  # the tokens of a block with a hash id; None: its calls have no hash ids

    @property
    def fingerprint(self) -> str:
        """Tells the program's system prompt from others: by its first block, or by its length.

        A trace does not have the prompt's text.
        """
        if self.block_tokens is not None:
            first = next((call.hash_ids[0] for call in self.calls if call.hash_ids and not call.parents), None)
            return f"block {first}"
        return f"{next((call.shared_prefix_tokens for call in self.calls if not call.parents), 0)} tokens"


def read(path: Path) -> list[TraceProgram]:
    """Return the programs of a trace file, in the order of its lines.

    Raises:
        TraceError: the file cannot be read, or a line is not a valid program. The message names the line.
    """
    programs: dict[str, TraceProgram] = {}
    lines: dict[str, int] = {}
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                program = parse(line, where)
                if program.program in lines:
                    raise TraceError(
                        f"{where}: program {program.program!r:.80} is on line {lines[program.program]} already; "
                        "give each program an id of its own."
                    )
                lines[program.program] = number
                programs[program.program] = program
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}. Name a trace file.") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path} is not UTF-8 text. Name a trace file: one program in JSON on each line.") from None
    if not programs:
        raise TraceError(f"{path} has no program. Write one on each line, as docs/reference/trace-format.md describes.")
    return list(programs.values())


def is_trace(path: Path) -> bool:
    """Whether a file seems to be a trace of this format. False for what cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES).lstrip()
    except OSError:
        return False
    return head.startswith(b"{") and all(key in head for key in (b'"program"', b'"calls"'))


def parse(line: str, where: str) -> TraceProgram:
    """Return the program on one line of a trace, or raise TraceError, also if its calls and parents are
    inconsistent."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        detail = " ".join(str(error).split())
        raise TraceError(f"{where}: not JSON ({detail:.100}); write one program on each line.") from None
    data = object_of(data, where, _PROGRAM_KEYS)
    version = data.get("version", VERSION)
    if type(version) is not int or not 1 <= version <= VERSION:
        raise TraceError(f"{where}: version is {version!r:.40}; this Weft reads versions 1 to {VERSION}.")
    program = text(data, "program", where, required=True)
    arrival_s = seconds(data, "arrival_s", where)
    name, tenant = text(data, "name", where), text(data, "tenant", where)
    deadline_s = seconds(data, "deadline_s", where) if data.get("deadline_s") is not None else None
    end_known = data.get("end_known", True)
    if not isinstance(end_known, bool):
        raise TraceError(f"{where}: end_known is {end_known!r:.40}; give true or false.")
    block_tokens = whole(data, "block_tokens", where, least=1) if data.get("block_tokens") is not None else None
    where = f"{where}: program {program!r:.80}"
    rows = data.get("calls")
    if not isinstance(rows, list) or not rows:
        raise TraceError(f"{where}: calls is {rows!r:.40}; give a list of at least one call.")
    calls: list[TraceCall] = []
    for number, row in enumerate(rows, 1):
        calls.append(_call(row, calls[-1] if calls else None, f"{where}, call {number}", block_tokens))
    _check_order(calls, where)
    return TraceProgram(program or "", tuple(calls), arrival_s, name, tenant, deadline_s, end_known, block_tokens)


def write(programs: Iterable[TraceProgram], path: Path) -> None:
    """Write a trace file whole or not at all. Most keys that have their default value are left out.

    Raises:
        TraceError: the file cannot be written.
    """
    write_whole((line + "\n" for line in map(dump, programs)), path)


def dump(program: TraceProgram) -> str:
    """Return a program as one line of JSON."""
    row: dict[str, Any] = {"version": _version(program), "program": program.program, "arrival_s": program.arrival_s}
    optional = ("name", "tenant", "deadline_s", "block_tokens")
    row |= {key: value for key in optional if (value := getattr(program, key)) is not None}
    if not program.end_known:
        row["end_known"] = False
    row["calls"] = list(_rows(program.calls))
    return json.dumps(row)


def from_graph(
    graph: ProgramGraph, *, start_s: float = 0.0, tenant: str | None = None, deadline_s: float | None = None
) -> TraceProgram:
    """Return the trace of a program from its graph.

    Calls without an output token are left out. A call whose parent is left out gets the parents of that parent.

    Args:
        graph: the graph of a program that has ended. The lengths of the calls are those of its accounts.
        start_s: the start of the trace on the engine's clock; `arrival_s` counts from it.
        tenant: the program's tenant.
        deadline_s: its deadline, in seconds from its first call.

    Raises:
        TraceError: no call of the program has an output token.
    """
    graph = graph.copy()  # the program may go on
    stands_for: dict[str, tuple[str, ...]] = {}  # for each call, the parents that its children get in the trace
    calls: list[TraceCall] = []
    threads: dict[str, str] = {}
    arrivals = [node.arrival_s for node in graph.calls if node.arrival_s is not None and node.account.output_tokens > 0]
    if not arrivals:
        raise TraceError(
            f"no call of program {graph.name!r} ({graph.program_id}) has an output token; record a program with one."
        )
    for node in graph.calls:
        parents = tuple(dict.fromkeys(each for edge in node.parents for each in stands_for[edge.parent]))
        account = node.account
        if node.arrival_s is None or account.output_tokens < 1:
            stands_for[node.call_id] = parents
            continue
        stands_for[node.call_id] = (node.call_id,)
        ends = [end_s for parent in map(graph.__getitem__, parents) if (end_s := parent.completion_s) is not None]  # type: ignore[arg-type]
        calls.append(
            TraceCall(
                call_id=node.call_id,
                parents=parents,
                output_tokens=account.output_tokens,
                prompt_tokens=account.prompt_tokens,
                gap_s=max(0.0, node.arrival_s - max(ends, default=min(arrivals))),
                tool=", ".join(node.tools) or None,
                shared_prefix_tokens=min(account.cached_tokens, account.prompt_tokens),
                measured=measured_of(node, threads, min(arrivals)),
            )
        )
    arrival_s = max(0.0, min(arrivals) - start_s)
    return TraceProgram(graph.program_id, tuple(calls), arrival_s, graph.name or None, tenant, deadline_s)


# -- the schema


def _version(program: TraceProgram) -> int:
    """The first version that can hold a program."""
    calls = program.calls
    if (
        not program.end_known
        or program.block_tokens is not None
        or any(call.at_s is not None or call.agent is not None for call in calls)
    ):
        return 3
    return 2 if any(call.measured is not None for call in calls) else 1


def _hash_ids(data: Mapping[str, Any], where: str, block_tokens: int | None, most: int) -> array[int]:
    """The ids of a call's blocks, of which there are at most `most`."""
    ids = data.get("hash_ids", [])
    if not isinstance(ids, list) or not all(type(each) is int and 0 <= each <= MOST_HASH_ID for each in ids):
        raise TraceError(f"{where}: hash_ids is {ids!r:.60}; give a list of whole numbers from 0 to 2^63 - 1.")
    if len(ids) > most:
        raise TraceError(
            f"{where}: hash_ids has {len(ids)} blocks after the shared prefix, but prompt and output have only {most}; "
            "leave out the ids of the shared prefix."
        )
    if ids and block_tokens is None:
        raise TraceError(f"{where}: hash_ids are given; say in the program's block_tokens how long a block is.")
    return array("q", ids)


def _call(row: object, previous: TraceCall | None, where: str, block_tokens: int | None) -> TraceCall:
    data = object_of(row, where, _CALL_KEYS)
    call_id = text(data, "id", where, required=True) or ""
    where = f"{where} ({call_id!r:.80})"
    default = [previous.call_id] if previous else []
    parents = data.get("parents", default)
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise TraceError(f"{where}: parents is {parents!r:.60}; give a list of ids of calls of this program.")
    if len(set(parents)) < len(parents):
        raise TraceError(f"{where}: a parent occurs twice in {parents!r:.60}; name each parent once.")
    prompt_tokens = whole(data, "prompt_tokens", where)
    shared = whole(data, "shared_prefix_tokens", where)
    if shared > prompt_tokens:
        raise TraceError(
            f"{where}: shared_prefix_tokens is {shared}, but the prompt has only {prompt_tokens} tokens; "
            "prompt_tokens counts the whole prompt."
        )
    if block_tokens is not None and shared and not parents:
        raise TraceError(
            f"{where}: shared_prefix_tokens is {shared}, but a call without parents shares by its hash_ids in a "
            "program with block_tokens; leave shared_prefix_tokens out."
        )
    output_tokens = whole(data, "output_tokens", where, least=1, required=True)
    block = block_tokens or 1
    most = (prompt_tokens + output_tokens) // block - shared // block
    return TraceCall(
        call_id=call_id,
        parents=tuple(parents),
        output_tokens=output_tokens,
        prompt_tokens=prompt_tokens,
        gap_s=seconds(data, "gap_s", where),
        tool=text(data, "tool", where),
        prompt=text(data, "prompt", where, empty=True),
        shared_prefix_tokens=shared,
        measured=read_measured(data["measured"], where) if data.get("measured") is not None else None,
        hash_ids=_hash_ids(data, where, block_tokens, most),
        at_s=seconds(data, "at_s", where) if data.get("at_s") is not None else None,
        agent=text(data, "agent", where),
    )


def in_order(calls: Sequence[TraceCall]) -> Iterator[TraceCall]:
    """Yield the calls of a program, parents before children. Calls on a cycle, or after one, are left out."""
    children: dict[str, list[TraceCall]] = {}
    for call in calls:
        for parent in call.parents:
            children.setdefault(parent, []).append(call)
    missing = {call.call_id: len(call.parents) for call in calls}
    free = [call for call in calls if not call.parents]
    while free:
        call = free.pop()
        yield call
        for child in children.get(call.call_id, ()):
            missing[child.call_id] -= 1
            if not missing[child.call_id]:
                free.append(child)


def ordered(calls: Iterable[TraceCall], where: str) -> tuple[TraceCall, ...]:
    """Return the calls of a program in the order of their times, each one after those of its parents that are among
    them. Calls that wait for one another in a circle raise TraceError."""
    by_id = {call.call_id: call for call in calls}
    waits = {call_id: [each for each in call.parents if each in by_id] for call_id, call in by_id.items()}
    found = in_turn(waits, lambda call_id: by_id[call_id].at_s or 0.0)
    if len(found) < len(by_id):
        raise TraceError(
            f"{where}: its calls wait for one another in a circle; expected that each began after another."
        )
    return tuple(by_id[call_id] for call_id in found)


def in_turn(waits: Mapping[str, Collection[str]], at_s: Callable[[str], float]) -> list[str]:
    """Return ids in the order of their times, each one after those it waits for; of one time, in the order given.

    Ids that wait for one another in a circle, or for one that does, are left out.
    """
    numbers = {each: number for number, each in enumerate(waits)}
    missing = {each: len(others) for each, others in waits.items()}
    children: dict[str, list[str]] = {}
    for each, others in waits.items():
        for other in others:
            children.setdefault(other, []).append(each)
    free = [(at_s(each), numbers[each], each) for each, count in missing.items() if not count]
    heapq.heapify(free)
    found: list[str] = []
    while free:
        found.append(heapq.heappop(free)[-1])
        for child in children.get(found[-1], ()):
            missing[child] -= 1
            if not missing[child]:
                heapq.heappush(free, (at_s(child), numbers[child], child))
    return found


def path_tokens(calls: Sequence[TraceCall]) -> int:
    """Return the output tokens on the critical path, the chain of calls that has the most."""
    longest: dict[str, int] = {}
    for call in in_order(calls):
        longest[call.call_id] = call.output_tokens + max((longest[parent] for parent in call.parents), default=0)
    return max(longest.values())


def _check_order(calls: list[TraceCall], where: str) -> None:
    """Check that ids are unique, that all parents exist, and that there is no cycle."""
    by_id = {call.call_id: call for call in calls}
    if len(by_id) < len(calls):
        seen: set[str] = set()
        twice = next(call.call_id for call in calls if call.call_id in seen or seen.add(call.call_id))  # type: ignore[func-returns-value]
        raise TraceError(f"{where}: two calls have the id {twice!r:.80}; give each call of a program its own.")
    for call in calls:
        for parent in call.parents:
            if parent not in by_id:
                raise TraceError(
                    f"{where}, call {call.call_id!r:.80}: there is no parent {parent!r:.80}; name a call of this "
                    "program."
                )
    for call in in_order(calls):
        del by_id[call.call_id]
    if by_id:
        raise TraceError(
            f"{where}: the parents of calls {', '.join(sorted(by_id))[:80]} form a cycle, or come after one; "
            "remove a parent."
        )


def _rows(calls: tuple[TraceCall, ...]) -> Iterator[dict[str, Any]]:
    previous: tuple[str, ...] = ()
    for call in calls:
        row: dict[str, Any] = {"id": call.call_id}
        if call.parents != previous:
            row["parents"] = call.parents
        row["output_tokens"] = call.output_tokens
        for key in ("prompt_tokens", "gap_s", "shared_prefix_tokens"):
            if value := getattr(call, key):
                row[key] = value
        row |= {key: value for key in ("tool", "prompt", "at_s", "agent") if (value := getattr(call, key)) is not None}
        if call.hash_ids:
            row["hash_ids"] = call.hash_ids.tolist()
        if call.measured is not None:
            row["measured"] = dump_measured(call.measured)
        yield row
        previous = (call.call_id,)


# -- what an engine measured of a recorded call: the key `measured` of a trace


@dataclass(frozen=True, slots=True)
class Measured:
    """What an engine measured of a call that was recorded. Times are seconds from the program's arrival."""

    thread: str  # its thread: all calls of a thread have the same text
    arrival_s: float
    end_s: float  # not before the arrival
    service_s: float = 0.0
    wait_s: float = 0.0
    preemptions: int = 0
    cached_tokens: int = 0
    label: str = ""
    engine: str = ""  # the replica
    state: str = CallState.FINISHED
    waits: tuple[tuple[float, float], ...] = ()  # as in `Account.waits`


def measured_of(node: CallNode, threads: dict[str, str], start_s: float) -> Measured | None:
    """What was measured of a call that has left; None if it has not.

    Args:
        threads: the numbers of the program's threads so far. The call's thread is added to it.
        start_s: when the program arrived, in seconds of the engine's clock.
    """
    if node.arrival_s is None or node.completion_s is None:
        return None
    account = node.account
    return Measured(
        thread=threads.setdefault(node.thread_id, str(len(threads))),  # the ids are long
        arrival_s=max(0.0, node.arrival_s - start_s),
        end_s=max(0.0, node.completion_s - start_s),
        service_s=account.service_s,
        wait_s=account.wait_s,
        preemptions=account.preemptions,
        cached_tokens=account.cached_tokens,
        label=node.label,
        engine=node.engine_id or "",
        state=str(node.state),
        waits=account.waits,
    )


_KEYS: Final = tuple(each.name for each in fields(Measured))
_DEFAULTS: Final = {each.name: each.default for each in fields(Measured)}


def read_measured(row: object, where: str) -> Measured:
    """Read the key `measured` of a call, or raise TraceError with a message that begins with `where`."""
    where = f"{where}, measured"
    data = object_of(row, where, _KEYS)
    state = text(data, "state", where) or CallState.FINISHED
    if state not in tuple(CallState):
        raise TraceError(f"{where}: state is {state!r:.40}; give one of {', '.join(CallState)}.")
    arrival_s, end_s = seconds(data, "arrival_s", where), seconds(data, "end_s", where)
    if end_s < arrival_s:
        raise TraceError(f"{where}: end_s is {end_s:g}, before arrival_s, {arrival_s:g}; give a later time.")
    return Measured(
        thread=text(data, "thread", where, required=True) or "",
        arrival_s=arrival_s,
        end_s=end_s,
        service_s=seconds(data, "service_s", where),
        wait_s=seconds(data, "wait_s", where),
        preemptions=whole(data, "preemptions", where),
        cached_tokens=whole(data, "cached_tokens", where),
        label=text(data, "label", where, empty=True) or "",
        engine=text(data, "engine", where, empty=True) or "",
        state=state,
        waits=_waits(data.get("waits", []), where),
    )


def dump_measured(measured: Measured) -> dict[str, Any]:
    """The value of the key `measured`. Keys that have their default value are left out."""
    return {name: value for name, value in asdict(measured).items() if value != _DEFAULTS[name]}


def _waits(rows: object, where: str) -> tuple[tuple[float, float], ...]:
    if not isinstance(rows, list) or len(rows) > MOST_WAITS:
        raise TraceError(f"{where}: waits is {rows!r:.40}; give a list of at most {MOST_WAITS} waits.")
    for row in rows:
        if not isinstance(row, list) or len(row) != 2:
            raise TraceError(f"{where}: a wait is {row!r:.40}; give its start and its length in seconds.")
    pairs = [{"start": row[0], "length": row[1]} for row in rows]
    return tuple(
        (seconds(pair, "start", f"{where}, waits"), seconds(pair, "length", f"{where}, waits")) for pair in pairs
    )


# -- the values of a trace's objects. Each function refuses a bad value with a message that says where and why
#
# In all of them `data` is the object, `key` the key to read, and `where` the place in the file, for the message. They
# raise TraceError.

MOST: Final = 10**15  # tokens of a call, and seconds: larger numbers would overflow, or lose their digits, in sums


def object_of(data: object, where: str, keys: tuple[str, ...]) -> Mapping[str, Any]:
    """Return `data` if it is an object that has no other keys than these."""
    if not isinstance(data, dict):
        raise TraceError(f"{where}: {data!r:.40} is not an object; give an object with the keys {', '.join(keys)}.")
    unknown = [key for key in data if key not in keys]
    if unknown:
        raise TraceError(f"{where}: there is no key {unknown[0]!r:.40}; the keys are {', '.join(keys)}.")
    return data


def text(data: Mapping[str, Any], key: str, where: str, *, required: bool = False, empty: bool = False) -> str | None:
    """Return a text. None for null or a missing key, unless it is `required`. "" is refused unless `empty`."""
    value = data.get(key)
    if (value is None and not required) or (isinstance(value, str) and (value or empty)):
        return value
    raise TraceError(f"{where}: {key} is {value!r:.40}; give a text{'' if required else ' or null'}.")


def whole(data: Mapping[str, Any], key: str, where: str, *, least: int = 0, required: bool = False) -> int:
    """Return a whole number of at least `least`. 0 for a missing key, unless it is `required`."""
    value = data.get(key, None if required else 0)
    if type(value) is not int or not least <= value <= MOST:
        raise TraceError(
            f"{where}: {key} is {value!r:.40}; give a whole number of at least {least} and at most {MOST:.0e}."
        )
    return value


def seconds(data: Mapping[str, Any], key: str, where: str, *, required: bool = False) -> float:
    """Return a number of seconds, 0 or more. 0 for a missing key, unless it is `required`."""
    value = data.get(key, None if required else 0.0)
    if type(value) not in (int, float) or not 0 <= value <= MOST:
        raise TraceError(f"{where}: {key} is {value!r:.40}; give seconds, 0 or more and at most {MOST:.0e}.")
    return float(value)
