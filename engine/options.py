"""The options of an engine: one object that every constructor fills and every layer reads."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Self, TypeVar

from weft.core.kv_cache.config import SwapConfig, check_swap
from weft.core.kv_cache.policies import KvPolicyConfig, as_kv_config
from weft.core.policies import DEFAULT_POLICY, PolicyConfig, registration
from weft.core.routing.admission import DEFAULT_MAX_CALLS, check_max_calls, check_timeout
from weft.core.routing.liveness import DEFAULT_HANG_TIMEOUT_S
from weft.engine.vllm_compat.known_names import VllmArgs, check_engine_args

F = TypeVar("F", bound=Callable[..., None])


class EngineKeywords(VllmArgs, total=False):
    """The keywords of `weft.Engine`: those of `EngineOptions` in the forms that users write, and vLLM's."""

    policy: str | PolicyConfig
    swap: SwapConfig | None
    kv_policy: str | KvPolicyConfig | None
    tool_call_parser: str | None
    max_calls: int
    call_timeout_s: float | None
    program_timeout_s: float | None
    hang_timeout_s: float | None
    clock: Callable[[], float]
    record: str | os.PathLike[str] | None
    history: str | os.PathLike[str] | None
    journal: str | os.PathLike[str] | None
    listen: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What an engine is made with. `weft.Engine` and `weft.AsyncMultiLLMEngine` take these as keywords.

    Args:
        policy: How calls are scheduled. A name in `weft.core.policies.POLICIES`, or a `PolicyConfig` with parameters.
        swap: Host memory for KV, by default sized by what the host has free. With None there is no such memory, and
            what the device has no room for is computed again. A `kv_transfer_config` of your own takes precedence.
            `engine.host_kv_gib` says how much there is.
        kv_policy: What is evicted from the KV cache next. A name in `weft.core.kv_cache.policies.KV_POLICIES`, or a
            `KvPolicyConfig` with parameters. By default it is "next-use" with host memory; without it the scheduling
            policy decides, for "ended-first" or "lru". It has no effect without prefix caching, or for models with
            several kinds of attention.
        tool_call_parser: vLLM's parser for tool calls that the model makes of its own accord, e.g. "hermes".
        max_calls: How many calls may be in flight on one vLLM engine, its queue included. Further calls are refused
            with `OverloadedError`.
        call_timeout_s: Seconds a call may take, its time in the queue included. `timeout_s` in its request takes
            precedence.
        program_timeout_s: Seconds a program may take from its first call on. `timeout_s` in its metadata takes
            precedence.
        hang_timeout_s: Seconds after which a vLLM engine that neither answers nor uses CPU time is killed. Its calls
            then fail as if it had died. With None it is never killed, e.g. for debugging.
        clock: Monotonic seconds, for the process table.
        record: A file to which each program is appended, when it ends, as a trace for `weft sim`. By default it is the
            file that WEFT_RECORD names in the environment, if the variable is set.
        history: A file in which the engine keeps what programs did, so that the next engine begins with it. It holds
            execution graphs, and the programs' work if the policy learns. Without a file, all this is forgotten when
            the engine ends.
        journal: A folder in which each vLLM engine keeps a journal of what comes to its scheduler and what it decides,
            for `weft replay`. It holds ids, names and counts, and no texts.
        listen: Where the engine serves its state over HTTP, for `weft top`: "unix:/path", or "127.0.0.1:8001"; port 0
            is any free one, and `engine.url` says which. Those who connect can see and end programs. None: nowhere.
        engine_args: vLLM's `AsyncEngineArgs`, e.g. `max_model_len=4096`, `max_num_seqs=16`.

    Raises:
        PolicyError: The policy makes no sense, or runs in simulation only.
        KvPolicyError, SwapArgumentError: The KV policy or `swap` is none.
        ReplicaError: `max_calls` is not above 0.
        InvalidRequestError: A timeout is not above 0.
    """

    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(DEFAULT_POLICY))
    swap: SwapConfig | None = field(default_factory=SwapConfig)
    kv_policy: KvPolicyConfig | None = None
    tool_call_parser: str | None = "hermes"
    max_calls: int = DEFAULT_MAX_CALLS
    call_timeout_s: float | None = None
    program_timeout_s: float | None = None
    hang_timeout_s: float | None = DEFAULT_HANG_TIMEOUT_S
    clock: Callable[[], float] = time.monotonic
    record: str | os.PathLike[str] | None = None
    history: str | os.PathLike[str] | None = None
    journal: str | os.PathLike[str] | None = None
    listen: str | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.policy.check_live()
        check_swap(self.swap)
        check_max_calls(self.max_calls)
        for name in ("call_timeout_s", "program_timeout_s", "hang_timeout_s"):
            check_timeout(getattr(self, name), name)

    @classmethod
    def of(cls, keywords: EngineKeywords, function: Callable[..., None]) -> Self:
        """The options that a user has written as keywords.

        Args:
            function: The function that got them. A wrong keyword may stand for one of its parameters.

        Raises:
            EngineStartError: Neither Weft nor vLLM has a keyword of this name.
        """
        own: dict[str, Any] = {name: value for name, value in keywords.items() if name in _OWN}
        engine_args = {name: value for name, value in keywords.items() if name not in _OWN}
        meant = [name for name in inspect.signature(function).parameters if name not in ("self", "engine_args")]
        check_engine_args(engine_args, meant)
        policy = own.get("policy")
        if isinstance(policy, str):
            own["policy"] = PolicyConfig(policy)
        own["kv_policy"] = as_kv_config(own.get("kv_policy"))
        return cls(**own, engine_args=engine_args)

    @property
    def learns(self) -> bool:
        """Whether the scheduling policy learns from programs that have ended."""
        return registration(self.policy.name).kind.learns

    @property
    def predicts(self) -> bool:
        """Whether the schedulers' KV policy predicts, and so wants to hear what happens between calls."""
        return self.kv_policy is not None and not self.kv_policy.follows_use


_OWN: Final = frozenset(each.name for each in fields(EngineOptions)) - {"engine_args"}


def with_signature(function: F) -> F:
    """Give a function with `**options: Unpack[EngineKeywords]` the signature that `help` and notebooks show."""
    signature = inspect.signature(function)
    *given, options = signature.parameters.values()
    hints = EngineKeywords.__annotations__
    own = (
        options.replace(
            name=each.name,
            kind=inspect.Parameter.KEYWORD_ONLY,
            default=each.default_factory() if callable(each.default_factory) else each.default,
            annotation=hints[each.name].__forward_arg__,
        )
        for each in fields(EngineOptions)
        if each.name in _OWN
    )
    last = options.replace(name="engine_args", annotation="Unpack[VllmArgs]")
    function.__signature__ = signature.replace(parameters=[*given, *own, last])  # type: ignore[attr-defined]
    return function
