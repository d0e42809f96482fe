"""Replicas whose answers come from a script instead of a model. All around them is the real engine's."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncGenerator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from weft.core.accounts import Account
from weft.core.errors import InvalidRequestError
from weft.core.ids import EngineId
from weft.core.testing.script import Reply, Script
from weft.engine.models.scripted_model import THINK, THOUGHT, request_of
from weft.engine.replicas.base import Replica
from weft.engine.vllm_compat.names import (
    EngineCoreOutput,
    FinishReason,
    InputProcessor,
    OutputProcessor,
    RequestOutput,
    RequestOutputCollector,
    SamplingParams,
    renderer_from_config,
)
from weft.engine.wire.call_header import decode_call

if TYPE_CHECKING:
    from weft.engine.vllm.accounting import OnAccount
    from weft.engine.vllm_compat.names import AsyncEngineArgs

_MODEL: Final = ("generate",)


class ScriptedReplica(Replica):
    """Gives replies as the tokens that a model would have sampled. vLLM makes text of them, and finds stop strings."""

    def __init__(self, engine_id: EngineId, arguments: AsyncEngineArgs, script: Script, on_account: OnAccount) -> None:
        self.engine_id = engine_id
        self._arguments = arguments
        self._script = script
        self._on_account = on_account

    async def start(self, timeout_s: float) -> None:
        config = self._arguments.create_engine_config()
        self._renderer = renderer_from_config(config)
        self._inputs = InputProcessor(config, self._renderer)
        self._outputs = OutputProcessor(self._renderer.tokenizer, log_stats=False)
        self.llm = SimpleNamespace(vllm_config=config, swap_stats=None)

    @property
    def is_dead(self) -> bool:
        return False

    def why_dead(self) -> str:
        return ""

    def detach(self) -> None:
        if self.llm is not None:
            self.llm = None
            self._renderer.shutdown()

    async def send_to_scheduler(self, message: Mapping[str, Any]) -> None:
        """There is no scheduler."""

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `AsyncLLM.generate`.

        Raises:
            ScriptError: The script has no reply.
            Exception: The reply is one.
        """
        if sampling_params.n != 1:
            raise InvalidRequestError("a scripted engine gives one answer to a call; leave out n.")
        clock, begin_s = asyncio.get_running_loop().time, asyncio.get_running_loop().time()
        arguments, session_id = sampling_params.extra_args or {}, kwargs.get("session_id")
        identity = decode_call(arguments, request_id, session_id, is_trusted=True).identity
        tokenizer = self._renderer.tokenizer
        asked = request_of(tokenizer.decode(prompt["prompt_token_ids"]))
        reply = self._script.reply(asked, identity)
        tokens = tokenizer.encode(written(reply), add_special_tokens=False)
        params = copy.copy(sampling_params)
        is_cut = params.max_tokens is not None and len(tokens) >= params.max_tokens
        tokens = tokens[: params.max_tokens]
        request = self._inputs.process_inputs(request_id, prompt, params, supported_tasks=_MODEL)
        self._inputs.assign_request_id(request)
        queue = RequestOutputCollector(params.output_kind, request.request_id)
        self._outputs.add_request(request, None, None, 0, queue)
        await asyncio.sleep(reply.latency_s or 0.0)
        try:
            for number, token in enumerate(tokens, 1):
                await asyncio.sleep(reply.token_s)
                is_last = number == len(tokens) and reply.error is None
                reason = (FinishReason.LENGTH if is_cut else FinishReason.STOP) if is_last else None
                self._outputs.process_outputs([EngineCoreOutput(request.request_id, [token], finish_reason=reason)])
                self._on_account(
                    identity.call_id,
                    Account(
                        service_s=clock() - begin_s, prompt_tokens=len(prompt["prompt_token_ids"]), output_tokens=number
                    ),
                )
                output = queue.get_nowait()
                if output is not None:
                    yield output
                    if output.finished:
                        return
            if reply.error is not None:
                raise reply.error
        finally:
            self._outputs.abort_requests([request.request_id], internal=True)


def written(reply: Reply) -> str:
    """A reply as vLLM's parsers "deepseek_r1" and "hermes" read it, with the token that ends it."""
    calls = "".join(
        f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in reply.tool_calls
    )
    return f"{THINK}{reply.reasoning}{THOUGHT}{reply.content}{calls}<|im_end|>"
