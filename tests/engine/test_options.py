"""The options of an engine: the same for every constructor, described and checked once."""

from __future__ import annotations

import inspect
import re
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

import weft
from weft.core.errors import EngineStartError, InvalidRequestError, KvPolicyError, PolicyError, ReplicaError
from weft.core.kv_cache.policies import KvPolicyConfig
from weft.engine.options import EngineKeywords, EngineOptions
from weft.engine.vllm_compat.known_names import VllmArgs
from weft.engine.wire.scheduler_config import config_of_engine, decode_config, encode_config

OWN = [each.name for each in fields(EngineOptions) if each.name != "engine_args"]


def of(**keywords: Any) -> EngineOptions:
    return EngineOptions.of(EngineKeywords(**keywords), weft.Engine.__init__)


def test_every_option_is_a_keyword_and_is_described() -> None:
    """The type of the keywords, the dataclass and its docstring name the same options in one order."""
    assert [name for name in EngineKeywords.__annotations__ if name not in VllmArgs.__annotations__] == OWN
    described = re.findall(r"^ {8}(\w+): ", EngineOptions.__doc__ or "", re.MULTILINE)
    assert described[: len(OWN) + 1] == [*OWN, "engine_args"]


@pytest.mark.parametrize("kind", [weft.Engine, weft.AsyncMultiLLMEngine])
def test_help_shows_every_option_with_its_default(kind: type) -> None:
    """`help`, notebooks and `inspect` show them, though the constructor takes them as `**options`."""
    parameters = inspect.signature(kind).parameters
    assert [name for name in parameters if name in OWN] == OWN
    defaults = EngineOptions()
    assert {name: parameters[name].default for name in OWN} == {name: getattr(defaults, name) for name in OWN}
    assert list(parameters)[-1] == "engine_args"


def test_names_become_configurations_and_the_rest_is_vllms() -> None:
    """A user writes names; what reads the options gets objects that were checked."""
    options = of(policy="atlas", kv_policy="ttl", max_calls=3, max_num_seqs=4)
    assert (options.policy, options.kv_policy) == (weft.PolicyConfig("atlas"), KvPolicyConfig("ttl"))
    assert (options.max_calls, options.engine_args) == (3, {"max_num_seqs": 4})
    with pytest.raises(FrozenInstanceError):
        options.max_calls = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("keywords", "error"),
    [
        ({"policy": "lottery"}, PolicyError),
        ({"policy": "srpt"}, PolicyError),
        ({"kv_policy": "nothing"}, KvPolicyError),
        ({"max_calls": 0}, ReplicaError),
        ({"call_timeout_s": 0.0}, InvalidRequestError),
        ({"program_timeout_s": -1.0}, InvalidRequestError),
        ({"hang_timeout_s": 0.0}, InvalidRequestError),
        ({"max_cals": 3}, EngineStartError),
        ({"engine_args": {}}, EngineStartError),
    ],
)
def test_options_that_make_no_sense_are_refused(keywords: dict[str, Any], error: type[Exception]) -> None:
    """Before anything starts, whatever the constructor."""
    with pytest.raises(error):
        of(**keywords)


def test_a_scheduler_gets_the_options_that_are_its_own() -> None:
    """As JSON, in `additional_config`."""
    options = of(policy=weft.PolicyConfig("atlas", beta=4.0), kv_policy=KvPolicyConfig("ttl", quantile=0.5))
    config = decode_config({"weft": encode_config(config_of_engine(options, "my/model"))})
    assert (config.policy, config.kv_policy, config.model) == (options.policy, options.kv_policy, "my/model")
    assert config.one_client
    assert config.trust_clients
