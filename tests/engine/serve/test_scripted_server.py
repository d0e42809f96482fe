"""`weft.testing.ScriptedServer` and `weft serve --scripted`: the real server, whose answers a script gives."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

import weft
from weft.core.errors import CallFailedError, OverloadedError, RetryableCallError
from weft.core.process_rows import ProgramRow
from weft.core.trace.format import read
from weft.engine.http.http_errors import error_code, error_status
from weft.integrations.langchain import ChatWeft
from weft.testing import Reply, ScriptedServer

pytestmark = pytest.mark.engine
pytest_plugins = ["weft.testing.fixtures"]

Servers = Callable[..., ScriptedServer]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "", "parameters": SCHEMA}}
CALL = Reply("Let me look.", [("weather", {"city": "Rome"})], reasoning="Where is it?")


def ask(server: ScriptedServer, messages: list[Any], **more: Any) -> Any:
    """A whole answer, or the list of a stream's chunks."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model="scripted", messages=messages, **more)
        return list(answer) if more.get("stream") else answer


def test_chat_completions_has_texts_reasoning_and_tool_calls(scripted_server: Servers) -> None:
    """vLLM's parsers take them apart, in streams as well."""
    server = scripted_server(lambda _request: CALL)
    user = {"role": "user", "content": "How is the weather?"}
    message = ask(server, [user], tools=[WEATHER]).choices[0].message
    assert message.content.strip() == "Let me look."
    assert message.reasoning == "Where is it?"
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("weather", '{"city": "Rome"}')
    ]
    deltas = [chunk.choices[0].delta for chunk in ask(server, [user], tools=[WEATHER], stream=True)]
    assert "".join(delta.content or "" for delta in deltas).strip() == "Let me look."
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "Where is it?"
    calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
    assert "".join(call.name or "" for call in calls) == "weather"
    assert "".join(call.arguments or "" for call in calls) == '{"city": "Rome"}'


def test_messages_and_responses_have_the_same_answer(scripted_server: Servers) -> None:
    """The script need not know by which API a request came."""
    server = scripted_server(lambda request: CALL if request["tools"] else "Hello.")
    tool: Any = {"name": "weather", "description": "", "input_schema": SCHEMA}
    with (
        anthropic.Anthropic(base_url=server.url, api_key="none") as client,
        client.messages.stream(
            model="scripted", max_tokens=300, messages=[{"role": "user", "content": "Hi"}], tools=[tool]
        ) as stream,
    ):
        blocks = {block.type: block for block in stream.get_final_message().content}
    assert blocks["tool_use"].input == {"city": "Rome"}
    assert blocks["thinking"].thinking == "Where is it?"
    flat: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.responses.create(model="scripted", input="Hi", tools=[flat])
        assert [(each.name, each.arguments) for each in answer.output if each.type == "function_call"] == [
            ("weather", '{"city": "Rome"}')
        ]
        assert client.responses.create(model="scripted", input="Hi").output_text == "Hello."
    assert [call.body["messages"][-1] for call in server.calls] == [{"role": "user", "content": "Hi"}] * 3


