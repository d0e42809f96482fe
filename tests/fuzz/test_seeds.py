"""The fuzz targets that need no engine hold for their seeds, and a target that finds a bug says so."""

from __future__ import annotations

import importlib
from typing import Any

import pytest


@pytest.mark.parametrize("name", ["fuzz_history", "fuzz_trace", "fuzz_importers", "fuzz_csrc"])
def test_every_seed_is_answered(name: str) -> None:
    """Seeds are files and arguments of each kind, and those that once failed with an untyped error or a hang."""
    target: Any = importlib.import_module(name)
    for seed in target.seeds():
        target.one_input(seed)


def test_seeds_swap_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some seeds of the compiled part reach the kernel, which is what a fuzzer would find only by luck."""
    target: Any = importlib.import_module("fuzz_csrc")
    swaps: list[bool] = []
    swap = target._swap
    monkeypatch.setattr(target, "_swap", lambda *args: (swaps.append(args[2]), swap(*args)))
    for seed in target.seeds():
        target.one_input(seed)
    assert {True, False} <= set(swaps)


def test_a_wrong_byte_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A swap that also moves a byte that it must not move fails the target."""
    target: Any = importlib.import_module("fuzz_csrc")

    def swap(kernel: Any, *args: Any) -> Any:
        class Wrong:
            def swap(self, *ids: Any) -> None:
                kernel.swap(*ids)
                target._MEMORY[-1] += 1

        return right(Wrong(), *args)

    right = target._swap
    monkeypatch.setattr(target, "_swap", swap)
    with pytest.raises(AssertionError):
        list(map(target.one_input, target.seeds()))


def test_an_untyped_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that raises an error of its own fails the target."""
    target: Any = importlib.import_module("fuzz_trace")
    monkeypatch.setattr(target, "read", lambda _path: {}["missing"])
    with pytest.raises(KeyError):
        target.one_input(b"")
