"""What an engine does with a vLLM that is newer than those that Weft is tested with."""

from __future__ import annotations

import importlib
import os
from functools import cache
from typing import Final

from weft.core.errors import UnsupportedVllmError
from weft.core.log import get_logger
from weft.engine.vllm_compat.versions.members import changed_members
from weft.engine.vllm_compat.versions.version import TESTED_VLLM, check_vllm, is_tested

_GOES_ON: Final = "WEFT_UNTESTED_VLLM"  # an environment variable; "1": even if members have changed


def check_members() -> None:
    """Compare the members of a newer vLLM with those that Weft expects, once in a process, and warn.

    Raises:
        UnsupportedVllmError: One that Weft overrides or writes has changed, which could make outputs wrong, or a name
            that Weft imports is gone. The change of another member ends in an error where it is used.
    """
    version = check_vllm()
    if not is_tested(version):
        _check(version)


@cache
def _check(version: str) -> None:
    breaking = changed_members(uses=("overridden", "written"))
    changes = [*breaking, *(change for change in changed_members() if change not in breaking)]
    if breaking and os.environ.get(_GOES_ON) != "1":
        raise UnsupportedVllmError(version, TESTED_VLLM, changes)
    try:
        importlib.import_module("weft.engine.vllm_compat.names")
    except ImportError as error:
        raise UnsupportedVllmError(version, TESTED_VLLM, [f"{error}."]) from error
    found = " ".join(changes) or "It has every member that Weft uses."
    get_logger().warning(
        f"vLLM {version} is newer than those that Weft is tested with ({', '.join(TESTED_VLLM)}). {found} "
        "`weft doctor --engine` starts an engine on it; compare outputs before you rely on them."
    )
