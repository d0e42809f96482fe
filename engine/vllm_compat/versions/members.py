"""The members of vLLM's classes that Weft overrides, imitates, calls, reads, writes or passes.

vLLM promises none of them, least of all those with a leading underscore, so `changed_members` looks for each of them in
the installed vLLM. To add a member, add its line to the table. A signature is written as vLLM has it: without the types
of the parameters, and with the returned type where Weft depends on it; a tuple has one for each form that versions
have. Of a called function, optional parameters that Weft leaves at their defaults may be left out. For an overridden or
imitated one, `...` stands for them.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Final, get_args

from weft.core.errors import UnsupportedVllmError
from weft.core.log import get_logger
from weft.engine.vllm_compat.versions.changes import Member, Signature, Use, change_of
from weft.engine.vllm_compat.versions.version import TESTED_VLLM, check_vllm, is_tested


@dataclass(frozen=True, kw_only=True)
class Uses:
    """How Weft uses the members of one class or module.

    Attributes:
        overridden: methods and properties that a subclass in Weft replaces, each with its signature.
        imitated: methods and attributes that vLLM expects of an object, and that a class of Weft has without being a
            subclass.
        called: functions and methods, each with its signature.
        read: attributes, properties, fields and enum members; their names, with spaces between them.
        written: attributes that Weft assigns, and may read too; likewise.
        passed: keyword arguments of the constructor; likewise.
        since: the members among these that older versions lack, each with the first minor version that has it.
    """

    overridden: Mapping[str, Signature] = field(default_factory=dict)
    imitated: Mapping[str, Signature] = field(default_factory=dict)
    called: Mapping[str, Signature] = field(default_factory=dict)
    read: str = ""
    written: str = ""
    passed: str = ""
    since: Mapping[str, str] = field(default_factory=dict)

    def members(self, owner: str) -> Iterator[Member]:
        """Each of them, as a member of the class or module with the full name `owner`."""
        callables: dict[Use, Mapping[str, Signature]] = {
            "overridden": self.overridden,
            "imitated": self.imitated,
            "called": self.called,
        }
        for use, signatures in callables.items():
            yield from (Member(owner, name, use, form, self.since.get(name)) for name, form in signatures.items())
        others: dict[Use, str] = {"read": self.read, "written": self.written, "passed": self.passed}
        for use, names in others.items():
            yield from (Member(owner, name, use, None, self.since.get(name)) for name in names.split())


MEMBERS: Final[Mapping[str, Uses]] = {
    # -- the scheduler
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler": Uses(
        overridden={
            "__init__": "(self, *args, **kwargs) -> None",
            "_free_request": (
                "(self, request, delay_free_blocks=False) -> tuple[dict[str, Any] | None, dict[str, Any] | None]"
            ),
            "_handle_blocked_waiting_request": "(self, request) -> bool",
            "_handle_stopped_request": "(self, request) -> bool",
            "_preempt_request": "(self, request, timestamp, drop_stale_output=False) -> None",
            "_reserve_prefill_lookahead": "(self, request, num_computed_tokens, num_new_tokens) -> int",
            "_update_after_schedule": "(self, scheduler_output) -> None",
            "_update_request_with_output": "(self, request, new_token_ids, is_stale=False) -> tuple[list[int], bool]",
            "add_request": "(self, request) -> None",
            "finish_requests": "(self, request_ids, finished_status) -> list[Request]",
            "get_grammar_bitmask": "(self, scheduler_output) -> GrammarOutput | None",
            "reset_prefix_cache": "(self, reset_running_requests=False, reset_connector=False) -> bool",
            "schedule": "(self, throttle_prefills=False) -> SchedulerOutput",
            "set_pause_state": "(self, pause_state) -> None",
            "shutdown": "(self) -> None",
            "update_from_output": "(self, scheduler_output, model_runner_output) -> dict[int, EngineCoreOutputs]",
        },
        read=(
            "_inflight_prefills block_size cache_config connector kv_cache_config kv_cache_manager "
            "kv_holding_waiting last_prefill_step local_prefill_interval max_num_scheduled_tokens "
            "need_mamba_block_aligned_split num_executed_steps num_lookahead_tokens num_prefill_lookahead "
            "num_spec_tokens num_waiting_for_streaming_input pause_state prefill_capacity_bound "
            "prev_step_scheduled_req_ids requests running scheduler_config vllm_config"
        ),
        written="max_num_active_reqs waiting",
        since=dict.fromkeys(("last_prefill_step", "local_prefill_interval", "num_executed_steps"), "0.33"),
    ),
    "vllm.v1.core.sched.scheduler.Scheduler": Uses(
        called={
            # Where steps do not overlap, past AsyncScheduler.
            "_update_after_schedule": "(self, scheduler_output) -> None",
            "_update_request_with_output": "(self, request, new_token_ids, is_stale=False) -> tuple[list[int], bool]",
            "finish_requests": "(self, request_ids, finished_status) -> list[Request]",
        },
        passed=("block_size hash_block_size kv_cache_config log_stats structured_output_manager vllm_config"),
    ),
    "vllm.v1.core.sched.interface.PauseState": Uses(read="UNPAUSED"),
    "vllm.v1.core.sched.request_queue.RequestQueue": Uses(
        overridden={
            "__bool__": "(self) -> bool",
            "__iter__": "(self) -> Iterator[Request]",
            "__len__": "(self) -> int",
            "add_request": "(self, request) -> None",
            "peek_request": "(self) -> Request",
            "pop_request": "(self) -> Request",
            "prepend_request": "(self, request) -> None",
            "prepend_requests": "(self, requests) -> None",
            "remove_request": "(self, request) -> None",
            "remove_requests": "(self, requests) -> None",
        }
    ),
    "vllm.v1.core.kv_cache_manager.KVCacheManager": Uses(
        called={
            "evict_blocks": "(self, block_ids) -> None",
            "get_block_ids": "(self, request_id) -> tuple[list[int], ...]",
            "get_blocks": "(self, request_id) -> KVCacheBlocks",
            "prefix_cache_lookup_enabled": "(self, request) -> bool",
        },
        read="block_pool coordinator empty_kv_cache_blocks watermark_blocks",
    ),
    "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator": Uses(
        called={
            "find_longest_cache_hit": (
                "(self, block_hashes, max_cache_hit_length) -> tuple[tuple[list[KVCacheBlock], ...], int, int]"
            ),
            "get_num_blocks_to_allocate": (
                "(self, request_id, num_tokens, new_computed_blocks, num_encoder_tokens, total_computed_tokens, "
                "num_local_computed_tokens, num_tokens_main_model, apply_admission_cap=False, prefill_end=0) -> int"
            ),
        },
        read="scheduler_block_size",
    ),
    "vllm.v1.core.kv_cache_utils.KVCacheBlock": Uses(read="block_hash block_id is_null ref_cnt"),
    "vllm.v1.core.block_pool.BlockPool": Uses(
        called={
            "_insert_block_hash": "(self, block_hash_with_group_id, block, num_tokens) -> None",
            "free_blocks": "(self, ordered_blocks) -> None",
            "get_cached_block": "(self, block_hash, kv_cache_group_ids) -> list[KVCacheBlock] | None",
            "get_new_blocks": "(self, num_blocks) -> list[KVCacheBlock]",
            "get_num_free_blocks": "(self) -> int",
            "touch": "(self, blocks) -> None",
            "unpin_blocks": "(self, blocks, on_reuse) -> None",
        },
        read="blocks free_block_queue hash_block_size",
    ),
    "vllm.v1.core.kv_cache_utils": Uses(
        called={"make_block_hash_with_group_id": "(block_hash, group_id) -> BlockHashWithGroupId"}
    ),
    "vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue": Uses(
        called={
            "iter_blocks_after": "(self, cursor) -> Iterator[KVCacheBlock]",
            "prepend_n": "(self, blocks) -> None",
            "remove": "(self, block) -> None",
        }
    ),
    "vllm.v1.request.Request": Uses(
        read=(
            "block_hashes drop_stale_output ec_transfer_params has_encoder_inputs is_prefill_chunk kv_transfer_params "
            "lora_request max_tokens num_computed_tokens num_output_placeholders num_output_tokens num_preemptions "
            "num_prompt_tokens num_stale_output_tokens num_tokens num_tokens_with_spec pooling_params prompt_embeds "
            "request_id resumable sampling_params session_id skip_reading_prefix_cache status"
        )
    ),
    "vllm.v1.request.RequestStatus": Uses(
        read=(
            "FINISHED_ABORTED FINISHED_ERROR FINISHED_REPETITION FINISHED_STOPPED WAITING "
            "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR name"
        )
    ),
    "vllm.v1.core.sched.output.SchedulerOutput": Uses(
        read=(
            "finished_req_ids kv_connector_metadata num_scheduled_tokens scheduled_cached_reqs scheduled_new_reqs "
            "scheduled_spec_decode_tokens total_num_scheduled_tokens"
        )
    ),
    "vllm.v1.core.sched.output.NewRequestData": Uses(read="num_computed_tokens prompt_token_ids req_id"),
    "vllm.v1.core.sched.output.CachedRequestData": Uses(read="num_computed_tokens req_ids resumed_req_ids"),
    "vllm.v1.engine.EngineCoreOutputs": Uses(read="outputs"),
    "vllm.v1.engine.EngineCoreOutput": Uses(
        read="finish_reason request_id", written="kv_transfer_params", passed="finish_reason"
    ),
    "vllm.v1.structured_output.StructuredOutputManager": Uses(called={"__init__": "(self, vllm_config)"}),
    # -- the KV connector
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1": Uses(
        overridden={
            "__init__": "(self, vllm_config, role, kv_cache_config)",
            "build_connector_meta": "(self, scheduler_output) -> KVConnectorMetadata",
            "build_connector_worker_meta": "(self) -> KVConnectorWorkerMetadata | None",
            "get_block_ids_with_load_errors": "(self) -> set[int]",
            "get_num_new_matched_tokens": "(self, request, num_computed_tokens) -> tuple[int | None, bool]",
            "handle_preemptions": "(self, kv_connector_metadata)",
            "has_pending_push_work": "(self) -> bool",
            "register_kv_caches": "(self, kv_caches)",
            "requires_kv_delivery": None,
            "reset_cache": "(self) -> bool | None",
            "save_kv_layer": "(self, layer_name, kv_layer, attn_metadata, **kwargs) -> None",
            "shutdown": "(self)",
            "start_load_kv": "(self, forward_context, **kwargs) -> None",
            "supports_sleep_mode": "(cls, kv_transfer_config) -> bool",
            "update_connector_output": "(self, connector_output)",
            "update_state_after_alloc": "(self, request, blocks, num_external_tokens)",
            "wait_for_layer_load": "(self, layer_name) -> None",
            "wait_for_save": "(self)",
        },
        read="_connector_metadata",
        since={"supports_sleep_mode": "0.33"},
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.base.SupportsHMA": Uses(
        overridden={"request_finished_all_groups": "(self, request, block_ids) -> tuple[bool, dict[str, Any] | None]"}
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorWorkerMetadata": Uses(
        overridden={"aggregate": "(self, other) -> KVConnectorWorkerMetadata"}
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorRole": Uses(read="SCHEDULER"),
    "vllm.distributed.kv_transfer.kv_connector.factory.KVConnectorFactory": Uses(
        called={"register_connector": "(cls, name, module_path, class_name) -> None"}
    ),
    "vllm.distributed.kv_transfer.kv_transfer_state": Uses(written="_KV_CONNECTOR_AGENT"),
    "vllm.v1.core.kv_cache_manager.KVCacheBlocks": Uses(
        called={"get_block_ids": "(self) -> tuple[list[int], ...] | None"}, read="blocks"
    ),
    "vllm.v1.outputs.KVConnectorOutput": Uses(read="invalid_block_ids kv_connector_worker_meta"),
    "vllm.v1.outputs.ModelRunnerOutput": Uses(read="kv_connector_output"),
    "vllm.v1.kv_cache_interface.KVCacheConfig": Uses(
        called={"__init__": "(self, num_blocks, kv_cache_tensors, kv_cache_groups) -> None"},
        read="kv_cache_groups num_blocks",
    ),
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec": Uses(
        called={"__init__": "(self, layer_names, kv_cache_spec) -> None"}, read="kv_cache_spec layer_names"
    ),
    "vllm.v1.kv_cache_interface.FullAttentionSpec": Uses(
        read="page_size_bytes sliding_window", passed="block_size dtype head_size num_kv_heads"
    ),
    # -- the front end
    "vllm.v1.engine.async_llm.AsyncLLM": Uses(
        overridden={
            "__del__": "(self)",
            "generate": "(self, prompt, sampling_params, request_id, ...) -> AsyncGenerator[RequestOutput, None]",
        },
        called={
            "from_vllm_config": (
                "(cls, vllm_config, stat_loggers=None, enable_log_requests=False, disable_log_stats=False)"
            ),
            "get_supported_tasks": "(self)",
            "shutdown": "(self, timeout=None) -> None",
        },
        read="engine_core errored model_config output_handler renderer vllm_config",
    ),
    "vllm.v1.metrics.loggers.PrometheusStatLogger": Uses(
        overridden={
            "__init__": "(self, vllm_config, engine_indexes=None)",
            "_counter_cls": None,
            "_gauge_cls": None,
            "_histogram_cls": None,
            "record": "(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0)",
        }
    ),
    "vllm.engine.protocol.EngineClient": Uses(
        overridden={  # by ServedEngine; RoutedLLM imitates some of them, for the chat serving layer
            "abort": "(self, request_id) -> None",
            "add_lora": None,
            "check_admission": "(self, n=1, request_id=None) -> None",
            "check_health": "(self) -> None",
            "dead_error": None,
            "do_log_stats": "(self) -> None",
            "encode": None,
            "errored": None,
            "generate": (
                "(self, prompt, sampling_params, request_id, *, session_id=None, ...) "
                "-> AsyncGenerator[RequestOutput, None]"
            ),
            "get_supported_tasks": "(self)",
            "is_paused": "(self) -> bool",
            "is_running": None,
            "is_sleeping": "(self) -> bool",
            "is_stopped": None,
            "is_tracing_enabled": "(self) -> bool",
            "notify_kv_transfer_request_rejected": None,
            "pause_generation": None,
            "release_kv_cache_memory": None,
            "reset_encoder_cache": None,
            "reset_mm_cache": None,
            "reset_prefix_cache": None,
            "resume_generation": None,
            "shutdown": "(self, timeout=None) -> None",
            "sleep": None,
            "start_profile": None,
            "stop_profile": None,
            "wake_up": None,
        },
        written="input_processor model_config renderer vllm_config",
    ),
    "vllm.v1.engine.input_processor.InputProcessor": Uses(
        called={
            "__init__": "(self, vllm_config, renderer=None) -> None",
            "assign_request_id": "(request)",
            "process_inputs": "(self, request_id, prompt, params, supported_tasks) -> EngineCoreRequest",
        }
    ),
    "vllm.v1.engine.output_processor.OutputProcessor": Uses(
        called={
            "__init__": "(self, tokenizer, *, log_stats)",
            "abort_requests": "(self, request_ids, internal) -> list[str]",
            "add_request": "(self, request, prompt, parent_req=None, request_index=0, queue=None) -> None",
            "process_outputs": "(self, engine_core_outputs) -> OutputProcessorOutput",
        },
        passed="log_stats",
    ),
    "vllm.v1.engine.output_processor.RequestOutputCollector": Uses(
        called={
            "__init__": "(self, output_kind, request_id)",
            "get_nowait": "(self) -> RequestOutput | PoolingRequestOutput | None",
        }
    ),
    "vllm.v1.engine.FinishReason": Uses(read="LENGTH STOP"),
    "vllm.v1.engine.exceptions.EngineDeadError": Uses(called={"__init__": "(self)"}),
    "vllm.v1.engine.exceptions.EngineGenerateError": Uses(),
    "vllm.exceptions.GenerationError": Uses(read="status_code"),
    "vllm.outputs.RequestOutput": Uses(
        read="finished num_cached_tokens outputs prompt_token_ids request_id", written="kv_transfer_params"
    ),
    "vllm.outputs.CompletionOutput": Uses(read="token_ids"),
    "vllm.sampling_params.SamplingParams": Uses(
        read="allowed_token_ids extra_args logit_bias min_tokens n output_kind stop_token_ids",
        passed="detokenize extra_args ignore_eos logprobs max_tokens output_kind temperature",
    ),
    "vllm.sampling_params.RequestOutputKind": Uses(read="DELTA FINAL_ONLY"),
    "vllm.platforms.interface.Platform": Uses(called={"is_cpu": "(self) -> bool", "is_cuda": "(self) -> bool"}),
    # -- the control channel
    "vllm.v1.engine.core_client.AsyncMPClient": Uses(called={"call_utility_async": "(self, method, *args) -> Any"}),
    "vllm.v1.engine.core_client.SyncMPClient": Uses(called={"call_utility": "(self, method, *args) -> Any"}),
    "vllm.v1.engine.core_client.InprocClient": Uses(read="engine_core"),
    "vllm.v1.engine.core.EngineCore": Uses(read="scheduler"),
    "vllm.v1.engine.core.EngineCoreProc": Uses(
        # Not by Weft: it fetches the attribute that a utility call names.
        called={"_handle_client_request": "(self, request_type, request) -> None"}
    ),
    # -- the chat serving layer
    "vllm.entrypoints.openai.chat_completion.serving.OpenAIServingChat": Uses(
        called={
            "create_chat_completion": (
                "(self, request) -> AsyncGenerator[str, None] | ChatCompletionResponse | ErrorResponse"
            )
        },
        passed=(
            "chat_template chat_template_content_format enable_auto_tools enable_prompt_tokens_details "
            "online_renderer request_logger response_role tool_parser tool_strict_level"
        ),
    ),
    "vllm.entrypoints.openai.models.serving.OpenAIServingModels": Uses(
        called={"__init__": "(self, engine_client, base_model_paths)"}
    ),
    "vllm.entrypoints.openai.models.protocol.BaseModelPath": Uses(passed="model_path name"),
    "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionRequest": Uses(
        called={
            "build_chat_params": "(self, default_template, default_template_content_format) -> ChatParams",
            "build_tok_params": "(self, model_config) -> TokenizeParams",
        },
        read="messages model request_id stream tools",
        written="return_token_ids vllm_xargs",
        passed="request_id session_id stream",
    ),
    "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionResponse": Uses(read="prompt_token_ids"),
    "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionResponseChoice": Uses(read="token_ids"),
    "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionStreamResponse": Uses(read="prompt_token_ids"),
    "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionResponseStreamChoice": Uses(read="token_ids"),
    "vllm.entrypoints.serve.engine.protocol.ErrorResponse": Uses(read="error"),
    "vllm.entrypoints.serve.engine.protocol.ErrorInfo": Uses(read="code message"),
    "vllm.renderers.online_renderer.OnlineRenderer": Uses(
        passed=(
            "chat_template chat_template_content_format enable_auto_tools model_config renderer request_logger "
            "tool_parser tool_strict_level"
        )
    ),
    "vllm.renderers.base.BaseRenderer": Uses(
        called={
            "render_chat_async": "(self, conversations, chat_params, tok_params=None)",
            "render_cmpl": "(self, prompts)",
            "render_cmpl_async": "(self, prompts)",
            "shutdown": "(self) -> None",
        },
        read="tokenizer",
    ),
    "vllm.renderers": Uses(called={"renderer_from_config": "(config)"}),
    "vllm.renderers.params.ChatParams": Uses(called={"with_defaults": "(self, default_chat_template_kwargs=None)"}),
    "vllm.renderers.params.TokenizeParams": Uses(read="max_total_tokens"),
    "vllm.inputs.engine.TokensInput": Uses(read="prompt_token_ids"),
    # -- starting an engine
    "vllm.engine.arg_utils.AsyncEngineArgs": Uses(
        called={"create_engine_config": "(self) -> VllmConfig"},
        read=("disable_log_stats enable_log_requests kv_transfer_config pipeline_parallel_size tensor_parallel_size"),
        written="model",
        passed=(
            "additional_config disable_log_stats dtype kv_cache_memory_bytes kv_transfer_config logging_config "
            "model scheduler_cls served_model_name"
        ),
    ),
    "vllm.engine.arg_utils.EngineArgs": Uses(
        called={"create_engine_config": "(self) -> VllmConfig"},
        passed=(
            "additional_config block_size disable_log_stats dtype enable_chunked_prefill enable_prefix_caching "
            "enforce_eager gpu_memory_utilization kv_cache_memory_bytes kv_transfer_config logging_config "
            "max_model_len max_num_batched_tokens max_num_seqs model num_gpu_blocks_override scheduler_cls "
            "scheduling_policy skip_tokenizer_init use_tqdm_on_load"
        ),
    ),
    "vllm.config.VllmConfig": Uses(
        read=(
            "additional_config cache_config kv_transfer_config model_config parallel_config scheduler_config "
            "use_v2_model_runner"
        ),
        written="logging_config",
    ),
    "vllm.config.CacheConfig": Uses(read="cache_dtype", written="block_size num_gpu_blocks"),
    "vllm.config.ModelConfig": Uses(
        called={"get_vocab_size": "(self) -> int"}, read="dtype max_model_len model quantization revision"
    ),
    "vllm.config.ParallelConfig": Uses(
        read="decode_context_parallel_size prefill_context_parallel_size rank world_size"
    ),
    "vllm.config.SchedulerConfig": Uses(
        called={"get_scheduler_cls": "(self) -> type[SchedulerInterface]"}, written="async_scheduling"
    ),
    "vllm.config.KVTransferConfig": Uses(
        read="kv_connector_extra_config",
        passed=("kv_connector kv_connector_extra_config kv_connector_module_path kv_load_failure_policy kv_role"),
    ),
    "vllm.config.logging.LoggingConfig": Uses(read="configure_logging", passed="configure_logging log_level"),
    "vllm.tool_parsers.ToolParserManager": Uses(called={"list_registered": "(cls) -> list[str]"}),
    "vllm.envs": Uses(
        read=(
            "VLLM_CONFIGURE_LOGGING VLLM_CPU_OMP_THREADS_BIND VLLM_ENABLE_V1_MULTIPROCESSING "
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_LOGGING_LEVEL VLLM_RPC_BASE_PATH"
        )
    ),
    # -- the HTTP server
    "vllm.entrypoints.serve.exception_handling.register": Uses(called={"init_exception_handler": "(app)"}),
    "vllm.entrypoints.launchers.app": Uses(
        called={"build_app": "(args, supported_tasks=None, model_config=None) -> FastAPI"}
    ),
    "vllm.entrypoints.launchers.api_server.app_state": Uses(
        called={"init_app_state": "(engine_client, state, args, supported_tasks=None) -> None"}
    ),
    "vllm.entrypoints.launchers.cli_args": Uses(
        called={"make_arg_parser": "(parser) -> FlexibleArgumentParser", "validate_parsed_serve_args": "(args)"}
    ),
    "vllm.entrypoints.launchers.cli_args.FrontendArgs": Uses(
        read=(
            "api_key disable_uvicorn_access_log enable_auto_tool_choice grpc_port h11_max_incomplete_event_size "
            "lora_modules middleware ssl_ca_certs ssl_cert_reqs ssl_certfile ssl_ciphers ssl_keyfile "
            "tool_call_parser uds uvicorn_log_level"
        ),
        since={"grpc_port": "0.32"},
    ),
    "vllm.entrypoints.launchers.launcher": Uses(called={"setup_server": "(args, *, reuse_port)"}),
    "vllm.entrypoints.launchers.utils.server_utils": Uses(called={"get_uvicorn_log_config": "(args) -> dict | None"}),
    "vllm.exceptions.GracefulHTTPError": Uses(called={"__init__": "(self, message, http_status)"}),
    "vllm.utils.argparse_utils.FlexibleArgumentParser": Uses(
        called={"parse_args": "(self, args=None, namespace=None)"}
    ),
    # -- the worker on a CPU
    "vllm.v1.worker.cpu_worker.CPUWorker": Uses(
        overridden={"sample_tokens": "(self, grammar_output)"}, read="model_runner"
    ),
    "vllm.v1.worker.cpu_model_runner.CPUModelRunner": Uses(read="discard_request_mask input_batch"),
    "vllm.v1.worker.gpu_input_batch.InputBatch": Uses(read="generators num_reqs"),
    "vllm.v1.utils.CpuGpuBuffer": Uses(read="np"),
    # -- an engine in this process, for `weft bench`
    "vllm.v1.engine.llm_engine.LLMEngine": Uses(
        called={
            "add_request": "(self, request_id, prompt, params, arrival_time=None, priority=0) -> str",
            "from_engine_args": "(cls, engine_args)",
            "reset_prefix_cache": "(self) -> bool",
            "step": "(self) -> list[RequestOutput | PoolingRequestOutput]",
        },
        read="engine_core renderer",
    ),
}


def members(table: Mapping[str, Uses]) -> list[Member]:
    return [member for owner, uses in table.items() for member in uses.members(owner)]


def changed_members(table: Mapping[str, Uses] = MEMBERS, *, uses: Collection[Use] = get_args(Use)) -> list[str]:
    """One sentence for each member that the installed vLLM lacks or has in another form.

    Importing vLLM takes seconds, so this is not done when the module is imported.
    """
    return [change for each in members(table) if each.use in uses and (change := change_of(each)) is not None]


_GOES_ON: Final = "WEFT_UNTESTED_VLLM"  # an environment variable; "1": even if members have changed


def check_members() -> None:
    """Compare the members of a newer vLLM with those that Weft expects, once in a process, and warn.

    Raises:
        UnsupportedVllmError: One that Weft overrides or writes has changed, which could make outputs wrong, or a name
            that Weft imports is gone. The change of another member ends in an error where it is used.
    """
    version = check_vllm()
    if not is_tested(version):
        _check(version)


@cache
def _check(version: str) -> None:
    breaking = changed_members(uses=("overridden", "written"))
    changes = [*breaking, *(change for change in changed_members() if change not in breaking)]
    if breaking and os.environ.get(_GOES_ON) != "1":
        raise UnsupportedVllmError(version, TESTED_VLLM, changes)
    try:
        importlib.import_module("weft.engine.vllm_compat.names")
    except ImportError as error:
        raise UnsupportedVllmError(version, TESTED_VLLM, [f"{error}."]) from error
    found = " ".join(changes) or "It has every member that Weft uses."
    get_logger().warning(
        f"vLLM {version} is newer than those that Weft is tested with ({', '.join(TESTED_VLLM)}). {found} "
        "`weft doctor --engine` starts an engine on it; compare outputs before you rely on them."
    )
