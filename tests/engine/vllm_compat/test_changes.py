"""The check of vLLM's members finds what has changed, and only that. These tests use classes of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest

from weft.engine.vllm_compat.versions.changes import Member, Use, change_of
from weft.engine.vllm_compat.versions.members import Uses, changed_members


class Status(Enum):
    RUNNING = 1


class Base:
    inherited: int

    def __init__(self) -> None:
        self.set_by_base = 0


class Scheduler(Base):
    on_class = 1

    def __init__(self, size: int, name: str | None = None) -> None:
        super().__init__()
        self.typed: list[int] = []
        self.first, self.second = 1, 2
        if size:
            self.conditional = name

    def fill(self) -> None:
        self.set_later = 0
        other = Base()
        other.of_another_object = 0  # type: ignore[attr-defined]
        print(self.only_read)  # type: ignore[attr-defined]  # noqa: T201

    @property
    def fixed(self) -> int:
        return 1

    @property
    def settable(self) -> int:
        return 1

    @settable.setter
    def settable(self, value: int) -> None: ...

    def preempt(self, request: Base, at_s: float, drop: bool = False) -> tuple[list[int], bool]:
        raise NotImplementedError

    def grown(self, request: Base, *, priority: int = 0, session: str | None = None) -> None: ...

    def demanding(self, request: Base, reason: str) -> None: ...

    def unpacked(self, *args: Any, **kwargs: Any) -> Callable[[], Base]:
        raise NotImplementedError

    def quoted(self) -> "Base | None": ...  # noqa: UP037  as vLLM has it

    def defaults(self, status: Status = Status.RUNNING, marker: object = object()) -> None: ...

    @classmethod
    def make(cls, size: int) -> Scheduler:
        raise NotImplementedError

    @staticmethod
    def static(size: int) -> int:
        return size


@dataclass(frozen=True)
class Config:
    size: int
    name: str = ""


MODULE_VARIABLE = 1


def use(name: str, how: Use, signature: str | None = None, owner: str = "Scheduler") -> str | None:
    """What the check says of a member of this module's classes."""
    return change_of(Member(f"{__name__}.{owner}" if owner else __name__, name, how, signature))


@pytest.mark.parametrize(
    "name", ["on_class", "inherited", "set_by_base", "typed", "first", "second", "conditional", "set_later", "fixed"]
)
def test_an_attribute_is_found_wherever_it_is_defined(name: str) -> None:
    """It may be assigned by any method of the class or of a base, or annotated, or a property."""
    assert use(name, "read") is None


@pytest.mark.parametrize("name", ["gone", "of_another_object", "only_read"])
def test_a_removed_attribute_is_reported_by_name(name: str) -> None:
    """An attribute that no method assigns to `self` is missing."""
    assert use(name, "read") == f"Scheduler.{name} (read) is missing."
    assert use(name, "written") == f"Scheduler.{name} (written) is missing."


def test_fields_enum_members_and_module_variables_are_found() -> None:
    """Attributes of the other kinds of owners are found, and missed."""
    assert use("size", "read", owner="Config") is None
    assert use("length", "read", owner="Config") == "Config.length (read) is missing."
    assert use("RUNNING", "read", owner="Status") is None
    assert use("WAITING", "read", owner="Status") == "Status.WAITING (read) is missing."
    assert use("MODULE_VARIABLE", "written", owner="") is None
    assert use("NO_VARIABLE", "written", owner="") == "test_changes.NO_VARIABLE (written) is missing."


def test_an_attribute_that_became_a_method_is_reported() -> None:
    """Reading it would give a bound method instead of a value."""
    assert use("preempt", "read") == "Scheduler.preempt (read) is a method now."


