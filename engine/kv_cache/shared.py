"""Host memory that the replicas on one host share, so that a program that moves finds its KV where it left it.

Each replica has a part, which it alone writes and all others read, without a lock. Every slot of a part has a
generation, which is odd while the slot holds a block that others may read, and the key of that block. The owner makes
the generation even before it plans a copy into the slot, and odd again when its workers have reported the copy. A
reader notes the generation when it finds the key, and its worker compares after it has copied: if the generation has
changed, the block is computed again. So a process that dies, or stands still, at any moment leaves a part that can be
read, and the replica that is started in its place finds it, too.

`SharedFolder` makes the parts, in the process that launches the replicas. They are memory without a name in any file
system: nothing is left behind when all processes are gone, and the size of /dev/shm is no limit.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import threading
from collections.abc import Hashable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch

from weft.core.errors import SwapError
from weft.engine.kv_cache.kernel import Swapper
from weft.engine.kv_cache.layout import CacheLayout
from weft.engine.kv_cache.pool import HostPool
from weft.engine.kv_cache.slot_plans import SwapBatch
from weft.engine.processes.run_folder import RunFolder

VARIABLE: Final = "WEFT_SHARED_KV"  # tells a replica's processes where its part is
KEY_BYTES: Final = 32  # of vLLM's hashes of blocks. Shorter ones may not be safe to share.
_MAGIC: Final = int.from_bytes(b"weft-kv1", "big")
_HEADER_BYTES: Final = 4096
_MOST_RANKS: Final = 256
_LOG: Final = 2048  # a reader that has missed more changes than that looks at all slots
_LOOK_EVERY_S: Final = 1.0  # so often a replica looks for parts that are new
_PAGE_BYTES: Final = 2 << 20
_WAY_BYTES: Final = 16 << 20  # through which a worker reads what others have
_KEPT_S: Final = 600.0  # so long others can read what a replica has left that was removed


class SharedFolder:
    """Makes the memory of replicas, and a folder with links to it that only this user can read."""

    def __init__(self) -> None:
        self._folder = RunFolder()
        self._files: dict[int, int] = {}
        self._retired: threading.Timer | None = None

    def add(self, number: int) -> str:
        """Make the part of a replica. Returns the value of `VARIABLE` for its processes."""
        self._files[number] = file = os.memfd_create(f"weft-kv-{number}", os.MFD_CLOEXEC)
        link = self._folder.path / str(number)
        link.symlink_to(f"/proc/{os.getpid()}/fd/{file}")
        return str(link)

    def retire(self, number: int) -> None:
        """A replica will not be started again. Its programs go on elsewhere, so its part is given back after some
        minutes only, or when another replica is retired: one such part is kept at most."""
        if self._retired is not None:
            self._retired.cancel()
            self.remove(*self._retired.args)
        self._retired = threading.Timer(_KEPT_S, self.remove, (number,))
        self._retired.daemon = True
        self._retired.start()

    def remove(self, number: int) -> None:
        """Give back the part of a replica. Does nothing if there is none."""
        file = self._files.pop(number, None)
        if file is not None:
            (self._folder.path / str(number)).unlink(missing_ok=True)
            threading.Thread(target=_give_back, args=(file,), name="weft-shared-kv", daemon=True).start()

    def close(self) -> None:
        """Let go of all parts."""
        if self._retired is not None:
            self._retired.cancel()
        while self._files:  # one by one, as the timer may just take one
            os.close(self._files.popitem()[1])
        self._folder.remove()


def _give_back(file: int) -> None:
    """Give back memory that the others still map, which takes seconds for much of it. They see from the generations,
    which go first, that nothing is there."""
    try:
        if size := os.fstat(file).st_size:
            with mmap.mmap(file, size) as memory:
                for start in range(0, size, _PAGE_BYTES):
                    memory.madvise(mmap.MADV_REMOVE, start, min(_PAGE_BYTES, size - start))
    finally:
        os.close(file)


class Shape(NamedTuple):
    """What parts must have in common so that one replica can read the other's."""

    slots: int
    stride: int  # bytes from one slot to the next, on each rank
    ranks: int
    model: bytes  # a digest of what decides the content of a block with a given key

    @property
    def index_bytes(self) -> int:
        """What comes before the memory of the ranks."""
        return _rounded(_HEADER_BYTES + 4 * _LOG + (8 + KEY_BYTES) * self.slots)

    @property
    def rank_bytes(self) -> int:
        """The memory of a rank."""
        return _rounded(self.slots * self.stride)


