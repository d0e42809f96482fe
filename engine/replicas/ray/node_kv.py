"""The KV of a program that moves to a replica on another node, which goes over Ray's object store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.core.log import get_logger
from weft.engine.kv_cache.shared import KEY_BYTES, Known, Part, SharedFolder

_BATCH_BYTES: Final = 32 << 20  # of blocks that are on their way at once
_SHARE: Final = 4  # what comes from other nodes takes a fourth of what the replica has in host memory


class MovedBlocks(NamedTuple):
    """Blocks on their way, with what says whether they fit where they arrive."""

    model: bytes
    layouts: tuple[int, ...]  # by rank, see `layout_digest`
    keys: list[bytes]
    data: npt.NDArray[np.uint8]  # (blocks, ranks, bytes of a slot)


class NodeKv:
    """Host memory of a replica on its node: the replica's part, and one for what comes from other nodes.

    The replica's scheduler finds that in the second part as it finds what replicas on its own host have. Where the part
    is full, what came first makes way.

    Raises:
        OSError: The system does not give such memory.
    """

    def __init__(self, number: int) -> None:
        self._folder = SharedFolder()
        self.link = self._folder.add(number)
        self._guests_link = Path(self._folder.add(number + 1))
        self._own: Known | None = None
        self._has_warned = False

    def open(self) -> None:
        """The replica runs. If it has claimed its part, blocks can be read from now on, and can come."""
        self._slots: dict[bytes, int] = {}  # of the guests, in the order in which they came
        try:
            shape = Part.shape_of(Path(self.link))
            if shape is None:
                return
            self._guests = Part(self._guests_link, shape)
            self._guests.claim()
            self._shape, self._own = shape, Known(Part(Path(self.link), shape))
        except OSError as error:
            get_logger().warning("programs that move take no KV along", reason=str(error))
            return
        self._most = max(1, shape.slots // _SHARE)

    def lacking(self, keys: Sequence[bytes]) -> Iterator[list[bytes]]:
        """The blocks that are not here, as far as there is room for them, in batches."""
        if self._own is None:
            return
        self._own.update()
        missing = [key for key in keys if key not in self._own.slots and key not in self._slots][: self._most]
        count = max(1, _BATCH_BYTES // (self._shape.ranks * self._shape.stride))
        for start in range(0, len(missing), count):
            yield missing[start : start + count]

    def read(self, keys: Sequence[bytes]) -> MovedBlocks | None:
        """Blocks of the replica's part, without those that have gone meanwhile; None if it has no part."""
        if self._own is None:
            return None
        part, shape = self._own.part, self._shape
        self._own.update()
        found = [(key, slot) for key in keys if (slot := self._own.slots.get(key)) is not None]
        slots = np.array([slot for _, slot in found], np.int64)
        before = part.generations[slots]
        is_there = np.array([part.key(slot) == key for key, slot in found], bool) & (before % 2 == 1)
        data = np.empty((len(found), shape.ranks, shape.stride), np.uint8)
        for rank in range(shape.ranks):
            data[:, rank] = part.arena(rank).numpy()[slots]
        is_there &= part.generations[slots] == before
        kept = [key for (key, _), is_kept in zip(found, is_there, strict=True) if is_kept]
        return MovedBlocks(shape.model, self._layouts, kept, data if is_there.all() else data[is_there])

    def add(self, blocks: MovedBlocks) -> bool:
        """Take blocks of another node. Returns whether they fit: the model and the layout of its KV are the same."""
        if self._own is None:
            return False
        if (blocks.model, blocks.layouts) != (self._shape.model, self._layouts):
            if not self._has_warned:
                self._has_warned = True
                get_logger().warning(
                    "KV of a replica on another node cannot be used here, and is computed again. This is logged once",
                    reason="the model's files have other names, sizes or times there, or the KV cache another layout",
                )
            return False
        arenas = [self._guests.arena(rank).numpy() for rank in range(self._shape.ranks)]
        for rank, digest in enumerate(blocks.layouts):
            self._guests.use_layout(rank, digest)
        for key, rows in zip(blocks.keys, blocks.data, strict=True):
            if len(key) != KEY_BYTES or key in self._slots:
                continue
            slot = len(self._slots)
            if slot == self._most:
                slot = self._slots.pop(next(iter(self._slots)))
                self._guests.withdraw(slot)
            for arena, row in zip(arenas, rows, strict=True):
                arena[slot] = row
            self._guests.publish(slot, key)
            self._slots[key] = slot
        return True

    @property
    def _layouts(self) -> tuple[int, ...]:
        assert self._own is not None  # noqa: S101  both callers have asked
        return tuple(self._own.part.layout(rank) for rank in range(self._shape.ranks))

    def close(self) -> None:
        """Give the memory back."""
        self._folder.close()
