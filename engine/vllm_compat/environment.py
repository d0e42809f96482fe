"""The environment variables that a start of vLLM 0.32 writes in the host process, and those that set its logging.

vLLM writes them for the processes that it starts. Other children of the host must not inherit them, so Weft restores
them after a start. It touches no other variable, because the host may set its own variables meanwhile. A test on a real
start finds the variables that are missing here.
"""

from __future__ import annotations

import os
from typing import Final

IMPORT_WRITES: Final = (  # vLLM and the packages that it imports
    "AITER_SITUV2_A4W4",
    "CUDA_VISIBLE_DEVICES",  # on ROCm, from HIP_VISIBLE_DEVICES
    "HIP_ONLINE_TUNING",
    "LD_LIBRARY_PATH",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "QT_QPA_FONTDIR",
    "QT_QPA_PLATFORM_PLUGIN_PATH",
    "RAY_CLIENT_MODE",
    "TILELANG_CLEANUP_TEMP_FILES",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TRITON_CACHE_AUTOTUNING",
    "TRITON_CACHE_DIR",
    "UCX_RCACHE_MAX_UNRELEASED",
)
CONFIG_WRITES: Final = (  # vLLM's configuration, on all platforms
    "GPU_PINNED_MIN_XFER_SIZE",
    "LD_PRELOAD",
    "LOCAL_WORLD_SIZE",
    "NCCL_GRAPH_REGISTER",
    "NUMEXPR_MAX_THREADS",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "RAY_ADDRESS",
    "RAY_USAGE_STATS_ENABLED",
    "TORCHINDUCTOR_CPP_DYNAMIC_THREADS",
    "UCX_MEMTYPE_CACHE",
    "VLLM_DISABLE_SHARED_EXPERTS_STREAM",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_SSM_CONV_STATE_LAYOUT",
    "VLLM_USE_BREAKABLE_CUDAGRAPH",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_USE_TRITON_AWQ",
    "VLLM_WORKER_MULTIPROC_METHOD",
)
START_WRITES: Final = frozenset(IMPORT_WRITES + CONFIG_WRITES)
# Torch warns on each start on CPU that Triton is missing, with which nobody can do anything.
QUIET: Final = {"TORCH_LOGS": "-torch._library"}
LOGGING: Final = ("VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_CONFIG_PATH")


def quiet() -> dict[str, str]:
    """Environment variables for a start, unless the user has set them."""
    return {name: value for name, value in QUIET.items() if name not in os.environ}


def sets_logging() -> bool:
    """Whether the user has said, by an environment variable, how vLLM logs."""
    return any(variable in os.environ for variable in LOGGING)
