"""The kernels under test: every backend that can move blocks on this machine."""

from __future__ import annotations

import ctypes

import pytest
import swap_fake_cuda
import torch
from swap_kernels import Kernel

from weft import _csrc

# The kernels for a GPU are tested only where there is a GPU.
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
compiled = pytest.mark.skipif(not _csrc.has_cuda, reason="built without nvcc")
KERNELS = [
    "host",
    "no compiled part",
    "torch",
    "fake cuda, kernels",
    "fake cuda, copy engines",
    pytest.param("torch on gpu", marks=gpu),
    pytest.param("cuda", marks=[*gpu, compiled]),
    pytest.param("cuda, kernels", marks=[*gpu, compiled]),
    pytest.param("cuda, copy engines", marks=[*gpu, compiled]),
]


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The library of csrc/swap_cuda.cu on a fake GPU."""
    if swap_fake_cuda.compiler() is None:
        pytest.skip("no C++ compiler")
    return swap_fake_cuda.build(tmp_path_factory.mktemp("fake_cuda"))


@pytest.fixture(params=KERNELS, scope="module")
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """Every kernel that this machine can test, one after the other."""
    return Kernel(request.param, lambda: request.getfixturevalue("fake_cuda"))