def test_programs_threads_and_parents_are_the_real_servers(scripted_server: Servers) -> None:
    """A conversation is one program, and its second call comes after its first one."""
    server = scripted_server(lambda request: f"answer {len(request['messages'])}")
    first = {"role": "user", "content": "A question"}
    answer = {"role": "assistant", "content": ask(server, [first]).choices[0].message.content}
    ask(server, [first, answer, {"role": "user", "content": "And then?"}])
    ask(server, [{"role": "user", "content": "Something else"}])
    one, two, other = server.calls
    assert (one.program_id, one.thread_id) == (two.program_id, two.thread_id)
    assert two.parents == (one.call_id,)
    assert other.program_id != one.program_id
    assert other.thread_id != one.thread_id
    assert [row.calls for row in server.programs] == [2, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_recording_has_the_prefixes_that_turns_share(
    stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second prompt begins with the first one. Without that, `weft advise` would find nothing to reuse."""
    monkeypatch.setenv("WEFT_RECORD", str(tmp_path / "runs.jsonl"))
    user = {"role": "user", "content": "Name a river. " * 20}
    with ScriptedServer(lambda _request: "It is a river in Africa, and a long one.") as server:
        ask(server, [user], stream=stream)
        answer = {"role": "assistant", "content": "It is a river in Africa, and a long one."}
        ask(server, [user, answer, {"role": "user", "content": "And one in Europe?"}], stream=stream)
    ((first, second),) = (program.calls for program in read(tmp_path / "runs.jsonl"))
    assert first.shared_prefix_tokens == 0
    assert first.prompt_tokens - 16 <= second.shared_prefix_tokens <= first.prompt_tokens + first.output_tokens


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_an_sdks_retry_belongs_to_the_call_that_it_left(scripted_server: Servers, api: str) -> None:
    """It says so in a header. The same words of another client are another program's."""
    delays_s = iter([600.0, 0.0, 0.0])
    server = scripted_server(lambda _request: Reply("Hello.", [], next(delays_s)))
    user: Any = {"role": "user", "content": "Hi"}
    if api == "openai":
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=1, timeout=3) as client:
            client.chat.completions.create(model="scripted", messages=[user])
    else:
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=1, timeout=3) as client:
            client.messages.create(model="scripted", max_tokens=300, messages=[user])
    ask(server, [user])
    one, again, other = (call.program_id for call in server.calls)
    assert one == again != other


@pytest.mark.parametrize("api", ["openai", "anthropic"])
@pytest.mark.parametrize("error", [OverloadedError(1, 1, 0.1), RetryableCallError("the engine is paused.")])
def test_an_sdks_retry_of_a_refused_call_belongs_to_its_program(
    scripted_server: Servers, error: Exception, api: str
) -> None:
    """Status 429 or 503, in the first turn, which has nothing else that joins it, and in the second."""
    server = scripted_server([error, "Good day to you.", error, error, "It is warm."])
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    for question in ("How is the weather?", ""):
        if api == "openai":
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
                answer = client.chat.completions.create(model="scripted", messages=messages)
                text = answer.choices[0].message.content
        else:
            with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
                block: Any = client.messages.create(model="scripted", max_tokens=300, messages=messages).content[0]
                text = block.text
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
    assert text == "It is warm."
    assert [row.calls for row in server.programs] == [5]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [OverloadedError(1, 1, 0.1), CallFailedError("the engine failed.")])
