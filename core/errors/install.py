"""The commands that install what is missing. `weft` is no name for them: on PyPI it is another project's."""

from __future__ import annotations

import importlib.metadata
import re
from functools import cache
from typing import Final

_NAME: Final = re.compile(r"[\w.-]+")


def pip_install(*distributions: str) -> str:
    """The command that installs distributions in the versions that Weft asks for, if it asks for any.

    Args:
        distributions: their names, such as "langchain-core".
    """
    wanted = _requirements()
    return f"pip install {' '.join(wanted.get(name, name) for name in distributions)}"


@cache
def _requirements() -> dict[str, str]:
    """By name, each distribution that Weft or one of its extras requires, quoted for a shell."""
    try:
        found = importlib.metadata.requires("vllm-weft") or []
    except importlib.metadata.PackageNotFoundError:  # Weft is imported from a folder that is not installed
        return {}
    texts = [text.partition(";")[0].strip() for text in found]  # without the extra
    return {match[0]: f"'{text}'" for text in texts if (match := _NAME.match(text))}
