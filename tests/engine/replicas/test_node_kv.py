"""KV that goes from the host memory of a replica on one node to a replica on another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="the extra for Ray is not installed")
pytest.importorskip("vllm", reason="vLLM is not installed")

from weft.engine.kv_cache.shared import Part, Shape, SharedIndex
from weft.engine.replicas.ray.node_kv import NodeKv

pytestmark = pytest.mark.engine  # the module under test imports vLLM's kernels
SHAPE = Shape(slots=16, stride=64, ranks=2, model=bytes(32))
LAYOUT = 77


def key(number: int) -> bytes:
    return bytes([number]) * 32


class Node:
    """A replica on a node of its own: what its scheduler and its actor have."""

    def __init__(self, number: int, shape: Shape = SHAPE, layout: int = LAYOUT) -> None:
        self.kv = NodeKv(number)
        self.folder = Path(self.kv.link).parent
        self.scheduler = SharedIndex(Path(self.kv.link), shape)
        self.scheduler.open()
        self.own = Part(Path(self.kv.link), shape)
        for rank in range(shape.ranks):
            self.own.use_layout(rank, layout)
        self.kv.open()

    def has(self, numbers: range) -> None:
        """Its workers have copied blocks to host memory, each to the slot of its number."""
        for number in numbers:
            for rank in range(SHAPE.ranks):
                self.own.arena(rank)[number] = 10 * number + rank
            self.scheduler.publish(number, key(number))

    def finds(self, number: int) -> list[int] | None:
        """What its workers read of a block, by rank; None if its scheduler finds none."""
        self.scheduler.look(1e9)
        found = self.scheduler.find(key(number))
        if found is None:
            return None
        part = Part(self.folder / str(found.slot // SHAPE.slots - 1), SHAPE)
        rows = [part.arena(rank)[found.slot % SHAPE.slots] for rank in range(SHAPE.ranks)]
        assert all(part.layout(rank) == LAYOUT for rank in range(SHAPE.ranks))
        assert all(len(set(row.tolist())) == 1 for row in rows)
        return [int(row[0]) for row in rows]


@contextmanager
def two(**other: Any) -> Iterator[tuple[Node, Node]]:
    nodes = Node(0), Node(1, **other)
    try:
        yield nodes
    finally:
        for node in nodes:
            node.kv.close()


def move(source: Node, to: Node, numbers: range) -> bool:
    found = [source.kv.read(batch) for batch in list(to.kv.lacking([key(number) for number in numbers]))]
    return {to.kv.add(each) for each in found if each is not None} == {True}


def test_blocks_that_have_come_are_found_and_read() -> None:
    """On each rank, what was written there. Nothing is fetched twice."""
    with two() as (source, to):
        source.has(range(1, 4))
        assert to.finds(2) is None
        assert move(source, to, range(1, 4))
        assert [to.finds(number) for number in (1, 2, 3)] == [[10, 11], [20, 21], [30, 31]]
        assert list(to.kv.lacking([key(1), key(2), key(3)])) == []


def test_what_a_replica_has_itself_is_not_fetched() -> None:
    with two() as (_, to):
        to.has(range(1, 3))
        assert list(to.kv.lacking([key(number) for number in (1, 2, 3)])) == [[key(3)]]


def test_what_came_first_makes_way() -> None:
    """A fourth of the slots is for what comes, and more is never asked for at once."""
    with two() as (source, to):
        source.has(range(16))
        assert list(to.kv.lacking([key(number) for number in range(16)])) == [[key(0), key(1), key(2), key(3)]]
        assert move(source, to, range(3))
        assert move(source, to, range(3, 6))
        assert [to.finds(number) for number in range(6)] == [None, None, [20, 21], [30, 31], [40, 41], [50, 51]]


def test_many_blocks_come_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a large context does not fill the object store."""
    monkeypatch.setattr("weft.engine.replicas.ray.node_kv._BATCH_BYTES", 3 * SHAPE.ranks * SHAPE.stride)
    with two() as (_, to):
        assert [len(batch) for batch in to.kv.lacking([key(number) for number in range(4)])] == [3, 1]


def test_blocks_that_go_are_left_out() -> None:
    """Also one whose slot gets another block while it is read."""
    with two() as (source, to):
        source.has(range(1, 4))
        source.scheduler.withdraw(1)
        found = source.kv.read([key(1), key(2), key(3)])
        assert found is not None
        assert (found.keys, found.data[:, 0, 0].tolist()) == ([key(2), key(3)], [20, 30])

        part = source.kv._own.part  # type: ignore[union-attr]
        arena = part.arena

        def overwritten(rank: int) -> Any:
            source.scheduler.withdraw(2)
            source.scheduler.publish(2, key(9))
            return arena(rank)

        part.arena = overwritten  # type: ignore[method-assign]
        found = source.kv.read([key(2), key(3)])
        assert found is not None
        assert (found.keys, found.data[:, 0, 0].tolist()) == ([key(3)], [30])
        assert to.kv.add(found)
        assert to.finds(3) == [30, 31]


@pytest.mark.parametrize(
    "other", [{"shape": SHAPE._replace(model=b"other" + bytes(27))}, {"layout": 78}], ids=["model", "layout"]
)
def test_kv_of_another_model_or_layout_is_never_found(other: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """It is computed again, and the log says so once."""
    with two(**other) as (source, to):
        source.has(range(1, 3))
        assert not move(source, to, range(1, 2))
        assert not move(source, to, range(2, 3))
        assert to.scheduler.find(key(1)) is None
    assert [record.getMessage().count("cannot be used here") for record in caplog.records] == [1]


def test_memory_that_the_system_refuses_costs_the_kv_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The replica serves, and what moves is computed again."""

    def refuse(*_: Any) -> None:
        raise OSError(12, "cannot allocate memory")

    with two() as (_, there):
        monkeypatch.setattr("weft.engine.replicas.ray.node_kv.Part.__init__", refuse)
        there.kv._own = None
        there.kv.open()
        assert list(there.kv.lacking([key(1)])) == []
        assert there.kv.read([key(1)]) is None
    assert [record.getMessage().count("take no KV along") for record in caplog.records] == [1]


def test_a_replica_without_host_memory_gives_and_takes_nothing() -> None:
    """Its model's KV cannot be swapped, so it has claimed no part."""
    bare = NodeKv(5)
    try:
        bare.open()
        assert bare.read([key(1)]) is None
        assert list(bare.lacking([key(1)])) == []
    finally:
        bare.close()
