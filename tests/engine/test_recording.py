"""Recording on real vLLM: the trace of agents is read back and simulated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from background import CommandResult
from recorded_host import recorded_host

import weft
from weft.core.errors import TraceError
from weft.core.sim import SimSettings, TraceProgram, simulate
from weft.core.trace.format import read
from weft.core.trace.recorder import Recorder
from weft.integrations.langchain import ChatWeft

pytestmark = [pytest.mark.engine, pytest.mark.anyio]

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"far": {"type": "boolean"}},
            "required": ["far"],
            "additionalProperties": False,
        },
    },
}


Recorded = Callable[[], list[TraceProgram]]


@pytest.fixture
def recording(engine: weft.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Reads what the shared engine has recorded during a test."""
    path = tmp_path / "runs.jsonl"
    recorder = Recorder(path)
    observers = engine.programs.observers
    monkeypatch.setattr(observers, "_told", dict(observers._told))  # so that the recorder hears of this test only
    engine.observe(recorder)
    monkeypatch.setattr(engine.call_path, "_recorder", recorder)

    def recorded() -> list[TraceProgram]:
        assert recorder.flush()
        return read(path)

    return recorded


async def test_a_langchain_program_is_recorded_and_simulated(engine: weft.Engine, recording: Recorded) -> None:
    """The recorded calls have the parents and the tokens of the program's graph, and share the common beginnings of
    their prompts. The calls are whole or streamed, one after another or parallel."""
    model = ChatWeft(engine=engine, temperature=0, max_tokens=12, model_kwargs={"ignore_eos": True})
    handles: list[weft.Program] = []

    @weft.program(tenant="acme")
    async def agent(question: str, program: weft.Program) -> None:
        handles.append(program)
        history: list[Any] = [("system", "You count ships in the night. " * 5), ("user", question)]
        first = await model.ainvoke(history, config=program.config())
        history += [first, ("user", "Go on.")]
        pieces = [piece async for piece in model.astream(history, config=program.config())]
        history += [("assistant", "".join(piece.text for piece in pieces)), ("user", "Again.")]
        await model.abatch([history, history], config=program.config())

    await agent("How many?")
    await agent("How many were there then?")
    recorded = recording()
    assert [(each.program, each.name, each.tenant) for each in recorded] == [
        (handle.program_id, "agent", "acme") for handle in handles
    ]
    assert 0 == recorded[0].arrival_s < recorded[1].arrival_s
    for trace, handle in zip(recorded, handles, strict=True):
        assert len(trace.calls) == 4
        for call, node in zip(trace.calls, handle.graph.calls, strict=True):
            assert (call.call_id, call.parents) == (node.call_id, tuple(edge.parent for edge in node.parents))
            assert (call.prompt_tokens, call.output_tokens) == (node.account.prompt_tokens, 12)
        one, two, three, four = trace.calls
        assert (two.parents, three.parents, four.parents) == ((one.call_id,), (two.call_id,), (two.call_id,))
        # The text of an answer may be other tokens in the next prompt than those that were generated.
        for parent, call in ((one, two), (two, three), (two, four)):
            assert parent.prompt_tokens <= call.shared_prefix_tokens <= parent.prompt_tokens + 12
    assert recorded[0].calls[0].shared_prefix_tokens == 0  # there is no earlier program
    assert 40 < recorded[1].calls[0].shared_prefix_tokens < recorded[1].calls[0].prompt_tokens
    result = simulate(recorded, SimSettings())
    assert {program: row.calls for program, row in result.programs.items()} == {each.program: 4 for each in recorded}
    assert result.prefix_hit_rate > 0.5


@pytest.mark.parametrize("wants_ids", [False, True])
async def test_recording_changes_no_answer(
    wants_ids: bool, engine: weft.Engine, recording: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer, whole or streamed, has token ids only if the request asks for them."""
    request = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 80,
        "temperature": 0,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        **({"return_token_ids": True} if wants_ids else {}),
    }

    async def ask() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        with weft.Program("asks") as program:
            whole = await engine.chat(request, program, program.reports.start_call("whole"))
            stream = engine.chat_stream(request, program, program.reports.start_call("stream"))
            return whole, [chunk async for chunk in stream]

    def arguments(chunks: list[dict[str, Any]]) -> str:
        calls = (call for c in chunks for choice in c["choices"] for call in choice["delta"].get("tool_calls") or [])
        return "".join(call["function"].get("arguments") or "" for call in calls)

    def ids(choice: dict[str, Any]) -> list[int]:
        return choice.get("token_ids") or []

    whole, chunks = await ask()
    monkeypatch.setattr(engine.call_path, "_recorder", None)
    monkeypatch.setattr(engine.programs.observers, "_told", {})
    plain, plain_chunks = await ask()
    tool_call, plain_tool_call = (
        answer["choices"][0]["message"]["tool_calls"][0]["function"] for answer in (whole, plain)
    )
    assert tool_call == plain_tool_call
    assert arguments(chunks) == arguments(plain_chunks)
    assert json.loads(arguments(chunks)) == json.loads(tool_call["arguments"])
    assert whole.keys() == plain.keys()
    assert whole["choices"][0].keys() == plain["choices"][0].keys()
    assert (len(ids(whole["choices"][0])) > 0) is wants_ids
    assert whole.get("prompt_token_ids") == plain.get("prompt_token_ids")
    streamed = [token for chunk in chunks for choice in chunk["choices"] for token in ids(choice)]
    assert streamed == ids(whole["choices"][0])
    assert wants_ids or not any(choice["delta"] == {} for c in chunks[:-1] for choice in c["choices"])
    (recorded,) = recording()
    assert len(recorded.calls) == 2


def test_wrong_files_are_errors_before_anything_starts(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both engines refuse a file that cannot be recorded into, from `record=` or from WEFT_RECORD. `record=` takes
    precedence."""
    for kind in (weft.Engine, weft.AsyncMultiLLMEngine):
        with pytest.raises(TraceError, match="is not a file"):
            kind(tiny_model, record=tmp_path)
    monkeypatch.setenv("WEFT_RECORD", str(tmp_path / "no" / "trace.jsonl"))
    for kind in (weft.Engine, weft.AsyncMultiLLMEngine):
        with pytest.raises(TraceError, match=r"no/trace\.jsonl cannot be recorded into"):
            kind(tiny_model)
        with pytest.raises(TraceError, match="is not a file"):
            kind(tiny_model, record=tmp_path)


@recorded_host
def test_weft_record(command_result: CommandResult) -> None:
    """`weft record` records a script that says nothing of recording. Programs that are open when the engine shuts down
    are recorded once."""
    assert command_result.exit_code == 9, command_result.stderr
    recorded = read(command_result.folder / "runs.jsonl")
    first_calls = [(program.name, program.calls[0].output_tokens) for program in recorded]
    assert first_calls == [("chat", 9), ("chat", 9), ("late", 9), ("open", 4), ("unfinished", 5)]
    arrivals_s = [program.arrival_s for program in recorded]
    assert 0 == arrivals_s[0] < arrivals_s[1] < arrivals_s[2] < arrivals_s[3] < arrivals_s[4]
    assert [len(program.calls) for program in recorded[:-1]] == [1] * 4
    assert simulate(recorded, SimSettings()).programs[recorded[0].program].calls == 1
