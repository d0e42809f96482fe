"""Registries: names for users, parameters for validation, summaries for help texts and docs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

from weft.core.errors import WeftError

T = TypeVar("T")
C = TypeVar("C", bound=type[Any])


@dataclass(frozen=True, slots=True)
class NoParameters:
    """The parameters of a class that has none."""


def check_number(value: object, what: str, error: type[WeftError]) -> float:
    """Return a number as it is.

    Args:
        value: The value of a parameter.
        what: The parameter's name, for the error.
        error: The class of the error.

    Raises:
        WeftError: Of the class `error`: the value is not a number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise error(f"{what} must be a number, not {value!r:.60}.")
    return value


class Registered:
    """Base of the classes that are registered."""

    name: ClassVar[str]  # set by `Registry.register`

    @classmethod
    def from_parameters(cls, parameters: Any) -> Self:
        """Make an object from its parameters dataclass, whose fields are the constructor's arguments by default."""
        return cls(**{each.name: getattr(parameters, each.name) for each in fields(parameters)})


@dataclass(frozen=True, slots=True)
class Registration(Generic[T]):
    """A class that users choose by name.

    Attributes:
        name: What users write.
        summary: One line for help texts and docs.
        kind: The class.
        parameters: A frozen dataclass that validates itself. All its fields have defaults.
        simulation_only: Whether the class needs what only a simulator knows.
    """

    name: str
    summary: str
    kind: type[T]
    parameters: type[Any]
    simulation_only: bool


@dataclass(slots=True)
class Registry(Generic[T]):
    """The classes of one kind by name.

    Args:
        what: The kind, for errors: "policy".
        error: Raised for an unknown name.
    """

    what: str
    error: type[WeftError]
    entries: dict[str, Registration[T]] = field(default_factory=dict)

    def register(
        self, name: str, summary: str, parameters: type[Any] = NoParameters, *, simulation_only: bool = False
    ) -> Callable[[C], C]:
        """Register a class under a name; used as a decorator.

        Raises:
            ValueError: The name is taken.
        """

        def add(kind: C) -> C:
            if name in self.entries:
                raise ValueError(f"a {self.what} named {name!r} is registered already")
            kind.name = name
            self.entries[name] = Registration(name, summary, cast("type[T]", kind), parameters, simulation_only)
            return kind

        return add

    def registration(self, name: object) -> Registration[T]:
        """The registration of a name.

        Raises:
            WeftError: Of the class `error`: there is none. The message lists the names that an engine takes.
        """
        found = self.entries.get(name) if isinstance(name, str) else None
        if found is None:
            known = ", ".join(each.name for each in self.registrations() if not each.simulation_only)
            raise self.error(f"unknown {self.what} {name!r}; choose one of {known}.")
        return found

    def parameters(self, name: str, given: Mapping[str, Any]) -> Any:
        """The parameters dataclass of a name, with the values that are given.

        Raises:
            WeftError: Of the class `error`: the name is unknown, or it does not have a parameter, or refuses a value.
        """
        kind = self.registration(name).parameters
        allowed = [each.name for each in fields(kind)]
        unknown = [key for key in given if key not in allowed]
        removed: Mapping[str, str] = getattr(kind, "REMOVED", {})  # old parameters, and what replaces each
        if unknown and unknown[0] in removed:
            raise self.error(f"{self.what} {name!r} has lost the parameter {unknown[0]!r}: {removed[unknown[0]]}.")
        if unknown:
            known = ", ".join(allowed) or "no parameters"
            raise self.error(f"{self.what} {name!r} has no parameter {unknown[0]!r}; it has {known}.")
        return kind(**given)

    def registrations(self) -> list[Registration[T]]:
        """All registrations by name."""
        return [self.entries[name] for name in sorted(self.entries)]