def test_a_clients_own_retry_of_a_refused_first_turn_belongs_to_its_program(
    scripted_server: Servers, error: Exception, stream: bool
) -> None:
    """Claude Code's and Continue's do not say that they are retries. A stream has begun when it gets the error."""
    server = scripted_server([error, error, "Good day to you.", "Good day."])
    user = [{"role": "user", "content": "Hi"}]
    for _ in range(2):
        with pytest.raises(openai.APIError):
            ask(server, user, stream=stream)
    for _ in range(2):  # the second one is of somebody else
        ask(server, user)
    assert [row.calls for row in server.programs] == [3, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_program_whose_client_left_in_mid_answer_is_cancelled(stream: bool) -> None:
    """With a stream or without: vLLM writes an answer to the connection that is closed."""
    body = {"model": "scripted", "messages": [{"role": "user", "content": "Talk."}], "stream": stream}
    with ScriptedServer(lambda _request: Reply("The keeper counts the ships. " * 400, token_s=1.0)) as server:
        address = httpx.URL(server.url)
        with socket.create_connection((address.host, address.port or 0)) as client:
            sent = json.dumps(body).encode()
            kind = "Content-Type: application/json\r\n"
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n{kind}Content-Length: {len(sent)}\r\n\r\n"
            client.sendall(head.encode() + sent)
            while not server.calls:
                time.sleep(0.01)
        while any(row.in_flight for row in server.programs):
            time.sleep(0.01)
    assert [str(row.state) for row in server.programs] == ["cancelled"]


def test_an_error_of_the_script_has_the_servers_form(scripted_server: Servers) -> None:
    """The client sees what an overloaded server, or an engine that fails in mid-answer, would send."""
    server = scripted_server([OverloadedError(1, 1, 0.5), Reply("It is", error=CallFailedError("the engine failed."))])
    user = [{"role": "user", "content": "Hi"}]
    with pytest.raises(openai.RateLimitError) as refused:
        ask(server, user)
    assert refused.value.response.headers["retry-after-ms"] == "500"
    seen = []
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        stream = client.chat.completions.create(model="scripted", messages=user, stream=True)  # type: ignore[arg-type]
        with pytest.raises(openai.APIError, match="the engine failed"):  # noqa: PT012  it comes after some chunks
            for chunk in stream:
                seen += [choice.delta.content for choice in chunk.choices if choice.delta.content]
    assert "".join(seen) == "It is"


@pytest.mark.parametrize("stream", [False, True])
def test_what_vllm_calls_retryable_is_so_for_clients(scripted_server: Servers, stream: bool) -> None:
    """A paused engine refuses calls with such an error (vLLM 0.33), and vLLM's other failures are status 500."""
    from weft.engine.vllm_compat import names  # vLLM 0.31 does not have both

    failures = (names.RetryableRequestError("paused"), RetryableCallError), (names.GenerationError(), CallFailedError)
    for failure, kind in failures:
        server = scripted_server([Reply("", error=failure)] * 3)
        with pytest.raises(openai.APIError) as caught:
            ask(server, [{"role": "user", "content": "Hi"}], stream=stream)
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["code"] == error_code(kind(""))
        if isinstance(caught.value, openai.APIStatusError):
            assert caught.value.status_code == error_status(kind(""))
        with weft.connect(server.url) as remote:
            for engine in (remote, server.engine):
                model = ChatWeft(engine=engine)
                with pytest.raises(kind, match=str(failure)) as typed:
                    list(model.stream("Hi")) if stream else model.invoke("Hi")
                assert type(typed.value) is kind


@pytest.mark.parametrize("stream", [False, True])
def test_the_server_knows_which_answers_are_the_last_ones(scripted_server: Servers, stream: bool) -> None:
    """A program whose answer asks for a tool is not over, whichever API it came by."""
    server = scripted_server(lambda request: CALL if request["tools"] else 'It said "finish_reason":"tool_calls".')
    user: Any = [{"role": "user", "content": "Hi"}]
    tool: Any = {"name": "weather", "description": "", "input_schema": SCHEMA}
    flat: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
        anthropic.Anthropic(base_url=server.url, api_key="none") as other,
    ):

        def rows(*tools: Any) -> list[ProgramRow]:
            before = len(server.programs)
            chat, messages, responses = tools or ((), (), ())
            more: Any = {"model": "scripted", "stream": stream}
            for answer in (
                client.chat.completions.create(messages=user, tools=chat or openai.NOT_GIVEN, **more),
                other.messages.create(messages=user, tools=messages or anthropic.NOT_GIVEN, max_tokens=300, **more),
                client.responses.create(input="Hi", tools=responses or openai.NOT_GIVEN, **more),
            ):
                list(answer) if stream else None
            return server.programs[before:]

        assert [math.isnan(row.answered_s) for row in rows()] == [False] * 3
        assert [math.isnan(row.answered_s) for row in rows([WEATHER], [tool], [flat])] == [True] * 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["final_answer", "final_result", "final_report"])
