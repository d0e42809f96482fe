"""Programs from conversations whose messages are there and whose token counts are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.core.errors import TraceError
from weft.core.trace.format import TraceCall
from weft.core.trace.importers.reading import tokens_of


def next_call(
    calls: list[TraceCall], new: str, output: str, tool: str | None, *, more_tokens: int = 0, gap_s: float = 0.0
) -> TraceCall:
    """Return the call that follows those before it and repeats the last one's prompt and output.

    Args:
        calls: the calls so far.
        new: the text that its prompt adds.
        output: the text of its output.
        tool: the tool whose result the prompt adds, or "human".
        more_tokens: what the prompt adds besides, and whose text is not known.
        gap_s: how long the tool took.
    """
    history = calls[-1].prompt_tokens + calls[-1].output_tokens if calls else 0
    return TraceCall(
        call_id=f"c{len(calls)}",
        parents=(calls[-1].call_id,) if calls else (),
        output_tokens=max(1, tokens_of(output)),
        prompt_tokens=history + tokens_of(new) + more_tokens,
        gap_s=gap_s if calls else 0.0,
        tool=tool if calls else None,
        prompt=new or None,
        shared_prefix_tokens=history,
    )


def text_of(message: Mapping[str, Any], where: str) -> str:
    """Return the text of a message and of its tool calls.

    Raises:
        TraceError: the message is of no shape that OpenAI's API has.
    """
    try:
        calls = [each["function"] for each in message.get("tool_calls") or ()]
        content = message["content"] or ""
        if not isinstance(content, str):
            content = "\n".join(part.get("text") or "" for part in content)
        return "\n".join([content, *(f"{each['name']}({each['arguments']})" for each in calls)]).strip()
    except (KeyError, TypeError, AttributeError) as error:
        raise TraceError(
            f"{where}: a message cannot be read ({type(error).__name__}: {error!s:.60}); expected role, content and "
            "tool_calls as in OpenAI's API."
        ) from None
