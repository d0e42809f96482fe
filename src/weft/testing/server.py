"""`weft serve` on a thread of this process, with a script in place of the model."""

from __future__ import annotations

from concurrent.futures import wait
from contextlib import ExitStack
from pathlib import Path
from socket import create_server
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, Self

from weft.core.ids import CallId
from weft.core.process_rows import CallIdentity, ProgramRow
from weft.core.program.graph import ProgramGraph
from weft.core.program.observer import ProgramObserver
from weft.core.testing.script import Replies, Script, ScriptedCall

if TYPE_CHECKING:
    from weft.engine.multi import AsyncMultiLLMEngine

_LAST_ANSWERS_S: Final = 5.0  # for the errors of calls that were aborted at the end


class _Identities(ProgramObserver):
    """Notes the ids of calls."""

    def __init__(self) -> None:
        self.of: dict[CallId, CallIdentity] = {}

    def call_arrived(self, identity: CallIdentity, graph: ProgramGraph, now_s: float) -> None:
        self.of[identity.call_id] = identity


class ScriptedServer:
    """A server of agents without a model: the HTTP application of `weft serve`, which is vLLM's, with the routes of
    OpenAI and Anthropic, streams, programs and the page. Only the answers are yours. It needs vLLM, starts no process,
    and takes the seconds that vLLM's import takes.

    ::

        with ScriptedServer(["Paris", Reply(tool_calls=[("weather", {"city": "Paris"})])]) as server:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")

    The model is called `scripted`.

    Args:
        replies: As for `ScriptedEngine`. A function gets `messages` and `tools` in OpenAI's chat format, whichever API
            the request came by. `weft.testing.read_script` makes one from a file.
        arguments: More options of `vllm serve`, such as `"--served-model-name", "gpt-5"`.

    Attributes:
        url: The server's address, without `/v1`.
        calls: The calls that have arrived, in order.
        engine: The engine, with its process table.

    Raises:
        EngineStartError: An argument makes no sense.
    """

    url: str
    engine: AsyncMultiLLMEngine

    def __init__(self, replies: Replies, *arguments: str) -> None:
        self._script = Script(replies)
        self._identities = _Identities()
        self._arguments = arguments
        self._open = ExitStack()

    @property
    def calls(self) -> list[ScriptedCall]:
        """The calls that have arrived, in order."""
        known = self._identities.of  # threads and parents do not travel to replicas, and the script has none
        return [
            call._replace(thread_id=known[call.call_id].thread_id, parents=known[call.call_id].parents)
            for call in self._script.calls
        ]

    @property
    def programs(self) -> list[ProgramRow]:
        """The rows of all programs, ended ones first, each in the order of their starts."""
        return [*self.engine.table.ended(), *self.engine.table]

    def __enter__(self) -> Self:
        from weft.engine.multi import AsyncMultiLLMEngine, ServedModel
        from weft.engine.serve.keys import make_key_ring
        from weft.engine.serve.options import parse_options
        from weft.engine.serve.script_file import SCRIPTED_NAME, scripted_arguments
        from weft.engine.serve.server import make_server

        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="weft-scripted-")))
            quiet = ("--disable-uvicorn-access-log", "--uvicorn-log-level", "warning")
            options, engine_args = parse_options([*scripted_arguments(folder), *quiet, *self._arguments])
            names = options.served_model_name or [SCRIPTED_NAME]
            self.engine = stack.enter_context(
                AsyncMultiLLMEngine(
                    models=[ServedModel(options.model, 1, names[0])], backend=self._script, swap=None, **engine_args
                )
            )
            self.engine.observe(self._identities)
            bound = stack.enter_context(create_server(("127.0.0.1", 0)))
            served, server = self.engine.submit(make_server(self.engine, options, make_key_ring([], None))).result()
            running = self.engine.submit(server.serve(sockets=[bound]))

            async def stop() -> None:
                served.stop()
                server.should_exit = True

            def end() -> None:
                self.engine.submit(stop()).result()
                wait([running], _LAST_ANSWERS_S)
                server.force_exit = True
                wait([running])

            stack.callback(end)
            self.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._open.__exit__(*error)
