"""`weft.connect` with a live `weft serve`: frameworks, accounts, deadlines, cancellation, the end of programs."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
from autogen_core.models import UserMessage
from background import ROOT
from polling import until
from served import KEY, MAX_CALLS, Served
from tiny_engine import ENDLESS_TOKENS, MAX_MODEL_LEN

import weft
from weft.core.errors import (
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    ProgramEndedError,
    ServerError,
    UnknownModelError,
)
from weft.engine.host.frontend import FrontEnd
from weft.integrations.autogen import WeftChatCompletionClient
from weft.integrations.langchain import ChatWeft

FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT

pytestmark = [pytest.mark.engine, pytest.mark.anyio]


@pytest.fixture
def remote(served: Served) -> Iterator[FrontEnd]:
    """An engine on the server."""
    with weft.connect(served.url, api_key=KEY) as engine:
        yield engine


def request(max_tokens: int = 4, **more: Any) -> dict[str, Any]:
    """A chat request that produces as many tokens as it asks for."""
    return {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": max_tokens, "ignore_eos": True, **more}


async def ask(engine: FrontEnd, program: weft.Program, max_tokens: int = 4, **more: Any) -> dict[str, Any]:
    return await engine.chat(request(max_tokens, **more), program, program.reports.start_call(object()))


def listed(served: Served, program: weft.Program) -> dict[str, Any] | None:
    """The program as the server shows it; None: it is not open there."""
    rows = served.client.get("/weft/programs").json()["programs"]
    return next((row for row in rows if row["program_id"] == program.program_id), None)


async def test_an_answer_brings_its_account(remote: FrontEnd, served: Served) -> None:
    """Here as there the table has the call's service and tokens, under the same program."""
    with weft.Program("trip") as program:
        answer = await ask(remote, program)
        row = program.row
        there = listed(served, program)
    assert row is not None
    assert there is not None
    assert answer["weft"]["program_id"] == program.program_id
    assert answer["weft"]["output_tokens"] == answer["usage"]["completion_tokens"] == 4
    assert row.account.service_s == answer["weft"]["service_s"] > 0
    assert there["service_s"] == row.account.service_s
    assert (there["name"], there["calls"]) == ("trip", 1)
    remote.table.check_integrity()


async def test_a_stream_brings_its_account_with_the_last_text(remote: FrontEnd) -> None:
    """The chunks come one by one, and the one that ends the answer has ids and account."""
    with weft.Program("trip") as program:
        identity = program.reports.start_call(object())
        chunks = [chunk async for chunk in remote.chat_stream(request(8), program, identity)]
        row = program.row
    (last,) = [chunk for chunk in chunks if "weft" in chunk]
    assert len(chunks) > 1
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["weft"]["call_id"] == identity.call_id
    assert row is not None
    assert row.account.service_s == last["weft"]["service_s"] > 0


async def test_code_without_an_event_loop_is_served(remote: FrontEnd) -> None:
    """Whole answers and streams have the same text."""
    with weft.Program("trip") as program:
        whole = remote.chat_sync(request(6, temperature=0), program, program.reports.start_call(object()))
        chunks = list(remote.chat_stream_sync(request(6, temperature=0), program, program.reports.start_call(object())))
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"]


async def test_a_langchain_program_is_one_program_until_it_returns(remote: FrontEnd, served: Served) -> None:
    """`@weft.program` and `ChatWeft` need no change; the server hears of the end."""
    model = ChatWeft(engine=remote, max_tokens=4)
    seen: list[Any] = []

    @weft.program(name="langchain")
    async def run(program: weft.Program) -> str:
        for question in ("Where?", "When?"):
            answer = await model.ainvoke(question, config=program.config())
        seen.append((program, listed(served, program)))
        return str(answer.response_metadata["weft"][0]["program_id"])

    program_id = await run()
    ((program, there),) = seen
    assert program_id == program.program_id
    assert (there["name"], there["calls"], there["calls_in_flight"]) == ("langchain", 2, 0)
    assert (program.row.state, program.row.calls) == ("finished", 2)
    await until(lambda: listed(served, program) is None)