def test_a_tool_that_takes_the_answer_ends_the_program(scripted_server: Servers, name: str, stream: bool) -> None:
    """As in smolagents and pydantic-ai: it returns to no model."""
    server = scripted_server(lambda _request: Reply(tool_calls=[(name, {"answer": "Paris"})]))
    user: Any = [{"role": "user", "content": "Hi"}]
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
        anthropic.Anthropic(base_url=server.url, api_key="none") as other,
    ):
        more: Any = {"model": "scripted", "stream": stream}
        chat: Any = {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
        flat: Any = {"type": "function", "name": name, "parameters": SCHEMA, "strict": False}
        tool: Any = {"name": name, "input_schema": SCHEMA}
        for answer in (
            client.chat.completions.create(messages=user, tools=[chat], **more),
            other.messages.create(messages=user, tools=[tool], max_tokens=300, **more),
            client.responses.create(input="Hi", tools=[flat], **more),
        ):
            list(answer) if stream else None
    is_final = name != "final_report"
    assert [math.isnan(row.answered_s) for row in server.programs] == [not is_final] * 3


def test_a_tool_that_is_only_offered_ends_nothing(scripted_server: Servers) -> None:
    """An answer of the Responses API names the tools that it was offered."""
    server = scripted_server(lambda _request: CALL)
    tools: Any = [
        {"type": "function", "name": name, "parameters": SCHEMA, "strict": False}
        for name in ("weather", "final_answer")
    ]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        client.responses.create(model="scripted", input="Hi", tools=tools)
    assert math.isnan(server.programs[0].answered_s)


def test_a_conversation_that_was_handed_on_ends_with_its_last_agent(scripted_server: Servers) -> None:
    """The first one called a tool, whose result went to the second one with the rest of the conversation."""
    server = scripted_server([CALL, "It is warm in Paris."])
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        user: Any = {"role": "user", "content": "How is the weather?"}
        more: Any = {"model": "scripted", "tools": [WEATHER]}
        desk: Any = [{"role": "system", "content": "You are the desk."}, user]
        message = client.chat.completions.create(messages=desk, **more).choices[0].message
        assert message.tool_calls
        result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "The reporter goes on."}
        reporter: Any = {"role": "system", "content": "A reporter of the weather service answers here."}
        client.chat.completions.create(messages=[reporter, user, message, result], **more)
    (row,) = server.programs
    assert row.thread_count == 2
    assert not math.isnan(row.answered_s)


def test_limits_and_stop_strings_cut_an_answer(scripted_server: Servers) -> None:
    """As they cut a model's."""
    server = scripted_server(lambda _request: "one two three four")
    user = [{"role": "user", "content": "Count"}]
    stopped = ask(server, user, stop=[" three"]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("one two", "stop")
    assert ask(server, user, max_tokens=3).choices[0].finish_reason == "length"


def test_a_stream_that_its_client_leaves_ends_its_call(scripted_server: Servers) -> None:
    """The script stops, and the program has no call in flight any more."""
    server = scripted_server([Reply("word " * 1000, token_s=1.0)])  # a quarter of an hour
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        user: Any = [{"role": "user", "content": "Talk"}]
        with client.chat.completions.create(model="scripted", messages=user, stream=True) as stream:
            next(chunk for chunk in stream if chunk.choices and chunk.choices[0].delta.content)
    while (row := server.programs[0]).in_flight:
        time.sleep(0.01)
    assert row.account.output_tokens < 1000


def test_a_client_goes_on_with_what_it_has_got_of_a_stream(scripted_server: Servers) -> None:
    """It stops the model in mid-answer and says something else. Another client has asked the same."""
    things = ("ships", "trains", "birds", "rivers")
    server = scripted_server([Reply(f"I have counted the {thing} today. " * 99, token_s=0.05) for thing in things])
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        for _client in range(2):
            asked: Any = [{"role": "user", "content": "Talk"}]
            for _turn in range(2):
                text = ""
                with client.chat.completions.create(model="scripted", messages=asked, stream=True) as stream:
                    while len(text) < 40:
                        text += next(stream).choices[0].delta.content or ""
                while any(row.in_flight for row in server.programs):
                    time.sleep(0.01)
                asked = [*asked, {"role": "assistant", "content": text}, {"role": "user", "content": "No."}]
    assert [row.calls for row in server.programs] == [2, 2]


def test_a_client_goes_on_from_a_first_turn_that_it_left(scripted_server: Servers) -> None:
    """OpenCode's `--continue` has an empty answer in the place of what it had got of the stream."""
    server = scripted_server([Reply("The keeper counts. " * 1000, token_s=1.0), "He counts ships."])
    system = "You are a coding agent, and work in the folder of the lighthouse, where the keeper's notes are."
    said: Any = [{"role": "system", "content": system}, {"role": "user", "content": "Talk."}]
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
        client.chat.completions.create(model="scripted", messages=said, stream=True) as stream,
    ):
        next(chunk for chunk in stream if chunk.choices and chunk.choices[0].delta.content)
    while any(row.in_flight for row in server.programs):
        time.sleep(0.01)
    ask(server, [*said, {"role": "assistant", "content": ""}, {"role": "user", "content": "And now?"}])
    assert [row.calls for row in server.programs] == [2]


