"""Test your own agent code without a model, without vLLM and without waiting.

`RecordingBackend` takes the place of an engine: it records programs and calls, and keeps a real process table.
`FakeClock` is a clock that moves only when the test advances it. An agent whose model is an argument can be tested like
this::

    import asyncio

    import weft
    from weft.testing import FakeClock, RecordingBackend


    @weft.program(name="research", session_id="session-1")
    async def research(topics, ask, program: weft.Program):
        async def find(topic, branch):
            async with branch:
                await ask(f"Find facts about {topic}.", branch)

        await asyncio.gather(*(find(topic, program.branch()) for topic in topics))
        return await ask("Write the report.", program)


    def test_the_report_comes_after_all_facts():
        clock = FakeClock()
        backend = RecordingBackend(clock)

        async def ask(prompt, program):  # in place of the model: each answer takes two seconds
            clock.advance(2.0)
            backend.call(program, service_s=2.0)
            return "an answer"

        assert asyncio.run(research(["ships", "fog"], ask)) == "an answer"
        (program,) = backend.started
        assert (program.name, program.session_id) == ("research", "session-1")
        (row,) = backend.table.ended()
        assert (row.state, row.calls, row.account.service_s) == ("finished", 3, 6.0)
        ships, fog, report = backend.calls
        assert ships.parents == fog.parents == ()
        assert report.parents == (ships.call_id, fog.call_id)
"""

from weft.core.testing import FakeClock, RecordingBackend
from weft.core.testing.script import Reply, ScriptedCall
from weft.engine.serve.script_file import read_script
from weft.testing.scripted import ScriptedEngine
from weft.testing.server import ScriptedServer

__all__ = ["FakeClock", "RecordingBackend", "Reply", "ScriptedCall", "ScriptedEngine", "ScriptedServer", "read_script"]
