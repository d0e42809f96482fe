"""The types of decorated functions, as type checkers see them.

The decorator takes one parameter, the program, out of a signature. Python's types can state that for one position of
the program: `Concatenate` has the types of the parameters before it, and a `ParamSpec` stands for all that follow, with
their names and defaults. So there is a type for each position. Up to three parameters may come before the program, the
`self` of a method included. A function whose program comes later, or is keyword-only, keeps its result and takes any
arguments.

`Concatenate` does not know the names of the parameters before the program. An overload takes them by keyword, with any
type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar, overload

from weft.core.program.handle import Program

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
A_contra = TypeVar("A_contra", contravariant=True)
B_contra = TypeVar("B_contra", contravariant=True)
C_contra = TypeVar("C_contra", contravariant=True)


class HasOptions(Protocol):
    """What every decorated function has."""

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


class Entrypoint(HasOptions, Protocol[P, R_co]):
    """The result of `@program`: a function of the same kind as the decorated one, without the `Program` parameter.

    Call it to run the function as a new program, or with `program=` as a branch of that program.
    """

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, *args: Any, program: Program, **kwargs: Any) -> R_co: ...


class EntrypointAfter1(HasOptions, Protocol[A_contra, P, R_co]):
    """An `Entrypoint` with a parameter before the program."""

    @overload
    def __call__(self, first: A_contra, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, /, **kwargs: Any) -> R_co: ...
    @overload
    def __call__(self, *args: Any, program: Program, **kwargs: Any) -> R_co: ...

    @overload
    def __get__(self, instance: None, owner: Any, /) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: Any, /) -> Entrypoint[P, R_co]: ...


class EntrypointAfter2(HasOptions, Protocol[A_contra, B_contra, P, R_co]):
    """An `Entrypoint` with two parameters before the program."""

    @overload
    def __call__(self, first: A_contra, second: B_contra, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, first: A_contra, /, **kwargs: Any) -> R_co: ...
    @overload
    def __call__(self, /, **kwargs: Any) -> R_co: ...
    @overload
    def __call__(self, *args: Any, program: Program, **kwargs: Any) -> R_co: ...

    @overload
    def __get__(self, instance: None, owner: Any, /) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: Any, /) -> EntrypointAfter1[B_contra, P, R_co]: ...


class EntrypointAfter3(HasOptions, Protocol[A_contra, B_contra, C_contra, P, R_co]):
    """An `Entrypoint` with three parameters before the program."""

    @overload
    def __call__(
        self, first: A_contra, second: B_contra, third: C_contra, /, *args: P.args, **kwargs: P.kwargs
    ) -> R_co: ...
    @overload
    def __call__(self, first: A_contra, second: B_contra, /, **kwargs: Any) -> R_co: ...
    @overload
    def __call__(self, first: A_contra, /, **kwargs: Any) -> R_co: ...
    @overload
    def __call__(self, /, **kwargs: Any) -> R_co: ...
    @overload
    def __call__(self, *args: Any, program: Program, **kwargs: Any) -> R_co: ...

    @overload
    def __get__(self, instance: None, owner: Any, /) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: Any, /) -> EntrypointAfter2[B_contra, C_contra, P, R_co]: ...


class AnyEntrypoint(HasOptions, Protocol[R_co]):
    """An `Entrypoint` whose parameters type checkers do not know."""

    def __call__(self, *args: Any, **kwargs: Any) -> R_co: ...


class Decorator(Protocol):
    """`@program(...)` with options, which takes the function next."""

    # The overloads overlap for a function with two programs, which the decorator refuses when it runs.

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[Program, P], R_co], /
    ) -> Entrypoint[P, R_co]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[A_contra, Program, P], R_co], /
    ) -> EntrypointAfter1[A_contra, P, R_co]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[A_contra, B_contra, Program, P], R_co], /
    ) -> EntrypointAfter2[A_contra, B_contra, P, R_co]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[A_contra, B_contra, C_contra, Program, P], R_co], /
    ) -> EntrypointAfter3[A_contra, B_contra, C_contra, P, R_co]: ...
    @overload
    def __call__(self, function: Callable[..., R_co], /) -> AnyEntrypoint[R_co]: ...
