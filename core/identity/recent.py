"""The memory of `Lineage`: a mapping of bounded size that is fair between API keys."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from weft.core.identity.items import Digest

V = TypeVar("V")


class Recent(Generic[V]):
    """A mapping that forgets what was unused for longest, of the scope that has the most, so that no API key makes
    another one's entries forgotten.

    Args:
        most: How many values it keeps. A value that has grown counts for several.
        size_of: For how many a value counts.
        on_forget: Called with each value that it forgets.
    """

    def __init__(
        self, most: int, size_of: Callable[[V], int] = lambda _value: 1, on_forget: Callable[[V], None] | None = None
    ) -> None:
        self._most = most
        self._size_of = size_of
        self._on_forget = on_forget
        self._size = 0
        self._sizes: dict[str, int] = {}
        self._of_scope: dict[str, OrderedDict[Digest, V]] = {}

    def __len__(self) -> int:
        return self._size

    def known(self, scope: str) -> Collection[Digest]:
        """The digests of a scope."""
        return self._of_scope.get(scope, ())

    def get(self, scope: str, digest: Digest) -> V | None:
        """Return the value of a digest, which counts as used, or None if there is none or it was forgotten."""
        values = self._of_scope.get(scope)
        value = values.get(digest) if values is not None else None
        if values is not None and value is not None:
            values.move_to_end(digest)
        return value

    def put(self, scope: str, digest: Digest, value: V) -> None:
        """Keep a value, in place of the one that the digest had."""
        values = self._of_scope.setdefault(scope, OrderedDict())
        is_new = digest not in values
        values[digest] = value
        values.move_to_end(digest)
        if is_new:
            self.grow(scope, 1)

    def grow(self, scope: str, by: int) -> None:
        """Count what a value of a scope has become larger by."""
        self._sizes[scope] = self._sizes.get(scope, 0) + by
        self._size += by
        while self._size > self._most:
            fullest = max(self._sizes, key=lambda each: self._sizes[each])
            _digest, value = self._of_scope[fullest].popitem(last=False)
            size = self._size_of(value)
            self._sizes[fullest] -= size
            self._size -= size
            if not self._of_scope[fullest]:
                del self._of_scope[fullest], self._sizes[fullest]
            if self._on_forget is not None:
                self._on_forget(value)

    def pop(self, scope: str, digest: Digest) -> None:
        """Take a value out, which counts for one."""
        if digest in self._of_scope.get(scope, ()):
            del self._of_scope[scope][digest]
            self._sizes[scope] -= 1
            self._size -= 1
            if not self._of_scope[scope]:
                del self._of_scope[scope], self._sizes[scope]
