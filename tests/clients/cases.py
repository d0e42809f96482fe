"""What each real client does, what the model answers, and what the server should see."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from client_packages import Package
from client_runs import Case

from weft.core.testing.script import AnyReply, Reply


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part.get("text") or "" for part in content)


def last(request: Mapping[str, Any]) -> str:
    return text_of(request["messages"][-1])


def everything(request: Mapping[str, Any]) -> str:
    return "\n".join(map(text_of, request["messages"]))


def tools(request: Mapping[str, Any]) -> dict[str, Any]:
    return {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in request["tools"]}


def called(request: Mapping[str, Any]) -> list[str]:
    """The tools that the model has called in this conversation, in order."""
    return [call["function"]["name"] for message in request["messages"] for call in message.get("tool_calls") or ()]


# -- coding agents from npm

CLAUDE: Final = Package("claude-code", "2.1.197", "npm", ("@anthropic-ai/claude-code@2.1.197",), "claude")
CODEX: Final = Package("codex", "0.169.0", "npm", ("@openai/codex@0.169.0",), "codex")
OPENCODE: Final = Package("opencode", "1.18.33", "npm", ("opencode-ai@1.18.33",), "opencode")
QWEN: Final = Package("qwen-code", "0.15.10", "npm", ("@qwen-code/qwen-code@0.15.10",), "qwen")
CONTINUE: Final = Package("continue", "1.5.47", "npm", ("@continuedev/cli@1.5.47",), "cn")

READ_ARGUMENTS: Final = {"Read": "file_path", "read": "filePath", "read_file": "absolute_path"}


def coding_agent(request: Mapping[str, Any]) -> AnyReply:
    """Read a file, and say what is in it."""
    if "TITLE" in last(request).upper() and not request["tools"]:
        return "Notes"
    names = called(request)
    if not names:
        name = next(each for each in ("Read", "read", "read_file") if each in tools(request))
        properties = tools(request)[name].get("properties", {})
        argument = next(each for each in properties if "path" in each.lower())
        return Reply("I read the notes.", [(name, {argument: str(notes(request))})])
    return "The notes say that the lighthouse keeper counts the ships that pass in the night."


def notes(request: Mapping[str, Any]) -> str:
    """The path in the task."""
    words = everything(request).split()
    return next(word.strip('".,?') for word in reversed(words) if word.strip('".,?').endswith("notes.txt"))


def with_notes(_url: str, folder: Path) -> None:
    (folder / "notes.txt").write_text("The keeper counts the ships.\n")


def claude(*arguments: str) -> list[str]:
    return [CLAUDE.program, "-p", *arguments, "--model", "scripted", "--permission-mode", "bypassPermissions"]


CLAUDE_ENVIRONMENT: Final = {
    "DISABLE_TELEMETRY": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "ANTHROPIC_SMALL_FAST_MODEL": "scripted",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": "scripted",
    "IS_SANDBOX": "1",
}

CASES: Final[list[Case]] = [
    Case(
        CLAUDE,
        "one run",
        coding_agent,
        ("a a0",),
        command=lambda url, folder: [claude(f"What is in {folder}/notes.txt?")],
        environment=CLAUDE_ENVIRONMENT,
        prepare=with_notes,
        api="messages",
        identified_by="x-claude-code-session-id",
    ),
]
