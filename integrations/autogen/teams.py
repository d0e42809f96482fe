"""Teams of AutoGen that are bound to a program as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, MutableMapping, MutableSequence
from typing import Any, Final, NamedTuple, TypeVar

from autogen_agentchat.base import ChatAgent, Team
from autogen_agentchat.teams import BaseGroupChat
from autogen_core import CancellationToken, ComponentBase
from autogen_core.models import ChatCompletionClient

from weft.core.errors import ProgramEndedError, ProgramError
from weft.core.process_table import ProgramState
from weft.core.program import Program
from weft.integrations.autogen.calls import Binding
from weft.integrations.autogen.client import WeftChatCompletionClient

_STOP_S: Final = 1.0  # for a team to stop in, when its calls have been aborted

TeamT = TypeVar("TeamT", bound=ChatAgent | Team)


class TeamBindingError(ProgramError):
    """`bind_team` cannot bind an agent, and has bound nothing of its team.

    Attributes:
        agent: the agent's name, or the team's.
    """

    def __init__(self, agent: str, reason: str) -> None:
        super().__init__(f"bind_team: {agent!r} {reason}")
        self.agent = agent


def bind_team(team: TeamT, program: Program) -> TeamT:
    """Bind every model client of a team, or of an agent, to a program, in place; calls carry their agent's name.

    Covers agents, nested teams, agents and teams that are tools, and the clients that teams call themselves (a
    selector's, an orchestrator's): all that is an attribute of an AutoGen component, or in a list or dictionary that is
    one. A client that a tool's function or an object of your own holds is not found: bind that one yourself.

    Cancelling the task that runs the team, or closing its stream, aborts the team's calls, where AutoGen by itself lets
    the team go on to its end. When the program has ended, the team can be bound to another for its next run.

    Args:
        team: made with `WeftChatCompletionClient`s, which may be bound or not.
        program: a program, or a branch of one.

    Returns:
        The same team.

    Raises:
        TeamBindingError: an agent's client is not Weft's, an agent belongs to another program that still runs, a team
            has run unbound already, or there is no client at all.
        ProgramEndedError: the program has ended.
    """
    if not _runs(program):
        raise ProgramEndedError(program.program_id, program.name)
    places = list(_places(team, team.name, set()))
    if not places:
        raise TeamBindingError(team.name, "has no WeftChatCompletionClient to bind.")
    for place in places:
        _check(place, program)
    for place in places:
        binding = place.client.binding
        if binding is not None and binding.by_team:
            binding.program = program  # in place, since the team's manager keeps the client of its first run
        else:
            agent = (binding.agent if binding is not None else None) or place.owner
            bound = place.client.bind(program)
            bound.binding = Binding(program, agent, by_team=True)
            place.container[place.key] = bound
    if isinstance(team, BaseGroupChat):
        _stop_with_caller(team)
    return team


class _Place(NamedTuple):
    """Where a client is."""

    client: WeftChatCompletionClient
    container: MutableMapping[Any, Any] | MutableSequence[Any]
    key: Any
    part: Any  # the component that it is in
    owner: str  # the agent or team that this is a part of


def _places(part: Any, owner: str, seen: set[int]) -> Iterator[_Place]:
    """The clients in a component, and in the components that it is made of."""
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, ChatAgent | Team):
        owner = part.name
    attributes = getattr(part, "__dict__", {})
    for container in (attributes, *(value for value in attributes.values() if isinstance(value, list | dict))):
        for key, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
            if isinstance(value, WeftChatCompletionClient):
                yield _Place(value, container, key, part, owner)
            elif isinstance(value, ChatCompletionClient) and id(value) not in seen:
                inside = list(_places(value, owner, seen))  # one that wraps another, as a cache does
                if not inside:
                    raise TeamBindingError(
                        owner,
                        f"calls its model through {type(value).__name__}. A program runs on one engine: give each "
                        "agent a WeftChatCompletionClient on it.",
                    )
                yield from inside
            elif isinstance(value, ComponentBase):
                yield from _places(value, owner, seen)


def _check(place: _Place, program: Program) -> None:
    binding = place.client.binding
    if binding is not None and binding.program.program_id != program.program_id and _runs(binding.program):
        raise TeamBindingError(
            place.owner,
            f"belongs to program {binding.program.name!r} ({binding.program.program_id}), which still runs. Make a "
            "team for each program, or end that program first.",
        )
    by_team = binding is not None and binding.by_team
    if isinstance(place.part, BaseGroupChat) and place.part._initialized and not by_team:  # noqa: SLF001
        raise TeamBindingError(
            place.owner,
            "has run before it was bound, and its manager keeps the client of that run. Bind a team before its first "
            "run, or make a new one.",
        )


def _runs(program: Program) -> bool:
    return program.state in (ProgramState.IDLE, ProgramState.ACTIVE)


def _stop_with_caller(team: BaseGroupChat) -> None:
    """Have the team's runs cancelled with their caller: their calls are in the runtime's tasks, not in the caller's."""
    if "run_stream" in vars(team):
        return
    run_stream = team.run_stream

    async def stopping(
        *, cancellation_token: CancellationToken | None = None, **arguments: Any
    ) -> AsyncGenerator[Any, None]:
        token = CancellationToken()
        if cancellation_token is not None:
            cancellation_token.add_callback(token.cancel)
        messages: Any = run_stream(cancellation_token=token, **arguments)
        try:
            while True:
                step = asyncio.ensure_future(anext(messages, None))
                if (message := await asyncio.shield(step)) is None:
                    return
                yield message
        except asyncio.CancelledError:
            token.cancel()
            await _over(step)
            raise
        except GeneratorExit:
            token.cancel()
            await _over(asyncio.ensure_future(messages.aclose()))
            raise

    team.run_stream = stopping  # type: ignore[method-assign]  # `run` goes through it too


async def _over(task: asyncio.Future[Any]) -> None:
    """Wait for a cancelled team to stop. What it ends with is the cancellation of its runtime, and nobody's.

    An agent of AutoGen 0.7.5 whose tool is cancelled waits for it for ever, and with it the team: such a one is left.
    """
    await asyncio.wait({task}, timeout=_STOP_S)
    task.cancel()
    await asyncio.wait({task}, timeout=_STOP_S)
    _ = task.done() and (task.cancelled() or task.exception())
