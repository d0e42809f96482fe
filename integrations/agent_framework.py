"""Microsoft Agent Framework on a Weft engine, in this process.

::

    provider.add_span_processor(WeftSpanProcessor())  # of weft.integrations.otel
    agent = Agent(WeftChatClient(engine), middleware=[ProgramMiddleware()])
"""

# ruff: noqa: E402
from __future__ import annotations

from weft.integrations import require_packages

require_packages("weft.integrations.agent_framework", "agent-framework-core", "agent-framework-openai")

import weakref
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ClassVar

from agent_framework import AgentContext, AgentMiddleware
from agent_framework.openai import OpenAIChatCompletionClient

from weft.core.process_rows import ProgramState
from weft.core.program import Program
from weft.integrations.otel import openai_client
from weft.integrations.otel.span_runs import attached, enclosing

if TYPE_CHECKING:
    from weft.engine.host.frontend import FrontEnd

__all__ = ["ProgramMiddleware", "WeftChatClient"]


class WeftChatClient(OpenAIChatCompletionClient):
    """A chat client for any number of agents, workflows and programs.

    A call belongs to the program of the `Program.attach` block, or of the `ProgramMiddleware`, around it. The spans of
    the framework say where in the program it is, if the global TracerProvider has a `WeftSpanProcessor`.

    Args:
        engine: The engine on which the calls run.
        model: The model. Default: that of the engine.
        more: As for the framework's `OpenAIChatCompletionClient`.

    Raises:
        ArgumentTypeError: `engine` is no engine.
    """

    OTEL_PROVIDER_NAME: ClassVar[str] = "vllm"

    def __init__(self, engine: FrontEnd, model: str | None = None, **more: Any) -> None:
        super().__init__(model=model or engine.model, async_client=openai_client(engine), **more)


class ProgramMiddleware(AgentMiddleware):
    """Makes each run of an agent a program, unless the run is inside a program. It has the agent's name.

    The session of the run is that of the program. A stream ends its program when it is read to its end, closed or
    dropped.
    """

    async def process(self, context: AgentContext, call_next: Callable[[], Awaitable[None]]) -> None:
        """Run the agent."""
        if enclosing() is not None or attached() is not None:
            await call_next()
            return
        session = context.session.session_id if context.session is not None else None
        program = Program(context.agent.name or "agent", session_id=session)
        try:
            with program.attach():
                await call_next()
        except BaseException as error:
            program.reports.end_with(error)
            raise
        stream = context.result
        if not context.stream or stream is None:
            program.end()
            return
        weakref.finalize(stream, program.end, ProgramState.CANCELLED)
        # The framework has no public name for the error that its hooks see.
        stream.with_cleanup_hook(lambda: program.reports.end_with(stream._stream_error))  # noqa: SLF001
