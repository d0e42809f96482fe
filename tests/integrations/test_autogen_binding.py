"""`bind_team`: which clients it binds, what it rejects, and binding a team again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("autogen_agentchat", reason="the AutoGen extra is not installed")

from autogen_agentchat.agents import AssistantAgent, BaseChatAgent, CodeExecutorAgent, UserProxyAgent
from autogen_agentchat.agents._code_executor_agent import ApprovalRequest, ApprovalResponse
from autogen_agentchat.base import Response
from autogen_agentchat.messages import BaseChatMessage, TextMessage
from autogen_agentchat.teams import MagenticOneGroupChat, RoundRobinGroupChat, SelectorGroupChat
from autogen_core import CancellationToken
from autogen_core.code_executor import CodeBlock, CodeExecutor, CodeResult
from autogen_core.models import ChatCompletionClient
from autogen_ext.models.cache import ChatCompletionCache
from autogen_ext.models.replay import ReplayChatCompletionClient
from autogen_parts import babbling, parents, saying
from scripted_runs import answer_like_a_tiny_model

import weft
from weft.core.errors import ProgramEndedError, ProgramError
from weft.integrations.autogen import TeamBindingError, WeftChatCompletionClient, bind_team
from weft.testing import ScriptedEngine

pytestmark = pytest.mark.anyio
pytest_plugins = ["weft.testing.fixtures"]


@pytest.fixture
def engine(scripted_engine: Callable[..., ScriptedEngine]) -> ScriptedEngine:
    """An engine without a model, since only the binding is tested here."""
    return scripted_engine(answer_like_a_tiny_model, latency_s=0.5)


def agent(name: str, client: ChatCompletionClient, **extra: Any) -> AssistantAgent:
    return AssistantAgent(name, client, system_message=f"You are {name}.", **extra)


def pair(engine: ScriptedEngine, *names: str, **extra: Any) -> RoundRobinGroupChat:
    return RoundRobinGroupChat([agent(name, babbling(engine)) for name in names or ("ann", "bob")], **extra)


class Poet(BaseChatAgent):
    """A user's own agent class, with clients in a list and in a dictionary."""

    def __init__(self, name: str, client: ChatCompletionClient) -> None:
        super().__init__(name, "A poet.")
        self.muses: list[ChatCompletionClient] = [client]
        self.critics: dict[str, ChatCompletionClient] = {"stern": client}

    @property
    def produced_message_types(self) -> Sequence[type[BaseChatMessage]]:
        return (TextMessage,)

    async def on_messages(self, messages: Sequence[BaseChatMessage], cancellation_token: CancellationToken) -> Response:
        texts = [message.to_model_message() for message in messages]
        for client in (*self.muses, *self.critics.values()):
            answer = await client.create(texts, cancellation_token=cancellation_token)
        return Response(chat_message=TextMessage(content=str(answer.content), source=self.name))

    async def on_reset(self, cancellation_token: CancellationToken) -> None: ...


class NoExecutor(CodeExecutor):
    """An executor that runs nothing."""

    component_type = "code_executor"

    async def execute_code_blocks(
        self, code_blocks: list[CodeBlock], cancellation_token: CancellationToken
    ) -> CodeResult:
        return CodeResult(exit_code=0, output="")

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def restart(self) -> None: ...


def never_approve(_request: ApprovalRequest) -> ApprovalResponse:
    return ApprovalResponse(approved=False, reason="never")


def labels(program: weft.Program) -> list[str]:
    return [call.label for call in program.graph.calls]


# -- which clients it binds


async def test_it_returns_the_team(engine: ScriptedEngine) -> None:
    """`bind_team` returns the team itself, for use in an expression. Agents without a client are skipped."""
    team = RoundRobinGroupChat(
        [
            agent("ann", babbling(engine)),
            UserProxyAgent("me"),
            CodeExecutorAgent("code", NoExecutor(), approval_func=never_approve),
        ]
    )
    with weft.Program() as program:
        assert bind_team(team, program) is team


