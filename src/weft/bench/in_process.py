"""vLLM in this process instead of in ones of its own. To be called before anything imports it."""

from __future__ import annotations

import logging
import os
import warnings

from weft.engine.vllm_compat.version import require_vllm


def run_in_this_process(*, one_thread: bool = False) -> None:
    """Have vLLM, which is yet to be imported, run its engines here, and quietly.

    Args:
        one_thread: on a CPU, unless the environment says otherwise. Two threads, each bound to a core, wait for each
            other many times a step: where another process has one of the cores, a step of the tiny model that takes 3
            ms took 400 ms.

    Raises:
        UnsupportedVllmError, VllmUnavailableError: see `weft.core.errors`.
    """
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CONFIGURE_LOGGING="0")
    os.environ.update(TORCH_CPP_LOG_LEVEL="ERROR", TORCH_LOGS="-torch._library", HF_HUB_DISABLE_PROGRESS_BARS="1")
    if one_thread:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # vLLM's own
    require_vllm()