def _rounded(size: int) -> int:
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


class Part:
    """The memory of one replica, as one of its processes or another replica's maps it. Raises OSError if there is no
    such memory. Raises SwapError if it has another shape."""

    def __init__(self, path: Path, shape: Shape) -> None:
        size = shape.index_bytes + shape.ranks * shape.rank_bytes
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_size == 0:
                os.ftruncate(file, size)
            if os.fstat(file).st_size != size or shape.ranks > _MOST_RANKS:
                raise SwapError(f"the shared memory {path} was made for another engine.")
            self._memory = memory = mmap.mmap(file, size)
        finally:
            os.close(file)
        with suppress(OSError, AttributeError):  # the system has no huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._shape = shape
        self._head = np.frombuffer(memory, np.uint64, 8)  # magic, slots, stride, ranks, changes
        self._model = np.frombuffer(memory, np.uint8, len(shape.model), offset=64)
        self._layouts = np.frombuffer(memory, np.uint64, _MOST_RANKS, offset=128)
        self._log = np.frombuffer(memory, np.uint32, _LOG, offset=_HEADER_BYTES)
        start = _HEADER_BYTES + 4 * _LOG
        self.generations = np.frombuffer(memory, np.uint64, shape.slots, offset=start)
        self._keys = start + 8 * shape.slots

    @staticmethod
    def shape_of(path: Path) -> Shape | None:
        """The shape of the part that a replica has claimed; None if no replica has. Raises OSError if there is no
        such memory."""
        with path.open("rb") as file:
            head = file.read(_HEADER_BYTES)
        if not head:
            return None
        magic, slots, stride, ranks = map(int, np.frombuffer(head, np.uint64, 4))
        return Shape(slots, stride, ranks, head[64:96]) if magic == _MAGIC else None

    def arena(self, rank: int) -> torch.Tensor:
        """A rank's slots, `(slots, stride)` bytes."""
        shape = self._shape
        start = shape.index_bytes + rank * shape.rank_bytes
        flat = torch.frombuffer(self._memory, dtype=torch.uint8, offset=start, count=shape.slots * shape.stride)
        return flat.view(shape.slots, shape.stride)

    def claim(self) -> None:
        """Make it the part of this replica. What an earlier process of the replica has left can still be read, unless
        that had another model: SwapError."""
        if not self._head[0]:
            self._head[1:4] = self._shape[:3]
            self._model[:] = np.frombuffer(self._shape.model, np.uint8)
            self._head[0] = _MAGIC
        elif not self.fits:
            self.withdraw_all()
            raise SwapError("the replica's shared memory was made for another model.")

    @property
    def fits(self) -> bool:
        """Whether a replica of the same shape has claimed it."""
        head = [int(number) for number in self._head[:4]]
        return head == [_MAGIC, *self._shape[:3]] and self._model.tobytes() == self._shape.model

    def layout(self, rank: int) -> int:
        """How a rank's blocks lie in its slots, as `layout_digest` says it; 0 if there is no such rank."""
        return int(self._layouts[rank])

    def use_layout(self, rank: int, digest: int) -> None:
        """Say how this rank's blocks lie in its slots."""
        self._layouts[rank] = digest

    def publish(self, slot: int, key: bytes) -> None:
        """A slot holds this block now."""
        self._memory[self._keys + KEY_BYTES * slot : self._keys + KEY_BYTES * (slot + 1)] = key
        self.generations[slot] += np.uint64(1 + int(self.generations[slot]) % 2)
        self._changed(slot)

    def withdraw(self, slot: int) -> None:
        """A slot may be written from now on."""
        if self.generations[slot] % 2:
            self.generations[slot] += np.uint64(1)
            self._changed(slot)

    def withdraw_all(self) -> None:
        """Nothing can be read any more."""
        for slot in np.flatnonzero(self.generations % 2):
            self.withdraw(int(slot))

    def _changed(self, slot: int) -> None:
        self._log[self.changes % _LOG] = slot
        self._head[4] += np.uint64(1)

    @property
    def changes(self) -> int:
        """How many slots have changed so far."""
        return int(self._head[4])

    def changed(self, since: int) -> list[int]:
        """The slots that have changed since then; all that can be read if these are too many to tell."""
        now = self.changes
        if now - since >= _LOG // 2:  # the owner goes on while this looks
            return [int(slot) for slot in np.flatnonzero(self.generations % 2)]
        return [int(self._log[change % _LOG]) for change in range(since, now)]

    def key(self, slot: int) -> bytes:
        """What a slot holds, if its generation is odd before and after."""
        return self._memory[self._keys + KEY_BYTES * slot : self._keys + KEY_BYTES * (slot + 1)]


