"""`@program`: an entrypoint whose calls are one program."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from typing import (
    Any,
    Concatenate,
    ForwardRef,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    overload,
)

from weft.core.errors import ProgramParameterError
from weft.core.prediction import read_static_graph
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


# For annotations that cannot be evaluated, e.g. because a name is imported for type checkers only.
_UNION_TEXT = re.compile(r"(?:[\w.]+\.)?(?:Optional|Union)\[(.*)\]")
_PROGRAM_TEXT = re.compile(r"(?:[\w.]+\.)?Program")


@overload
def program(function: Callable[Concatenate[Program, P], R_co], /) -> Entrypoint[P, R_co]: ...
@overload
def program(function: Callable[Concatenate[A, Program, P], R_co], /) -> Entrypoint[Concatenate[A, P], R_co]: ...
@overload
def program(function: Callable[Concatenate[A, B, Program, P], R_co], /) -> Entrypoint[Concatenate[A, B, P], R_co]: ...
@overload
def program(
    function: Callable[Concatenate[A, B, C, Program, P], R_co], /
) -> Entrypoint[Concatenate[A, B, C, P], R_co]: ...
@overload
def program(
    function: Callable[Concatenate[A, B, C, D, Program, P], R_co], /
) -> Entrypoint[Concatenate[A, B, C, D, P], R_co]: ...
@overload
def program(function: Callable[..., R_co], /) -> Entrypoint[..., R_co]: ...
@overload
def program(
    *,
    name: str | None = None,
    session_id: str | None = None,
    tenant: str | None = None,
    timeout_s: float | None = None,
    deadline_s: float | None = None,
    tags: Iterable[str] = (),
    metadata: Mapping[str, Any] | None = None,
    graph: Any = None,
) -> Decorator: ...
def program(function: Any = None, /, **options: Any) -> Any:
    """Make a function the entrypoint of a program: each call of the function is one program.

    The function must have exactly one parameter annotated with `weft.Program`. Weft fills the parameter in and removes
    it from the signature. The decorator works on functions, methods and instances with `__call__`, sync and async, and
    on generators of both kinds. The program ends when the function returns, raises or is cancelled, or when a generator
    is exhausted, closed or garbage-collected.

    Type checkers report missing, superfluous and wrong arguments. They know the parameters before the program by
    position only, and those after it by name, too.

    Args:
        name: shown in the process table. Default: the function's name.
        session_id: the session that all runs belong to. Default: a new session for each run.
        tenant: the user or customer that the run is for.
        timeout_s: seconds that a run may take from its first call on. Then its calls are aborted and raise
            `DeadlineError`. Default: that of the engine.
        deadline_s: seconds from its first call on after which a run should have ended. Policies such as `fair` try to
            keep it. Nothing is aborted.
        tags: shown in traces and passed to the framework.
        metadata: shown in traces and passed to the framework.
        graph: the steps that the program may take, for forecasts before 30 programs of its name have ended: a compiled
            LangGraph graph, or the `DiGraph` of an AutoGen GraphFlow. Its nodes are matched with the labels of calls.

    Raises:
        ProgramParameterError: the function has no such parameter, or several.
        InvalidIdError: `session_id` or `tenant` cannot travel with a request.
        InvalidRequestError: `timeout_s` or `deadline_s` is not a finite number above 0.
        ArgumentTypeError: `graph` is no such graph, or has more than 255 nodes.
    """
    if function is None:
        return functools.partial(_decorate, options=options)
    return _decorate(function, options)


def _decorate(function: Any, options: dict[str, Any]) -> Any:
    if isinstance(function, staticmethod | classmethod):
        return type(function)(_decorate(function.__func__, options))
    given, named = function, function.func if isinstance(function, functools.partial) else function
    own_name = getattr(named, "__name__", type(named).__name__)
    method = getattr(function, "__call__", None)  # noqa: B004  it is used, not only looked for
    if inspect.ismethod(method) and not isinstance(function, type):  # that of a function is no method
        function = method
    full = inspect.signature(function)
    parameter = _program_parameter(function, full)
    public = full.replace(parameters=[p for name, p in full.parameters.items() if name != parameter])
    options = {**options, "name": options.get("name") or own_name}
    if options.get("graph") is not None:
        options["graph"] = read_static_graph(options["graph"])  # once for all programs
    Program(**options)  # invalid options raise here, not at the first call

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Program, tuple[Any, ...], dict[str, Any]]:
        """Open the program, or a branch of `outer`, and add it to the arguments."""
        outer = kwargs.pop(parameter, None)
        if outer is not None and not isinstance(outer, Program):
            raise TypeError(f"{parameter}= must be the weft.Program to run under, not {type(outer).__name__}.")
        arguments = public.bind(*args, **kwargs).arguments
        handle = Program(**options) if outer is None else outer.branch()
        arguments[parameter] = handle
        ordered = {name: arguments[name] for name in full.parameters if name in arguments}
        bound = inspect.BoundArguments(full, cast("Any", ordered))
        return handle, bound.args, bound.kwargs

    wrapper = _wrapper(function, begin)
    functools.update_wrapper(wrapper, function)
    wrapper.__name__ = own_name
    wrapper.__signature__ = public
    wrapper.__annotations__ = {k: v for k, v in getattr(function, "__annotations__", {}).items() if k != parameter}

    def with_options(**new: Any) -> Any:
        return _decorate(given, {**options, **{key: value for key, value in new.items() if value is not None}})

    wrapper.options = with_options
    return wrapper


_Begin = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Program, tuple[Any, ...], dict[str, Any]]]


def _wrapper(function: Any, begin: _Begin) -> Any:
    """Return a function of the same kind as `function` that runs `function` in a program."""
    if inspect.isasyncgenfunction(function):

        async def run_async_generator(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            handle, args, kwargs = begin(args, kwargs)
            with handle:
                generator = function(*args, **kwargs)
                try:
                    value = await anext(generator)
                    while True:
                        try:
                            sent = yield value
                        except Exception as error:  # thrown in by the consumer
                            value = await generator.athrow(error)
                        else:
                            value = await generator.asend(sent)
                except StopAsyncIteration:
                    pass
                finally:
                    await generator.aclose()

        return run_async_generator

    if inspect.iscoroutinefunction(function):

        async def run_async(*args: Any, **kwargs: Any) -> Any:
            handle, args, kwargs = begin(args, kwargs)
            with handle:
                return await function(*args, **kwargs)

        return run_async

    if inspect.isgeneratorfunction(function):

        def run_generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            handle, args, kwargs = begin(args, kwargs)
            with handle:
                return (yield from function(*args, **kwargs))

        return run_generator

    def run(*args: Any, **kwargs: Any) -> Any:
        handle, args, kwargs = begin(args, kwargs)
        with handle:
            return function(*args, **kwargs)

    return run


def _program_parameter(function: Any, signature: inspect.Signature) -> str:
    """Return the name of the parameter that takes the program."""
    try:
        evaluated = inspect.signature(function, eval_str=True)
    except Exception:  # evaluating an annotation may raise anything
        evaluated = signature
    found = [
        name
        for name, p in evaluated.parameters.items()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and _is_program(p.annotation)
    ]
    if len(found) == 1:
        return found[0]
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if found:
        raise ProgramParameterError(name, f"has {len(found)} parameters annotated with weft.Program")
    raise ProgramParameterError(name)


def _is_program(annotation: Any) -> bool:
    if isinstance(annotation, ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        text = annotation.strip("'\" ")
        union = _UNION_TEXT.fullmatch(text)
        parts = re.split("[|,]", union[1] if union else text)
        return any(_PROGRAM_TEXT.fullmatch(part.strip("'\" ")) for part in parts)
    if get_origin(annotation) in (Union, types.UnionType):
        return any(_is_program(part) for part in get_args(annotation))
    return isinstance(annotation, type) and issubclass(annotation, Program)
