"""Texts that models hand to agents: arguments of tool calls, steps of plans, and entries of lists."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final, NamedTuple

from weft.core.identity.conversations import quotes_in
from weft.core.identity.given import SHORT_BYTES, texts_of
from weft.core.identity.items import Digest, Item, digest_of
from weft.core.identity.recent import Recent
from weft.core.identity.states import SEVERAL
from weft.core.ids import ProgramId

_MOST_MESSAGES: Final = 16  # the latest, in which entries are looked for


class HandedText(NamedTuple):
    """A text that a model handed to an agent."""

    program_id: ProgramId
    kind: str  # of the agent; "" if the call does not say
    asked: bytes  # the end of what the model was told, folded


class Handed:
    """The texts of answers that may become an agent's task, until their tool call returns.

    Args:
        most: How many are kept.
        is_open: Whether a program has not ended.
    """

    def __init__(self, most: int, is_open: Callable[[ProgramId], bool]) -> None:
        self._is_open = is_open
        self._tasks: Recent[HandedText] = Recent(most)

    def add(
        self, scope: str, start: Digest, task: HandedText, texts: list[tuple[str, str]], told: Collection[str]
    ) -> list[Digest]:
        """Note texts that may be a whole message, and entries that may stand in one. Returns their digests. Those that
        the model was told are no tasks, but then they are no other program's either."""
        is_new = {digest_of(start, *each): each[1] not in told for each in texts}
        for digest, is_task in is_new.items():
            known = self._tasks.get(scope, digest)
            if known is not None and known.program_id != task.program_id:
                self._tasks.put(scope, digest, task._replace(program_id=SEVERAL))
            elif is_task:
                self._tasks.put(scope, digest, task)
        return [digest for digest, is_task in is_new.items() if is_task]

    def drop(self, scope: str, digests: Iterable[Digest]) -> None:
        """Their tool call has returned, so they are nobody's task any more."""
        for digest in digests:
            self._tasks.pop(scope, digest)

    def find(self, scope: str, start: Digest, items: list[Item], told: bytes) -> HandedText | None:
        """What a request has of one program: a message of the user, or an entry of a list in it.

        An entry is no evidence beside the end of what its model was told, as in an example, or if that was too short
        to tell.

        Args:
            items: What is new in the request.
            told: All texts of these items, folded.
        """
        texts = [text for item in reversed(items) if item[:2] == ("message", "user") for text in texts_of(item)]
        whole = (self._get(scope, digest_of(start, "text", text)) for text in texts)
        if (task := next(filter(None, whole), None)) is not None:
            return task
        quotes = (each for text in texts[:_MOST_MESSAGES] for each in quotes_in(text))
        entries = (self._get(scope, digest_of(start, "entry", each)) for each in quotes)
        found = {task.program_id: task for task in entries if task is not None}
        tasks = [task for task in found.values() if len(task.asked) >= SHORT_BYTES and task.asked not in told]
        return tasks[0] if len(found) == len(tasks) == 1 else None

    def _get(self, scope: str, digest: Digest) -> HandedText | None:
        task = self._tasks.get(scope, digest)
        return task if task and task.program_id != SEVERAL and self._is_open(task.program_id) else None
