"""Methods of an engine as callbacks that do not keep the engine alive. An engine without references shuts down."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def weakly(method: Callable[P, R]) -> Callable[P, R | None]:
    """A method that does nothing once its object is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
        alive = reference()
        return alive(*args, **kwargs) if alive is not None else None

    return call