async def test_autogens_client_is_served(remote: FrontEnd, served: Served) -> None:
    """It counts the prompt's tokens with the server's template, and its calls have the program's name."""
    client = WeftChatCompletionClient(remote, max_tokens=4)
    message = UserMessage(content="Hello", source="user")
    with weft.Program("autogen") as program:
        result = await client.bind(program, agent="planner").create([message])
        there = listed(served, program)
    assert there is not None
    assert there["calls"] == 1
    assert result.usage.prompt_tokens == client.count_tokens([message])
    assert client.remaining_tokens([message]) == remote.max_model_len - result.usage.prompt_tokens


async def test_openais_client_is_served(remote: FrontEnd, served: Served) -> None:
    """Our client of OpenAI's SDK takes the engine as any other."""
    with weft.Program("openai") as program:
        client = weft.openai_client(remote, program)
        messages: Any = request()["messages"]
        answer = await client.chat.completions.create(model=remote.model, messages=messages, max_tokens=4)
        assert answer.model_extra is not None
        assert answer.model_extra["weft"]["program_id"] == program.program_id
        assert listed(served, program) is not None


async def test_a_text_has_the_servers_tokens(remote: FrontEnd, served: Served) -> None:
    """They are those of the server's tokenizer, without special ones."""
    expected = served.client.post("/tokenize", json={"prompt": "Hello there", "add_special_tokens": False}).json()
    assert remote.tokenize("Hello there") == expected["tokens"]
    assert remote.models == ["tiny"]
    assert remote.max_model_len == MAX_MODEL_LEN


async def test_threads_and_parents_are_the_clients(served: Served) -> None:
    """The server takes over what the client has inferred, and names it in the answer."""
    ids = {"program_id": weft.Program("given").program_id, "thread_id": "left", "call_id": "call-1"}
    first = served.client.post("/v1/chat/completions", json={**request(), "model": "tiny", "vllm_xargs": ids})
    ids |= {"call_id": "call-2", "thread_id": "right", "parents": ["call-1"]}
    second = served.client.post("/v1/chat/completions", json={**request(), "model": "tiny", "vllm_xargs": ids})
    again = served.client.post("/v1/chat/completions", json={**request(), "model": "tiny", "vllm_xargs": ids})
    assert first.json()["weft"]["parents"] == []
    report = second.json()["weft"]
    assert {name: report[name] for name in ids} == ids
    assert again.json()["weft"]["call_id"] != "call-2"  # ids are used once


async def test_the_server_shows_the_tool_that_a_program_waits_for(remote: FrontEnd, served: Served) -> None:
    """Under its own name, until it returns."""

    def shown() -> dict[str, Any]:
        programs = served.client.get("/weft/state").json()["programs"]
        found: dict[str, Any] = next(each for each in programs if each["program_id"] == program.program_id)
        return found

    with weft.Program("tools") as program:
        await ask(remote, program)
        program.reports.tool_began("call-1", "search")
        await until(lambda: shown()["tools"] == ["search"])
        program.reports.tools_ended(["call-1"])
        await until(lambda: shown()["tools"] == [])


async def test_a_deadline_ends_a_call_here_and_there(remote: FrontEnd, served: Served) -> None:
    """The call's time-out and the program's, whichever is first, raise a `DeadlineError`."""
    with weft.Program("late") as program:
        await ask(remote, program)
        with pytest.raises(DeadlineError):
            await ask(remote, program, ENDLESS_TOKENS, timeout_s=0.05)
        await until(lambda: (listed(served, program) or {})["calls_in_flight"] == 0)
    with weft.Program("later", timeout_s=0.2) as program, pytest.raises(DeadlineError):
        await ask(remote, program, ENDLESS_TOKENS)


