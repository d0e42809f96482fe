"""What each real client does, what the model answers, and what the server should see."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Final

from client_packages import Package
from client_runs import APPS, Answer, Case

from weft.core.errors import OverloadedError, RetryableCallError
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

CLAUDE: Final = Package(
    "claude-code", "2.1.197", "npm", ("@anthropic-ai/claude-code@2.1.197",), "claude", is_small=True
)
CODEX: Final = Package("codex", "0.169.0", "npm", ("@openai/codex@0.169.0",), "codex", is_small=True)
OPENCODE: Final = Package("opencode", "1.18.33", "npm", ("opencode-ai@1.18.33",), "opencode")
QWEN: Final = Package("qwen-code", "0.15.10", "npm", ("@qwen-code/qwen-code@0.15.10",), "qwen")
CONTINUE: Final = Package("continue", "1.5.47", "npm", ("@continuedev/cli@1.5.47",), "cn")


def coding_agent(request: Mapping[str, Any]) -> AnyReply:
    """Read a file, and say what is in it."""
    if "TITLE" in last(request).upper() and not request["tools"]:
        return "Notes"
    if not called(request) and request["tools"]:
        offered, path = tools(request), notes(request)
        if "exec_command" in offered:
            return Reply("I read the notes.", [("exec_command", {"cmd": f"cat {path}"})])
        name = next(each for each in ("Read", "read", "read_file") if each in offered)
        argument = next(each for each in offered[name]["properties"] if "path" in each.lower())
        return Reply("I read the notes.", [(name, {argument: path})])
    return "The notes say that the lighthouse keeper counts the ships that pass in the night."


def notes(request: Mapping[str, Any]) -> str:
    """The path in the task."""
    words = everything(request).split()
    return next(word.strip('".,?') for word in reversed(words) if word.strip('".,?').endswith("notes.txt"))


def with_notes(_url: str, folder: Path) -> None:
    (folder / "notes.txt").write_text("The keeper counts the ships.\n")


def claude(_url: str, *arguments: str) -> list[str]:
    return [CLAUDE.program, "-p", *arguments, "--model", "scripted", "--permission-mode", "bypassPermissions"]


CLAUDE_ENVIRONMENT: Final = {
    "ANTHROPIC_BASE_URL": "{url}",
    "ANTHROPIC_API_KEY": "none",
    "DISABLE_TELEMETRY": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "ANTHROPIC_SMALL_FAST_MODEL": "scripted",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": "scripted",
    "IS_SANDBOX": "1",
}


def sub_agent(tool: str, arguments: Mapping[str, Any]) -> Answer:
    """Hand the task to a sub-agent, which reads the file."""

    def answer(request: Mapping[str, Any]) -> AnyReply:
        names = called(request)
        if HANDED_ON in everything(request) and tool not in names:  # the sub-agent's conversation
            return coding_agent(request)
        if tool not in names and tool in tools(request):
            return Reply("I hand it on.", [(tool, {**arguments, "prompt": f"{HANDED_ON} {notes(request)}"})])
        return (
            coding_agent(request) if not request["tools"] else "The helper says that the keeper counts ships at night."
        )

    return answer


def spawning(request: Mapping[str, Any]) -> AnyReply:
    """Codex's way: start a sub-agent, which reads the file, and wait for it. The first answers of both overlap."""
    names = [name.rpartition("__")[2] for name in called(request)]
    if "spawn_agent" not in names and HANDED_ON in everything(request):  # the sub-agent's conversation
        answer = coding_agent(request)
        return replace(answer, latency_s=4.0) if isinstance(answer, Reply) else answer
    if "spawn_agent" not in names:
        task = {"message": f"{HANDED_ON} {notes(request)}"}
        return Reply("I hand it on.", [("multi_agent_v1__spawn_agent", task)])
    if "wait_agent" not in names:
        agent = json.loads(last(request))["agent_id"]
        return Reply("I wait.", [("multi_agent_v1__wait_agent", {"targets": [agent]})], latency_s=4.0)
    return "The helper says that the keeper counts ships at night."


