"""The GPU benchmark's copies and results, on the fake GPU, and the picture of canned measurements."""

from __future__ import annotations

import ctypes
import json
import re
from pathlib import Path

import gpu_cases
import gpu_measure
import gpu_picture
import pytest
import swap_fake_cuda
import torch
from gpu_cases import METHODS, PASSED, Budget, Case, plan
from swap_kernels import Kernel

from weft.core.errors import SwapDeviceError
from weft.engine.kv_cache import CacheLayout, HostPool, Swapper
from weft.testing import FakeClock

ROOT = Path(__file__).parents[2]
SOME = plan(64 << 10, block_kib=(1, 16), blocks=(1, 4))


class FakeGpu:
    """Stands in for `gpu_measure.Gpu`: caches lie in host memory, and each copy takes a second of the clock."""

    device = torch.device("cpu")
    name = "a fake GPU"
    stream = 0

    def __init__(self, library: ctypes.CDLL, clock: FakeClock) -> None:
        self.clock = clock
        self.computed_s: list[float] = []
        self._library = library

    def swapper(self, layout: CacheLayout, pool: HostPool, way: str) -> Swapper:
        return Kernel(f"fake cuda, {way}", lambda: self._library).swapper(layout, pool, staging_bytes=8 << 10)

    def finish(self) -> None:
        self._library.device_synchronize()
        self.clock.advance(1)

    def finish_copies(self) -> None:
        self._library.engine_synchronize()

    def forget(self) -> None:
        return

    def begin_compute(self, for_s: float) -> None:
        self.computed_s.append(for_s)

    def end_compute(self) -> tuple[bool, float]:
        return False, 1.5


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Weft's kernel and the benchmark's copies, on one fake GPU."""
    if swap_fake_cuda.compiler() is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("fake_gpu")
    swap_fake_cuda.build(folder, ROOT / "benchmarks/gpu_copies.cpp")
    return with_results(gpu_measure.load(folder / "libfake.so"))


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_cases, "ROUNDS", 4)


def with_results(library: ctypes.CDLL) -> ctypes.CDLL:
    for name in ("swap_create", "swap_start"):
        getattr(library, name).restype = ctypes.c_void_p
    return library


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_copies_the_right_blocks(library: ctypes.CDLL, method: str, to_host: bool) -> None:
    """What is compared moves the same blocks to the same place, whichever way; the limit moves as many bytes."""
    case = Case(1, 16, pinned=True, to_host=to_host, compute=False)
    bench = gpu_measure.Bench(FakeGpu(library, FakeClock()), library, [case], seed=3)
    blocks, slots = torch.from_numpy(bench.blocks(case)), torch.from_numpy(bench.slots(case, method))
    assert len(set(blocks.tolist())) == len(set(slots.tolist())) == 16
    bench.host.random_()
    before = bench.cache.clone(), bench.host.clone()
    bench.copies(case)[method]()
    bench.gpu.finish()
    if method == "limit":
        assert torch.equal(bench.host[:16], before[0][:16] if to_host else before[1][:16])
        assert torch.equal(bench.cache[:16], before[0][:16] if to_host else before[1][:16])
    elif to_host:
        assert torch.equal(bench.host[slots], before[0][blocks])
        assert torch.equal(bench.cache, before[0])
    else:
        expected = before[0].clone()
        expected[blocks] = before[1][slots]
        assert torch.equal(bench.cache, expected)
    assert not bench.try_out(case, method, bench.copies(case)[method])[1]
    bench.close()


@pytest.mark.parametrize("to_host", [True, False])
def test_wrong_bytes_are_noticed(library: ctypes.CDLL, to_host: bool) -> None:
    """A copy that does nothing, or takes the wrong blocks, is found before its time counts."""
    case = Case(1, 16, pinned=True, to_host=to_host, compute=False)
    bench = gpu_measure.Bench(FakeGpu(library, FakeClock()), library, [case], seed=3)
    assert bench.try_out(case, "weft", lambda: None)[1]
    assert bench.try_out(case, "weft", bench.copies(case)["weft_scattered"])[1]
    bench.close()


def test_the_results_are_written_as_they_come(library: ctypes.CDLL, tmp_path: Path) -> None:
    """Each case has the times of all methods and their ratios, and compute ran during those cases that ask for it."""
    clock = FakeClock()
    gpu = FakeGpu(library, clock)
    out = tmp_path / "benchmark.json"
    assert gpu_measure.run(gpu, library, SOME, Budget(100_000, clock), out, seed=0) == 0
    result = json.loads(out.read_text())
    assert len(result["results"]) == sum(map(len, SOME))
    assert not result["left_out"]
    for row in result["results"]:
        assert set(row["methods"]) == set(METHODS)
        assert set(row["weft_is_faster"]) == set(METHODS) - {"weft"}
        assert not row["wrong"]
        for times in row["methods"].values():
            assert len(times["seconds"]) == times["rounds"] == 4
            assert times["lower_quartile_s"] <= times["median_s"] <= times["p95_s"] <= times["p99_s"]
            assert times.get("compute_takes_times_as_long", 1.5) == 1.5
            assert ("outlasted_the_compute" in times) == row["case"]["compute"]
    assert gpu.computed_s
    gpu_picture.main([str(out)])
    assert out.with_suffix(".svg").stat().st_size > 0


def test_what_the_time_does_not_allow_is_left_out(library: ctypes.CDLL, tmp_path: Path) -> None:
    """When the time is over, the file says which cases were not measured, and only whole rounds are in it."""
    clock = FakeClock()
    out = tmp_path / "benchmark.json"
    assert gpu_measure.run(FakeGpu(library, clock), library, SOME, Budget(30, clock), out, seed=0) == 0
    result = json.loads(out.read_text())
    assert result["results"]
    assert len(result["results"]) + len(result["left_out"]) == sum(map(len, SOME))
    assert {each["reason"] for each in result["left_out"]} == {"the time was over"}
    for row in result["results"]:
        assert len({times["rounds"] for times in row["methods"].values()}) <= 1


def test_memory_that_cannot_be_had_costs_its_group_only(
    library: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory cannot be page-locked, the file says so, and the other cases are measured."""
    make = HostPool.__init__

    def refuse(pool: HostPool, slots: int, slot_bytes: int, *, pinned: bool = False) -> None:
        if slot_bytes == 1024:
            raise SwapDeviceError("page-locking 8.00 GiB of host memory: out of memory")
        make(pool, slots, slot_bytes, pinned=pinned)

    monkeypatch.setattr(HostPool, "__init__", refuse)
    clock = FakeClock()
    out = tmp_path / "benchmark.json"
    assert gpu_measure.run(FakeGpu(library, clock), library, SOME, Budget(10_000, clock), out, seed=0) == 0
    result = json.loads(out.read_text())
    assert {row["case"]["block_kib"] for row in result["results"]} == {16}
    assert {(each["block_kib"], "out of memory" in each["reason"]) for each in result["left_out"]} == {(1, True)}


