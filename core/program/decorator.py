"""`@program`: make a function the entrypoint of a program."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from typing import Any, ForwardRef, Protocol, TypeVar, Union, cast, get_args, get_origin, overload

from weft.core.errors import ProgramParameterError
from weft.core.program import Program

R_co = TypeVar("R_co", covariant=True)

# An annotation that cannot be evaluated (a name imported only for type checkers, say) is judged by its text.
_UNION_TEXT = re.compile(r"(?:[\w.]+\.)?(?:Optional|Union)\[(.*)\]")
_PROGRAM_TEXT = re.compile(r"(?:[\w.]+\.)?Program")


class Entrypoint(Protocol[R_co]):
    """What `@program` makes of a function: the same function, of the same kind, without the `Program` parameter."""

    def __call__(self, *args: Any, **kwargs: Any) -> R_co:
        """Run it as a program of its own, or, given `program=`, as a branch of that one."""

    def options(
        self,
        *,
        name: str | None = None,
        session_id: str | None = None,
        tenant: str | None = None,
        tags: Iterable[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Entrypoint[R_co]:
        """The same entrypoint with other options for this use, e.g. `answer.options(session_id=user)(question)`.

        A method's belong to its class: `Agent.answer.options(session_id=user)(agent, question)`.
        """


@overload
def program(function: Callable[..., R_co], /) -> Entrypoint[R_co]: ...
@overload
def program(
    *,
    name: str | None = None,
    session_id: str | None = None,
    tenant: str | None = None,
    tags: Iterable[str] = (),
    metadata: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., R_co]], Entrypoint[R_co]]: ...
def program(function: Any = None, /, **options: Any) -> Any:
    """Make a function the entrypoint of a program: each call of it is one program.

    The function must have exactly one parameter annotated with `weft.Program`; Weft fills it in, and it disappears from
    the signature. Works on functions and methods, sync and async, and on generators of both kinds. The program ends
    when the function returns, raises or is cancelled, and when a generator is exhausted, closed or collected.

    Args:
        name: shown in the process table; default: the function's name.
        session_id: the session that all runs belong to; default: a session for each run.
        tenant: who the run is for.
        tags: shown in traces and handed to the framework.
        metadata: likewise.

    Raises:
        ProgramParameterError: the function has no such parameter, or several.
    """
    if function is None:
        return functools.partial(_decorate, options=options)
    return _decorate(function, options)


def _decorate(function: Any, options: dict[str, Any]) -> Any:
    if isinstance(function, staticmethod | classmethod):
        return type(function)(_decorate(function.__func__, options))
    full = inspect.signature(function)
    parameter = _program_parameter(function, full)
    public = full.replace(parameters=[p for name, p in full.parameters.items() if name != parameter])
    options = {**options, "name": options.get("name") or getattr(function, "__name__", type(function).__name__)}
    Program(**options)  # a mistake in the options is told here, not at the first call

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Program, tuple[Any, ...], dict[str, Any]]:
        """Open the program and put it among the arguments."""
        outer = kwargs.pop(parameter, None)
        if outer is not None and not isinstance(outer, Program):
            raise TypeError(f"{parameter}= takes a weft.Program to run under, not {type(outer).__name__}.")
        arguments = public.bind(*args, **kwargs).arguments
        handle = Program(**options) if outer is None else outer.branch()
        arguments[parameter] = handle
        ordered = {name: arguments[name] for name in full.parameters if name in arguments}
        bound = inspect.BoundArguments(full, cast("Any", ordered))
        return handle, bound.args, bound.kwargs

    wrapper = _wrapper(function, begin)
    functools.update_wrapper(wrapper, function)
    wrapper.__signature__ = public
    wrapper.__annotations__ = {k: v for k, v in function.__annotations__.items() if k != parameter}

    def with_options(**new: Any) -> Any:
        return _decorate(function, {**options, **{key: value for key, value in new.items() if value is not None}})

    wrapper.options = with_options
    return wrapper


_Begin = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Program, tuple[Any, ...], dict[str, Any]]]


def _wrapper(function: Any, begin: _Begin) -> Any:
    """A function of the same kind as `function` around it."""
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
    """Name of the parameter that takes the program."""
    try:
        evaluated = inspect.signature(function, eval_str=True)
    except Exception:  # any name in any annotation may be missing at run time
        evaluated = signature
    found = [
        name
        for name, p in evaluated.parameters.items()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and _is_program(p.annotation)
    ]
    if len(found) == 1:
        return found[0]
    if found:
        raise ProgramParameterError(function.__qualname__, f"has {len(found)} parameters annotated with weft.Program")
    raise ProgramParameterError(function.__qualname__)


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
