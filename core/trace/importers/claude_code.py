"""Claude Code's own logs: `projects/*/SESSION.jsonl`, and the files of its sub-agents beside it.

A line is a message, and has the `uuid` of the line that it follows. An answer is a line for each of its parts, which
repeat its id and its usage. The system prompt and the tools are not in the logs.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from weft.core.errors import TraceError
from weft.core.trace.format import TraceCall, TraceProgram, ordered, text, whole
from weft.core.trace.importers.contract import Blocks, Importer, LeftOut
from weft.core.trace.importers.reading import a_list, an_object, lines, moment, rows
from weft.core.trace.importers.spans import shared_tokens
from weft.core.trace.importers.weka import IN_BACKGROUND, NAME

_EXPECTED: Final = "a line of Claude Code's log, an object with type"
_AGENT_FILE: Final = "agent-"
_SYNTHETIC: Final = "<synthetic>"  # the model of messages that Claude Code writes itself
_TASK: Final = re.compile(r"<task-id>([^<]{1,100})</task-id>")


def _matches(path: Path, head: str) -> bool:
    """Whether the file begins like a log, and is not that of a sub-agent whose session is beside it."""
    if not head.lstrip().startswith("{") or not all(f'"{key}"' in head for key in ("sessionId", "parentUuid")):
        return False
    if not path.name.startswith(_AGENT_FILE):
        return True
    session = _session_of(path)
    return not any((folder / f"{session}.jsonl").is_file() for folder in list(path.parents)[:3])


def _start_s(path: Path) -> float | None:
    """The time of the first line that has one."""
    times_s = (moment(row, "timestamp", where) for where, row in rows(path, lambda _: None, _EXPECTED))
    return next((time_s for time_s in times_s if time_s is not None), None)


def _read(path: Path, blocks: Blocks, advance: Callable[[int], object]) -> Iterator[TraceProgram | LeftOut]:
    """Reads sessions. A program is a session, and a sub-agent a branch that joins where its result comes back.

    A call begins at the time of the line before it and ends at that of its own last line. Calls that a session repeats
    from the one that it continues are left out.
    """
    session = _Session(blocks)
    is_agent = path.name.startswith(_AGENT_FILE)
    session.read(path, advance, alone=is_agent)
    for beside in () if is_agent else _agent_files(path):
        session.read(beside, lambda _: None, agent=_Agent(beside.stem.removeprefix(_AGENT_FILE), beside))
    calls = session.calls(str(path))
    if calls:
        yield TraceProgram(path.stem, calls, arrival_s=session.arrival_s, name=NAME)
    if session.repeated:
        yield LeftOut(session.repeated)


CLAUDE_CODE: Final = Importer("claude-code", "Claude Code's logs, projects/*/SESSION.jsonl", _matches, _read, _start_s)


def _session_of(path: Path) -> str | None:
    """The session that an agent's file says it is of."""
    row = next((row for _, row in rows(path, lambda _: None, _EXPECTED)), {})
    session = row.get("sessionId")
    return session if isinstance(session, str) else None


def _agent_files(path: Path) -> list[Path]:
    """The files of a session's sub-agents: in its folder, or, as once, beside it."""
    folder = path.parent
    beside = _agents_beside(folder, folder.stat().st_mtime_ns).get(path.stem, ())
    return [*sorted(path.with_suffix("").rglob(f"{_AGENT_FILE}*.jsonl")), *beside]


@functools.lru_cache(maxsize=1)
def _agents_beside(folder: Path, changed_ns: int) -> dict[str | None, list[Path]]:
    """The agents' files of a folder by their sessions, for the folder looked at last."""
    found: dict[str | None, list[Path]] = {}
    for each in sorted(folder.glob(f"{_AGENT_FILE}*.jsonl")):
        found.setdefault(_session_of(each), []).append(each)
    return found


@dataclass(slots=True)
class _Call:
    """An answer, and how it came about."""

    number: int
    chain: _Chain
    before: _Call | None  # the call that it continues
    begin_s: float
    end_s: float
    prompt: int
    cached: int
    output: int
    by_human: bool
    is_new: bool
    joined: list[tuple[str, float]]  # agents whose results came before it, and when
    tools: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Agent:
    """A sub-agent."""

    agent_id: str
    path: Path | None = None