HANDED_ON: Final = "Please open the file that is named at the end of this task and say what stands in it:"


def long_answer(request: Mapping[str, Any]) -> AnyReply:
    """Talk until the client leaves."""
    del request
    return Reply("The keeper counts the ships. " * 400, token_s=0.05)


def refusing(error: Exception, answer: Answer) -> Answer:
    """Each call is refused once, with a status that says to send it again."""
    numbers = count()
    return lambda request: answer(request) if next(numbers) % 2 else error


def twice(command: Sequence[str]) -> list[Any]:
    """The same command, two at once."""
    return [[command, command]]


def question(folder: Path) -> str:
    return f"What is in {folder}/notes.txt?"


def codex_files(url: str, folder: Path) -> None:
    with_notes(url, folder)
    (folder / ".codex").mkdir()
    (folder / ".codex/config.toml").write_text(
        f"""model = "scripted"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
"""
    )


def codex(_url: str, *arguments: str) -> list[str]:
    return [*(CODEX.program, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"), *arguments]


def opencode_files(url: str, folder: Path) -> None:
    with_notes(url, folder)
    settings = {
        "provider": {
            "local": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
                "models": {"scripted": {"name": "scripted", "tool_call": True}},
            }
        },
        "model": "local/scripted",
        "small_model": "local/scripted",
        "autoupdate": False,
        "share": "disabled",
    }
    (folder / "opencode.json").write_text(json.dumps(settings))


def opencode(_url: str, *arguments: str) -> list[str]:
    # Without a title, OpenCode asks for one while it works.
    return [OPENCODE.program, "run", "--auto", "--model", "local/scripted", "--title", "Notes", *arguments]


def qwen(url: str, *arguments: str) -> list[str]:
    endpoint = ("--auth-type", "openai", "--openai-base-url", f"{url}/v1", "--openai-api-key", "none")
    return [QWEN.program, "--yolo", *endpoint, "--model", "scripted", *arguments]


def continue_files(url: str, folder: Path) -> None:
    with_notes(url, folder)
    (folder / "config.yaml").write_text(
        f"""name: local
version: 1.0.0
schema: v1
models:
  - name: scripted
    provider: openai
    model: scripted
    apiBase: {url}/v1
    apiKey: none
    roles: [chat]
    capabilities: [tool_use]
"""
    )


def cn(_url: str, *arguments: str) -> list[str]:
    return [CONTINUE.program, "--print", "--auto", "--config", "config.yaml", *arguments]


# -- frameworks from PyPI

LANGGRAPH: Final = Package(
    "langgraph",
    "1.2.24",
    "pypi",
    (
        *("langgraph==1.2.24", "langgraph-supervisor==0.0.31", "langgraph-swarm==0.1.0"),
        *("langchain==1.5.2", "langchain-openai", "deepagents==0.7.32"),
    ),
)
DSPY: Final = Package("dspy", "3.4.1", "pypi", ("dspy==3.4.1",))
SMOLAGENTS: Final = Package("smolagents", "1.26.0", "pypi", ("smolagents[openai]==1.26.0",), is_small=True)
PYDANTIC_AI: Final = Package("pydantic-ai", "2.68.0", "pypi", ("pydantic-ai-slim[openai]==2.68.0",), is_small=True)
OPENAI_AGENTS: Final = Package("openai-agents", "0.24.0", "pypi", ("openai-agents==0.24.0",), is_small=True)
LLAMA_INDEX: Final = Package(
    "llama-index", "0.14.25", "pypi", ("llama-index-core==0.14.25", "llama-index-llms-openai-like")
)
AUTOGEN: Final = Package(
    "autogen", "0.7.5", "pypi", ("autogen-agentchat==0.7.5", "autogen-ext[openai,magentic-one]==0.7.5")
)
CREWAI: Final = Package("crewai", "1.15.30", "pypi", ("crewai==1.15.30",))
AIDER: Final = Package("aider", "0.86.2", "pypi", ("aider-chat==0.86.2",))
ADK: Final = Package("adk", "2.13.0", "pypi", ("google-adk==2.13.0", "litellm"))
LITELLM: Final = Package("litellm", "1.108.7", "pypi", ("litellm[proxy]==1.108.7",))
AGENT_FRAMEWORK: Final = Package(
    "agent-framework",
    "1.23.0",
    "pypi",
    ("agent-framework-core==1.23.0", "agent-framework-openai", "agent-framework-orchestrations"),
    is_small=True,
)


def systems(request: Mapping[str, Any]) -> str:
    return "\n".join(text_of(each) for each in request["messages"] if each["role"] in ("system", "developer"))


def city(request: Mapping[str, Any]) -> str:
    """The city of the run: two runs at once have different ones."""
    return "Oslo" if "Oslo" in everything(request) else "Rome"


def reporter(request: Mapping[str, Any]) -> AnyReply:
    """Look up the weather, and report it."""
    if "weather" not in called(request):
        return Reply("I look.", [("weather", {"city": city(request)})])
    return f"It is warm in {city(request)} today, and the fishing boats have all returned to the harbour with herring."


def chief(tool: str, arguments: Mapping[str, str]) -> Answer:
    """Ask the reporter by a tool, and answer."""

    def answer(request: Mapping[str, Any]) -> AnyReply:
        if "reporter" in systems(request):
            return reporter(request)
        if "tomorrow" in last(request):
            return "Tomorrow it will be as warm as it is today, says the reporter."
        if tool not in called(request):
            return Reply(
                "I ask.", [(tool, {name: text.format(city=city(request)) for name, text in arguments.items()})]
            )
        return f"The reporter says that it is warm in {city(request)}, and that all of the boats are back."

    return answer


def desk(tool: str, arguments: Mapping[str, Any]) -> Answer:
    """Hand the conversation on to the reporter."""

    def answer(request: Mapping[str, Any]) -> AnyReply:
        return Reply("", [(tool, dict(arguments))]) if "You are the desk" in systems(request) else reporter(request)

    return answer


TOPICS: Final = (
    "The lighthouse keeper of {city}, who counted the ships that passed in the night and wrote them into a book\n"
    "The train that left the station of {city} at half past seven and travelled along the river to the mountains\n"
    "The scientists of {city} who measured how quickly plants grow under red and green light and found no reason"
)


def map_and_reduce(request: Mapping[str, Any]) -> AnyReply:
    if "three topics" in last(request):
        return TOPICS.format(city=city(request))
    if "You are a writer" in last(request):
        topic = last(request).partition("Topic: ")[2].strip()
        text = f"A section that was written with great care, about {topic.lower()}, and about nothing else at all."
        return Reply(text, latency_s=3.0)  # so that the writers' calls overlap
    return "The report has three sections."


def supervised(request: Mapping[str, Any]) -> AnyReply:
    if "reporter" in systems(request):
        return reporter(request)
    if "editor" in systems(request):
        return "It is warm in Rome."
    names = called(request)
    if "transfer_to_reporter" not in names:
        return Reply("", [("transfer_to_reporter", {})])
    if "transfer_to_editor" not in names:
        return Reply("", [("transfer_to_editor", {})])
    return "All is done."


def deep(request: Mapping[str, Any]) -> AnyReply:
    if "You are the helper" in systems(request):
        return "It is warm."
    if "task" not in called(request):
        return Reply("", [("task", {"description": "Look up the weather in Rome now.", "subagent_type": "helper"})])
    return "The helper says that it is warm in Rome."


def react(request: Mapping[str, Any]) -> AnyReply:
    """DSPy's fields."""
    asked = everything(request)
    if "next_tool_name" in asked:
        seen = "warm" in last(request)
        name, arguments = ("finish", "{}") if seen else ("weather", json.dumps({"city": city(request)}))
        thought = (
            "I know it now, so I can finish."
            if seen
            else f"I should look up how the weather in {city(request)} is today."
        )
        return (
            f"[[ ## next_thought ## ]]\n{thought}\n\n[[ ## next_tool_name ## ]]\n{name}\n\n"
            f"[[ ## next_tool_args ## ]]\n{arguments}\n\n[[ ## completed ## ]]"
        )
    return "[[ ## reasoning ## ]]\nThe tool said so.\n\n[[ ## answer ## ]]\nIt is warm.\n\n[[ ## completed ## ]]"


def managed(request: Mapping[str, Any]) -> AnyReply:
    """smolagents' tools: the chief asks the reporter, who looks the weather up."""
    if "weather" in tools(request):
        if "warm" in last(request):
            return Reply(
                "", [("final_answer", {"answer": "The weather in Rome is warm today, as it has been all week."})]
            )
        return Reply("", [("weather", {"city": "Rome"})])
    if "warm" in everything(request):
        return Reply("", [("final_answer", {"answer": "It is warm in Rome."})])
    task = "Please find out how the weather in Rome is today, and report it to me in one whole sentence."
    return Reply("", [("reporter", {"task": task})])


def looked_up(request: Mapping[str, Any]) -> AnyReply:
    """smolagents' reporter, whose history has calls as texts."""
    if ": warm" not in last(request):
        return Reply("", [("weather", {"city": city(request)})])
    return Reply("", [("final_answer", {"answer": f"The weather in {city(request)} is as warm as it was all week."})])


def coding(
    package: Package,
    run: Callable[..., list[str]],
    prepare: Callable[[str, Path], None],
    *,
    helper: tuple[str, Mapping[str, Any]] | Answer | None = None,
    helped: Sequence[str] = ("a b0 b1 a2", ""),
    resume: Sequence[str] = (),
    resumed: str = "a a0 a1",
    **more: Any,
) -> list[Case]:
    """The cases of a coding agent.

    Args:
        package: The agent.
        run: Makes a command of the server's address and more words.
        prepare: Writes its files.
        helper: The tool that starts a sub-agent, and its arguments but for the prompt, or the model's answers; None: it
            has none.
        helped: The program of a run with a sub-agent, and how it looks in another order.
        resume: The words that go on with the latest conversation; none if it cannot.
        resumed: The program of a run and the one that goes on with it.
        more: Of each case.
    """

    def case(name: str, answer: Answer, commands: Callable[[str, Path], list[Any]], *programs: str) -> Case:
        return Case(package, name, answer, programs, command=commands, prepare=prepare, **more)

    cases = [
        case("one run", coding_agent, lambda url, folder: [run(url, question(folder))], "a a0"),
        case("two at once", coding_agent, lambda url, folder: twice(run(url, question(folder))), "a a0", "a a0"),
        replace(
            case("abort", long_answer, lambda url, _folder: [run(url, "Talk.")], "a"),
            expects_exit=None,
            is_left=True,
            ends=("cancelled",),
        ),
    ]
    if helper is not None:
        answer = helper if callable(helper) else sub_agent(*helper)
        one = case("sub-agent", answer, lambda url, folder: [run(url, question(folder))], helped[0])
        cases.append(replace(one, or_program=helped[1]))
    if resume:

        def commands(url: str, folder: Path) -> list[Any]:
            return [run(url, question(folder)), run(url, *resume, "Thank you.")]

        cases.append(case("resume", coding_agent, commands, resumed))
    return cases


def framework(package: Package, name: str, answer: Answer, *programs: str, **more: Any) -> Case:
    """A case of the script in `apps` that uses a framework."""
    return Case(package, name, answer, programs, **more)


def left(package: Package) -> Case:
    """A framework's process is interrupted in its first call."""
    return framework(package, "abort", long_answer, "a", expects_exit=None, is_left=True, ends=("cancelled",))


WHAT: Final = "How is the weather in the city of {city} today, and will it stay so until the boats return?"
ASK: Final = chief("ask_reporter", {"question": WHAT})
ASK_INPUT: Final = chief("ask_reporter", {"input": WHAT})


def swarmed(request: Mapping[str, Any]) -> AnyReply:
    """AutoGen's swarm, whose history has the results of tools as texts."""
    if "reporter" not in systems(request):
        return Reply("", [("transfer_to_reporter", {})])
    if ": warm" not in everything(request):
        return Reply("", [("weather", {"city": city(request)})])
    return f"It is warm in {city(request)}, and all of the boats have returned to the harbour. THE END"


def selected(request: Mapping[str, Any]) -> AnyReply:
    """AutoGen's selector: first the writer, then the editor."""
    if "You are the writer" in systems(request):
        return "Ships carry herring and mackerel to the harbour, and the gulls follow them to the market every day."
    if "You are the editor" in systems(request):
        return "Ships carry fish, and gulls follow. THE END"
    return "editor" if "herring" in everything(request) else "writer"


def selected_with_a_tool(request: Mapping[str, Any]) -> AnyReply:
    """The writer's tool answers in its place, because AutoGen asks the model for no reflection on it."""
    if "You are the writer" in systems(request):
        return Reply("I look the weather up for the harbour.", [("weather", {"city": "the harbour"})])
    if "You are the editor" in systems(request):
        return "It is warm in the harbour, and gulls follow the ships. THE END"
    return "editor" if "harbour" in everything(request) else "writer"


def magentic(request: Mapping[str, Any]) -> AnyReply:
    """The ledgers of Magentic-One's manager, and its agents' answers."""
    asked = last(request)
    if "You are the writer" in systems(request) or "You are the reporter" in systems(request):
        return "Ships carry herring and mackerel to the harbour, and the gulls follow them to the market every day."
    if "is_request_satisfied" in asked:
        is_done = "herring and mackerel" in everything(request)
        name = "writer" if "writer" in asked else "reporter"
        return json.dumps(
            {
                "is_request_satisfied": {"reason": "It says so.", "answer": is_done},
                "is_in_loop": {"reason": "No.", "answer": False},
                "is_progress_being_made": {"reason": "Yes.", "answer": True},
                "next_speaker": {"reason": "They can.", "answer": name},
                "instruction_or_question": {
                    "reason": "It is left.",
                    "answer": "Write a whole sentence on the ships in the harbour.",
                },
            }
        )
    if "GIVEN OR VERIFIED FACTS" in asked:
        return "The facts are that ships carry fish, that gulls follow ships, and that the market is near the harbour."
    if "plan" in asked:
        return "- Let one of the team write a sentence about ships, which is then given to the user as it stands."
    return "Ships carry fish, and gulls follow them."


def crew(request: Mapping[str, Any]) -> AnyReply:
    """CrewAI's agents, with a manager that delegates or without."""
    offered = list(tools(request))
    manager = next((name for name in offered if "delegate" in name.lower()), None)
    if manager is not None and "reporter" not in systems(request).partition(".")[0]:
        if manager not in called(request):
            task = {
                "task": WHAT.format(city="Rome"),
                "context": "The user wants to know how the weather is.",
                "coworker": "reporter",
            }
            return Reply("", [(manager, task)])
        return "It is warm in Rome, and all of the boats are back."
    if "weather" in offered:
        return reporter(request)
    return "It is warm in Rome."


def briefly(request: Mapping[str, Any]) -> AnyReply:
    """CrewAI's agents, the first of which answers with a few words that the next one's task has inside a template."""
    if "reporter" in systems(request) and called(request):
        return "Warm in Rome, and no wind at sea."
    return crew(request)


def in_turns(request: Mapping[str, Any]) -> AnyReply:
    """ADK's loop: a reporter and an editor, each of whom gets what the other one said inside a template."""
    count = sum(message["role"] == "assistant" for message in request["messages"])
    who = "reporter" if "reporter" in systems(request).partition("Your internal")[0] else "editor"
    return f"Warm in Rome, no wind, says the {who} in round {count + 1}."


def planned(request: Mapping[str, Any]) -> AnyReply:
    """smolagents' plan, which its agent gets inside a template, and its steps."""
    return looked_up(request) if tools(request) else "Ask the weather tool, and report."


def noted(request: Mapping[str, Any]) -> AnyReply:
    """Aider's chat."""
    turns = sum(message["role"] == "user" for message in request["messages"])
    return f"This is answer number {turns}: the keeper counts the ships, as the notes have said since the beginning."


def shorter(request: Mapping[str, Any]) -> AnyReply:
    """An answer without a tool, which takes so long that two calls at once overlap."""
    who = "reporter" if "reporter" in systems(request) else "editor"
    return Reply(f"It is warm, says the {who}.", latency_s=3.0)


def named(request: Mapping[str, Any]) -> AnyReply:
    """The same to all, in the form that the framework asks for, after so long that two calls at once overlap."""
    if "final_answer" in json.dumps(request["tools"]):
        return Reply("", [("final_answer", {"answer": "A gull."})], latency_s=3.0)
    is_dspy = "[[ ##" in everything(request)
    return Reply("[[ ## answer ## ]]\nA gull.\n\n[[ ## completed ## ]]" if is_dspy else "A gull.", latency_s=3.0)


def reported(request: Mapping[str, Any]) -> AnyReply:
    """The reporter looks the weather up, and the editor makes its report shorter."""
    return reporter(request) if "reporter" in systems(request) else "It is warm in Rome, say the papers."


def guided(request: Mapping[str, Any]) -> AnyReply:
    """A guide, and another agent that sums up what was said."""
    if "Sum up" in systems(request):
        return "The user asks about Rome, where it is warm."
    return "There is a breeze from the sea." if "wind" in last(request) else "It is warm in Rome, and dry."


def judged(request: Mapping[str, Any]) -> AnyReply:
    """A writer's short drafts, and what a judge or teacher says of them, which is the same each time."""
    if "judge" in systems(request) or "teacher" in systems(request):
        return "Too short."
    drafts = [message for message in request["messages"] if message["role"] == "assistant"]
    return (
        f"Draft {len(drafts) + 1} says this of ships and eels." if not drafts else f"It ends so: {text_of(drafts[-1])}"
    )


def architected(request: Mapping[str, Any]) -> AnyReply:
    """Aider's architect, and its editor, who gets what the architect said between canned exchanges."""
    is_editor = "SEARCH/REPLACE" in systems(request)
    return "It is done." if is_editor else "Add a line on gulls to notes.txt."


BY_HEADER: Final[dict[str, Any]] = {"identified_by": "weft-program-id"}
# As the clients call themselves; the other ones use OpenAI's SDK as it is.
NAMES: Final = {
    "claude-code": "claude-code",
    "codex": "codex",
    "opencode": "opencode",
    "qwen-code": "qwencode",
    "continue": "ls-js",
    "dspy": "dspy",
    "pydantic-ai": "pydantic-ai",
    "openai-agents": "agents-python",
    "agent-framework": "agent-framework-python",
}
_CASES: Final[list[Case]] = [
    *coding(
        CLAUDE,
        claude,
        with_notes,
        helper=("Agent", {"description": "Read the notes", "subagent_type": "general-purpose"}),
        resume=["--continue"],
        environment=CLAUDE_ENVIRONMENT,
        api="messages",
        identified_by="x-claude-code-session-id",
    ),
    Case(
        CLAUDE,
        "refused with 429",
        refusing(OverloadedError(1, 1, 1.0), coding_agent),
        ("a a a1 a1",),
        command=lambda url, folder: [claude(url, question(folder))],
        prepare=with_notes,
        environment=CLAUDE_ENVIRONMENT,
        api="messages",
        identified_by="x-claude-code-session-id",
    ),
    Case(
        CODEX,
        "refused with 503",
        refusing(RetryableCallError("the engine is paused."), coding_agent),
        ("a a a1 a1",),
        command=lambda url, folder: [codex(url, question(folder))],
        prepare=codex_files,
        api="responses",
        identified_by="session-id, thread-id",
    ),
    *coding(
        CODEX,
        codex,
        codex_files,
        helper=spawning,
        helped=("a a0 b0 b2 a1,3", "a b0 a0 b1 a2,3"),
        resume=["resume", "--last"],
        api="responses",
        identified_by="session-id, thread-id",
    ),
    *coding(
        OPENCODE,
        opencode,
        opencode_files,
        helper=("task", {"description": "Read the notes", "subagent_type": "general"}),
        resume=["--continue"],
        environment={"OPENCODE_DISABLE_MODELS_FETCH": "1"},
        identified_by="x-session-id",
    ),
    *coding(
        QWEN,
        qwen,
        with_notes,
        helper=("agent", {"description": "Read the notes", "subagent_type": "general-purpose"}),
        resume=["--continue"],
        resumed="a a0 a1 b2",  # in the end another agent asks what is worth remembering
    ),
    *coding(CONTINUE, cn, continue_files, resume=["--resume"]),
    framework(LANGGRAPH, "send", map_and_reduce, "a a0 b0 c0 a1,2,3"),  # without system prompts
    framework(LANGGRAPH, "send two at once", map_and_reduce, "a a0 b0 c0 a1,2,3", "a a0 b0 c0 a1,2,3"),
    framework(LANGGRAPH, "supervisor", supervised, "a b0 b1 a2 c3 a4"),
    framework(LANGGRAPH, "swarm", desk("transfer_to_reporter", {}), "a b0 b1"),
    framework(LANGGRAPH, "deepagents", deep, "a b0 a1"),
    framework(LANGGRAPH, "resume", reporter, "a a0 a1"),
    framework(LANGGRAPH, "reflection", judged, "a b0 a1 b2 a3"),
    framework(LANGGRAPH, "header", named, "a b", **BY_HEADER),
    left(LANGGRAPH),
    framework(DSPY, "one run", react, "a a0 b1"),
    framework(DSPY, "two at once", react, "a a0 b1", "a a0 b1"),
    framework(DSPY, "resume", react, "a a0"),
    left(DSPY),
    framework(DSPY, "header", named, "a b", **BY_HEADER),
    framework(SMOLAGENTS, "one run", managed, "a b0 b1 a2"),
    framework(SMOLAGENTS, "two at once", looked_up, "a a0", "a a0"),
    framework(SMOLAGENTS, "resume", looked_up, "a a0 a1 a2"),
    left(SMOLAGENTS),
    framework(SMOLAGENTS, "planning", planned, "a b0 b1"),
    framework(SMOLAGENTS, "header", named, "a b", **BY_HEADER),
    framework(PYDANTIC_AI, "one run", ASK, "a b0 b1 a2"),
    framework(PYDANTIC_AI, "two at once", ASK, "a b0 b1 a2", "a b0 b1 a2"),
    framework(PYDANTIC_AI, "resume", ASK, "a b0 b1 a2 a3"),
    framework(PYDANTIC_AI, "summary", guided, "a a0 b1 a2"),
    framework(PYDANTIC_AI, "prompted summary", guided, "a a0 b1 a2"),
    framework(PYDANTIC_AI, "header", named, "a b", **BY_HEADER),
    framework(PYDANTIC_AI, "abort", long_answer, "a", ends=("cancelled",)),
    framework(OPENAI_AGENTS, "one run", ASK_INPUT, "a b0 b1 a2"),
    framework(OPENAI_AGENTS, "two at once", ASK_INPUT, "a b0 b1 a2", "a b0 b1 a2"),
    framework(OPENAI_AGENTS, "responses", ASK_INPUT, "a b0 b1 a2", api="responses"),
    framework(OPENAI_AGENTS, "handoff", desk("transfer_to_reporter", {}), "a b0 b1"),
    framework(OPENAI_AGENTS, "judge", judged, "a b0 a1 b2"),
    framework(OPENAI_AGENTS, "header", shorter, "a b", **BY_HEADER),
    framework(OPENAI_AGENTS, "resume", ASK_INPUT, "a b0 b1 a2 a3"),
    framework(OPENAI_AGENTS, "abort", long_answer, "a", ends=("cancelled",)),
    framework(LLAMA_INDEX, "one run", reporter, "a a0"),
    framework(LLAMA_INDEX, "two at once", reporter, "a a0", "a a0"),
    framework(LLAMA_INDEX, "resume", reporter, "a a0 a1"),
    framework(LLAMA_INDEX, "header", named, "a b", **BY_HEADER),
    left(LLAMA_INDEX),
    framework(LLAMA_INDEX, "handoff", desk("handoff", {"to_agent": "reporter", "reason": "They know it."}), "a b0 b1"),
    framework(AUTOGEN, "one run", reporter, "a a0"),
    framework(AUTOGEN, "resume", reporter, "a a0 a1"),
    left(AUTOGEN),
    framework(AUTOGEN, "header", named, "a b", **BY_HEADER),
    framework(AUTOGEN, "selector", selected, "a b0 a1 c2"),
    framework(AUTOGEN, "selector-with-a-tool", selected_with_a_tool, "a b0 a1 c2"),
    framework(AUTOGEN, "swarm", swarmed, "a b0 b1"),
    framework(AUTOGEN, "swarm two at once", swarmed, "a b0 b1", "a b0 b1"),
    framework(AUTOGEN, "magentic", magentic, "a a0 a1 b2 a3 a4"),
    framework(CREWAI, "sequential", crew, "a a0 b1"),
    framework(CREWAI, "short answers", briefly, "a a0 b1"),
    framework(CREWAI, "hierarchical", crew, "a b0 b1 a2"),
    framework(CREWAI, "two at once", crew, "a a0", "a a0"),
    left(CREWAI),
    framework(CREWAI, "header", named, "a b", **BY_HEADER),
    framework(AIDER, "three turns", noted, "a a0 a1"),
    framework(
        AIDER,
        "two at once",
        noted,
        *("a a0 a1", "a a0 a1"),
        command=lambda _url, _folder: [  # with the same words at once, nobody could say whose a request is
            [[AIDER.program, str(APPS / "aider_app.py"), "two at once", each] for each in ("In short.", "At length.")]
        ],
    ),
    framework(AIDER, "resume", noted, "a a0 a1"),
    framework(AIDER, "architect", architected, "a b0"),
    left(AIDER),
    framework(ADK, "agent tool", chief("reporter", {"request": WHAT}), "a b0 b1 a2"),
    framework(ADK, "two at once", chief("reporter", {"request": WHAT}), "a b0 b1 a2", "a b0 b1 a2"),
    framework(ADK, "resume", chief("reporter", {"request": WHAT}), "a b0 b1 a2 a3"),
    left(ADK),
    framework(ADK, "sequential", reported, "a a0 b1"),
    framework(ADK, "loop", in_turns, "a b0 a1 b2"),
    framework(ADK, "transfer", desk("transfer_to_agent", {"agent_name": "reporter"}), "a b0 b1"),
    framework(ADK, "header", named, "a b", **BY_HEADER),
    framework(LITELLM, "one run", reporter, "a a0"),
    left(LITELLM),
    framework(LITELLM, "two at once", reporter, "a a0", "a a0"),
    framework(AGENT_FRAMEWORK, "one run", reporter, "a a0"),
    framework(AGENT_FRAMEWORK, "two at once", reporter, "a a0", "a a0"),
    framework(AGENT_FRAMEWORK, "resume", reporter, "a a0 a1"),
    framework(AGENT_FRAMEWORK, "sub-agent", ASK, "a b0 b1 a2"),
    left(AGENT_FRAMEWORK),
    framework(AGENT_FRAMEWORK, "sequential", reported, "a a0 b1"),
    framework(AGENT_FRAMEWORK, "concurrent", shorter, "a b"),
    framework(AGENT_FRAMEWORK, "concurrent, with an id", shorter, "a b", identified_by="weft-program-id"),
    framework(AGENT_FRAMEWORK, "magentic", magentic, "a a0 a1 b2 a3 a4"),
]

CASES: Final = [
    replace(case, names=(NAMES[case.package.name],)) if case.package.name in NAMES else case for case in _CASES
]

# Which of one run, two at once, a sub-agent, an abort and a resume a client does not have.
LACKS: Final = {
    "aider": "sub-agents",
    "continue": "sub-agents",
    "crewai": "resume, because a crew's run starts anew",
    "dspy": "sub-agents",
    "litellm": "sub-agents and no resume, because it is a gateway",
}

# Why the server does not see a case as it is.
WRONG: Final = {("agent-framework", "concurrent"): "the two agents share only the user's words"}
