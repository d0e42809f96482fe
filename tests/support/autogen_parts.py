"""Shared by the AutoGen tests: clients whose output a test controls, and graphs with readable names."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from autogen_core.models import LLMMessage, SystemMessage, UserMessage
from tiny_engine import ENDLESS_TOKENS

import weft
from weft.engine.host.frontend import FrontEnd
from weft.integrations.autogen import WeftChatCompletionClient
from weft.testing import ScriptedEngine


def asked(text: str = "Where is the lighthouse?") -> list[LLMMessage]:
    """A conversation with one question."""
    return [SystemMessage(content="You are a helpful assistant."), UserMessage(content=text, source="user")]


def babbling(engine: FrontEnd, tokens: int = 12, **fields: Any) -> WeftChatCompletionClient:
    """A client that generates so many random tokens, which differ between prompts."""
    return WeftChatCompletionClient(engine, temperature=0, max_tokens=tokens, ignore_eos=True, **fields)


def endless(engine: FrontEnd) -> WeftChatCompletionClient:
    """A client whose calls last for seconds, unless they are aborted."""
    return babbling(engine, tokens=ENDLESS_TOKENS)


def terse(engine: FrontEnd, **fields: Any) -> WeftChatCompletionClient:
    """A client for tool calls and JSON.

    White space is excluded, because schemas allow any amount of it and a random model would generate it without end.
    """
    bias = bias_against(engine, lambda text: not text.strip())
    return WeftChatCompletionClient(engine, temperature=0, max_tokens=160, **bias, **fields)


def saying(engine: FrontEnd, *texts: str, **fields: Any) -> WeftChatCompletionClient:
    """A client that generates one of some texts."""
    return WeftChatCompletionClient(engine, temperature=0, structured_outputs={"choice": list(texts)}, **fields)


def calling(engine: FrontEnd, *calls: tuple[str, dict[str, Any]], **fields: Any) -> WeftChatCompletionClient:
    """A client that generates the thought "I ask." and then these tool calls.

    Where tools are offered, vLLM lets the model choose between the requested text and other tool calls. Those begin
    with "<", so no token may begin with it. The requested text begins with the thought instead.
    """
    parts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    text = "I ask." + "".join(f"\n<tool_call>\n{part}\n</tool_call>" for part in parts)
    return saying(engine, text, **bias_against(engine, lambda token: token.startswith("<")), **fields)


def bias_against(engine: FrontEnd, is_excluded: Callable[[str], bool]) -> dict[str, Any]:
    """The field of a client that excludes tokens by their texts. A scripted engine chooses no tokens."""
    if isinstance(engine, ScriptedEngine):
        return {}
    tokenizer: Any = engine._llm.renderer.tokenizer  # type: ignore[attr-defined]  # of `weft.Engine`
    vocabulary = tokenizer.get_vocab().values()
    return {"logit_bias": {str(token): -100 for token in vocabulary if is_excluded(tokenizer.decode([token]))}}


def readable_names(program: weft.Program) -> dict[str, str]:
    """Readable names of a program's calls by id: the agent's name and the number of the call, such as "ann2"."""
    counts: Counter[str] = Counter()
    names: dict[str, str] = {}
    for node in program.graph.calls:
        counts[node.label] += 1
        names[node.call_id] = f"{node.label}{counts[node.label]}"
    return names


def parents(program: weft.Program) -> dict[str, list[str]]:
    """The parents of each call. A parent that is a guess has a question mark."""
    names = readable_names(program)
    return {
        names[node.call_id]: sorted(names[edge.parent] + ("" if edge.exact else "?") for edge in node.parents)
        for node in program.graph.calls
    }


def threads(program: weft.Program) -> list[list[str]]:
    """The calls of each thread."""
    names = readable_names(program)
    return [[names[call_id] for call_id in calls] for calls in program.graph.threads.values()]
