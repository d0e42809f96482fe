"""Registries of the classes that users choose by name: policies, KV policies and balancers.

Each class is registered with its name, a dataclass that validates its parameters, and a summary for help texts and
docs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

from weft.core.errors import WeftError

T = TypeVar("T")
C = TypeVar("C", bound=type[Any])


@dataclass(frozen=True, slots=True)
class NoParameters:
    """The parameters of a class that has none."""


def check_number(value: object, what: str, error: type[WeftError]) -> float:
    """Return `value`, or raise an error of the class `error` if it is not a number."""
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
        self, name: str, summary: str, parameters: type[Any] | None = None, *, simulation_only: bool = False
    ) -> Callable[[C], C]:
        """Register a class under a name that is not taken; used as a decorator. A class that is a dataclass is its own
        parameters."""

        def add(kind: C) -> C:
            if name in self.entries:
                raise ValueError(f"a {self.what} named {name!r} is registered already")
            kind.name = name
            own = parameters or (kind if is_dataclass(kind) else NoParameters)
            self.entries[name] = Registration(name, summary, cast("type[T]", kind), own, simulation_only)
            return kind

        return add

    def registration(self, name: object) -> Registration[T]:
        """The registration of a name. An error of the class `error` lists the names that an engine takes."""
        found = self.entries.get(name) if isinstance(name, str) else None
        if found is None:
            known = ", ".join(each.name for each in self.registrations() if not each.simulation_only)
            raise self.error(f"unknown {self.what} {name!r}; choose one of {known}.")
        return found

    def parameters(self, name: str, given: Mapping[str, Any]) -> Any:
        """Make the parameters dataclass of a name from the values that are given. An error of the class `error` says
        which name or parameter is unknown, or which value the dataclass refuses."""
        kind = self.registration(name).parameters
        allowed = [each.name for each in fields(kind)]
        unknown = [key for key in given if key not in allowed]
        if unknown:
            known = ", ".join(allowed) or "no parameters"
            raise self.error(f"{self.what} {name!r} has no parameter {unknown[0]!r}; it has {known}.")
        return kind(**given)

    def registrations(self) -> list[Registration[T]]:
        """All registrations, sorted by name."""
        return [self.entries[name] for name in sorted(self.entries)]
