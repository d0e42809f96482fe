"""vLLM's parsers for tool calls, by name."""

from __future__ import annotations

import difflib

from weft.core.errors import EngineStartError
from weft.engine.vllm_compat.names import ToolParserManager


def check_tool_call_parser(name: str | None) -> None:
    """Check the name of a parser.

    Raises:
        EngineStartError: vLLM has no parser of this name.
    """
    known = ToolParserManager.list_registered()
    if name is None or name in known:
        return
    near = difflib.get_close_matches(str(name), known, n=1)
    raise EngineStartError(
        f"tool_call_parser={name!r} is not one of vLLM's parsers{f' (did you mean {near[0]!r}?)' if near else ''}. "
        f"Give one of {', '.join(known)}, or None."
    )
