"""`bind_team`: binds all model clients of an AutoGen team to a program."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, MutableMapping, MutableSequence
from typing import Any, Final, NamedTuple, TypeVar

from autogen_agentchat.base import ChatAgent, Team
from autogen_agentchat.messages import ToolCallExecutionEvent
from autogen_agentchat.teams import BaseGroupChat
from autogen_core import CancellationToken, ComponentBase
from autogen_core.models import ChatCompletionClient

from weft.core.errors import ArgumentTypeError, ProgramEndedError, ProgramError
from weft.core.program import Program, passed_on
from weft.integrations.arguments import check_program
from weft.integrations.autogen.client import WeftChatCompletionClient
from weft.integrations.autogen.client_calls import Binding

_STOP_S: Final = 1.0  # the time that a team has to stop after its calls have been aborted

TeamT = TypeVar("TeamT", bound=ChatAgent | Team)


class TeamBindingError(ProgramError):
    """`bind_team` cannot bind an agent, and has bound no client of its team.

    Attributes:
        agent: The name of the agent or of the team.
    """

    def __init__(self, agent: str, reason: str) -> None:
        super().__init__(f"bind_team: {agent!r} {reason}")
        self.agent = agent


def bind_team(team: TeamT, program: Program) -> TeamT:
    """Bind every model client of a team or an agent to a program, in place. Calls carry the name of their agent.

    Binds the clients of agents, of nested teams, of agents and teams that are tools, and of teams themselves (the
    client of a selector or an orchestrator). A client is found if it is an attribute of an AutoGen component, or in a
    list or dictionary that is such an attribute. A client inside a tool's function or inside an object of your own is
    not found; bind that client yourself.

    Cancelling the task that runs the team, or closing the team's stream, aborts the team's calls. AutoGen by itself
    would let the team run to its end. After the end of the program, the team can be bound to another one for its next
    run.

    Args:
        team: A team or agent with `WeftChatCompletionClient`s, bound or unbound.
        program: A program, or a branch of one.

    Returns:
        The same team.

    Raises:
        TeamBindingError: An agent has another kind of client, an agent belongs to another program that still runs, a
            team has run unbound before, or there is no client at all.
        ProgramEndedError: The program has ended.
        ArgumentTypeError: `team` is neither an agent nor a team, or `program` is no program.
    """
    check_program("bind_team", program)
    if not isinstance(team, ChatAgent | Team):
        raise ArgumentTypeError("bind_team", "team", team, "an AutoGen agent or team")
    if program.state.has_ended:
        raise ProgramEndedError(program.program_id, program.name)
    slots = list(_client_slots(team, team.name, set()))
    if not slots:
        raise TeamBindingError(team.name, "has no WeftChatCompletionClient to bind.")
    for slot in slots:
        _check_slot(slot, program)
    program = passed_on(program)
    for slot in slots:
        binding = slot.client.binding
        if binding is not None and binding.by_team:
            binding.program = program  # changed in place, since the team's manager keeps the client of its first run
        else:
            agent = (binding.agent if binding is not None else None) or slot.owner
            bound = slot.client.bind(program)
            bound.binding = Binding(program, agent, by_team=True)
            slot.container[slot.key] = bound
    if isinstance(team, BaseGroupChat):
        first = slots[0].container[slots[0].key].binding
        _follow(team, first)
    return team


class _ClientSlot(NamedTuple):
    """An attribute or an element of a container that holds a client."""

    client: WeftChatCompletionClient
    container: MutableMapping[Any, Any] | MutableSequence[Any]
    key: Any
    component: Any  # the component that has the attribute or the container
    owner: str  # the name of the agent or team to which the component belongs


def _client_slots(component: Any, owner: str, visited: set[int]) -> Iterator[_ClientSlot]:
    """Find the clients of a component and of the components inside it."""
    if id(component) in visited:
        return
    visited.add(id(component))
    if isinstance(component, ChatAgent | Team):
        owner = component.name
    attributes = getattr(component, "__dict__", {})
    for container in (attributes, *(value for value in attributes.values() if isinstance(value, list | dict))):
        for key, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
            if isinstance(value, WeftChatCompletionClient):
                yield _ClientSlot(value, container, key, component, owner)
            elif isinstance(value, ChatCompletionClient) and id(value) not in visited:
                inside = list(_client_slots(value, owner, visited))  # A cache, for example, wraps another client.
                if not inside:
                    raise TeamBindingError(
                        owner,
                        f"calls its model through {type(value).__name__}. A program runs on one engine: give each "
                        "agent a WeftChatCompletionClient on it.",
                    )
                yield from inside
            elif isinstance(value, ComponentBase):
                yield from _client_slots(value, owner, visited)


def _check_slot(slot: _ClientSlot, program: Program) -> None:
    binding = slot.client.binding
    if binding is not None and binding.program.program_id != program.program_id and not binding.program.state.has_ended:
        raise TeamBindingError(
            slot.owner,
            f"belongs to program {binding.program.name!r} ({binding.program.program_id}), which still runs. Make a "
            "team for each program, or end that program first.",
        )
    by_team = binding is not None and binding.by_team
    if isinstance(slot.component, BaseGroupChat) and slot.component._initialized and not by_team:  # noqa: SLF001
        raise TeamBindingError(
            slot.owner,
            "has run before it was bound, and its manager keeps the client of that run. Bind a team before its first "
            "run, or make a new team.",
        )


def _follow(team: BaseGroupChat, binding: Binding) -> None:
    """Cancel the team's runs with their caller, and report its tools as they return.

    AutoGen does not cancel them by itself, because the calls run in tasks of the runtime and not in the caller's task.
    A call reports the tools that it begins. No call needs to follow the tools' results.

    Args:
        binding: That of one of its clients. `bind_team` changes its program in place.
    """
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
                if isinstance(message, ToolCallExecutionEvent):
                    binding.program.reports.tools_ended([result.call_id for result in message.content])
                yield message
        except asyncio.CancelledError:
            token.cancel()
            await _wait_for_stop(step)
            raise
        except GeneratorExit:
            token.cancel()
            await _wait_for_stop(asyncio.ensure_future(messages.aclose()))
            raise

    team.run_stream = stopping  # type: ignore[method-assign]  # `run` calls `run_stream`.


async def _wait_for_stop(task: asyncio.Future[Any]) -> None:
    """Wait until a cancelled team has stopped. Its exception is dropped: it is the cancellation of the team's runtime.

    An agent of AutoGen 0.7.5 waits for a cancelled tool for ever, and so does its team. After a while, such a team is
    abandoned.
    """
    await asyncio.wait({task}, timeout=_STOP_S)
    task.cancel()
    await asyncio.wait({task}, timeout=_STOP_S)
    _ = task.done() and (task.cancelled() or task.exception())
