"""The scheduler's own settings, which it reads at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.core.errors import PolicyError
from weft.core.kv_cache.policies import KvPolicyConfig, check_kv_policy


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The settings of a scheduler: `additional_config["weft"]`."""

    policy: Mapping[str, Any]  # of a `PolicyConfig`
    # The scheduler serves one engine of Weft. Behind a server it must not tell one client of another one's calls.
    one_client: bool = False
    trust_clients: bool = False  # Weft's own engine is always trusted; see `decode_call`
    model: str = ""  # the name by which the engine serves the model
    kv_policy: KvPolicyConfig | None = None  # None: as the policy says


def encode_config(config: SchedulerConfig) -> dict[str, Any]:
    """The settings as `additional_config["weft"]` carries them."""
    flags = {"one_client": config.one_client, "trust_clients": config.trust_clients}
    model = {"model": config.model} if config.model else {}
    kv_policy = {"kv_policy": config.kv_policy.to_dict()} if config.kv_policy is not None else {}
    return {**config.policy, **{name: True for name, is_set in flags.items() if is_set}, **model, **kv_policy}


def decode_config(additional_config: object) -> SchedulerConfig:
    """Read vLLM's `additional_config`.

    Raises:
        PolicyError: `weft` is no mapping, one of the two flags is neither true nor false, or the model has no name.
        KvPolicyError: `kv_policy` is neither the name of a KV policy nor a mapping with a name and parameters.
    """
    config = additional_config.get("weft", {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(config, Mapping):
        raise PolicyError(f'"weft" in additional_config must be a policy, such as {{"name": "atlas"}}, not {config!r}.')
    policy = dict(config)
    flags = {name: policy.pop(name, False) for name in ("one_client", "trust_clients")}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise PolicyError(f'"{name}" in additional_config["weft"] must be true or false, not {value!r:.80}.')
    model = policy.pop("model", "")
    if not isinstance(model, str):
        raise PolicyError(f'"model" in additional_config["weft"] must be a name, not {model!r:.80}.')
    kv_policy = check_kv_policy(policy.pop("kv_policy", None))
    return SchedulerConfig(policy, flags["one_client"], flags["one_client"] or flags["trust_clients"], model, kv_policy)
