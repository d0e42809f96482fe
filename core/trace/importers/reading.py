"""Reads files of JSON for importers. Every error is a `TraceError` that names the file and the line.

In all functions `path` is the file, `where` the place and `expected` what should be there, both for messages, and
`advance` is called with the number of bytes of each line that is read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from weft.core.errors import TraceError
from weft.core.trace.format import MOST, TraceCall

CHARS_PER_TOKEN: Final = 4  # where a file has texts and no token counts
_SIZES: Final = (512, 16, 32, 64, 128, 256, 1024, 2048, 4096, 8, 4, 2, 1)  # of blocks, those that are used most first

_Item = TypeVar("_Item")


def lines(path: Path, advance: Callable[[int], object]) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file that are not empty, with their numbers."""
    try:
        with path.open("rb") as file:
            for number, data in enumerate(file, 1):
                advance(len(data))
                try:
                    text = data.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError:
                    raise TraceError(f"{path}, line {number}: not UTF-8 text; give a text file.") from None
                if text.strip():
                    yield number, text
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}. Name another file.") from None


def rows(path: Path, advance: Callable[[int], object], expected: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the JSON object on each line, with the place for messages."""
    for number, text in lines(path, advance):
        where = f"{path}, line {number}"
        yield where, an_object(_parsed(text, where, expected), where, expected)


def grouped(
    path: Path, advance: Callable[[int], object], expected: str, key: Callable[[dict[str, Any], str], Hashable]
) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Yield the rows of a file that belong together, with their places, as soon as the last one of them is read.

    `advance` is called with the number of bytes of each line, when it is read for the second time.
    """
    return together(lambda advance: rows(path, advance, expected), advance, lambda each: key(each[1], each[0]))


def together(
    read: Callable[[Callable[[int], object]], Iterator[_Item]],
    advance: Callable[[int], object],
    key: Callable[[_Item], Hashable],
) -> Iterator[list[_Item]]:
    """Yield the items of a file that belong together, as soon as the last one of them is read.

    The file is read twice, so that only groups that are not complete yet are held.

    Args:
        read: reads the items, and calls its argument with the number of bytes of each line.
        advance: given to the second reading.
    """
    missing = Counter(map(key, read(lambda _: None)))
    groups: dict[Hashable, list[_Item]] = {}
    for each in read(advance):
        group = key(each)
        groups.setdefault(group, []).append(each)
        missing[group] -= 1
        if not missing[group]:
            yield groups.pop(group)
    yield from groups.values()  # a log to which lines were added meanwhile


def documents(path: Path, advance: Callable[[int], object], expected: str) -> Iterator[tuple[str, Any]]:
    """Yield the JSON documents of a file, with the place for messages: one a line, or one over several lines."""
    rest = lines(path, advance)
    number, first = next(rest, (1, ""))
    try:
        data = json.loads(first)
    except (ValueError, RecursionError):
        text = "\n" * (number - 1) + first + "".join(line for _, line in rest)
        yield str(path), _parsed(text, str(path), expected)
        return
    yield (f"{path}, line {number}"), data
    for number, text in rest:
        where = f"{path}, line {number}"
        yield where, _parsed(text, where, expected)


def _parsed(text: str, where: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        detail = " ".join(str(error).split()).removesuffix(".")
        raise TraceError(f"{where}: not JSON ({detail:.100}); expected {expected}.") from None


def an_object(data: object, where: str, expected: str) -> dict[str, Any]:
    if isinstance(data, dict):
        return data
    raise TraceError(f"{where}: {data!r:.40} is not an object; expected {expected}.")


def a_list(data: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = data.get(key)
    if isinstance(value, list):
        return value
    raise TraceError(f"{where}: {key} is {value!r:.40}; expected a list.")


def optional_seconds(data: Mapping[str, Any], key: str, where: str, unit_s: float = 1.0) -> float | None:
    """Return the number under a key in seconds. None for null or a missing key. Times a little below 0 are 0.

    `unit_s` is the unit of the file's numbers, in seconds.
    """
    value = data.get(key)
    if value is None:
        return None
    if type(value) not in (int, float) or not abs(value) <= MOST:
        raise TraceError(f"{where}: {key} is {value!r:.40}; expected a number, at most {MOST:.0e}.")
    return max(0.0, float(value) * unit_s)


def whole_or_text(data: Mapping[str, Any], key: str, where: str, most: int = MOST) -> int:
    """Return the whole number under a key, from 0 to `most`, which may be a text or have a decimal point."""
    value = data.get(key)
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= len(str(most)):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 <= value <= most:
        raise TraceError(f"{where}: {key} is {value!r:.40}; expected a whole number, at most {most:.0e}.")
    return value


def moment(data: Mapping[str, Any], key: str, where: str) -> float | None:
    """Return the time under a key in seconds since 1970: a date, which is UTC if it has no zone, or a number of them.

    None for null or a missing key.
    """
    value = data.get(key)
    try:
        if not isinstance(value, str):
            return optional_seconds(data, key, where)
        date = datetime.fromisoformat(value.strip())
        at_s = (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp()
        if at_s >= 0:
            return at_s
    except (ValueError, OverflowError):
        pass
    raise TraceError(f"{where}: {key} is {value!r:.40}; expected a date such as 2026-11-25T15:40:21.458Z.")


def hash_ids(data: Mapping[str, Any], where: str, tokens: int, block_tokens: int) -> list[int]:
    """Return the ids of the whole blocks of a prompt under the key `hash_ids`, whose last block may be cut off."""
    ids = data.get("hash_ids") or []
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise TraceError(f"{where}: hash_ids is {ids!r:.60}; expected a list of whole numbers.")
    if len(ids) > -(-tokens // block_tokens):
        raise TraceError(
            f"{where}: hash_ids has {len(ids)} blocks, but {tokens} tokens have only {-(-tokens // block_tokens)}; "
            f"expected one id for each {block_tokens} tokens."
        )
    return ids[: tokens // block_tokens]


def block_size(prompts: list[tuple[int, int]], where: str) -> int:
    """Return the tokens of a block, which some formats do not say.

    Args:
        prompts: lengths of prompts in tokens, and in blocks of which the last one may be cut off.
    """
    for size in _SIZES:
        if all(-(-tokens // size) == blocks for tokens, blocks in prompts):
            return size
    tokens, blocks = max(prompts)
    raise TraceError(
        f"{where}: no size of blocks fits the prompts, of which one has {tokens} tokens and {blocks} hash_ids; "
        "expected one id for each 16, 64, 512, … tokens, and one for the rest."
    )


def tokens_of(text: str) -> int:
    return -(-len(text) // CHARS_PER_TOKEN)


def next_call(
    calls: list[TraceCall], new: str, output: str, tool: str | None, *, more_tokens: int = 0, gap_s: float = 0.0
) -> TraceCall:
    """Return the call that follows those before it and repeats the last one's prompt and output.

    Args:
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
    """Return the text of a message and of its tool calls."""
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
