"""Values of any shape from a fuzzer's bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class ByteReader:
    """Reads bytes one after another, and zeros after the end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        return self._at >= len(self._data)

    def byte(self) -> int:
        return int.from_bytes(self.take(1))

    def take(self, count: int) -> bytes:
        """The next bytes, at most `count`."""
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken

    def text(self) -> str:
        return self.take(self.byte()).decode("utf-8", "surrogatepass" if self.byte() % 2 else "replace")


def value(reader: ByteReader, words: Sequence[str] = (), depth: int = 0) -> Any:
    """A value that Python can hold: of JSON, with integers of any size, nested as deeply as a test can afford.

    Args:
        words: Texts that are likely.
    """
    kind = reader.byte() % 14
    if depth > 20 or reader.is_at_end or kind < 8:
        return _scalar(reader, kind % 8, words)
    if kind < 10:
        return [value(reader, words, depth + 1) for _ in range(reader.byte() % 4)]
    if kind < 13:
        return {key(reader, words): value(reader, words, depth + 1) for _ in range(reader.byte() % 5)}
    nested = value(reader, words, depth + 1)
    for _ in range(reader.byte() * 20):
        nested = [nested] if depth % 2 else {"a": nested}
    return nested


def _scalar(reader: ByteReader, kind: int, words: Sequence[str]) -> Any:
    makers: tuple[Callable[[], Any], ...] = (
        lambda: None,
        lambda: bool(reader.byte() % 2),
        lambda: int.from_bytes(reader.take(reader.byte() % 9), signed=True),
        lambda: (-1) ** reader.byte() * 10 ** (20 * reader.byte()),  # up to 5,100 digits
        lambda: reader.byte() / 16 - 4,
        lambda: float(("nan", "inf", "-inf", "1e308", "5e-324")[reader.byte() % 5]),
        lambda: _text(reader),
        lambda: words[reader.byte() % len(words)] if words else "x" * 300 * (reader.byte() % 5),
    )
    return makers[kind]()


def key(reader: ByteReader, words: Sequence[str]) -> str:
    """The key of an entry."""
    choice = reader.byte()
    return _text(reader) if choice > 240 or not words else words[choice % len(words)]


def _text(reader: ByteReader) -> str:
    try:
        return reader.text()
    except UnicodeDecodeError:
        return "\ud800"
