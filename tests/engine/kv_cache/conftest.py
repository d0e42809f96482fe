"""The kernels under test: each way to move blocks that this machine has."""

from __future__ import annotations

import ctypes

import pytest
import swap_fake_cuda
import torch
from swap_kernels import Kernel

from weft import _csrc

# Those for a GPU run where there is one.
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
compiled = pytest.mark.skipif(not _csrc.has_cuda, reason="built without nvcc")
KERNELS = [
    "host",
    "torch",
    "fake cuda",
    pytest.param("torch on gpu", marks=gpu),
    pytest.param("cuda", marks=[gpu, compiled]),
]


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """csrc/swap_cuda.cu on a fake GPU."""
    if swap_fake_cuda.compiler() is None:
        pytest.skip("no C++ compiler")
    return swap_fake_cuda.build(tmp_path_factory.mktemp("fake_cuda"))


@pytest.fixture(params=KERNELS, scope="module")
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """Each way to move blocks that this machine has."""
    return Kernel(request.param, lambda: request.getfixturevalue("fake_cuda"))
