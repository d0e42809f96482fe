"""Replicas on one host read each other's host memory: what they find, what they do not, and never a wrong token."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from host_programs import call, end, harness, prompt_of
from kv_fuzz import play_together
from scheduler_harness import SchedulerHarness, share_memory

from weft.core.errors import SwapError
from weft.core.ids import ProgramId
from weft.engine.kv_cache.layout import describe
from weft.engine.kv_cache.pool import HostPool
from weft.engine.kv_cache.shared import Found, Part, Shape, SharedFolder, SharedIndex, SharedPools, layout_digest
from weft.engine.kv_cache.slot_plans import SwapBatch, SwapPlan
from weft.engine.kv_cache.worker import SwapWorker
from weft.engine.wire.control import SpillProgram, encode_control

SHAPE = Shape(slots=4, stride=64, ranks=1, model=bytes(32))


@pytest.fixture
def folder() -> Iterator[SharedFolder]:
    shared = SharedFolder()
    yield shared
    shared.close()


def key(number: int) -> bytes:
    return bytes([number]) * 32


def opened(folder: SharedFolder, number: int, shape: Shape = SHAPE) -> SharedIndex:
    index = SharedIndex(Path(folder.add(number)), shape)
    index.open()
    return index


class TestIndex:
    def test_a_published_block_is_found_by_the_others_until_it_is_withdrawn(self, folder: SharedFolder) -> None:
        """Its slot is numbered among those of all parts."""
        one, other = opened(folder, 0), opened(folder, 1)
        one.publish(3, key(7))
        other.look(0.0)
        found = other.find(key(7))
        assert found == Found(slot=1 * 4 + 3, generation=1)
        one.withdraw(3)
        assert other.find(key(7)) is None  # though it has not looked
        other.look(0.0)
        one.publish(3, key(7))
        other.look(0.0)
        assert other.find(key(7)) == Found(slot=1 * 4 + 3, generation=3)

    def test_a_slot_that_gets_another_block_is_found_by_that_one_only(self, folder: SharedFolder) -> None:
        one, other = opened(folder, 0), opened(folder, 1)
        one.publish(0, key(1))
        other.look(0.0)
        one.withdraw(0)
        one.publish(0, key(2))
        assert other.find(key(1)) is None
        other.look(0.0)
        assert other.find(key(1)) is None
        assert other.find(key(2)) is not None

    def test_a_reader_that_has_missed_many_changes_looks_at_all_slots(self, folder: SharedFolder) -> None:
        one, other = opened(folder, 0), opened(folder, 1)
        one.publish(1, key(1))
        for _ in range(3000):
            one.withdraw(2)
            one.publish(2, key(2))
        other.look(0.0)
        assert other.find(key(1)) is not None
        assert other.find(key(2)) is not None

    def test_nothing_is_shared_before_the_workers_have_their_memory_there(self, folder: SharedFolder) -> None:
        one, other = SharedIndex(Path(folder.add(0)), SHAPE), opened(folder, 1)
        one.publish(0, key(1))
        other.publish(0, key(2))
        one.look(0.0)
        other.look(0.0)
        assert other.find(key(1)) is None
        assert one.find(key(2)) is None

    def test_a_replica_that_leaves_finds_nothing_and_is_not_found(self, folder: SharedFolder) -> None:
        """Its weights have changed, and those of the others may not have."""
        one, other = opened(folder, 0), opened(folder, 1)
        one.publish(0, key(1))
        other.publish(0, key(2))
        other.look(0.0)
        one.look(0.0)
        one.leave()
        assert one.find(key(2)) is None
        assert other.find(key(1)) is None
        one.publish(1, key(3))
        other.look(0.0)
        assert other.find(key(3)) is None

    def test_what_could_not_be_read_is_not_found_again_until_it_is_published_again(self, folder: SharedFolder) -> None:
        one, other = opened(folder, 0), opened(folder, 1)
        one.publish(0, key(1))
        other.look(0.0)
        found = other.find(key(1))
        assert found is not None
        other.forget(found.slot)
        other.look(0.0)
        assert other.find(key(1)) is None
        one.withdraw(0)
        one.publish(0, key(1))
        other.look(0.0)
        assert other.find(key(1)) is not None

    @pytest.mark.parametrize("other", [SHAPE._replace(model=bytes([1] * 32)), SHAPE._replace(slots=5)])
    def test_replicas_of_another_model_or_size_do_not_see_each_other(self, folder: SharedFolder, other: Shape) -> None:
        one, stranger = opened(folder, 0), opened(folder, 1, other)
        one.publish(0, key(1))
        stranger.look(0.0)
        assert stranger.find(key(1)) is None

    def test_a_replica_that_starts_again_finds_what_it_had(self, folder: SharedFolder) -> None:
        link = Path(folder.add(0))
        first = SharedIndex(link, SHAPE)
        first.open()
        first.publish(2, key(9))
        again = SharedIndex(link, SHAPE)
        again.open()
        again.look(0.0)
        assert again.find(key(9)) == Found(slot=4 + 2, generation=1)
        again.withdraw(2)  # it is to be written
        assert again.find(key(9)) is None

    def test_a_replica_that_starts_again_with_another_model_shares_nothing(self, folder: SharedFolder) -> None:
        link, other = Path(folder.add(0)), opened(folder, 1)
        first = SharedIndex(link, SHAPE)
        first.open()
        first.publish(0, key(1))
        other.look(0.0)
        assert other.find(key(1)) is not None
        with pytest.raises(SwapError, match="another model"):
            SharedIndex(link, SHAPE._replace(model=bytes([1] * 32)))
        assert other.find(key(1)) is None  # its workers write there now
        with pytest.raises(SwapError, match="another engine"):
            SharedIndex(link, SHAPE._replace(slots=100_000))

    def test_the_memory_of_a_replica_that_was_removed_is_given_back(self, folder: SharedFolder) -> None:
        """Though others still map it. They find nothing there any more."""
        one, other = opened(folder, 0), opened(folder, 1)
        one.publish(0, key(1))
        other.look(0.0)
        folder.remove(0)
        while other.find(key(1)) is not None:
            time.sleep(0.01)
        with pytest.raises(OSError, match="No such file"):
            Part(Path(folder.add(2)).parent / "0", SHAPE)
        folder.remove(5)  # there is none

    def test_what_a_replica_has_left_that_was_removed_is_found_until_another_one_is(self, folder: SharedFolder) -> None:
        """Its programs go on elsewhere. The memory of one such replica is kept at most."""
        one, two, other = (opened(folder, number) for number in range(3))
        one.publish(0, key(1))
        two.publish(0, key(2))
        other.look(0.0)
        folder.retire(0)
        other.look(10.0)
        assert other.find(key(1)) is not None
        folder.retire(1)
        while other.find(key(1)) is not None:
            time.sleep(0.01)
        other.look(20.0)
        assert other.find(key(2)) is not None

    def test_what_a_replica_has_left_is_given_back_in_time(
        self, folder: SharedFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("weft.engine.kv_cache.shared._KEPT_S", 0.0)
        one, other = opened(folder, 0), opened(folder, 1)
        one.publish(0, key(1))
        other.look(0.0)
        folder.retire(0)
        while other.find(key(1)) is not None:
            time.sleep(0.01)

    def test_a_random_history_agrees_with_a_dict(self, folder: SharedFolder) -> None:
        """A reader that has looked finds exactly what is published, in whatever order things happened."""
        rng = random.Random(0)
        writers, reader = [opened(folder, number) for number in range(2)], opened(folder, 2)
        published: dict[tuple[int, int], bytes] = {}
        for _ in range(2000):
            number, slot = rng.randrange(2), rng.randrange(4)
            writers[number].withdraw(slot)
            published.pop((number, slot), None)
            each = key(rng.randrange(6))
            if each not in {block for (part, _), block in published.items() if part == number}:
                published[number, slot] = each
                writers[number].publish(slot, each)
            if rng.random() < 0.3:
                reader.look(0.0)
                for kind in range(6):
                    found = reader.find(key(kind))
                    places = {4 * (n + 1) + s for (n, s), each in published.items() if each == key(kind)}
                    assert (found is None) == (not places)
                    assert found is None or found.slot in places


def caches(fill: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((6, 2, 4), fill, dtype=torch.float32) for name in ("a", "b")}


class TestWorkers:
    """Two workers with real memory and the real kernel."""

    SHAPE = Shape(slots=4, stride=64, ranks=1, model=bytes(32))

    def worker(self, link: str, mine: dict[str, torch.Tensor]) -> SwapWorker:
        return SwapWorker(mine, 6, 4, SharedPools(Path(link), self.SHAPE, rank=0))

    def test_a_worker_reads_what_another_has_copied_out(self, folder: SharedFolder) -> None:
        one, two = caches(7), caches(0)
        links = [folder.add(number) for number in range(2)]
        owner, reader = self.worker(links[0], one), self.worker(links[1], two)
        index = SharedIndex(Path(links[0]), self.SHAPE)
        index.open()
        assert owner.swap_out(SwapPlan(out=SwapBatch([5], [3]), number=1)) == set()
        index.publish(3, key(1))
        plan = SwapPlan(loads=[SwapBatch([2], [4 + 3])], number=1, generations={4 + 3: 1})
        assert reader.swap_in(plan) == (set(), set(), set())
        assert all((cache[2] == 7).all() and (cache[1] == 0).all() for cache in two.values())
        reader.close()
        owner.close()

    def test_a_block_that_was_overwritten_meanwhile_is_computed_again(self, folder: SharedFolder) -> None:
        """Blocks of this replica's own memory in the same plan are not concerned."""
        one, two = caches(7), caches(3)
        links = [folder.add(number) for number in range(2)]
        owner, reader = self.worker(links[0], one), self.worker(links[1], two)
        index = SharedIndex(Path(links[0]), self.SHAPE)
        index.open()
        owner.swap_out(SwapPlan(out=SwapBatch([5], [3]), number=1))
        index.publish(3, key(1))
        index.withdraw(3)
        reader.swap_out(SwapPlan(out=SwapBatch([0], [0]), number=1))
        plan = SwapPlan(loads=[SwapBatch([1, 2], [0, 4 + 3])], number=2, generations={4 + 3: 1})
        assert reader.swap_in(plan) == ({2}, set(), {4 + 3})
        assert all((cache[1] == 3).all() for cache in two.values())

    def test_a_part_that_is_gone_or_laid_out_otherwise_is_not_read(self, folder: SharedFolder) -> None:
        links = [folder.add(number) for number in range(3)]
        turned = {name: cache.transpose(1, 2).contiguous().transpose(1, 2) for name, cache in caches(1).items()}
        self.worker(links[2], turned)
        reader = self.worker(links[1], caches(0))
        folder.remove(0)
        for slot in (4, 12):
            plan = SwapPlan(loads=[SwapBatch([2], [slot])], number=1, generations={slot: 1})
            assert reader.swap_in(plan) == ({2}, set(), {slot})

    def test_a_worker_that_starts_again_leaves_what_is_there(self, folder: SharedFolder) -> None:
        """Though it measures how fast it copies."""
        link = folder.add(0)
        owner = self.worker(link, caches(7))
        owner.swap_out(SwapPlan(out=SwapBatch([1, 2, 3, 5], [0, 1, 2, 3]), number=1))
        before = owner.pool.arena.clone()
        again = self.worker(link, caches(0))
        assert again.measure().in_bytes_per_s > 0
        assert again.pool.arena.equal(before)
        assert before.any()

    def test_blocks_that_are_smaller_than_the_scheduler_thinks_are_shared(self, folder: SharedFolder) -> None:
        """As where layers share a cache. A slot is then larger than what is in it."""
        shape = self.SHAPE._replace(stride=192)
        one, two = caches(7), caches(0)
        links = [folder.add(number) for number in range(2)]
        owner = SwapWorker(one, 6, 4, SharedPools(Path(links[0]), shape, rank=0))
        reader = SwapWorker(two, 6, 4, SharedPools(Path(links[1]), shape, rank=0))
        index = SharedIndex(Path(links[0]), shape)
        index.open()
        owner.swap_out(SwapPlan(out=SwapBatch([5], [3]), number=1))
        index.publish(3, key(1))
        plan = SwapPlan(loads=[SwapBatch([2], [4 + 3])], number=1, generations={4 + 3: 1})
        assert reader.swap_in(plan) == (set(), set(), set())
        assert all((cache[2] == 7).all() and (cache[1] == 0).all() for cache in two.values())
        one["a"][5] = 0
        owner.swap_in(SwapPlan(loads=[SwapBatch([1], [3])], number=2))
        assert (one["a"][1] == 7).all()

    def test_blocks_that_are_larger_than_the_scheduler_thinks_are_not_shared(self, folder: SharedFolder) -> None:
        """They would reach into the next slot."""
        pools = SharedPools(Path(folder.add(0)), self.SHAPE, rank=0)
        mine = {name: torch.zeros(6, 2, 8) for name in ("a", "b")}
        with pytest.raises(SwapError, match="128 bytes here, and 64"):
            pools.own_pool(describe(mine, 6), layout_digest(mine))

    def test_a_replica_that_was_removed_is_mapped_until_the_next_read(self, folder: SharedFolder) -> None:
        """What was read of it stays mapped no longer."""

        def mapped() -> int:
            return sum("weft-kv-77 " in line for line in Path("/proc/self/maps").read_text().splitlines())

        SharedIndex(Path(folder.add(77)), self.SHAPE)
        reader = self.worker(folder.add(1), caches(0))
        plans = [
            SwapPlan(loads=[SwapBatch([2], [4 * (number + 1)])], number=1, generations={4 * (number + 1): 1})
            for number in (77, 5)
        ]
        reader.swap_in(plans[0])
        folder.remove(77)
        for thread in threading.enumerate():  # it maps the memory, too, while it gives it back
            if thread.name == "weft-shared-kv":
                thread.join()
        assert mapped() == 1
        reader.swap_in(plans[1])
        assert mapped() == 0

    def test_caches_at_other_addresses_are_laid_out_alike(self) -> None:
        """The memory of layers has another order in each process."""
        many = [caches(1) for _ in range(20)]
        assert len({layout_digest(each) for each in many}) == 1
        sizes = {tuple(describe(each, 6).pieces[:, 2]) for each in many}
        assert len(sizes) == 1
        first = [describe(each, 6).caches[0] is each["a"] for each in many]
        assert all(first)

    def test_a_pool_on_given_memory_keeps_it(self) -> None:
        arena = torch.zeros(4, 64, dtype=torch.uint8)
        with HostPool(4, 60, arena=arena) as pool:
            assert pool.arena is arena
            assert pool.slot_stride == 64


