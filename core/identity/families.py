"""Sessions that others have started: a run with its sub-agents is one program, and each sub-agent a thread of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from weft.core.identity.items import digest_of
from weft.core.identity.recent import Recent
from weft.core.identity.sources import Identity
from weft.core.ids import ProgramId, ThreadId

_MOST: Final = 30_000  # sessions that others have started; those unused for longest are forgotten


class Families:
    """Remembers which session began the family of each session that another one has started.

    Args:
        most: How many sessions are remembered.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._roots: Recent[ProgramId] = Recent(most)

    def __len__(self) -> int:
        return len(self._roots)

    def joined(self, identity: Identity, scope: str) -> Identity:
        """The identity of a request as a thread of the program whose session began its family.

        A session that names no parent, and never has, is a program. That a thread ends does not end the program.

        Args:
            identity: The identity that the request names.
            scope: The scope of its API key.
        """
        own = identity.program_id
        parent = identity.starter_id
        root = self._root(scope, parent) or parent if parent is not None else self._root(scope, own)
        if root is None or root == own:
            return identity
        self._roots.put(scope, _key(own), root)
        return replace(
            identity,
            program_id=root,
            thread_id=_thread(own),
            parent_thread_id=_thread(parent) if parent not in (None, root) else None,
            ends=False,
        )

    def _root(self, scope: str, program_id: ProgramId) -> ProgramId | None:
        return self._roots.get(scope, _key(program_id))


def _key(program_id: ProgramId) -> bytes:
    return digest_of(b"family", program_id)


def _thread(program_id: ProgramId | None) -> ThreadId:
    """A session's own id: what is behind the scope and the source."""
    return ThreadId((program_id or "").partition(":")[2])
