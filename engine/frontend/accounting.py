"""An `AsyncLLM` that reads what Weft's scheduler attaches to outputs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from weft.core.ids import CallId
from weft.core.kv_cache.stats import SwapStats
from weft.core.process_table import Account
from weft.engine.vllm_compat.names import AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from weft.engine.wire import decode_aborted, decode_account, decode_swap

OnAccount = Callable[[CallId, Account], None]


class AccountingLLM(AsyncLLM):
    """An `AsyncLLM` that takes the accounts which Weft's scheduler attaches off the outputs and reports them.

    `on_account` is called on the engine's event loop, before the output that carried the account is delivered.
    """

    on_account: OnAccount
    swap_stats: SwapStats | None = None  # as of the call that ended last

    def __del__(self) -> None:
        """Nothing: `weft.Engine` shuts it down, and vLLM's own would fail in an interpreter that is ending."""

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        call_id = CallId((sampling_params.extra_args or {}).get("call_id", request_id))
        is_delta = sampling_params.output_kind == RequestOutputKind.DELTA
        output_tokens = 0
        # Closing this generator must close vLLM's at once, which aborts the request.
        async with aclosing(super().generate(prompt, sampling_params, request_id, **kwargs)) as outputs:
            async for output in outputs:
                produced = sum(len(choice.token_ids) for choice in output.outputs)
                output_tokens = output_tokens + produced if is_delta else produced
                account = decode_account(
                    output.kv_transfer_params,
                    len(output.prompt_token_ids or ()),
                    output_tokens,
                    output.num_cached_tokens or 0,
                )
                if account is not None:
                    self.on_account(call_id, account)
                for aborted, spent in decode_aborted(output.kv_transfer_params).items():
                    self.on_account(aborted, spent)
                self.swap_stats = decode_swap(output.kv_transfer_params) or self.swap_stats
                output.kv_transfer_params = None  # else it would show up in the OpenAI response
                yield output
