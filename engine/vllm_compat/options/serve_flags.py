"""The options of `vllm serve`, read from the sources of the installed vLLM: its import takes many seconds."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# Where versions define them: as fields of classes, or by their names.
_FILES: Final = ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py", "entrypoints/common/cli_args.py")
_FLAG: Final = re.compile(r"--?[a-z][\w-]*")


def serve_flags() -> frozenset[str]:
    """All options, and a few more, which vLLM's own parser refuses: versions name an option's opposite in other ways.

    vLLM must be installed.
    """
    spec = importlib.util.find_spec("vllm")
    roots = (spec is not None and spec.submodule_search_locations) or ()
    files = [file for root in roots for name in _FILES if (file := Path(root, name)).is_file()]
    flags = {flag for file in files for flag in _flags(ast.parse(file.read_text(encoding="utf-8")))}
    turned = {(turn, way) for turn in ("--enable-", "--disable-") for way in ("--enable-", "--disable-")}
    turned.add(("--", "--no-"))
    opposites = {way + each.removeprefix(turn) for turn, way in turned for each in flags if each.startswith(turn)}
    return frozenset(flags | opposites | {"-h"})


def _flags(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _FLAG.fullmatch(node.value):
            yield node.value
        for each in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.target.id[0] != "_":
                yield f"--{each.target.id.replace('_', '-')}"