def test_a_call_that_the_script_has_no_reply_for_fails(scripted_server: Servers) -> None:
    """The error names the call and its last message."""
    server = scripted_server([])
    with pytest.raises(openai.InternalServerError, match="no reply for call 1, whose last message"):
        ask(server, [{"role": "user", "content": "Hi"}])


def test_the_page_and_the_state_are_served(scripted_server: Servers) -> None:
    """A script's programs are seen as a model's are."""
    server = scripted_server(["Hello."])
    ask(server, [{"role": "user", "content": "Hi"}])
    with httpx.Client(base_url=server.url) as client:
        assert client.get("/weft").status_code == 200
        state: Mapping[str, Any] = client.get("/weft/state").json()
    assert [program["calls"] for program in state["programs"]] == [1]
    assert [replica["state"] for replica in state["replicas"]] == ["ready"]


def test_the_command_serves_a_file(tmp_path: Path) -> None:
    """`weft serve --scripted FILE` answers by the file's rules until SIGTERM."""
    script, log = tmp_path / "script.toml", tmp_path / "log"
    script.write_text('[[rule]]\nlast = "Hi"\ntext = "Hello."\n')
    command = [sys.executable, "-m", "weft", "serve", "--scripted", str(script), "--host", "127.0.0.1", "--port", "0"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "COLUMNS": "200"}
        )
    try:
        while (found := re.search(r"^scripted at (http://\S+)", log.read_text(), re.MULTILINE)) is None:
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        with openai.OpenAI(base_url=f"{found[1]}/v1", api_key="none") as client:
            answer = client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "Hi"}])
        assert answer.choices[0].message.content == "Hello."
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_a_sub_agent_of_claude_code_is_a_thread_with_a_name(scripted_server: Servers) -> None:
    """The stream that asks for the agent names its kind, and the agent's first request quotes the task."""
    task = "Find out where the keeper of the lighthouse writes down the ships that he has counted."
    kind = {"type": "object", "properties": {"prompt": {"type": "string"}, "subagent_type": {"type": "string"}}}
    asked = Reply("I ask.", [("Agent", {"prompt": task, "subagent_type": "Explore"})])
    server = scripted_server(lambda request: asked if request.get("tools") else "In a book with a blue cover.")

    def say(text: str, tools: list[Any], **agent: str) -> None:
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            headers = {"x-claude-code-session-id": "one", **agent}
            messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": text}]}]
            with client.messages.stream(
                model="scripted", max_tokens=99, messages=messages, tools=tools, extra_headers=headers
            ) as stream:
                stream.until_done()

    say("Where are the ships?", [{"name": "Agent", "description": "", "input_schema": kind}])
    say(task, [], **{"x-claude-code-agent-id": "a1"})
    say("Are you sure?", [], **{"x-claude-code-agent-id": "a1"})
    timeline = httpx.get(f"{server.url}/weft/programs/claude-code:one/timeline").json()
    assert [call["label"] for call in timeline["calls"]] == ["", "claude-code/Explore", "claude-code/Explore"]