async def test_cancelling_aborts_the_call_on_the_server(remote: FrontEnd, served: Served) -> None:
    """The connection is closed, so the server gives the call's place to others; the program goes on."""
    with weft.Program("cancelled") as program:
        call = asyncio.create_task(ask(remote, program, ENDLESS_TOKENS))
        await until(lambda: (listed(served, program) or {}).get("calls_in_flight") == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: (listed(served, program) or {})["calls_in_flight"] == 0)
        await ask(remote, program)


async def test_a_stream_that_is_left_is_aborted(remote: FrontEnd, served: Served) -> None:
    """Closing it is enough."""
    with weft.Program("left") as program:
        stream = remote.chat_stream(request(ENDLESS_TOKENS), program, program.reports.start_call(object()))
        await anext(stream)
        await stream.aclose()
        await until(lambda: (listed(served, program) or {})["calls_in_flight"] == 0)


async def test_too_many_calls_are_told_when_to_retry(remote: FrontEnd, served: Served) -> None:
    """The server's 429 is an `OverloadedError`. The calls that were admitted go on, and when one has left, the next
    has its answer."""
    with weft.Program("many") as program:
        calls = [asyncio.create_task(ask(remote, program, ENDLESS_TOKENS)) for _ in range(MAX_CALLS + 2)]
        await until(lambda: sum(map(asyncio.Task.done, calls)) == 2)
        refused = [each.exception() for each in calls if each.done()]
        assert all(isinstance(error, OverloadedError) and error.retry_after_s > 0 for error in refused)
        await until(lambda: (listed(served, program) or {}).get("calls_in_flight") == MAX_CALLS)
        assert sum(map(asyncio.Task.done, calls)) == 2
        for each in calls:
            each.cancel()
        await asyncio.wait(calls)
        await until(lambda: (listed(served, program) or {})["calls_in_flight"] == 0)
        await ask(remote, program)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model": "another"}, UnknownModelError),
        ({"messages": [{"role": "user", "content": "word " * MAX_MODEL_LEN}]}, ContextLengthError),
        ({"temperature": -3}, InvalidRequestError),
    ],
)
async def test_the_servers_errors_are_wefts(remote: FrontEnd, fields: dict[str, Any], error: type[Exception]) -> None:
    """A call that is refused there raises what it would raise in process."""
    with weft.Program("wrong") as program, pytest.raises(error):
        await ask(remote, program, **fields)


async def test_a_program_that_was_ended_on_the_server_is_told(remote: FrontEnd, served: Served) -> None:
    """Its call in flight fails as that of an ended program."""
    with weft.Program("ended") as program:
        call = asyncio.create_task(ask(remote, program, ENDLESS_TOKENS))
        await until(lambda: (listed(served, program) or {}).get("calls_in_flight") == 1)
        assert served.client.delete(f"/weft/programs/{program.program_id}").status_code == 204
        with pytest.raises(ProgramEndedError) as caught:
            await call
    assert caught.value.program_id == program.program_id


async def test_closing_ends_the_programs_that_are_open(served: Served) -> None:
    """Nothing of a client is left on the server when it closes its connection."""
    with weft.connect(f"{served.url}/v1", api_key=KEY) as engine:
        program = weft.Program("open")
        await ask(engine, program)
    assert listed(served, program) is None
    program.end()


async def test_the_snippets_of_the_page_run(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of docs/how-to/connect.md, on this server, one after another."""
    names: dict[str, Any] = {}
    page = (ROOT / "docs" / "how-to" / "connect.md").read_text()
    for source in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        code = compile(source.replace("http://localhost:8000", served.url), "connect.md", "exec", FLAGS)
        result = eval(code, names)  # noqa: S307  the documents' own code
        if inspect.iscoroutine(result):
            await result
    assert "cannot be reached" in capsys.readouterr().out
    assert not names["engine"].is_alive


async def test_a_wrong_key_is_refused_at_once(served: Served) -> None:
    """Before any call."""
    with pytest.raises(ServerError, match="API key") as caught:
        weft.connect(served.url, api_key="wrong")
    assert caught.value.status == 401
