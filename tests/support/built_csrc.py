"""Importing this makes `weft._csrc` the extension in the folder $WEFT_CSRC. For pytest, it is a plugin."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

import weft

spec = PathFinder.find_spec("_csrc", [os.environ["WEFT_CSRC"]])
if spec is None or spec.loader is None:
    raise ImportError(
        f"there is no extension in {os.environ['WEFT_CSRC']}. Build it with make test-asan, test-ubsan or gpu-check."
    )
extension = importlib.util.module_from_spec(spec)
spec.loader.exec_module(extension)
sys.modules["weft._csrc"] = weft._csrc = extension  # type: ignore[attr-defined]
