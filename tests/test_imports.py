"""Every module of Weft can be imported, with the vLLM and the frameworks that are installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import importlib, pkgutil
import weft
from weft.core.errors import MissingPackageError
for found in pkgutil.walk_packages(weft.__path__, "weft."):
    if not found.name.endswith(".__main__"):
        try:
            importlib.import_module(found.name)
        except MissingPackageError as error:  # Agent Framework is in no lock
            assert found.name.startswith("weft.integrations.agent_framework"), error
            continue
        print(found.name)
"""


@pytest.mark.engine  # imports vLLM, but starts no engine
def test_every_module_can_be_imported() -> None:
    """A name that another version of vLLM or of a framework has moved would stop one of them."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {"weft.engine.vllm_compat.server_names", "weft.integrations.langchain"} <= set(done.stdout.split())
