"""The `weft` command, and what vLLM loads as its plugin.

This package has the distribution's own name. The import package `weft` shares its folder with that of a distribution
`weft`, which is another project's on PyPI, if both are installed.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def other_weft() -> str | None:
    """What to do if the other project's `weft` has written to the folder of the package; None if it has not."""
    try:
        other = distribution("weft")
    except PackageNotFoundError:
        return None
    found, folder = importlib.util.find_spec("weft"), Path(str(other.locate_file("weft")))
    if found is None or found.origin is None or folder != Path(found.origin).parent:
        return None
    return (
        f"weft {other.version}, another project, is installed beside vllm-weft, and both write to {folder}. Run "
        "`pip uninstall weft vllm-weft`, then install vllm-weft again, or use an environment for each."
    )


def main() -> None:
    """Run the `weft` command."""
    if (line := other_weft()) is not None:
        sys.exit(line)
    from weft.commands.cli import main as command

    sys.exit(command())


def register() -> None:
    """Tell vLLM the name of the KV connector. vLLM calls this in each of its processes, with Weft or without."""
    if (line := other_weft()) is not None:
        sys.stderr.write(f"{line}\n")
        return
    from weft.engine.vllm_compat.connector_name import register_connector

    register_connector()