def asked(h: SchedulerHarness, program: str | None, *, begins: bool) -> bool:
    """Tell a scheduler that a program moves, None: all of them, or ask whether their contexts are being copied."""
    named = ProgramId(program) if program is not None else None
    return bool(h.scheduler(encode_control(SpillProgram(named, begins=begins)))["copying"])


class TestReplicas:
    """Two schedulers of vLLM without a model."""

    def replicas(
        self, tmp_path: Path, folder: SharedFolder, **options: Any
    ) -> tuple[SchedulerHarness, SchedulerHarness]:
        links = [folder.add(number) for number in range(2)]
        harnesses = {link: harness(tmp_path, shared=link, **options) for link in links}
        share_memory(harnesses)
        one, two = harnesses.values()
        return one, two

    def pushed_out(self, h: SchedulerHarness, prompt: list[int]) -> None:
        """A program calls, and others push its context out to host memory."""
        call(h, "first", prompt, "moves", max_tokens=8)
        for number in range(3):
            call(h, f"other-{number}", prompt_of(number, 100), f"other-{number}")
        h.settle()

    def test_a_program_that_moves_finds_its_context(self, tmp_path: Path, folder: SharedFolder) -> None:
        """It computes what is new and at most a block, though the replica has never seen it."""
        one, two = self.replicas(tmp_path, folder)
        prompt = prompt_of(9, 96)
        self.pushed_out(one, prompt)
        prompt += one.tokens["first"] + [55] * 10
        assert call(two, "second", prompt, "moves", max_tokens=8) >= len(prompt) - 10 - 16
        assert two.scheduler._swap is not None
        assert two.scheduler._swap.counts.moved_tokens >= 80

    def test_a_program_that_moves_finds_what_was_on_the_device_only(self, tmp_path: Path, folder: SharedFolder) -> None:
        """An idle replica copies it out when it is told, in steps without calls, and says when others can read it."""
        one, two = self.replicas(tmp_path, folder)
        prompt = prompt_of(9, 96)
        call(one, "first", prompt, "moves", max_tokens=8)
        one.settle()
        assert one.scheduler._swap is not None
        assert one.scheduler._swap.stats().used == 0
        assert asked(one, "unknown", begins=True) is False
        assert asked(one, "moves", begins=False) is False
        assert asked(one, "moves", begins=True)
        one.settle()
        assert asked(one, "moves", begins=False) is False
        prompt += one.tokens["first"] + [55] * 10
        assert call(two, "second", prompt, "moves", max_tokens=8) >= len(prompt) - 10 - 16
        one.scheduler.check_integrity()

    def test_a_replica_that_leaves_copies_out_all_programs(self, tmp_path: Path, folder: SharedFolder) -> None:
        """But for those that have ended. It names the blocks once it is done."""
        one, two = self.replicas(tmp_path, folder, blocks=40)
        prompts = [prompt_of(number, 96) for number in range(3)]
        for number, prompt in enumerate(prompts):
            call(one, f"first-{number}", prompt, f"moves-{number}", max_tokens=8)
        end(one, "moves-2")
        one.settle()
        assert asked(one, None, begins=True)
        one.settle()
        answer = one.scheduler(encode_control(SpillProgram(None, begins=False)))
        assert answer["copying"] is False
        assert len(set(answer["blocks"])) == 2 * 6
        found = [
            call(two, f"second-{number}", [*prompt, 55], f"moves-{number}") for number, prompt in enumerate(prompts)
        ]
        assert found == [96, 96, 0]

    def test_what_host_memory_has_no_room_for_is_not_waited_for(self, tmp_path: Path, folder: SharedFolder) -> None:
        one, two = self.replicas(tmp_path, folder, swap_blocks=2)
        prompt = prompt_of(9, 96)
        call(one, "first", prompt, "moves", max_tokens=8)
        asked(one, "moves", begins=True)
        one.settle()
        assert asked(one, "moves", begins=False) is False
        assert call(two, "second", [*prompt, 55], "moves", max_tokens=8) <= 2 * 16

    def test_a_program_that_ends_while_it_moves_is_not_copied(self, tmp_path: Path, folder: SharedFolder) -> None:
        one, _ = self.replicas(tmp_path, folder)
        call(one, "first", prompt_of(9, 96), "moves")
        assert asked(one, "moves", begins=True)
        end(one, "moves")
        one.settle()
        assert one.scheduler._swap is not None
        assert one.scheduler._swap.stats().used == 0

    def test_a_context_that_is_gone_is_computed_again(self, tmp_path: Path, folder: SharedFolder) -> None:
        """Its slots were given to others after it was found, which the worker sees."""
        one, two = self.replicas(tmp_path, folder)
        prompt = prompt_of(9, 96)
        self.pushed_out(one, prompt)
        assert two.scheduler._swap is not None
        shared = one.scheduler._swap.shared  # type: ignore[union-attr]
        assert shared is not None
        swap = two.worker.swap

        def late(plan: SwapPlan) -> object:
            for slot in range(one.worker.slots):
                shared.withdraw(slot)
                one.worker.host[slot] = [-1] * 16
            return swap(plan)

        two.worker.swap = late  # type: ignore[assignment]
        call(two, "second", [*prompt, *one.tokens["first"], 55], "moves", max_tokens=8)  # checks the tokens
        assert two.worker.failures > 0

    def test_what_a_replica_forgets_when_its_weights_change_is_not_found(
        self, tmp_path: Path, folder: SharedFolder
    ) -> None:
        one, two = self.replicas(tmp_path, folder)
        prompt = prompt_of(9, 96)
        self.pushed_out(one, prompt)
        one.scheduler.reset_prefix_cache(reset_connector=True)
        assert call(two, "second", [*prompt, 55], "moves") == 0

    @pytest.mark.parametrize("seed", range(6))
    def test_random_programs_that_move_have_the_right_tokens(self, tmp_path: Path, seed: int) -> None:
        play_together(tmp_path, seed)

    def test_random_programs_find_what_they_had_elsewhere(self, tmp_path: Path) -> None:
        """So the runs above try what they are to try."""
        done = sum((play_together(tmp_path, seed) for seed in range(6, 9)), Counter[str]())
        assert done["moved"] > 0
