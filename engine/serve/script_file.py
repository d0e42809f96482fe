"""Files of scripted answers: rules, or a function."""

from __future__ import annotations

import importlib.util
import re
import tomllib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from weft.core.errors import (
    CallFailedError,
    ContextLengthError,
    InvalidRequestError,
    OverloadedError,
    ScriptError,
    ScriptFileError,
    WeftError,
)
from weft.core.testing.script import AnyReply, Reply
from weft.engine.models.scripted_model import make_scripted_model

_ERRORS: Final[Mapping[str, Callable[[str], WeftError]]] = {  # by the code that the server gives them
    "call_failed": CallFailedError,
    "context_length_exceeded": ContextLengthError,
    "invalid_request": InvalidRequestError,
    "overloaded": lambda _message: OverloadedError(1, 1, 0.5),
}


def _compiled(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{error}") from error
    return pattern


Pattern = Annotated[str, AfterValidator(_compiled)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Call(_Strict):
    name: str = Field(min_length=1)
    arguments: dict[str, Any] = {}


class _Rule(_Strict):
    """A rule of a script file: the conditions, all of which must hold, and the reply."""

    system: Pattern | None = None
    last: Pattern | None = None
    anywhere: Pattern | None = None
    tool: str | None = None
    turn: int | None = Field(None, ge=0)
    times: int | None = Field(None, ge=1)

    text: str = ""
    reasoning: str = ""
    calls: list[_Call] = []
    delay_s: float = Field(0.0, ge=0, strict=False)
    token_s: float = Field(0.0, ge=0, strict=False)
    error: Literal["call_failed", "context_length_exceeded", "invalid_request", "overloaded"] | None = None

    def holds(self, request: Mapping[str, Any]) -> bool:
        """Whether the rule is for this request."""
        messages = request["messages"]
        texts = [_text(message) for message in messages]
        systems = [text for text, each in zip(texts, messages, strict=True) if each["role"] in ("system", "developer")]
        return (
            (self.system is None or any(re.search(self.system, text) for text in systems))
            and (self.last is None or re.search(self.last, texts[-1]) is not None)
            and (self.anywhere is None or any(re.search(self.anywhere, text) for text in texts))
            and (self.tool is None or self.tool in (tool["function"]["name"] for tool in request.get("tools") or ()))
            and (self.turn is None or self.turn == sum(message["role"] == "assistant" for message in messages))
        )

    def reply(self) -> Reply:
        calls = [(call.name, call.arguments) for call in self.calls]
        error = _ERRORS[self.error](f"{self.text or 'the script says so'}.") if self.error else None
        return Reply(self.text, calls, self.delay_s, self.reasoning, self.token_s, error)


class _File(_Strict):
    rule: list[_Rule] = Field(min_length=1)


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(part.get("text") or "" for part in content if isinstance(part, Mapping))
    return content or ""


@dataclass
class _Rules:
    """The function of a file's rules: the first that holds replies."""

    path: Path
    rules: list[_Rule]
    used: dict[int, int] = field(default_factory=dict)

    def __call__(self, request: Mapping[str, Any]) -> AnyReply:
        for number, rule in enumerate(self.rules):
            used = self.used.get(number, 0)
            if (rule.times is None or used < rule.times) and rule.holds(request):
                self.used[number] = used + 1
                return rule.reply()
        last = request["messages"][-1]
        raise ScriptError(f"no rule of {self.path.name} is for a request whose last message is {last!r:.200}.")


def read_script(path: Path) -> Callable[[Mapping[str, Any]], AnyReply]:
    """The function of a script file: a TOML file of rules, or a Python file with a function `reply(request)`.

    Raises:
        ScriptFileError: The file cannot be read, or makes no sense. The message has the line.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ScriptFileError(path, None, f"cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ScriptFileError(path, None, "is not UTF-8 text") from error
    return _function_of(path) if path.suffix == ".py" else _rules_of(path, text)


def _rules_of(path: Path, text: str) -> _Rules:
    try:
        return _Rules(path, _File.model_validate(tomllib.loads(text)).rule)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+)", str(error))
        line = int(found[1]) if found else text.count("\n") + 1
        raise ScriptFileError(path, line, f"{str(error).partition(' (at ')[0]}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = first["loc"]
        name = ".".join(str(part) for part in place[2 if len(place) > 1 else 0 :] if isinstance(part, str))
        raise ScriptFileError(path, _line_of(text, place), f"{name}: {first['msg']}".removeprefix(": ")) from error


def _line_of(text: str, place: tuple[int | str, ...]) -> int:
    """The line where a value begins: the last of the shortest beginning of the file that parses and has it, or has what
    should have held it."""
    lines = text.splitlines()
    for length in range(len(place), 0, -1):
        for count in range(1, len(lines) + 1):
            try:
                value: Any = tomllib.loads("\n".join(lines[:count]))
                for part in place[:length]:
                    value = value[part]
            except (tomllib.TOMLDecodeError, KeyError, IndexError, TypeError):
                continue
            return count
    return 1


def _function_of(path: Path) -> Callable[[Mapping[str, Any]], AnyReply]:
    spec = importlib.util.spec_from_file_location("weft_script", path)
    assert spec is not None  # noqa: S101  the suffix is .py
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ScriptFileError(path, error.lineno, error.msg) from error
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        raise ScriptFileError(path, lines[-1] if lines else None, f"{type(error).__name__}: {error}") from error
    function = getattr(module, "reply", None)
    if not callable(function):
        raise ScriptFileError(path, None, "has no function reply(request)")
    reply: Callable[[Mapping[str, Any]], AnyReply] = function
    return reply


SCRIPTED_NAME: Final = "scripted"


def scripted_arguments(folder: Path) -> list[str]:
    """The command line of `vllm serve` for the model without weights, which is written to `folder`.

    Further arguments may follow, such as `--served-model-name`.
    """
    return [
        str(make_scripted_model(folder)),
        *("--served-model-name", SCRIPTED_NAME),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "deepseek_r1"),
    ]
