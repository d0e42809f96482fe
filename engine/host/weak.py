"""Methods of an engine as callbacks that do not keep the engine alive. An engine without references shuts down."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def weakly(method: Callable[P, None]) -> Callable[P, None]:
    """A method that does nothing once its object is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        alive = reference()
        if alive is not None:
            alive(*args, **kwargs)

    return call


def weakly_async(method: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T | None]]:
    """`weakly` for a coroutine method; None once its object is gone."""
    reference = weakref.WeakMethod(method)

    async def call(*args: P.args, **kwargs: P.kwargs) -> T | None:
        alive = reference()
        return await alive(*args, **kwargs) if alive is not None else None

    return call
