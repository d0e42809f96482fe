"""What a step has room for. `Policy.victims` uses it to decide which running calls are preempted."""

from __future__ import annotations

from typing import Protocol

from weft.core.policies.view import Call


class Room(Protocol):
    """The KV cache of an engine and the tokens of its next step, if some calls started and others were preempted.

    Calls that begin with the same tokens share KV. Therefore the space that a call needs or gives back depends on the
    calls that run together with it. A driver makes a new object for each decision. The object changes no call.
    """

    def offer(self, call: Call) -> bool:
        """Consider a waiting call. `fits` and `start` are about the call that was offered last.

        Returns:
            Whether running calls of better rank leave the call tokens of the step. If not, no later call starts either.
        """
        ...

    def fits(self) -> bool:
        """Whether the KV cache has room for the offered call."""
        ...

    def start(self) -> None:
        """The offered call would start."""

    def preempt(self, call: Call) -> None:
        """A running call would be preempted."""

    def keep(self, call: Call) -> None:
        """A call that would have been preempted stays. The last call to be preempted is the first to stay.

        After this, `fits` is not called any more.
        """


class UnlimitedRoom:
    """The room of an engine whose KV cache never fills, and whose steps have no bound."""

    def offer(self, call: Call) -> bool:
        del call
        return True

    def fits(self) -> bool:
        return True

    def start(self) -> None: ...

    def preempt(self, call: Call) -> None: ...

    def keep(self, call: Call) -> None: ...