@dataclass(slots=True)
class _Chain:
    """The lines of an agent so far. `agent` is None for the session's own."""

    agent: _Agent | None
    calls: list[_Call] = field(default_factory=list)
    at_s: float | None = None  # the last line's time
    begin_s: float | None = None  # the first line's
    prompt: str | None = None  # what a sub-agent was told
    name: str | None = None
    by_human: bool = False  # whether a human wrote since the last call
    joined: list[tuple[str, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Line:
    """A message."""

    where: str
    row: dict[str, Any]
    at_s: float


class _Session:
    """Collects the calls of a session and of its sub-agents."""

    def __init__(self, blocks: Blocks) -> None:
        self.arrival_s = 0.0
        self._blocks = blocks
        self._calls: dict[str, _Call] = {}  # by message id and request id
        self._lines: dict[str, tuple[_Chain, _Call | None, float]] = {}  # by uuid: the call that a line is or follows
        self._main = _Chain(None)
        self._chains: dict[str, _Chain] = {}  # those of sub-agents
        self._spawners: dict[str, _Call] = {}  # by the id of a tool's call: who made it
        self._tools_of: dict[str, str] = {}  # by agent: the tool's call that started it
        self._prompts: dict[str, str] = {}  # by what an agent was told: the tool's call
        self._kinds: dict[str, str] = {}  # by tool's call: the type of agent that it asked for

    def read(
        self, path: Path, advance: Callable[[int], object], *, alone: bool = False, agent: _Agent | None = None
    ) -> None:
        """Read a file.

        Args:
            alone: whether it is the file of a sub-agent that is read without its session.
        """
        if agent is not None:
            self._meta(agent)
        for where, row in rows(path, advance, _EXPECTED):
            kind, uuid = text(row, "type", where, required=True), text(row, "uuid", where)
            if uuid is None:  # only messages have one
                if kind in ("user", "assistant"):
                    raise TraceError(f"{where}: there is no uuid; expected one with each message.")
                continue
            at_s = moment(row, "timestamp", where)
            if at_s is None:
                raise TraceError(f"{where}: there is no timestamp; expected one with each message.")
            before = row.get("parentUuid") or row.get("logicalParentUuid")
            before_chain, call, last_s = self._lines.get(before if isinstance(before, str) else "", (None, None, None))
            if alone:
                chain = self._main
            elif agent is not None:
                chain = self._chains.setdefault(agent.agent_id, _Chain(agent))
            else:
                chain = self._chain_of(row, where, before_chain)
            if call is None or call.chain is not chain:
                call = chain.calls[-1] if chain.calls else None
            if kind == "assistant":
                begin_s = last_s if last_s is not None else chain.at_s
                call = self._answer(_Line(where, row, at_s), chain, call, begin_s)
            elif kind == "user":
                self._told(_Line(where, row, at_s), chain)
            chain.begin_s = at_s if chain.begin_s is None else chain.begin_s
            chain.at_s = at_s
            self._lines[uuid] = (chain, call, at_s)

    def _chain_of(self, row: dict[str, Any], where: str, before: _Chain | None) -> _Chain:
        """The agent whose line this is, in a session's file. Once, the lines of sub-agents were there too."""
        if not row.get("isSidechain"):
            return self._main
        if before is not None and before is not self._main:
            return before
        agent_id = text(row, "agentId", where) or row["uuid"]
        return self._chains.setdefault(agent_id, _Chain(_Agent(agent_id)))

    def _meta(self, agent: _Agent) -> None:
        """Read what the file beside an agent's file says, if there is one."""
        path = agent.path.with_suffix(".meta.json") if agent.path is not None else None
        if path is None or not path.is_file():
            return
        where = str(path)
        try:
            data = json.loads("".join(line for _, line in lines(path, lambda _: None)))
        except (ValueError, RecursionError) as error:
            if isinstance(error, TraceError):
                raise
            raise TraceError(f"{where}: not JSON; expected an object with agentType and toolUseId.") from None
        meta = an_object(data, where, "an object with agentType and toolUseId")
        tool = text(meta, "toolUseId", where)
        if tool is not None:
            self._tools_of[agent.agent_id] = tool
            self._kinds[tool] = text(meta, "agentType", where) or "subagent"

    def _answer(self, line: _Line, chain: _Chain, before: _Call | None, begin_s: float | None) -> _Call | None:
        """Read a part of an answer, and return the call that it is part of."""
        where, row, at_s = line.where, line.row, line.at_s
        message = an_object(row.get("message"), where, "an object with usage in message")
        if message.get("model") == _SYNTHETIC or row.get("isApiErrorMessage"):
            return before
        usage = an_object(message.get("usage"), where, "an object with input_tokens and output_tokens in usage")
        key = f"{text(message, 'id', where) or row['uuid']} {text(row, 'requestId', where)}"
        call = self._calls.get(key)
        cached = _tokens(usage, "cache_read_input_tokens", where)
        prompt = whole(usage, "input_tokens", where, required=True) + cached
        prompt += _tokens(usage, "cache_creation_input_tokens", where)
        output = whole(usage, "output_tokens", where, required=True)
        if call is None:
            begin_s = min(at_s, begin_s if begin_s is not None else at_s)
            call = _Call(
                len(self._calls), chain, before, begin_s, at_s, prompt, cached, output, chain.by_human,
                self._blocks.is_new(("claude-code", row["uuid"])), chain.joined,
            )  # fmt: skip
            self._calls[key] = call
            chain.calls.append(call)
            chain.by_human, chain.joined = False, []
        call.end_s, call.output = max(call.end_s, at_s), max(call.output, output)
        for part in _parts(message, where):
            if part.get("type") == "tool_use":
                call.tools[text(part, "name", where) or "tool"] = None
                self._asked(part, where, call)
        return call

    def _asked(self, part: dict[str, Any], where: str, call: _Call) -> None:
        """Note which tool was asked for, which may be an agent."""
        tool = text(part, "id", where)
        if tool is None:
            return
        self._spawners[tool] = call
        asked = part.get("input")
        if isinstance(asked, dict) and isinstance(prompt := asked.get("prompt"), str):
            self._prompts.setdefault(prompt, tool)
            if isinstance(kind := asked.get("subagent_type"), str) and kind:
                self._kinds[tool] = kind

    def _told(self, line: _Line, chain: _Chain) -> None:
        """Read what an agent was told: the result of a tool, or the words of a human."""
        where, row, at_s = line.where, line.row, line.at_s
        message = an_object(row.get("message"), where, "an object with content in message")
        parts = _parts(message, where)
        results = [part for part in parts if part.get("type") == "tool_result"]
        result = row.get("toolUseResult")
        agent_id = result.get("agentId") if isinstance(result, dict) else None
        is_done = not isinstance(result, dict) or result.get("status") != IN_BACKGROUND
        for part in results:
            tool = text(part, "tool_use_id", where)
            if tool is not None and isinstance(agent_id, str):
                self._tools_of.setdefault(agent_id, tool)
            if tool is not None and is_done:
                chain.joined.append((tool, at_s))
        said = "\n".join(each for part in parts if isinstance(each := part.get("text"), str))
        origin = row.get("origin")
        if isinstance(origin, dict) and origin.get("kind") == "task-notification":
            chain.joined += [(found, at_s) for found in _TASK.findall(said)]
        elif not results and not row.get("isMeta"):
            chain.by_human = True
        if chain.prompt is None:
            chain.prompt = said

    # -- the calls of the program

    @property
    def repeated(self) -> int:
        """How many calls came in an earlier file."""
        return sum(not call.is_new for call in self._calls.values())

    def calls(self, where: str) -> tuple[TraceCall, ...]:
        """Return the calls in their order, those that came in an earlier file left out."""
        kept = [call for call in self._calls.values() if call.is_new]
        if not kept:
            return ()
        self.arrival_s = min(call.begin_s for call in kept)
        agents: dict[str, _Chain] = {}  # by id, and by the tool's call that started it
        starts: dict[int, _Call] = {}  # the call that started a sub-agent, by its chain
        for agent_id, chain in self._chains.items():
            tool = self._tools_of.get(agent_id) or self._prompts.get(chain.prompt or "")
            agents[agent_id] = chain
            chain.name = self._kinds.get(tool or "", "subagent")
            if tool is not None and tool in self._spawners:
                agents[tool] = chain
                starts[id(chain)] = self._spawners[tool]
            else:
                earlier = [call for call in self._main.calls if call.begin_s <= (chain.begin_s or 0.0)]
                if earlier:
                    starts[id(chain)] = earlier[-1]
        return ordered((self._call(call, agents, starts) for call in kept), where)

    def _call(self, call: _Call, agents: dict[str, _Chain], starts: dict[int, _Call]) -> TraceCall:
        before = call.before if call.before is not None and call.before.is_new else None
        first = call.before or starts.get(id(call.chain))
        parents = [first] if first is not None and first.is_new else []
        for name, at_s in call.joined:
            chain = agents.get(name)
            if chain is not None and chain is not call.chain:
                parents += [each for each in chain.calls if each.is_new and each.begin_s <= at_s][-1:]
        by_number = {each.number: each for each in parents}
        gap_s = call.begin_s - max((each.end_s for each in by_number.values()), default=self.arrival_s)
        shared = 0
        if before is not None or not by_number:
            lengths = None if before is None else (before.prompt, max(1, before.output))
            shared = shared_tokens(call.prompt, call.cached, lengths)
        tool = None
        if before is not None:
            tool = "human" if call.by_human else ", ".join(before.tools) or None
        return TraceCall(
            call_id=f"c{call.number}",
            parents=tuple(f"c{number}" for number in by_number),
            output_tokens=max(1, call.output),
            prompt_tokens=call.prompt,
            gap_s=max(0.0, round(gap_s, 6)),
            tool=tool,
            shared_prefix_tokens=shared,
            at_s=max(0.0, round(call.begin_s - self.arrival_s, 6)),
            agent=call.chain.name,
        )


def _tokens(usage: dict[str, Any], key: str, where: str) -> int:
    """Tokens that a server without a cache does not tell, or tells as null."""
    return whole(usage, key, where) if usage.get(key) is not None else 0


def _parts(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The parts of a message. A text alone is one part."""
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    parts = a_list(message, "content", where)
    return [an_object(part, where, "parts of a message with type") for part in parts]