def test_a_baseline_that_fails_is_reported_and_the_others_go_on(
    library: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A driver without cudaMemcpyBatchAsync costs that column only."""
    monkeypatch.setattr(library, "copy_batch", lambda *_: 801)
    clock = FakeClock()
    out = tmp_path / "benchmark.json"
    assert gpu_measure.run(FakeGpu(library, clock), library, SOME[:1], Budget(10_000, clock), out, seed=0) == 0
    for row in json.loads(out.read_text())["results"]:
        assert row["errors"] == {"batch": "a fake error"}
        assert set(row["methods"]) == set(METHODS) - {"batch"}
    assert "batch failed: a fake error" in capsys.readouterr().out


def test_a_failure_of_wefts_kernel_fails_the_benchmark(
    library: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The benchmark then ends with code 1, and the error is in its file."""

    def fail(*_: object, **_options: object) -> None:
        raise SwapDeviceError("an illegal memory access was encountered")

    monkeypatch.setattr(Swapper, "swap_out", fail)
    clock = FakeClock()
    out = tmp_path / "benchmark.json"
    assert gpu_measure.run(FakeGpu(library, clock), library, SOME[:1], Budget(10_000, clock), out, seed=0) == 1
    rows = json.loads(out.read_text())["results"]
    assert any("illegal memory access" in row["errors"].get("weft", "") for row in rows)


def test_the_picture_has_every_size_and_method(tmp_path: Path) -> None:
    """Canned measurements give a picture with a column for each size, a row for each kind, and every method's name."""
    times = {"median_s": 2e-3, "lower_quartile_s": 1e-3, "upper_quartile_s": 3e-3}
    results = [
        {"case": case.row(), "methods": dict.fromkeys(METHODS, times)}
        for group in plan(8 << 30, block_kib=(16, 2048), blocks=(1, 4096))
        for case in group
    ]
    path = tmp_path / "canned.json"
    path.write_text(json.dumps({"machine": {"gpu": "a GPU"}, "results": results}))
    assert gpu_picture.main([str(path)]) == 0
    words = set(re.findall(r"<!-- (.*?) -->", path.with_suffix(".svg").read_text()))  # of each text that is drawn
    assert {"blocks of 16 KiB", "blocks of 2048 KiB", *METHODS.values()} - words == {METHODS[PASSED]}
    assert {f"{memory}, {way} (GB/s)" for memory in ("pinned", "pageable") for way in ("out", "in")} <= words
