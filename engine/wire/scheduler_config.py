"""The scheduler's own settings, which it reads at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from weft.core.errors import PolicyError
from weft.core.kv_cache.policies import KvPolicyConfig, as_kv_config
from weft.core.policies import Policy, PolicyConfig
from weft.engine.options import EngineOptions

_FLAGS: Final = ("one_client", "trust_clients")
_WHERE: Final = 'in additional_config["weft"]'


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The settings of a scheduler: `additional_config["weft"]`."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    # The scheduler serves one engine of Weft. Behind a server it must not tell one client of another one's calls.
    one_client: bool = False
    trust_clients: bool = False  # Weft's own engine is always trusted; see `decode_call`
    model: str = ""  # the name by which the engine serves the model
    kv_policy: KvPolicyConfig | None = None  # None: `evicts_by` says
    journal: str = ""  # the folder of the scheduler's journal; empty: it writes none

    def evicts_by(self, policy: Policy, *, has_host_memory: bool) -> KvPolicyConfig:
        """The KV policy: as given, or else what goes with the scheduling policy and with host memory."""
        if self.kv_policy is not None:
            return self.kv_policy
        if has_host_memory and self.one_client:  # vLLM's server says what it wants
            return KvPolicyConfig("next-use")
        return KvPolicyConfig("ended-first" if policy.evicts_ended_first else "lru")


def config_of_engine(options: EngineOptions, model: str) -> SchedulerConfig:
    """The settings of the scheduler of one of Weft's engines, which serves a model by this name."""
    journal = str(Path(options.journal).absolute()) if options.journal is not None else ""
    return SchedulerConfig(options.policy, one_client=True, model=model, kv_policy=options.kv_policy, journal=journal)


def encode_config(config: SchedulerConfig) -> dict[str, Any]:
    """The settings as `additional_config["weft"]` carries them. Those that have their defaults are left out."""
    encoded: dict[str, Any] = {}
    for name in _SETTINGS:
        value = getattr(config, name)
        if value != getattr(_DEFAULTS, name):
            encoded[name] = value.to_dict() if isinstance(value, PolicyConfig | KvPolicyConfig) else value
    return encoded


def decode_config(additional_config: object) -> SchedulerConfig:
    """Read vLLM's `additional_config`.

    A policy is its name, or a mapping with the name and parameters: `{"policy": {"name": "atlas", "beta": 4}}`.

    Raises:
        PolicyError: `weft` is no mapping, it has a key that is none, a flag is neither true nor false, the model has no
            name, or the policy is none that an engine can run.
        KvPolicyError: `kv_policy` is neither the name of a KV policy nor a mapping with a name and parameters.
    """
    config = additional_config.get("weft", {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(config, Mapping):
        raise PolicyError(f'"weft" in additional_config must have settings, such as {_EXAMPLE}, not {config!r:.80}.')
    wrong = [key for key in config if key not in _SETTINGS]
    if wrong:
        raise PolicyError(f"{wrong[0]!r:.80} is no setting {_WHERE}, which takes {', '.join(_SETTINGS)}: {_EXAMPLE}.")
    for name in _FLAGS:
        if not isinstance(config.get(name, False), bool):
            raise PolicyError(f'"{name}" {_WHERE} must be true or false, not {config[name]!r:.80}.')
    for name in ("model", "journal"):
        if not isinstance(config.get(name, ""), str):
            raise PolicyError(f'"{name}" {_WHERE} must be a name, not {config[name]!r:.80}.')
    one_client = config.get("one_client", False)
    return SchedulerConfig(
        policy=_policy(config.get("policy", {})),
        one_client=one_client,
        trust_clients=one_client or config.get("trust_clients", False),
        model=config.get("model", ""),
        journal=config.get("journal", ""),
        kv_policy=as_kv_config(config.get("kv_policy")),
    )


_DEFAULTS: Final = SchedulerConfig()
_SETTINGS: Final = tuple(SchedulerConfig.__dataclass_fields__)
_EXAMPLE: Final = '{"policy": "atlas"} or {"policy": {"name": "atlas", "beta": 4}}'


def _policy(policy: object) -> PolicyConfig:
    if isinstance(policy, str):
        return PolicyConfig(policy).check_live()
    if isinstance(policy, Mapping):
        return PolicyConfig.from_dict(policy).check_live()
    raise PolicyError(f'"policy" {_WHERE} must be a name or a mapping, such as {_EXAMPLE}, not {policy!r:.80}.')
