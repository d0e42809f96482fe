"""Scripts of answers: rules and functions in files, and what is said of a bad one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.core.errors import CallFailedError, OverloadedError, ScriptError, ScriptFileError
from weft.core.testing.script import Reply
from weft.engine.serve.script_file import read_script

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}


def request(*messages: tuple[str, Any], tools: Any = ()) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages], "tools": list(tools)}


def script(folder: Path, text: str, name: str = "script.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


RULES = """
[[rule]]
system = "reviewer"
text = "It is fine."

[[rule]]
last = "^weather"
tool = "weather"
reasoning = "I look."
calls = [{ name = "weather", arguments = { city = "Rome" } }]
token_s = 1

[[rule]]
turn = 1
text = "Again?"
delay_s = 0.5

[[rule]]
last = "busy"
times = 1
error = "overloaded"

[[rule]]
last = "broken"
text = "I"
error = "call_failed"

[[rule]]
anywhere = "hello"
text = "Hello."
"""


def test_the_first_rule_whose_conditions_hold_replies(tmp_path: Path) -> None:
    """Conditions are about the system prompt, the last message, any message, the tools and the turns so far."""
    reply = read_script(script(tmp_path, RULES))
    assert reply(request(("system", "You are a reviewer."), ("user", "weather?"))) == Reply("It is fine.", [], 0.0)
    assert reply(request(("user", "weather in Rome"), tools=[WEATHER])) == Reply(
        "", [("weather", {"city": "Rome"})], 0.0, "I look.", 1.0
    )
    assert reply(request(("user", "hi"), ("assistant", "Hi."), ("user", "x"))) == Reply("Again?", [], 0.5)
    assert reply(request(("user", [{"type": "text", "text": "hello"}]))) == Reply("Hello.", [], 0.0)


def test_a_rule_with_times_replies_only_so_often(tmp_path: Path) -> None:
    """So a script can fail first, and answer the client's second try."""
    reply = read_script(script(tmp_path, RULES))
    busy = request(("user", "hello"), ("user", "busy"))
    first = reply(busy)
    assert isinstance(first, Reply)
    assert isinstance(first.error, OverloadedError)
    assert reply(busy) == Reply("Hello.", [], 0.0)


def test_an_error_may_come_after_a_text(tmp_path: Path) -> None:
    """The text is streamed first."""
    reply = read_script(script(tmp_path, RULES))(request(("user", "broken")))
    assert isinstance(reply, Reply)
    assert reply.content == "I"
    assert isinstance(reply.error, CallFailedError)


def test_a_request_that_no_rule_is_for_is_an_error(tmp_path: Path) -> None:
    """The message has the request's last message."""
    with pytest.raises(ScriptError, match=r"no rule of script.toml .* 'nobody'"):
        read_script(script(tmp_path, RULES))(request(("user", "nobody")))


def test_a_function_of_a_python_file_replies(tmp_path: Path) -> None:
    """It gets the request, and returns what a list of replies may hold."""
    path = script(tmp_path, 'def reply(request):\n    return request["messages"][-1]["content"].upper()\n', "script.py")
    assert read_script(path)(request(("user", "hello"))) == "HELLO"


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ('[[rule]]\ntext = "a"\n\n[[rule]]\nlasst = "b"\n', 5, "lasst: Extra inputs"),
        ('[[rule]]\ntext = """\n[[rule]]\n"""\n[[rule]]\nturn = -1\n', 6, "turn: Input should be greater"),
        ('[[rule]]\ncalls = [{ name = "a", arguments = 3 }]\n', 2, "calls.arguments: Input should be a valid dict"),
        ('[[rule]]\nlast = "("\n', 2, "last: "),
        ("[[rule]]\ntext = a\n", 2, "Invalid value"),
        ("", 1, "rule: Field required"),
        ('[[rule]]\ntext = "a"\n[other]\n', 3, "other: Extra inputs"),
    ],
)
def test_a_bad_file_of_rules_is_one_error_with_its_line(tmp_path: Path, text: str, line: int, problem: str) -> None:
    """The line is that of the value, not of some table around it."""
    with pytest.raises(ScriptFileError) as found:
        read_script(script(tmp_path, text))
    assert found.value.line == line
    assert f"script.toml:{line}: {problem}" in str(found.value)


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("def reply(request)\n", 1, "expected ':'"),
        ("\nimport no_such_module\n", 2, "ModuleNotFoundError"),
        ("def answer(request): ...\n", None, "has no function reply"),
    ],
)
def test_a_bad_python_file_is_one_error_with_its_line(
    tmp_path: Path, text: str, line: int | None, problem: str
) -> None:
    """Whatever the file raises."""
    with pytest.raises(ScriptFileError, match=problem) as found:
        read_script(script(tmp_path, text, "script.py"))
    assert found.value.line == line


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """As every file that a user names."""
    with pytest.raises(ScriptFileError, match=r"missing\.toml: cannot be read: No such file or directory\. docs"):
        read_script(tmp_path / "missing.toml")
    (tmp_path / "picture.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ScriptFileError, match=r"picture\.toml: is not UTF-8 text\. docs"):
        read_script(tmp_path / "picture.toml")
