"""`BalancerConfig` and the registry of balancers."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest

from weft.core.errors import BalancerError
from weft.core.ids import EngineId, ProgramId, SessionId
from weft.core.routing import (
    BALANCERS,
    Arrival,
    Balancer,
    BalancerConfig,
    Loads,
    balancer,
    register,
    registration,
    registrations,
)


@pytest.mark.parametrize("name", BALANCERS)
def test_each_name_makes_its_balancer(name: str) -> None:
    """A configuration's name is the name of the balancer that it makes."""
    assert BalancerConfig(name).make().name == name


def test_the_names_are_those_of_the_registry() -> None:
    """They are sorted, and those that users have in their configurations stay. Each balancer has a summary of one
    line."""
    assert {"adaptive_locality", "affinity", "least_used", "locality", "round_robin"} <= {*BALANCERS}
    assert tuple(sorted(each.name for each in registrations())) == BALANCERS
    for each in registrations():
        assert each.summary
        assert "\n" not in each.summary


def test_the_default_is_the_balancer_that_was_best_in_measurements() -> None:
    """`docs/results/balancers.md` has them. Algorithm 2 has the paper's threshold."""
    assert BalancerConfig() == BalancerConfig("adaptive_locality", idle_tokens=1024)
    assert BalancerConfig("locality") == BalancerConfig("locality", threshold_tokens=2048)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "random"}, f"unknown balancer 'random'; choose one of {', '.join(BALANCERS)}\\."),
        ({"name": "locality", "threshold_tokens": -1}, "threshold_tokens must be 0 or more, not -1"),
        ({"name": "locality", "threshold_tokens": float("nan")}, "threshold_tokens must be 0 or more, not nan"),
        ({"name": "locality", "threshold_tokens": "9"}, "threshold_tokens must be a number, not '9'"),
        ({"idle_tokens": -1}, "idle_tokens must be a finite number, 0 or more, not -1"),
        ({"idle_tokens": float("inf")}, "idle_tokens must be a finite number, 0 or more, not inf"),
        ({"idle_tokens": "9"}, "idle_tokens must be a number, not '9'"),
        ({"name": "affinity", "threshold": 0}, "threshold must be above 0, a share of an engine's capacity, not 0"),
        ({"name": "affinity", "threshold": float("nan")}, "threshold must be above 0, .* not nan"),
        ({"name": "affinity", "threshold": None}, "threshold must be a number, not None"),
        ({"name": "affinity", "by": "user"}, 'by must be "program" or "session", not \'user\''),
        (
            {"name": "locality", "load_ratio": 3.0},
            "balancer 'locality' has no parameter 'load_ratio'; it has threshold_tokens",
        ),
        ({"name": "round_robin", "load_ratio": 3.0}, "'round_robin' has no parameter 'load_ratio'; it has no param"),
    ],
)
def test_invalid_values_are_refused(wrong: dict[str, Any], message: str) -> None:
    """The error names the value and the values that are possible."""
    with pytest.raises(BalancerError, match=message):
        BalancerConfig(**wrong)


def test_a_configuration_is_a_value() -> None:
    """It is equal by name and parameters, hashable, and survives pickling and copying."""
    config = BalancerConfig("affinity", threshold=0.5)
    assert config == BalancerConfig("affinity", threshold=0.5) != BalancerConfig("affinity")
    assert len({config, BalancerConfig("affinity", threshold=0.5)}) == 1
    for twin in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):  # noqa: S301 - pickled on this line
        assert twin == config
    assert (config.name, config.parameters.threshold) == ("affinity", 0.5)
    assert repr(config) == "BalancerConfig(name='affinity', parameters=AffinityParameters(threshold=0.5, by='session'))"


def test_a_configuration_is_frozen() -> None:
    """Neither the name nor a parameter can be changed."""
    config = BalancerConfig("locality", threshold_tokens=1)
    with pytest.raises(FrozenInstanceError):
        config.name = "affinity"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        config.parameters.threshold_tokens = 2


# -- adding a balancer


@pytest.fixture
def scratch_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop the test's registrations at its end."""
    monkeypatch.setattr(balancer.REGISTRY, "entries", dict(balancer.REGISTRY.entries))


@dataclass(frozen=True, slots=True)
class PinnedParameters:
    """The parameter of the balancer below."""

    index: int = 0


def add_pinned() -> None:
    @register("pinned", "always the same engine of those offered", PinnedParameters)
    class Pinned(Balancer):
        def __init__(self, index: int = 0) -> None:
            super().__init__()
            self.index = index

        def choose(self, arrival: Arrival, loads: Loads) -> EngineId:
            del arrival
            return loads.all()[self.index % len(loads)].engine_id


@pytest.mark.usefixtures("scratch_registry")
def test_a_registered_balancer_is_configured_by_name() -> None:
    """Registration alone makes a name, its parameters and its errors available."""
    add_pinned()
    assert registration("pinned").parameters is PinnedParameters
    balancer = BalancerConfig("pinned", index=1).make()
    loads = Loads(capacity=10)
    loads.open(EngineId("a"), 0)
    loads.open(EngineId("b"), 1)
    assert balancer.choose(Arrival(ProgramId("p"), SessionId("s"), 1), loads) == "b"
    with pytest.raises(BalancerError, match="balancer 'pinned' has no parameter 'load_ratio'; it has index"):
        BalancerConfig("pinned", load_ratio=2.0)


@pytest.mark.usefixtures("scratch_registry")
def test_a_name_is_registered_once() -> None:
    """A second balancer of the same name is a programming error."""
    add_pinned()
    with pytest.raises(ValueError, match="a balancer named 'pinned' is registered already"):
        add_pinned()
