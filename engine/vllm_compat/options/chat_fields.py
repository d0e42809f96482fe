"""The fields of vLLM's chat request, so that a wrong name is refused before vLLM is imported.

vLLM itself accepts any field and ignores those that it does not know.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from typing import Final

from weft.core.errors import InvalidRequestError
from weft.engine.vllm_compat.versions.version import lacking

_SINCE: Final = {"mm_payload": "0.32", "return_mm_kwargs": "0.32", "return_weight_versions": "0.33"}
_NAMES: Final = (
    "add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template "
    "chat_template_kwargs continue_final_message documents ec_transfer_params echo frequency_penalty ignore_eos "
    "include_reasoning include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids "
    "logprobs max_completion_tokens max_tokens media_io_kwargs messages min_p min_tokens mm_payload "
    "mm_processor_kwargs model n parallel_tool_calls presence_penalty priority prompt_logprobs reasoning_effort "
    "repetition_detection repetition_penalty request_id response_format return_mm_kwargs return_prompt_text "
    "return_token_ids return_token_offsets return_tokens_as_token_ids return_weight_versions "
    "routed_experts_prompt_start seed session_id skip_special_tokens spaces_between_special_tokens stop "
    "stop_token_ids stream stream_interval stream_options structured_outputs temperature thinking_token_budget "
    "tool_choice tools top_k top_logprobs top_p truncate_prompt_tokens truncation_side use_beam_search user "
    "vllm_xargs watermarking"
)
CHAT_FIELDS: Final = frozenset(_NAMES.split()) - lacking(_SINCE)

# The front end fills these in. Of another value it would make no use.
FILLED_IN: Final = frozenset({"messages", "request_id", "session_id", "stream"})


def check_fields(names: Iterable[str], known: Collection[str]) -> None:
    """Check the names of request fields that a user sets.

    Raises:
        InvalidRequestError: A name is not among `known`. The message names it, and the known name nearest to it.
    """
    wrong = [name for name in names if name not in known]
    if not wrong:
        return
    problems = []
    for name in wrong:
        near = difflib.get_close_matches(name[:64], known, n=1)  # a search takes time by the square of the length
        problems.append(f"{name:.80} (did you mean {near[0]}?)" if near else f"{name:.80}")
    one = len(wrong) == 1
    raise InvalidRequestError(
        f"{', '.join(problems)}: {'this is not a field' if one else 'these are not fields'} of the chat request that "
        "can be set here. The fields are those of vLLM's chat completions, such as temperature, max_tokens, top_p, "
        "seed, stop, min_tokens and structured_outputs."
    )