class Known:
    """What is known of another replica's part."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.changes = 0
        self.slots: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    def update(self) -> None:
        if (now := self.part.changes) == self.changes:  # as in most steps
            return
        changed, self.changes = self.part.changed(self.changes), now
        for slot in changed:
            self.forget(slot)
            if self.part.generations[slot] % 2:
                self._keys[slot] = key = self.part.key(slot)
                self.slots[key] = slot

    def forget(self, slot: int) -> None:
        key = self._keys.pop(slot, None)
        if key is not None and self.slots.get(key) == slot:
            del self.slots[key]


class Found(NamedTuple):
    """A block in shared memory."""

    slot: int  # of all parts: that of the part numbered n begin at (n + 1) times the slots of a part
    generation: int


class SharedIndex:
    """Which blocks are in the parts of the replicas, all of one shape, for the scheduler of one of them. `link` is
    what `SharedFolder.add` gave. Raises OSError or SwapError if it is gone, or was made for another engine or model."""

    def __init__(self, link: Path, shape: Shape) -> None:
        self._folder, self._slots, self._shape = link.parent, shape.slots, shape
        self._own = Part(link, shape)
        self._own.claim()
        self._known = {int(link.name): Known(self._own)}
        self._next_look_s = -math.inf
        self.is_open = False

    def open(self) -> None:
        """The workers have their memory here. Before, nothing is found or published."""
        self.is_open = True

    def leave(self) -> None:
        """Share nothing any more: the model's weights have changed, and those of others may not."""
        self._own.withdraw_all()
        self.is_open = False

    def publish(self, slot: int, key: Hashable) -> None:
        """A slot of this replica holds a block. Nobody else finds one whose key is known to this replica only."""
        if self.is_open and isinstance(key, bytes) and len(key) == KEY_BYTES:
            self._own.publish(slot, key)

    def withdraw(self, slot: int) -> None:
        """A slot of this replica may be written from now on."""
        self._own.withdraw(slot)

    def look(self, now_s: float) -> None:
        """Take note of what the replicas have published. Called once a step."""
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_EVERY_S
            self._look_for_parts()
        for known in self._known.values():
            known.update()

    def _look_for_parts(self) -> None:
        with suppress(OSError):  # the launcher has gone
            names = {int(link.name) for link in self._folder.iterdir() if link.name.isdigit()}
            for number in self._known.keys() - names:
                del self._known[number]
            for number in names - self._known.keys():
                with suppress(OSError, SwapError):  # it is not ready, or another model's
                    path = self._folder / str(number)
                    if path.stat().st_size and (part := Part(path, self._shape)).fits:
                        self._known[number] = Known(part)

    def find(self, key: Hashable) -> Found | None:
        """Where a block is now; None: no replica has published it."""
        if not self.is_open or not isinstance(key, bytes):
            return None
        for number, known in self._known.items():
            slot = known.slots.get(key)
            if slot is None:
                continue
            generation = int(known.part.generations[slot])
            if generation % 2 and known.part.key(slot) == key and known.part.generations[slot] == generation:
                return Found((number + 1) * self._slots + slot, generation)
        return None

    def forget(self, slot: int) -> None:
        """A block could not be read from there. It is not found there again, unless it is published again."""
        known = self._known.get(slot // self._slots - 1)
        if known is not None:
            known.forget(slot % self._slots)


class SharedPools:
    """The host memory of all replicas, for a worker of one of them.

    What it reads of others goes through a small pool of its own. So whether it was valid is known as soon as it has
    been read, and the memory of the others need not be page-locked here.

    Args:
        link: What `SharedFolder.add` gave.
        shape: Of all parts.

    Attributes:
        swapper: Copies through the small pool.

    Raises:
        OSError, SwapError: As for `Part`.
    """

    def __init__(self, link: Path, shape: Shape, rank: int) -> None:
        self._folder, self._shape, self._rank = link.parent, shape, rank
        self._own = int(link.name)
        self._parts = {self._own: Part(link, shape)}

    def own_pool(self, layout: CacheLayout, digest: int) -> HostPool:
        """The pool of this worker. Raises SwapError if its blocks are larger than the scheduler thinks, or memory
        cannot be page-locked."""
        if layout.slot_bytes > self._shape.stride:
            raise SwapError(f"a block has {layout.slot_bytes} bytes here, and {self._shape.stride} elsewhere.")
        is_gpu, part = layout.device.type == "cuda", self._parts[self._own]
        self._digest = digest
        part.use_layout(self._rank, digest)
        self._way = HostPool(max(1, _WAY_BYTES // self._shape.stride), layout.slot_bytes, pinned=is_gpu)
        self.swapper = Swapper(layout, self._way, staging_bytes=_WAY_BYTES)
        return HostPool(self._shape.slots, layout.slot_bytes, pinned=is_gpu, arena=part.arena(self._rank))

    def read(self, batch: SwapBatch, generations: Mapping[int, int]) -> SwapBatch:
        """Copy blocks from the host memory of replicas.

        Args:
            batch: The blocks, and the slots as `Found` numbers them.
            generations: By slot, what `Found` says.

        Returns:
            What could not be copied, or had been given up meanwhile.
        """
        # What was removed stays mapped no longer.
        self._parts = {each: part for each, part in self._parts.items() if (self._folder / str(each)).is_symlink()}
        failed, way = SwapBatch(), self._way
        for start in range(0, len(batch.slots), way.slots):
            blocks: list[int] = []
            for block, slot in zip(batch.blocks[start:][: way.slots], batch.slots[start:][: way.slots], strict=True):
                if self._copy(slot, generations[slot], way.arena[len(blocks)]):
                    blocks.append(block)
                else:
                    failed.add(block, slot)
            self.swapper.swap_in(blocks, range(len(blocks))).wait()  # the next blocks take the same way
        return failed

    def _copy(self, slot: int, generation: int, to: torch.Tensor) -> bool:
        number, slot = slot // self._shape.slots - 1, slot % self._shape.slots
        try:
            if number not in self._parts:
                self._parts[number] = Part(self._folder / str(number), self._shape)
        except (OSError, SwapError):
            return False  # the replica was removed
        part = self._parts[number]
        to.copy_(part.arena(self._rank)[slot, : len(to)])
        return part.layout(self._rank) == self._digest and int(part.generations[slot]) == generation

    def close(self) -> None:
        """Let go of all memory but that of `own_pool`, which is the caller's to close."""
        self._way.close()
        self._parts.clear()


def layout_digest(caches: Mapping[str, torch.Tensor]) -> int:
    """Tells whether two processes lay blocks into slots in the same way. See `CacheLayout`."""
    memory: dict[int, int] = {}
    said = [
        (
            name,
            memory.setdefault(cache.untyped_storage().data_ptr(), len(memory)),
            (cache.storage_offset(), cache.shape, cache.stride(), cache.dtype),
        )
        for name, cache in caches.items()
    ]
    return int.from_bytes(hashlib.sha256(repr(said).encode()).digest()[:8], "big") | 1
