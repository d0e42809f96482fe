"""Teams put together at random from AutoGen's parts, each with its structure's DAG."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import count, pairwise
from typing import Any, Final, NamedTuple

from autogen_agentchat.agents import AssistantAgent, SocietyOfMindAgent
from autogen_agentchat.base import Handoff, Team
from autogen_agentchat.teams import DiGraphBuilder, GraphFlow, RoundRobinGroupChat, SelectorGroupChat, Swarm
from autogen_agentchat.tools import AgentTool, TeamTool
from random_programs import Edges, Frontier

from weft.engine.host.frontend import FrontEnd
from weft.integrations.autogen import WeftChatCompletionClient
from weft.testing import Reply, ScriptedCall

MOST_CALLS: Final = 14  # a team gets no new parts beyond these
_TAG: Final = re.compile(r"<(\w+)(?: (tools|picks) ([\w ]+))?>")


class Member(NamedTuple):
    """A part of a team: an agent, or a team of its own."""

    run: Any  # a `ChatAgent` or a `Team`
    after: Callable[[Frontier, Edges], Frontier]  # from the calls before the part to its last ones; adds its edges
    text: str


def _tag(body: Mapping[str, Any]) -> tuple[str, str, str]:
    found = _TAG.search(str(body["messages"]))
    assert found is not None, body["messages"]
    return found[1], found[2] or "", found[3] or ""


def _has_results(body: Mapping[str, Any]) -> bool:
    return bool(body["messages"][-1]["role"] == "tool")


class Model:
    """A model whose answers all differ. It calls the tools that a prompt's tag names, once, and picks who speaks."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._numbers = rng, count()
        self._picked: dict[str, int] = {}

    def __call__(self, body: Mapping[str, Any]) -> Reply:
        name, does, names = _tag(body)
        if does == "picks":
            number = self._picked[name] = self._picked.get(name, -1) + 1
            return Reply(names.split()[number])
        if does == "tools" and not _has_results(body):
            asked = [
                (each, {} if each.startswith("transfer") else {"task": f"task {next(self._numbers)}"})
                for each in names.split()
            ]
            return Reply("", asked)
        return Reply(f"answer {next(self._numbers)} is {self._rng.random():.9f}")


def names_of(calls: Sequence[ScriptedCall]) -> dict[str, str]:
    """The calls' names in the structure by id. An agent's call after its tools has a prime, a pick its number."""
    picks: dict[str, int] = {}
    found: dict[str, str] = {}
    for call in calls:
        name, does, _ = _tag(call.body)
        if does == "picks":
            picks[name] = picks.get(name, 0) + 1
            name = f"{name}.{picks[name]}"
        found[call.call_id] = name + ("'" if _has_results(call.body) else "")
    return found