async def test_agent_classes_of_users(engine: ScriptedEngine) -> None:
    """Clients in a list and in a dictionary of a user's own agent are bound."""
    team = RoundRobinGroupChat([Poet("poet", babbling(engine))], max_turns=1)
    async with weft.Program() as program:
        await bind_team(team, program).run(task="Sing.")
    assert labels(program) == ["poet", "poet"]


async def test_a_client_behind_a_cache(engine: ScriptedEngine) -> None:
    """A client that another client wraps is bound inside it. An answer from the cache is not a call."""
    asker = agent("asker", ChatCompletionCache(babbling(engine)))
    async with weft.Program() as program:
        bind_team(asker, program)
        await asker.run(task="Talk.")
        await asker.on_reset(CancellationToken())
        await asker.run(task="Talk.")
    assert labels(program) == ["asker"]


async def test_an_orchestrator(engine: ScriptedEngine) -> None:
    """The client of Magentic-One's orchestrator is bound under the team's name."""
    team = MagenticOneGroupChat([agent("ann", babbling(engine))], babbling(engine), name="magentic")
    with weft.Program() as program:
        bind_team(team, program)
        assert team._model_client.binding.agent == "magentic"  # type: ignore[attr-defined]


async def test_names_given_by_hand(engine: ScriptedEngine) -> None:
    """A client that was bound with an agent name keeps the name, and agents may share a client."""
    client = babbling(engine)
    async with weft.Program() as program:
        team = RoundRobinGroupChat(
            [agent("ann", client.bind(program, agent="the first")), agent("bob", client), agent("cid", client)],
            max_turns=3,
        )
        await bind_team(team, program).run(task="Talk.")
    assert labels(program) == ["the first", "bob", "cid"]
    assert client.binding is None
    assert client.total_usage().completion_tokens == 36


async def test_with_the_decorator(engine: ScriptedEngine) -> None:
    """A team can be made, bound and run inside an entrypoint."""
    client = babbling(engine)

    @weft.program
    async def debate(topic: str, program: weft.Program) -> list[str]:
        team = bind_team(RoundRobinGroupChat([agent(name, client) for name in ("ann", "bob")], max_turns=2), program)
        result = await team.run(task=topic)
        assert labels(program) == ["ann", "bob"]
        return [message.source for message in result.messages]

    assert await debate("The sea") == ["user", "ann", "bob"]
    assert [row.info.name for row in engine.table.ended()[:1]] == ["debate"]


# -- binding again


@pytest.mark.parametrize("kind", ["round robin", "selector"])
async def test_a_team_is_bound_again_for_its_next_run(engine: ScriptedEngine, kind: str) -> None:
    """After the end of its program, a team and its manager can run in another program."""
    members: list[Any] = [agent(name, babbling(engine)) for name in ("ann", "bob", "cid")]
    team: Any = RoundRobinGroupChat(members, max_turns=2)
    if kind == "selector":
        team = SelectorGroupChat(members, saying(engine, "ann", "bob"), allow_repeated_speaker=True, max_turns=2)
    programs = []
    for name in ("first", "second", "third"):
        async with weft.Program(name) as program:
            await bind_team(team, program).run(task=f"Talk about the {name} thing.")
            programs.append(program)
    assert [len(program.graph) for program in programs] == [2 if kind == "round robin" else 4] * 3
    assert [program.row.calls for program in programs if program.row is not None] == [len(programs[0].graph)] * 3
    if kind == "round robin":
        assert labels(programs[1]) == ["cid", "ann"]  # The team continues with the next agent.
        assert parents(programs[1]) == {"cid1": [], "ann1": ["cid1"]}


async def test_binding_twice_to_the_same_program(engine: ScriptedEngine) -> None:
    """Binding a team twice changes nothing, and a team can be bound to a branch of its program."""
    team = pair(engine, max_turns=2)
    async with weft.Program() as program:
        bind_team(bind_team(team, program), program)
        await team.run(task="Talk.")
        async with program.branch() as branch:
            await bind_team(team, branch).run(task="Go on.")
    assert labels(program) == ["ann", "bob"] * 2


