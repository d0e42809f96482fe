"""Reads conversations off requests. Of a request that goes on from the one before, only what is new is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from weft.core.identity.conversations import Said, kinds_of, said_in
from weft.core.identity.items import MOST_ITEMS, SILENCE, Digest, Item, chain, item_keys, items_before, items_of_message
from weft.core.identity.recent import Recent

_MOST_KIB: Final = 32 << 10  # of requests that are kept
_MOST_SIZE: Final = 1 << 20  # of a conversation that is kept
_MOST_TWINS: Final = 4  # conversations with the same first words


@dataclass(slots=True)
class _Reading:
    """A conversation as it was read."""

    before: list[Item]
    messages: list[Any]  # as they came
    items: list[list[Item]]  # of each message
    kinds: bytes  # of all items; see `kinds_of`
    own: list[list[Digest]]  # of these items
    head: list[Digest]  # of the beginnings of the system prompt
    rest: list[Digest]  # of those of what is behind it, which stay if it changes
    kept: dict[Item, Digest]  # see `Said`
    characters: int
    size: int  # its characters, or if it has more that lineage does not read, the bytes of the request


class Readings:
    """Keeps the conversations that were read last."""

    def __init__(self) -> None:
        self._read: Recent[list[_Reading]] = Recent(_MOST_KIB, _kib)

    def read(self, body: Mapping[str, Any], scope: str, start: Digest, body_bytes: int = 0) -> Said:
        """The conversation in a request of any of the three APIs.

        It is empty if there is none, as in a plain completion, or if it has more than `MOST_ITEMS`, which take too long
        to compare. Its digests begin with `start`. What is kept of a request counts for at least its `body_bytes`.
        """
        before = items_before(body)
        messages = body.get("messages", body.get("input"))
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        messages = list(messages) if isinstance(messages, list) else []
        key = _key_of(start, messages)
        known = self._read.get(scope, key) or []
        found = ((_same(each.messages, messages), each) for each in known)
        unknown = _Reading([], [], [], b"", [], [], [], {}, 0, 0)
        same, reading = max(found, key=lambda each: each[0], default=(0, unknown))
        items, own = reading.items[:same], reading.own[:same]
        is_same_system = same > 0 and reading.messages[0] == messages[0]
        if same and not is_same_system:
            items[0] = items_of_message(messages[0])
            own[0] = item_keys(items[0])
        count = len(before) + sum(map(len, items))
        for message in messages[same:]:
            items.append(items_of_message(message) if isinstance(message, Mapping) else [])
            count += len(items[-1])
            if count > MOST_ITEMS:
                return said_in([], b"", [], start, {})
        if items[-1:] == [[SILENCE]] and not messages[-1].get("name"):  # the place of the answer
            del items[-1], messages[-1], own[len(items) :]
        own += map(item_keys, items[len(own) :])
        flat = [*before, *(item for each in items for item in each)]
        at = int(bool(messages) and _is_system(messages[0]))
        head, rest = reading.head, reading.rest[: sum(map(len, items[at:same]))]
        kinds, behind = reading.kinds[: len(head)], reading.kinds[len(head) :][: len(rest)]
        if not (is_same_system and reading.before == before):
            head = chain(start, [*item_keys(before), *(key for each in own[:at] for key in each)])
            kinds = kinds_of(flat[: len(head)])
        kinds += behind + kinds_of(flat[len(head) + len(rest) :])
        rest += chain(rest[-1] if rest else start, [key for each in own[max(at, same) :] for key in each])
        digests = [*(start + each for each in head), *(each + (head or [start])[-1] for each in rest)]
        new = sum(len(text) for each in items[same:] for item in each for text in item)
        had = reading.characters if same == len(reading.messages) else 0
        had = had or sum(len(text) for each in items[:same] for item in each for text in item)
        kept = reading.kept if same == len(reading.messages) else {}
        size = max(had + new, body_bytes)
        if messages and size <= _MOST_SIZE:
            others = [each for each in known if each is not reading or same < len(reading.messages) - 1]
            latest = _Reading(before, messages, items, kinds, own, head, rest, kept, had + new, size)
            readings = [latest, *others][:_MOST_TWINS]
            self._read.put(scope, key, readings)
            self._read.grow(scope, _kib(readings) - (_kib(known) or 1))
        return said_in(flat, kinds, digests, start, kept)


def _kib(readings: list[_Reading]) -> int:
    return sum(1 + each.size // 1024 for each in readings)


def _key_of(start: Digest, messages: Sequence[Any]) -> Digest:
    """Return the key of a conversation: the digest of its first message that is not the system's."""
    for message in messages:
        if isinstance(message, Mapping) and not _is_system(message):
            return [start, *chain(start, item_keys(items_of_message(message)))][-1]
    return start


def _same(one: list[Any], other: list[Any]) -> int:
    """With how many equal messages two conversations begin, whatever the system's first one says."""
    place = int(bool(one) and bool(other) and _is_system(one[0]) and _is_system(other[0]))
    least = min(len(one), len(other))
    if one[place:least] == other[place:least]:
        return least
    while place < least and one[place] == other[place]:
        place += 1
    return place


def _is_system(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") in ("system", "developer")
