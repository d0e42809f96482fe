"""Any arguments of the compiled part make a typed error, or a swap that moves the right bytes and no others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from values import ByteReader, value

from weft import _csrc

_SIZE: Final = 1 << 14
_MEMORY: Final = np.zeros(_SIZE, np.uint8)  # cache and pool; every address that is used lies in here
_BASE: Final = _MEMORY.ctypes.data
_BEFORE: Final = (np.arange(_SIZE) * 7).astype(np.uint8)  # what is in it before a swap
_EDGES: Final = (0, -1, 1 << 31, (1 << 31) - 1, 1 << 62, (1 << 63) - 1, -(1 << 63), 1 << 63, (1 << 64) - 1, 1 << 64)


def one_input(data: bytes) -> None:
    """Make a layout, check a batch, make a kernel, and swap where the layout lies inside the memory."""
    reader = ByteReader(data)
    pieces, sizes = _pieces(reader), [_number(reader) for _ in range(4)]
    layout = _answer(lambda: _csrc.SwapLayout(pieces, *sizes))
    if layout is not None:
        _check_layout(pieces, *sizes)
    blocks, slots = _ids(reader, sizes[0]), _ids(reader, sizes[3])
    if reader.byte() % 16 == 0:
        layout = value(reader)
    elif layout is not None and _answer(lambda: layout.check(blocks, slots) or True):
        for ids, limit in ((blocks, sizes[0]), (slots, sizes[3])):
            assert all(0 <= each < limit for each in ids.tolist())
            assert len(set(ids.tolist())) == len(ids)
    threads, cpus = _number(reader), [reader.byte() - 100 for _ in range(reader.byte() % 4)]
    kernel = _answer(lambda: _csrc.HostSwap(layout, threads, cpus))
    if kernel is not None and _lies_inside(pieces, *sizes):
        _swap(kernel, (pieces, *sizes), bool(reader.byte() % 2), blocks, slots)


def _answer(call: Callable[[], Any]) -> Any:
    """The result of a call; None if it raised an error for wrong arguments."""
    try:
        return call()
    except (TypeError, ValueError) as error:
        message = str(error)
    assert _is_a_refusal(message), message
    return None


def _is_a_refusal(message: str) -> bool:
    """Whether the compiled part says such things. Each `or` tells the fuzzer of a check that it has reached."""
    return len(message) < 2000 and (
        "incompatible function arguments" in message
        or "appears twice" in message
        or "is out of range: there are" in message
        or "Pass one slot for each block" in message
        or "holds nothing to swap" in message
        or "Make the pool with slot_bytes" in message
        or "the pool does not lie in the address space" in message
        or "bytes does not lie in the address space" in message
        or "the blocks overlap" in message
        or "the pool overlaps the cache" in message
        or "two pieces of the cache overlap" in message
        or "exceed the address space" in message
        or "threads. Give 1 to 1024" in message
    )


def _check_layout(pieces: Any, num_blocks: int, pool: int, slot_stride: int, num_slots: int) -> None:
    """Assert that no byte of a layout that was accepted belongs to two blocks, or to a block and the pool."""
    if num_blocks * len(pieces) > 1000:
        return
    spans = [(pool, pool + num_slots * slot_stride)]
    for address, stride, size in pieces.tolist():
        spans += [(address + block * stride, address + block * stride + size) for block in range(num_blocks)]
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def _swap(kernel: Any, layout: tuple[Any, ...], out: bool, blocks: Any, slots: Any) -> None:
    """Swap, and compare every byte of the memory with what a plain copy makes of it."""
    _MEMORY[:] = _BEFORE
    expected = _BEFORE.copy()
    if _answer(lambda: kernel.swap(out, blocks, slots) or True):
        pieces, _, pool, slot_stride, _ = layout
        for block, slot in zip(blocks.tolist(), slots.tolist(), strict=True):
            at = pool - _BASE + slot * slot_stride
            for address, stride, size in pieces.tolist():
                page = address - _BASE + block * stride
                target, source = (at, page) if out else (page, at)
                expected[target : target + size] = _BEFORE[source : source + size]
                at += size
    assert np.array_equal(_MEMORY, expected)


def _lies_inside(pieces: Any, num_blocks: Any, pool: Any, slot_stride: Any, num_slots: Any) -> bool:
    spans = [(pool, slot_stride, slot_stride, num_slots)]
    spans += [(address, stride, size, num_blocks) for address, stride, size in pieces.tolist()]
    return all(
        first >= _BASE and first + (count - 1) * stride + size <= _BASE + _SIZE for first, stride, size, count in spans
    )


# -- arguments


def _number(reader: ByteReader) -> Any:
    """A number of things, an address in the memory, an edge, or something else."""
    kind = reader.byte()
    if kind < 100:
        return reader.byte() % 64
    if kind < 200:
        return _BASE + int.from_bytes(reader.take(2), "little") % _SIZE
    if kind < 230:
        return _EDGES[reader.byte() % len(_EDGES)] + reader.byte() % 3 - 1
    return int.from_bytes(reader.take(8), "little", signed=True) if kind < 250 else value(reader)


def _pieces(reader: ByteReader) -> Any:
    kind, count = reader.byte(), reader.byte() % 5
    if kind < 200:  # a plausible layout
        rows = [[_number(reader), reader.byte() * 4, reader.byte()] for _ in range(count)]
        rows = [row for row in rows if isinstance(row[0], int) and abs(row[0]) < 1 << 63]
        return np.array(rows, np.int64).reshape(-1, 3)
    if kind < 240:  # any numbers
        return np.frombuffer(reader.take(24 * count).ljust(24 * count, b"\x00"), np.int64).reshape(-1, 3)
    return _odd(reader, np.arange(12).reshape(-1, 3))


def _ids(reader: ByteReader, limit: Any) -> Any:
    """Numbers of blocks or slots: small ones, and those next to the limit."""
    kind, count = reader.byte(), reader.byte() % 9
    if kind >= 240:
        return _odd(reader, np.arange(8))
    edge = limit if isinstance(limit, int) and abs(limit) < 1 << 62 else 0
    numbers = [reader.byte() for _ in range(count)]
    return np.array([edge + byte % 4 - 2 if byte >= 160 else byte % 16 for byte in numbers], np.int64)


def _odd(reader: ByteReader, array: NDArray[np.int64]) -> Any:
    """An argument of the wrong type, shape or layout in memory."""
    odd: tuple[Callable[[], Any], ...] = (
        lambda: array[::-1],
        lambda: array.reshape(2, -1).T,
        lambda: array.astype(np.int32),
        lambda: array.astype(np.float64),
        lambda: array.astype(">i8"),
        lambda: np.array(None),
        lambda: array[:0],
        array.tolist,
        lambda: value(reader),
    )
    return odd[reader.byte() % len(odd)]()


def seeds() -> list[bytes]:
    """A layout with two pieces and a swap in each direction, each number that overflows, and wrong types."""
    piece = bytes((150, 0, 0, 16, 64)), bytes((150, 0, 8, 16, 64))
    sizes = bytes((0, 4)) + bytes((150, 0, 16)) + bytes((0, 63)) + bytes((0, 4))
    small = bytes((150, 0, 0, 16, 16)), bytes((150, 0, 8, 16, 16))
    ids = bytes((0, 3, 0, 1, 2)), bytes((0, 3, 3, 0, 1))
    rest = bytes((1, 0, 2, 1, 100))
    whole = [bytes((0, 2)) + b"".join(small) + sizes + b"".join(ids) + rest + bytes((out,)) for out in (0, 1)]
    edges = [
        bytes((0, 2)) + b"".join(piece) + bytes((210, edge, 1)) * 4 + b"".join(ids) + rest
        for edge in range(len(_EDGES))
    ]
    many_blocks = [  # pieces of different strides, in as many blocks as the address space holds
        bytes((220, 2))
        + np.array([[1 << 20, 1 << 22, 8], [(1 << 20) + 16, 3 << 20, 8]], np.int64).tobytes()
        + b"\xe7" + (1 << 40).to_bytes(8, "little")
        + b"\xe7" + (1 << 12).to_bytes(8, "little")
        + bytes((0, 16, 0, 4))
        + b"".join(ids)
        + rest
    ]  # fmt: skip
    odd = [bytes((250, 1, kind)) + sizes + bytes((250, 1, kind)) * 2 + rest for kind in range(9)]
    return [*whole, *edges, *many_blocks, *odd, b""]
