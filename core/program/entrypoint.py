"""The types of decorated functions, as type checkers see them.

The decorator takes one parameter, the program, out of a signature. Python's types can state that for one position of
the program: `Concatenate` has the types of the parameters before it, and a `ParamSpec` stands for all that follow, with
their names and defaults. So there is an overload for each position. Up to four parameters may come before the program,
the `self` of a method included. A function whose program comes later, or is keyword-only, keeps its result and takes
any arguments.

`Concatenate` does not know the names and defaults of the parameters before the program. Type checkers therefore want
an argument for each of them, by position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar, overload

from weft.core.program.handle import Program

P = ParamSpec("P")
Q = ParamSpec("Q")
R_co = TypeVar("R_co", covariant=True)
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")


class Entrypoint(Protocol[P, R_co]):
    """The result of `@program`: a function of the same kind as the decorated one, without the `Program` parameter.

    Call it to run the function as a new program, or with `program=` as a branch of that program. Type checkers do not
    look at the other arguments of a branch.
    """

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, *args: Any, program: Program, **kwargs: Any) -> R_co: ...

    @overload
    def __get__(self, instance: None, owner: Any, /) -> Self: ...
    @overload
    def __get__(self: Entrypoint[Concatenate[A, Q], R_co], instance: A, owner: Any, /) -> Entrypoint[Q, R_co]: ...

    def options(
        self,
        *,
        name: str | None = None,
        session_id: str | None = None,
        tenant: str | None = None,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        tags: Iterable[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        graph: Any = None,
    ) -> Self:
        """Return the same entrypoint with other options, e.g. `answer.options(session_id=user)(question)`.

        Options that are None stay as they are. For a method, use the class:
        `Agent.answer.options(session_id=user)(agent, question)`.
        """


class Decorator(Protocol):
    """`@program(...)` with options, which takes the function next."""

    @overload
    def __call__(self, function: Callable[Concatenate[Program, P], R_co], /) -> Entrypoint[P, R_co]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[A, Program, P], R_co], /
    ) -> Entrypoint[Concatenate[A, P], R_co]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[A, B, Program, P], R_co], /
    ) -> Entrypoint[Concatenate[A, B, P], R_co]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[A, B, C, Program, P], R_co], /
    ) -> Entrypoint[Concatenate[A, B, C, P], R_co]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[A, B, C, D, Program, P], R_co], /
    ) -> Entrypoint[Concatenate[A, B, C, D, P], R_co]: ...
    @overload
    def __call__(self, function: Callable[..., R_co], /) -> Entrypoint[..., R_co]: ...
