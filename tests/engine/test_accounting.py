"""A call's account, as its front end puts it together from what a scheduler attaches to outputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from weft.core.accounts import Account
from weft.engine.vllm.accounting import AccountingLLM
from weft.engine.vllm_compat.names import AsyncLLM, SamplingParams
from weft.engine.wire.reports import attach, encode_account

pytestmark = pytest.mark.engine  # imports vLLM, but starts no engine


class Reported(AsyncLLM):  # type: ignore[misc]
    """Makes outputs that carry these accounts; None: an output without one."""

    reports: tuple[Account | None, ...] = ()

    async def generate(self, *_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        for report in self.reports:
            params = None if report is None else attach(None, encode_account(report))
            yield SimpleNamespace(
                kv_transfer_params=params, outputs=(), prompt_token_ids=[1, 2], num_cached_tokens=1, finished=False
            )


class Accounting(AccountingLLM, Reported):
    """The class under test over those outputs."""


def accounts_of(*reports: Account | None) -> list[Account]:
    llm, found = object.__new__(Accounting), []
    llm.reports, llm.vllm_config = reports, SimpleNamespace(use_v2_model_runner=False)
    llm.on_account = lambda _call_id, account: found.append(account)

    async def drain() -> None:
        async for _ in llm.generate("prompt", SamplingParams(n=2), "c"):
            pass

    asyncio.run(drain())
    return found


def test_an_output_without_an_account_keeps_the_one_before() -> None:
    had = Account(service_s=0.5, wait_s=0.25, preemptions=1)
    assert [each.service_s for each in accounts_of(None, had, None)] == [0.0, 0.5, 0.5]


def test_a_choice_that_comes_late_adds_to_those_that_have_ended() -> None:
    """The scheduler had closed the call's account with its first choice, and opens another one."""
    first, second = Account(service_s=0.5, wait_s=0.25, preemptions=1), Account(service_s=0.125, fetched_tokens=16)
    last = accounts_of(first, None, second, replace(second, service_s=0.75))[-1]
    costs = Account(service_s=1.25, wait_s=0.25, preemptions=1, fetched_tokens=16)
    assert last == replace(costs, prompt_tokens=2, cached_tokens=1)
