"""Sessions that others have started: a run with its sub-agents is one program, and each sub-agent a thread of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from weft.core.identity.conversations import arguments_of
from weft.core.identity.given import texts_of
from weft.core.identity.items import Item, digest_of, items_of_message
from weft.core.identity.recent import Recent
from weft.core.identity.sources import Identity
from weft.core.ids import ProgramId, ThreadId

_AGENT_KINDS: Final = {"subagent_type", "agent_type"}  # of Claude Code, OpenCode, Qwen Code, deepagents; and Codex
# A name, and no words of a prompt.
_AGENT_KIND: Final = re.compile(r'"(?:subagent|agent)_type":"([A-Za-z0-9_:.-]{1,64})"')
_MOST: Final = 30_000  # sessions that others have started; those unused for longest are forgotten
_MOST_MESSAGES: Final = 8  # of a sub-agent's first request, among which its task is


class Families:
    """Remembers which session began the family of each session that another one has started, and the tasks of
    sub-agents with the kinds of these agents.

    Args:
        most: How many sessions are remembered, and how many tasks and names of threads.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._roots: Recent[ProgramId] = Recent(most)
        self._kinds: Recent[str] = Recent(most)  # of agents, by their tasks and by their threads

    def __len__(self) -> int:
        return len(self._roots) + len(self._kinds)

    def joined(self, identity: Identity, scope: str) -> Identity:
        """The identity of a request as a thread of the program whose session began its family.

        A session that names no parent, and never has, is a program. That a thread ends does not end the program.
        """
        own = identity.program_id
        parent = identity.starter_id
        root = self._roots.get(scope, digest_of(b"family", parent or own)) or parent
        if root is None or root == own:
            return identity
        self._roots.put(scope, digest_of(b"family", own), root)
        return replace(
            identity,
            program_id=root,
            thread_id=ThreadId(own.partition(":")[2]),  # without the scope and the source
            parent_thread_id=ThreadId(parent.partition(":")[2]) if parent and parent != root else None,
            ends=False,
        )

    def named(self, identity: Identity, body: Mapping[str, Any], scope: str) -> Identity:
        """The identity of a thread's request with the kind of its agent, which the call that handed it its task names.
        The body is read if it is the thread's first request."""
        program_id, thread_id = identity.program_id, identity.thread_id
        if thread_id is None or identity.label is not None:
            return identity
        thread = digest_of(b"agent", program_id, thread_id)
        kind = self._kinds.get(scope, thread)
        if kind is None:
            messages = body.get("messages", body.get("input"))
            first = messages[:_MOST_MESSAGES] if isinstance(messages, list) else ()
            items = (item for each in first if isinstance(each, Mapping) for item in items_of_message(each))
            texts = (text for item in items for text in texts_of(item))
            found = (self._kinds.get(scope, digest_of(b"task", program_id, text)) for text in texts)
            kind = next(filter(None, found), "")
            self._kinds.put(scope, thread, kind)
        return replace(identity, label=label_of(identity.program_name, kind))

    def answered(self, identity: Identity, answers: Iterable[Iterable[Item]], scope: str) -> None:
        """Note the sub-agents that an answer starts."""
        for kind, task in (task_in(item) for answer in answers for item in answer if item[0] == "call"):
            if kind:
                self._kinds.put(scope, digest_of(b"task", identity.program_id, task), kind)


def task_in(item: Item) -> tuple[str, str]:
    """The kind of the agent that a tool call starts, and the longest text that it hands on; "" if it starts none."""
    kind = _AGENT_KIND.search(item[3])
    return (kind[1], max(arguments_of(item), key=len, default="")) if kind else ("", "")


def starts_agents(tools: object, depth: int = 4) -> bool:
    """Whether one of a request's tools starts agents, and takes their kind."""
    if isinstance(tools, list):
        return any(starts_agents(each, depth - 1) for each in tools if depth)
    if not isinstance(tools, Mapping):
        return False
    fields = tools.get("properties")
    inside = (tools.get(name) for name in ("function", "parameters", "input_schema", "tools") if depth)
    return (isinstance(fields, Mapping) and not _AGENT_KINDS.isdisjoint(fields)) or any(
        starts_agents(each, depth - 1) for each in inside
    )


def label_of(program_name: str | None, kind: str) -> str | None:
    """What calls of an agent are called, such as `claude-code/Explore`; None: its kind is not known."""
    return "/".join(filter(None, (program_name, kind))) if kind else None