async def test_a_team_whose_program_has_ended(engine: ScriptedEngine) -> None:
    """The calls of a team whose program has ended raise an error that names the program."""
    team = pair(engine, max_turns=2)
    async with weft.Program("over") as program:
        bind_team(team, program)
    with pytest.raises(RuntimeError, match=r"program 'over'.*has ended"):
        await team.run(task="Talk.")
    with pytest.raises(ProgramEndedError, match="over"):
        bind_team(team, program)


# -- what it rejects


async def test_two_programs_at_once(engine: ScriptedEngine) -> None:
    """A team cannot be bound while its program runs, and neither can a team that shares an agent with it."""
    team = pair(engine)
    shared = RoundRobinGroupChat([agent("cid", babbling(engine)), team._participants[1]])
    with weft.Program("first") as first, weft.Program("second") as second:
        bind_team(team, first)
        with pytest.raises(TeamBindingError, match=r"'ann' belongs to program 'first' .*still runs") as caught:
            bind_team(team, second)
        assert caught.value.agent == "ann"
        assert isinstance(caught.value, ProgramError)
        with pytest.raises(TeamBindingError, match="'bob' belongs to program 'first'"):
            bind_team(shared, second)
        assert [client_of(member).binding.program for member in team._participants] == [first, first]  # type: ignore[union-attr]
        assert client_of(shared._participants[0]).binding is None, "no client of a rejected team is bound"
    with weft.Program() as third:
        bind_team(shared, third)


def client_of(member: Any) -> WeftChatCompletionClient:
    client = member._model_client
    assert isinstance(client, WeftChatCompletionClient)
    return client


async def test_a_client_bound_by_hand_to_another_program(engine: ScriptedEngine) -> None:
    """A client that was bound by `bind` counts like one that was bound by `bind_team`."""
    with weft.Program("first") as first, weft.Program("second") as second:
        bound = agent("ann", babbling(engine).bind(first))
        with pytest.raises(TeamBindingError, match="'ann' belongs to program 'first'"):
            bind_team(bound, second)


async def test_another_client(engine: ScriptedEngine) -> None:
    """The error for an agent with another kind of client names the agent and the client."""
    team = RoundRobinGroupChat([agent("ann", babbling(engine)), agent("bob", ReplayChatCompletionClient(["Hello"]))])
    with (
        weft.Program() as program,
        pytest.raises(TeamBindingError, match="'bob' calls its model through Replay") as caught,
    ):
        bind_team(team, program)
    assert caught.value.agent == "bob"
    assert client_of(team._participants[0]).binding is None


async def test_nothing_to_bind() -> None:
    """A team without any client is an error."""
    with weft.Program() as program, pytest.raises(TeamBindingError, match="'me' has no WeftChatCompletionClient"):
        bind_team(UserProxyAgent("me"), program)


async def test_a_team_that_has_run_unbound(engine: ScriptedEngine) -> None:
    """A selector keeps the client of its first run, so it must be bound before that run."""
    members: list[Any] = [agent(name, babbling(engine)) for name in ("ann", "bob")]
    team = SelectorGroupChat(members, saying(engine, "ann", "bob"), name="chair", max_turns=1)
    await team.run(task="Talk.")
    with weft.Program() as program, pytest.raises(TeamBindingError, match="'chair' has run before it was bound"):
        bind_team(team, program)
    plain = pair(engine, max_turns=1)
    await plain.run(task="Talk.")
    async with weft.Program() as program:
        await bind_team(plain, program).run(task="Talk.")
    assert labels(program) == ["bob"]


async def test_a_streamed_run(engine: ScriptedEngine) -> None:
    """A bound team streams its messages and then its result."""
    team = pair(engine, max_turns=2)
    async with weft.Program() as program:
        messages = [message async for message in bind_team(team, program).run_stream(task="Talk.")]
    assert [getattr(message, "source", "") for message in messages] == ["user", "ann", "bob", ""]
    assert messages[-1].stop_reason is not None  # type: ignore[union-attr]
