"""What several benchmarks share: the machine, a spread as text, matplotlib, and the tiny engine."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from typing import Any, Final

from weft.core.routing import BalancerConfig

# A small engine that starts quickly.
TINY_ENGINE_ARGS: Final[dict[str, Any]] = {
    "max_num_seqs": 4,
    "max_model_len": 2048,
    "enforce_eager": True,
    "use_tqdm_on_load": False,
    "kv_cache_memory_bytes": 256 << 20,
}


def machine() -> dict[str, Any]:
    """The machine that a benchmark runs on, for its JSON file."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
    }


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median (lowest, highest)."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}, {max(values):.{digits}f})"


def pyplot() -> Any:
    """matplotlib's `pyplot`, set up to draw into SVG files."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    return plt


def balancer_config(name: str, threshold_tokens: int) -> BalancerConfig:
    """A balancer; the threshold is a parameter of Algorithm 2 only, which is `locality`."""
    return BalancerConfig(name, threshold_tokens=threshold_tokens) if name == "locality" else BalancerConfig(name)
