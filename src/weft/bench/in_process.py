"""Runs vLLM's engines in this process instead of in processes of their own."""

from __future__ import annotations

import logging
import os
import warnings

from weft.engine.vllm_compat.version import require_vllm


def run_in_this_process(*, one_thread: bool = False) -> None:
    """Make vLLM run its engines in this process, without log output. Call this before anything imports vLLM.

    Args:
        one_thread: use one thread on a CPU, unless the environment sets another number. Two threads, each bound to a
            core, wait for each other many times a step. When another process occupied one of the cores, a step of the
            tiny model took 400 ms instead of 3 ms.

    Raises:
        UnsupportedVllmError, VllmUnavailableError: see `weft.core.errors`.
    """
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CONFIGURE_LOGGING="0")
    os.environ.update(TORCH_CPP_LOG_LEVEL="ERROR", TORCH_LOGS="-torch._library", HF_HUB_DISABLE_PROGRESS_BARS="1")
    if one_thread:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # vLLM's own warnings
    require_vllm()
