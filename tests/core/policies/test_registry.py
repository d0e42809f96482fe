"""The registry of policies, and the configuration that is validated by it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import pytest

from weft.core.errors import PolicyError
from weft.core.policies import (
    POLICIES,
    SIMULATED_POLICIES,
    Call,
    Fcfs,
    Policy,
    PolicyConfig,
    Rank,
    register,
    registration,
    registrations,
)
from weft.core.policies.policy import REGISTRY
from weft.core.sim import SimSettings


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is gone after it."""
    monkeypatch.setattr(REGISTRY, "entries", dict(REGISTRY.entries))
    return


@dataclass(frozen=True)
class ByKeyParameters:
    """Parameters of the policy below."""

    reverse: bool = False


class ByKey(Fcfs):
    """Orders calls by their key."""

    def __init__(self, reverse: bool) -> None:
        super().__init__()
        self.reverse = reverse

    @classmethod
    def from_parameters(cls, parameters: Any) -> ByKey:
        return cls(parameters.reverse)

    def rank(self, call: Call, now_s: float) -> Rank:
        return Rank(0, -ord(call.key) if self.reverse else ord(call.key))


@pytest.mark.usefixtures("restored")
def test_a_new_policy_needs_only_its_registration() -> None:
    """A registered class is configured, made and simulated by its name."""
    register("key", "by key", ByKeyParameters)(ByKey)
    config = PolicyConfig("key", reverse=True)
    made = config.make()
    assert isinstance(made, ByKey)
    assert (made.name, made.reverse) == ("key", True)
    assert "key" in [each.name for each in registrations()]
    assert SimSettings(policy=config).policy.name == "key"
    assert SimSettings(policy="key").policy == PolicyConfig("key")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="policy 'key' has no parameter 'beta'; it has reverse"):
        PolicyConfig("key", beta=1.0)


@pytest.mark.usefixtures("restored")
def test_a_name_is_taken_once() -> None:
    """Two policies of one name are a mistake, not a replacement."""
    with pytest.raises(ValueError, match="a policy named 'atlas' is registered already"):
        register("atlas", "another")(ByKey)
    assert registration("atlas").kind is not ByKey


@pytest.mark.parametrize("name", SIMULATED_POLICIES)
def test_every_policy_is_complete(name: str) -> None:
    """Each policy has a summary of one line, frozen parameters with defaults, and is made from them."""
    found = registration(name)
    assert found.summary
    assert "\n" not in found.summary
    assert is_dataclass(found.parameters)
    with pytest.raises((AttributeError, TypeError)):
        found.parameters().anything = 1
    made = PolicyConfig(name, gate=False).make()
    assert isinstance(made, Policy)
    assert (made.name, type(made)) == (name, found.kind)


@pytest.mark.parametrize("name", SIMULATED_POLICIES)
def test_a_configuration_survives_its_journey(name: str) -> None:
    """A configuration is the same after JSON (`--additional-config`), after pickling and after `to_dict`."""
    config = PolicyConfig(name, decide_every=3, token_s=0.5)
    assert PolicyConfig.from_dict(config.to_dict()) == config
    assert PolicyConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301  our own bytes
    assert hash(config) == hash(PolicyConfig.from_dict(config.to_dict()))


def test_a_configuration_cannot_be_changed() -> None:
    """A configuration is frozen; `to_dict` and `from_dict` make another one."""
    config = PolicyConfig("atlas", beta=8)
    with pytest.raises(AttributeError):
        config.name = "plas"  # type: ignore[misc]
    other = PolicyConfig.from_dict({**config.to_dict(), "beta": 2.0, "decide_every": 4})
    assert (other.parameters.beta, other.decide_every, config.parameters.beta) == (2.0, 4, 8)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": "atlas", "betta": 3}, "policy 'atlas' has no parameter 'betta'; it has bounds_s, beta, quanta_s"),
        ({"name": "fcfs", "beta": 3}, "policy 'fcfs' has no parameter 'beta'; it has none of its own"),
        ({"name": "atlas", "beta": "3"}, "beta must be a number, not '3'"),
        ({"name": "atlas", "beta": True}, "beta must be a number, not True"),
        ({"name": "atlas", "bounds_s": 3}, "bounds_s must be a list of seconds, not 3"),
        ({"name": "atlas", "bounds_s": [1, "2"]}, "each of bounds_s must be a number, not '2'"),
        (
            {"name": "atlas", "bounds_s": [1, float("nan")]},
            "queue bounds must be positive, finite and increasing seconds",
        ),
        ({"name": "atlas", "bounds_s": [1.0], "quanta_s": [1.0]}, "quanta must be 2 positive numbers of seconds"),
        ({"name": "rr", "quanta_s": []}, "quanta must be 1 positive numbers of seconds"),
        ({"name": "rr", "quanta_s": None}, "round robin needs a quantum"),
        ({"decide_every": 0}, "decide_every must be a whole number of steps, at least 1, not 0"),
        ({"decide_every": 1.5}, "decide_every must be a whole number of steps"),
        ({"decide_every": "2"}, "decide_every must be a whole number of steps"),
        ({"token_s": "fast"}, "token_s must be a number, not 'fast'"),
        ({"name": 7}, "unknown policy 7; choose one of astraea, atlas, auto"),
        ({"name": ["atlas"]}, r"unknown policy \['atlas'\]; choose one of"),
        ({3: 4}, "the parameters of a policy have names"),
    ],
)
def test_a_wrong_value_says_what_to_do(arguments: dict[Any, Any], said: str) -> None:
    """Whatever JSON holds, the answer is a PolicyError that names the parameter."""
    with pytest.raises(PolicyError, match=said):
        PolicyConfig.from_dict(arguments)


def test_too_many_values_are_refused() -> None:
    """A value by position without a parameter is refused, not ignored."""
    with pytest.raises(PolicyError, match="policy 'fcfs' has no parameter number 1"):
        PolicyConfig("fcfs", (1.0,))


@pytest.mark.parametrize("name", sorted(set(SIMULATED_POLICIES) - set(POLICIES)))
def test_an_engine_does_not_take_a_policy_of_the_simulator(name: str) -> None:
    """What knows the future is configured for simulations only, and the refusal says so."""
    with pytest.raises(PolicyError, match=f"policy '{name}' needs what only a simulation knows"):
        PolicyConfig(name).check_live()


@pytest.mark.parametrize("name", POLICIES)
def test_an_engine_takes_the_others(name: str) -> None:
    """A policy that runs live passes."""
    config = PolicyConfig(name)
    assert config.check_live() is config


@pytest.mark.parametrize(
    ("name", "owned"),
    [
        ("atlas", ["bounds_s", "beta", "quanta_s"]),
        ("fcfs", []),
        ("mlfq", ["bounds_s", "beta", "quanta_s"]),
        ("plas", ["bounds_s", "beta", "quanta_s"]),
        ("priority", []),
        ("rr", ["quanta_s"]),
        ("srpt", []),
    ],
)
def test_each_policy_owns_its_parameters(name: str, owned: list[str]) -> None:
    """Only the multilevel policies have bounds and beta."""
    assert [field.name for field in fields(registration(name).parameters)] == owned
