"""Import paths that earlier versions documented still lead to the same objects."""

from __future__ import annotations

import importlib

import pytest

import weft

MOVED = {
    "weft.core.sim": ("weft.core.trace", ["TraceCall", "TraceProgram"]),
    "weft.core.program": ("weft.core.program.handle", ["Program", "register_adapter"]),
    "weft.engine.wire": ("weft.engine.wire.call_header", ["CallHeader"]),
    "weft.engine.http": ("weft.engine.http.check_ids", ["CheckIds"]),
}
MOVED_WITH_VLLM = {"weft.engine.scheduler": ("weft.engine.scheduler.plugin", ["WeftScheduler"])}


def check(path: str, now: str, names: list[str]) -> None:
    module, moved = importlib.import_module(path), importlib.import_module(now)
    for name in names:
        assert getattr(module, name) is getattr(moved, name), name


@pytest.mark.parametrize("path", MOVED)
def test_a_documented_path_still_works(path: str) -> None:
    """The path gives the objects of the module that has them now."""
    check(path, *MOVED[path])


@pytest.mark.engine
@pytest.mark.parametrize("path", MOVED_WITH_VLLM)
def test_a_documented_path_of_vllm_plugins_still_works(path: str) -> None:
    """vLLM imports these by the names that users give it: scheduler class, connector module, middleware."""
    check(path, *MOVED_WITH_VLLM[path])


def test_every_public_name_is_listed_before_it_is_first_used() -> None:
    """Shells and editors complete what `dir` lists, also the names that are imported late."""
    assert set(weft.__all__) <= set(dir(weft))
