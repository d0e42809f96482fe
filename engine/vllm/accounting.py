"""An `AsyncLLM` that reads what Weft's scheduler attaches to outputs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

from weft.core.accounts import Account
from weft.core.ids import CallId
from weft.core.kv_cache.stats import SwapStats
from weft.engine.vllm_compat.names import AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams, VLLMClientError
from weft.engine.wire.call_header import decode_key
from weft.engine.wire.reports import CallAccount, decode_account, read_report

OnAccount = Callable[[CallId, Account], None]
_MOST_TOKEN_IDS: Final = 1024  # of a bias, or allowed
_MOST_STOP_IDS: Final = 112  # vLLM takes 128, with the ids at which the model itself ends


class Delivered:
    """What a caller has received of an answer.

    Args:
        params: The call's sampling parameters. They say whether an output holds all tokens so far or only new ones.

    Attributes:
        tokens: Output tokens, over all choices.
        has_begun: Whether the caller has received an output.
        is_whole: Whether it was the last one.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.tokens = 0
        self.has_begun = self.is_whole = False
        self._is_delta = params.output_kind == RequestOutputKind.DELTA

    def add(self, output: RequestOutput) -> None:
        """The caller receives an output."""
        self.has_begun = True
        self.is_whole = output.finished
        produced = sum(len(choice.token_ids) for choice in output.outputs)
        self.tokens = self.tokens + produced if self._is_delta else produced


class AccountingLLM(AsyncLLM):
    """An `AsyncLLM` that takes the scheduler's reports off the outputs.

    Attributes:
        on_account: Called with a call's id and account so far on the engine's event loop, before each of its outputs is
            delivered.
        swap_stats: The swap's figures as of the last call that ended.
        why_dead: Why Weft killed the engine; empty if it did not.
        log: The file of the processes' output; None: the terminal.
    """

    on_account: OnAccount
    swap_stats: SwapStats | None = None
    why_dead: str = ""
    log: Path | None = None

    def __del__(self) -> None:
        """Does nothing. `weft.Engine` shuts the engine down; vLLM's own finaliser fails while the interpreter ends."""

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        if self.vllm_config.use_v2_model_runner:
            check_sampling(sampling_params)
        _, call_id = decode_key(sampling_params.extra_args, request_id, None)
        delivered = Delivered(sampling_params)
        told: CallAccount = {}  # by the latest output that carried an account
        earlier = Account()  # of choices that had ended before the scheduler knew of the others
        # Closing this generator must close vLLM's at once, which aborts the request.
        async with aclosing(super().generate(prompt, sampling_params, request_id, **kwargs)) as outputs:
            async for output in outputs:
                delivered.add(output)
                report = read_report(output.kv_transfer_params)
                output.kv_transfer_params = None  # otherwise it would show up in the OpenAI response
                before = told
                told = report.account or told
                if before and told["service_s"] < before["service_s"]:  # the scheduler has begun another account
                    earlier += decode_account(before)
                account = decode_account(
                    told,
                    prompt_tokens=len(output.prompt_token_ids or ()),
                    output_tokens=delivered.tokens,
                    cached_tokens=output.num_cached_tokens or 0,
                )
                account = earlier + account if earlier.service_s else account
                self.on_account(call_id, account)
                self.swap_stats = report.swap or self.swap_stats
                yield output


def check_sampling(params: SamplingParams) -> None:
    """Raise VLLMClientError if there are too many token ids for vLLM's second model runner, the default on a GPU.

    vLLM itself finds out in the worker, where the error ends the engine and with it the calls of everybody.
    """
    for name, ids, most in (
        ("logit_bias", params.logit_bias, _MOST_TOKEN_IDS),
        ("allowed_token_ids", params.allowed_token_ids, _MOST_TOKEN_IDS),
        ("stop_token_ids with min_tokens", params.stop_token_ids if params.min_tokens else None, _MOST_STOP_IDS),
    ):
        if ids and len(ids) > most:
            raise VLLMClientError(f"{name} has {len(ids)} token ids, and at most {most} are possible on a GPU.")
