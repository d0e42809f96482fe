"""Reads the values of a trace's objects. Each function refuses a bad value with a message that says where and why.

In all of them `data` is the object, `key` the key to read, and `where` the place in the file, for the message. They
raise TraceError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from weft.core.errors import TraceError

MOST: Final = 10**15  # tokens of a call, and seconds: larger numbers would overflow, or lose their digits, in sums


def object_of(data: object, where: str, keys: tuple[str, ...]) -> Mapping[str, Any]:
    """Return `data` if it is an object that has no other keys than these."""
    if not isinstance(data, dict):
        raise TraceError(f"{where}: {data!r:.40} is not an object; give an object with the keys {', '.join(keys)}.")
    unknown = [key for key in data if key not in keys]
    if unknown:
        raise TraceError(f"{where}: there is no key {unknown[0]!r:.40}; the keys are {', '.join(keys)}.")
    return data


def text(data: Mapping[str, Any], key: str, where: str, *, required: bool = False, empty: bool = False) -> str | None:
    """Return a text. None for null or a missing key, unless it is `required`. "" is refused unless `empty`."""
    value = data.get(key)
    if (value is None and not required) or (isinstance(value, str) and (value or empty)):
        return value
    raise TraceError(f"{where}: {key} is {value!r:.40}; give a text{'' if required else ' or null'}.")


def whole(data: Mapping[str, Any], key: str, where: str, *, least: int = 0, required: bool = False) -> int:
    """Return a whole number of at least `least`. 0 for a missing key, unless it is `required`."""
    value = data.get(key, None if required else 0)
    if type(value) is not int or not least <= value <= MOST:
        raise TraceError(
            f"{where}: {key} is {value!r:.40}; give a whole number of at least {least} and at most {MOST:.0e}."
        )
    return value


def seconds(data: Mapping[str, Any], key: str, where: str, *, required: bool = False) -> float:
    """Return a number of seconds, 0 or more. 0 for a missing key, unless it is `required`."""
    value = data.get(key, None if required else 0.0)
    if type(value) not in (int, float) or not 0 <= value <= MOST:
        raise TraceError(f"{where}: {key} is {value!r:.40}; give seconds, 0 or more and at most {MOST:.0e}.")
    return float(value)