class TeamMaker:
    """Makes teams at random.

    Args:
        rng: Decides.
        engine: Behind all clients.
    """

    def __init__(self, rng: random.Random, engine: FrontEnd) -> None:
        self._rng, self._engine, self._numbers = rng, engine, count(1)
        self.calls: list[str] = []
        self._teams = [self._round_robin, self._graph, self._selector, self._swarm]
        self._agents = [self._plain, self._asking, self._society]

    def team(self, depth: int) -> Member:
        """Make a team that contains teams, to some depth."""
        return self._rng.choice(self._teams)(depth - 1)

    def agent(self, depth: int) -> Member:
        """Make an agent that may ask others, to some depth."""
        if depth <= 0 or len(self.calls) >= MOST_CALLS:
            return self._plain(depth)
        return self._rng.choice(self._agents)(depth - 1)

    def _quick_agent(self, depth: int) -> Member:
        """Make an agent whose first call begins at once, as agents side by side must: a call that ends before the other
        one begins looks like the one before it."""
        return self._plain(depth) if depth <= 0 or self._rng.random() < 0.5 else self._asking(depth - 1)

    def _name(self, kind: str = "m") -> str:
        return f"{kind}{next(self._numbers)}"

    def _client(self) -> WeftChatCompletionClient:
        return WeftChatCompletionClient(self._engine)

    def _assistant(self, name: str, tag: str, **extra: Any) -> AssistantAgent:
        streams = self._rng.random() < 0.3
        return AssistantAgent(
            name, self._client(), system_message=f"<{tag}>", description=name, model_client_stream=streams, **extra
        )

    # -- agents

    def _plain(self, depth: int) -> Member:
        del depth
        name = self._name()
        self.calls.append(name)
        return Member(self._assistant(name, name), _chain(name), name)

    def _asking(self, depth: int) -> Member:
        name = self._name()
        self.calls += [name, f"{name}'"]
        asked = [self._tool(depth)] if self._rng.random() < 0.4 else self._tools(depth)
        tools = " ".join(tool.name for tool, _ in asked)
        agent = self._assistant(
            name, f"{name} tools {tools}", tools=[tool for tool, _ in asked], reflect_on_tool_use=True
        )

        def after(before: Frontier, edges: Edges) -> Frontier:
            first = _chain(name)(before, edges)
            ends = frozenset[str]().union(*(part.after(first, edges) for _, part in asked))
            return _chain(f"{name}'")(ends, edges)

        return Member(agent, after, f"{name}[{', '.join(part.text for _, part in asked)}]")

    def _tool(self, depth: int) -> tuple[Any, Member]:
        part = self.team(depth)
        return TeamTool(part.run, f"ask_{self._name('t')}", "Ask.", return_value_as_last_message=True), part

    def _tools(self, depth: int) -> list[tuple[Any, Member]]:
        parts: list[Any] = [self._quick_agent(depth) for _ in range(self._rng.randint(1, 3))]
        return [(AgentTool(part.run, return_value_as_last_message=True), part) for part in parts]

    def _society(self, depth: int) -> Member:
        name = self._name()
        self.calls.append(name)
        part = self.team(depth)
        mind = SocietyOfMindAgent(name, part.run, self._client(), instruction=f"<{name}>", description=name)

        def after(before: Frontier, edges: Edges) -> Frontier:
            return _chain(name)(part.after(before, edges), edges)

        return Member(mind, after, f"society {name}({part.text})")

    # -- teams

    def _members(self, depth: int, most: int = 3) -> list[Member]:
        return [self.agent(depth) for _ in range(self._rng.randint(2, most))]

    def _round_robin(self, depth: int) -> Member:
        parts = self._members(depth)
        if depth > 0 and len(self.calls) < MOST_CALLS and self._rng.random() < 0.4:
            parts.insert(self._rng.randrange(len(parts)), self.team(depth))
        team = RoundRobinGroupChat([part.run for part in parts], max_turns=len(parts), name=self._name("t"))
        return _one_by_one("round robin", team, parts)

    def _graph(self, depth: int) -> Member:
        """Layers, each of which waits for all of the one before it."""
        counts = (self._rng.choice([1, 1, 2, 3]) for _ in range(3))
        layers = [
            [self.agent(depth)] if count == 1 else [self._quick_agent(depth) for _ in range(count)] for count in counts
        ]
        builder = DiGraphBuilder()
        for layer in layers:
            for part in layer:
                builder.add_node(part.run)
        for layer, following in pairwise(layers):
            for part in layer:
                for other in following:
                    builder.add_edge(part.run, other.run)
        nodes: list[Any] = [part.run for layer in layers for part in layer]
        team = GraphFlow(nodes, graph=builder.build(), name=self._name("t"))
        return _one_by_one("graph", team, [_at_once(team, layer) for layer in layers])

    def _selector(self, depth: int) -> Member:
        parts, name = self._members(depth), self._name("s")
        picks = [f"{name}.{number}" for number in range(1, len(parts) + 1)]
        self.calls += picks
        names = " ".join(part.run.name for part in parts)
        prompt = f"<{name} picks {names}> {{roles}} {{participants}} {{history}}"
        team = SelectorGroupChat(
            [part.run for part in parts],
            self._client(),
            selector_prompt=prompt,
            allow_repeated_speaker=True,
            max_turns=len(parts),
            name=self._name("t"),
        )

        def after(before: Frontier, edges: Edges) -> Frontier:
            for pick, part in zip(picks, parts, strict=True):
                before = part.after(_chain(pick)(before, edges), edges)
            return before

        return Member(team, after, f"selector({', '.join(part.text for part in parts)})")

    def _swarm(self, depth: int) -> Member:
        del depth
        names = [self._name() for _ in range(self._rng.randint(2, 3))]
        self.calls += names
        agents: list[Any] = []
        for name, following in zip(names, [*names[1:], None], strict=True):
            tag = f"{name} tools transfer_to_{following}" if following else name
            handoffs = [Handoff(target=following)] if following else None
            agents.append(self._assistant(name, tag, handoffs=handoffs))
        team = Swarm(agents, max_turns=len(agents), name=self._name("t"))
        return _one_by_one("swarm", team, [Member(team, _chain(name), name) for name in names])


def _chain(name: str) -> Callable[[Frontier, Edges], Frontier]:
    def after(before: Frontier, edges: Edges) -> Frontier:
        edges |= {(each, name) for each in before}
        return frozenset([name])

    return after


def _one_by_one(kind: str, team: Team, parts: Sequence[Member]) -> Member:
    def after(before: Frontier, edges: Edges) -> Frontier:
        for part in parts:
            before = part.after(before, edges)
        return before

    return Member(team, after, f"{kind}({', '.join(part.text for part in parts)})")


def _at_once(team: Team, parts: Sequence[Member]) -> Member:
    def after(before: Frontier, edges: Edges) -> Frontier:
        return frozenset[str]().union(*(part.after(before, edges) for part in parts))

    return Member(team, after, " with ".join(part.text for part in parts))
