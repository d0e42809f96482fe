"""The base of policies that change a part of another policy: the gate and fair shares."""

from __future__ import annotations

import inspect

from weft.core.policies.policy import Policy
from weft.core.policies.view import Call, Rank


class PolicyAround(Policy):
    """Has the flags and the methods of an inner policy, except those that a subclass defines."""

    def __init__(self, inner: Policy) -> None:
        super().__init__()
        self.inner = inner
        self.waiting = inner.waiting
        kinds = type(self).__mro__
        defined = {name for kind in kinds[: kinds.index(Policy)] for name in vars(kind)}
        for name, member in vars(Policy).items():
            is_public = not name.startswith("_") and (isinstance(member, int | float) or inspect.isfunction(member))
            if is_public and name not in defined:
                setattr(self, name, getattr(inner, name))

    def rank(self, call: Call, now_s: float) -> Rank:
        return self.inner.rank(call, now_s)

    @property
    def preempts(self) -> bool:  # type: ignore[override]
        return self.inner.preempts

    @property
    def promotions(self) -> int:
        return self.inner.promotions