def test_an_attribute_that_cannot_be_assigned_is_reported() -> None:
    """A property needs a setter, and a frozen dataclass takes no assignment."""
    assert use("settable", "written") is None
    assert use("typed", "written") is None
    assert use("fixed", "written") == "Scheduler.fixed (written) can no longer be assigned."
    assert use("size", "written", owner="Config") == "Config.size (written) can no longer be assigned."


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("preempt", "(self, request, at_s, drop=False) -> tuple[list[int], bool]"),
        ("preempt", "(self, request, at_s, drop=False)"),
        ("grown", "(self, request, *, priority=0, session=None) -> None"),
        ("grown", "(self, request, *, priority=0, ...) -> None"),
        ("grown", "(self, request, ...)"),
        ("unpacked", "(self, *args, **kwargs) -> Callable[[], Base]"),
        ("grown", "(self, request)"),
        ("unpacked", "(self)"),
        ("quoted", "(self) -> Base | None"),
        ("defaults", "(self, status=Status.RUNNING, marker=<object>) -> None"),
        ("make", "(cls, size) -> Scheduler"),
        ("static", "(size) -> int"),
        ("__init__", "(self, size, name=None) -> None"),
    ],
)
def test_an_unchanged_signature_is_accepted(name: str, signature: str) -> None:
    """The types of parameters do not count; the returned type counts where it is written down."""
    assert use(name, "called", signature) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("preempt", "(self, request, at_s) -> tuple[list[int], bool]"),  # vLLM passes a parameter more
        ("preempt", "(self, request, at_s, drop=False, force=False)"),  # or one less
        ("preempt", "(self, request, when_s, drop=False)"),
        ("preempt", "(self, request, at_s, drop=True)"),
        ("preempt", "(self, at_s, request, drop=False)"),
        ("preempt", "(self, request, at_s, drop=False) -> bool"),
        ("grown", "(self, request, priority=0, ...)"),
        ("grown", "(self, request, *, rank=0, ...)"),
        ("demanding", "(self, request, ...)"),
    ],
)
def test_a_changed_signature_is_reported_with_both(name: str, expected: str) -> None:
    """Another name, order, kind, default or returned type is a change, and so is a new parameter that is required."""
    change = use(name, "overridden", expected)
    assert change is not None
    assert change.startswith(f"Scheduler.{name} (overridden) has the signature (self, request, ")
    assert change.endswith(f"; Weft expects {expected}.")


@pytest.mark.parametrize("how", ["overridden", "called"])
def test_one_of_several_forms_is_enough(how: Use) -> None:
    """Versions of vLLM differ; each form that they have is listed."""
    forms = "(self, request)", "(self, request, at_s, drop=False)"
    assert change_of(Member(f"{__name__}.Scheduler", "preempt", how, forms)) is None
    change = change_of(Member(f"{__name__}.Scheduler", "preempt", how, ("(self)", "(self, other)")))
    assert change is not None
    assert change.endswith("Weft expects (self, other).")


@pytest.mark.parametrize(("since", "is_missed"), [("0.31", True), ("99.1", False)])
def test_a_member_is_missed_only_where_the_version_has_it(since: str, is_missed: bool) -> None:
    """Weft reads some members only where they are."""
    table = {f"{__name__}.Scheduler": Uses(read="first third", since={"third": since})}
    assert bool(changed_members(table)) == is_missed


def test_the_uses_that_matter_can_be_asked_for() -> None:
    """A change of what Weft overrides or writes is worse than one of what it reads."""
    table = {f"{__name__}.Scheduler": Uses(overridden={"preempt": "(self)"}, read="third", written="fixed")}
    found = changed_members(table, uses=("overridden", "written"))
    assert [change.split(" ")[0] for change in found] == ["Scheduler.preempt", "Scheduler.fixed"]


def test_a_method_that_became_an_attribute_is_reported() -> None:
    """A call of it would fail."""
    assert use("on_class", "called", "(self)") == "Scheduler.on_class (called) is not callable any more."


def test_a_removed_keyword_argument_is_reported() -> None:
    """Constructors are checked for each keyword that Weft passes."""
    assert use("size", "passed") is None
    assert use("name", "passed", owner="Config") is None
    change = use("speed", "passed")
    assert change == "Scheduler(speed=) (passed) is missing: the constructor has no such parameter."


@pytest.mark.parametrize("owner", [f"{__name__}.Gone", f"{__name__}_gone.Scheduler"])
def test_a_removed_class_is_reported_for_each_of_its_members(owner: str) -> None:
    """A class that cannot be imported has none of its members."""
    changes = changed_members({owner: Uses(read="first second")})
    assert [change.split(" (read) is missing, since ")[0] for change in changes] == [
        f"{owner.rpartition('.')[2]}.first",
        f"{owner.rpartition('.')[2]}.second",
    ]
    assert all(owner in change for change in changes)


def test_only_changed_members_are_reported() -> None:
    """A table's sentences are those of its changed members, in the order of the table."""
    table = {
        f"{__name__}.Scheduler": Uses(
            overridden={"preempt": "(self, request)", "fixed": None},
            called={"static": "(size) -> int"},
            read="first third",
            passed="size",
        ),
        f"{__name__}.Config": Uses(imitated={"size": None, "depth": None}),
    }
    labels = [change.split(" ")[0] for change in changed_members(table)]
    assert labels == ["Scheduler.preempt", "Scheduler.third", "Config.depth"]
