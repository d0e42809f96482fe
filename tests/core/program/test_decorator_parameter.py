"""`@program`: the arguments of a decorated function, and which of its parameters gets the program."""

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Optional, get_type_hints

import pytest

import weft
from weft.core.errors import ProgramParameterError
from weft.core.process_rows import ProgramState
from weft.core.program import Program
from weft.core.testing import RecordingBackend

# -- arguments


def first_of_all(program: Program, a: int, b: int = 2) -> Any:
    return (a, b)


def in_the_middle(a: int, program: Program, b: int = 2) -> Any:
    return (a, b)


def after_a_default(a: int = 1, program: Optional[Program] = None, b: int = 2) -> Any:  # noqa: UP045 - users write Optional
    assert program is not None
    return (a, b)


def before_more(a: int, program: Program, *rest: int, c: int = 3) -> Any:
    return (a, rest, c)


def only_by_name(a: int, *, program: Program, b: int = 2) -> Any:
    return (a, b)


def only_by_position(a: int, program: Program, /, b: int = 2) -> Any:
    return (a, b)


def with_any_names(a: int, program: Program, **rest: int) -> Any:
    return (a, rest)


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "result"),
    [
        (first_of_all, (1,), {}, (1, 2)),
        (first_of_all, (1, 5), {}, (1, 5)),
        (first_of_all, (), {"b": 5, "a": 1}, (1, 5)),
        (in_the_middle, (1, 5), {}, (1, 5)),
        (in_the_middle, (1,), {"b": 5}, (1, 5)),
        (after_a_default, (), {}, (1, 2)),
        (after_a_default, (7, 8), {}, (7, 8)),
        (after_a_default, (), {"b": 8}, (1, 8)),
        (before_more, (1,), {}, (1, (), 3)),
        (before_more, (1, 2, 3), {"c": 4}, (1, (2, 3), 4)),
        (only_by_name, (1,), {"b": 5}, (1, 5)),
        (only_by_position, (1, 5), {}, (1, 5)),
        (with_any_names, (1,), {"x": 5}, (1, {"x": 5})),
    ],
)
def test_callers_pass_the_other_arguments_only(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    """Arguments are passed by position or by name, as if the program's parameter did not exist."""
    entry: Any = weft.program(function)
    assert entry(*args, **kwargs) == result
    assert entry(*args, **kwargs, program=Program("outer")) == result


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1, 2, 3), {}), ((1,), {"a": 1}), ((1,), {"unknown": 1}), ((Program(), 1, 2), {})]
)
def test_wrong_arguments_are_a_type_error(
    backend: RecordingBackend, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Missing, unknown and surplus arguments fail as for any function, and no program begins."""
    entry: Any = weft.program(in_the_middle)
    with pytest.raises(TypeError, match="argument"):
        entry(*args, **kwargs)
    assert backend.started == []


def test_the_parameter_is_removed_from_the_signature() -> None:
    """Signature, annotations and type hints have the other parameters; name and docstring are the function's."""

    @weft.program
    def answer(question: str, program: Program, *, limit: int = 3) -> str:
        """Answer a question."""
        return question * limit

    assert str(inspect.signature(answer)) == "(question: str, *, limit: int = 3) -> str"
    hints = {"question": str, "limit": int, "return": str}
    assert answer.__annotations__ == hints
    assert get_type_hints(answer) == hints
    entry: Any = answer
    assert (entry.__name__, entry.__doc__, entry.__module__) == ("answer", "Answer a question.", __name__)
    assert entry.__qualname__.endswith("<locals>.answer")
    assert "program" in entry.__wrapped__.__annotations__, "the function itself is not changed"


# -- which parameter


class Special(Program):
    """A subclass, as a user might write it."""


def written(folder: Path, source: str) -> ModuleType:
    """Import a module with this source from a file, as a user's module is."""
    path = folder / "users_agent.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("users_agent", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SOURCE = """{future}
import typing
from typing import TYPE_CHECKING, Optional, Union
import weft
import weft as w
from weft import Program
from weft.core.program import Program as Renamed

if TYPE_CHECKING:
    from nowhere import Missing

@weft.program
def entry(question: {other}, program: {annotation} = None, extra: int = 0):
    return question, type(program), extra
"""

ANNOTATIONS = [
    "Program",
    "weft.Program",
    "w.Program",
    "'Program'",
    "'weft.Program'",
    "Optional[Program]",
    "typing.Optional[weft.Program]",
    "Optional['Program']",
    "Union[Program, None]",
    "Program | None",
    "None | Program",
    "'weft.Program | None'",
]


@pytest.mark.parametrize("future", ["", "from __future__ import annotations"], ids=["objects", "text"])
@pytest.mark.parametrize("annotation", [*ANNOTATIONS, "Renamed"])
def test_the_parameter_is_found_by_its_annotation(tmp_path: Path, future: str, annotation: str) -> None:
    """The annotation may be the class or its text, optional or not, under any name."""
    module = written(tmp_path, SOURCE.format(future=future, annotation=annotation, other="str"))
    assert module.entry("why?", 5) == ("why?", Program, 5)
    assert list(inspect.signature(module.entry).parameters) == ["question", "extra"]


@pytest.mark.parametrize("annotation", ANNOTATIONS)
def test_the_parameter_is_found_although_another_name_is_missing(tmp_path: Path, annotation: str) -> None:
    """If another annotation cannot be evaluated, e.g. a name for type checkers only, the text is compared."""
    source = SOURCE.format(future="from __future__ import annotations", annotation=annotation, other="Missing")
    assert written(tmp_path, source).entry("why?", 5) == ("why?", Program, 5)


def test_the_parameter_is_found_if_program_is_imported_for_type_checkers(tmp_path: Path) -> None:
    """`Program` may be imported under TYPE_CHECKING only."""
    source = """
from __future__ import annotations
from typing import TYPE_CHECKING
from weft.core.program.decorator import program as weft_program
if TYPE_CHECKING:
    from weft import Program

@weft_program
def entry(question: str, program: Program) -> str:
    return question + program.name
"""
    assert written(tmp_path, source).entry("why? ") == "why? entry"


def test_the_parameter_may_have_any_name() -> None:
    """Only the annotation counts; a parameter named `program` may have any other type."""

    @weft.program
    def entry(program: str, handle: weft.Program) -> tuple[str, str]:
        return program, handle.name

    assert entry("by position") == ("by position", "entry")
    assert entry(program="by name") == ("by name", "entry")


def no_parameter(question: str) -> None: ...


def not_annotated(question: str, program) -> None: ...  # type: ignore[no-untyped-def] # noqa: ANN001


def in_a_list(programs: list[Program]) -> None: ...


def any_number(*programs: Program) -> None: ...


def any_names(**programs: Program) -> None: ...


def alike(program: "ProgramState", programmer: str) -> None: ...


def two(first: Program, second: Program) -> None: ...


def three(first: Program, second: Optional[Program], third: "weft.Program") -> None: ...  # noqa: UP045


@pytest.mark.parametrize(
    "function", [no_parameter, not_annotated, in_a_list, any_number, any_names, alike], ids=lambda f: f.__name__
)
def test_a_function_without_the_parameter_is_refused(function: Callable[..., None]) -> None:
    """Decorating a function without the parameter fails at once, and the error says what to add."""
    with pytest.raises(
        TypeError,
        match=rf"{function.__name__}\(\) has no parameter annotated with weft\.Program\. Give the function exactly one",
    ):
        weft.program(function)
    with pytest.raises(ProgramParameterError):
        weft.program(name="x")(function)


@pytest.mark.parametrize(("function", "count"), [(two, 2), (three, 3)])
def test_a_function_with_several_such_parameters_is_refused(function: Callable[..., None], count: int) -> None:
    """It is not clear which one takes the program; the error states their number."""
    with pytest.raises(ProgramParameterError, match=rf"{function.__name__}\(\) has {count} parameters annotated"):
        weft.program(function)


def test_decorating_twice_is_refused() -> None:
    """An entrypoint has no Program parameter any more, so it cannot be decorated again."""
    with pytest.raises(ProgramParameterError):
        weft.program(weft.program(in_the_middle))
