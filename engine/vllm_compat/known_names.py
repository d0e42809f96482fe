"""What users may pass to vLLM: an engine's arguments, fields of a chat request, and options of `vllm serve`.

Wrong names are refused before vLLM is imported, which takes seconds.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, TypedDict

from weft.core.errors import EngineStartError, InvalidRequestError
from weft.engine.vllm_compat.versions.version import is_older


class VllmArgs(TypedDict, total=False):
    """The fields of `AsyncEngineArgs` in all versions of vLLM that Weft is tested with, less the model. vLLM's own
    documentation describes them.

    `Any` stands for vLLM's configuration objects.
    """

    additional_config: dict[str, Any]
    aggregate_engine_logging: bool
    all2all_backend: str
    allow_deprecated_quantization: bool
    allowed_local_media_path: str
    allowed_media_domains: list[str] | None
    async_scheduling: bool | None
    attention_backend: Any
    attention_config: Any
    aux_output_config: Any
    block_size: int | None
    code_revision: str | None
    collect_detailed_traces: list[str] | None
    compilation_config: Any
    config_format: str
    convert: str
    cp_kv_cache_interleave_size: int | None
    cpu_distributed_timeout_seconds: int | None
    cpu_offload_gb: float
    cpu_offload_params: Any
    cudagraph_capture_sizes: list[int] | None
    cudagraph_metrics: bool
    custom_histogram_buckets: dict[str, Any] | None
    data_parallel_address: str | None
    data_parallel_backend: str
    data_parallel_external_lb: bool
    data_parallel_hybrid_lb: bool
    data_parallel_multi_port_external_lb: bool
    data_parallel_rank: int | None
    data_parallel_rpc_port: int | None
    data_parallel_size: int
    data_parallel_size_local: int | None
    data_parallel_start_rank: int | None
    dbo_decode_token_threshold: int
    dbo_prefill_token_threshold: int
    dcp_comm_backend: str | None
    dcp_kv_cache_interleave_size: int
    dcp_q_replicate: bool | None
    decode_context_parallel_size: int
    default_mm_loras: dict[str, Any] | None
    device_ids: list[int | str] | None
    diffusion_config: dict[str, Any] | None
    disable_cascade_attn: bool | None
    disable_chunked_mm_input: bool
    disable_custom_all_reduce: bool
    disable_hybrid_kv_cache_manager: bool | None
    disable_log_stats: bool
    disable_nccl_for_dp_synchronization: bool | None
    disable_sliding_window: bool
    distributed_executor_backend: Any
    distributed_timeout_seconds: int | None
    download_dir: str | None
    dp_sync_interval: int
    dtype: str
    ec_manager_config: Any
    ec_transfer_config: Any
    elastic_ep_max_dp_size: int | None
    enable_batch_sharded_sampling: bool | None
    enable_chunked_prefill: bool | None
    enable_cumem_allocator: bool
    enable_dbo: bool
    enable_elastic_ep: bool
    enable_ep_weight_filter: bool
    enable_eplb: bool
    enable_expert_parallel: bool
    enable_fault_tolerance: bool
    enable_flashinfer_autotune: bool | None
    enable_hc_sp: bool
    enable_layerwise_nvtx_tracing: bool
    enable_log_requests: bool
    enable_logging_iteration_details: bool
    enable_lora: bool
    enable_mamba_cache_stochastic_rounding: bool
    enable_mamba_shared_prefix_checkpoint: bool
    enable_mfu_metrics: bool
    enable_mixed_moe_lora_format: bool
    enable_mm_embeds: bool
    enable_mm_processor_stats: bool
    enable_moe_shared_loras: bool
    enable_nccl_comm_suspend: bool
    enable_prefix_caching: bool | None
    enable_prompt_embeds: bool
    enable_return_routed_experts: bool
    enable_shm_tensor_arena: bool
    enable_sleep_mode: bool
    enable_tower_connector_lora: bool
    enable_trace_replay: bool
    enforce_eager: bool
    engram_config: Any
    eplb_config: Any
    expert_placement_strategy: str
    fail_on_environ_validation: bool
    fault_tolerance_config: Any
    fully_sharded_loras: bool
    gdn_prefill_backend: str | None
    generation_config: str
    gpu_memory_utilization: float
    hf_config_path: str | None
    hf_overrides: Any
    hf_token: bool | str | None
    ignore_patterns: str | list[str]
    interleave_mm_strings: bool
    io_processor_plugin: str | None
    ir_op_priority: Any
    jit_monitor_mode: str
    jit_monitor_verbose: bool
    kda_decode_backend: str | None
    kda_prefill_backend: str | None
    kernel_config: Any
    kv_cache_dtype: str
    kv_cache_dtype_skip_layers: list[str]
    kv_cache_memory_bytes: int | None
    kv_cache_metrics: bool
    kv_cache_metrics_sample: float
    kv_events_config: Any
    kv_offloading_backend: str
    kv_offloading_size: float | None
    kv_sharing_fast_prefill: bool
    kv_transfer_config: Any
    language_model_only: bool
    limit_mm_per_prompt: dict[str, Any]
    linear_backend: str
    load_format: str
    log_config_file: str | None
    log_level: str | None
    logging_config: Any
    logits_processors: list[Any] | None
    logprobs_mode: str
    long_prefill_token_threshold: int
    long_prefill_token_threshold_adaptive: bool
    lora_dtype: Any
    lora_target_modules: list[str] | None
    mamba_backend: Any
    mamba_block_size: int | None
    mamba_cache_dtype: str
    mamba_cache_mode: str | None
    mamba_cache_philox_rounds: int
    mamba_config: Any
    mamba_ssm_cache_dtype: str
    mamba_ssu_algorithm: str | None
    master_addr: str
    master_port: int
    max_cpu_loras: int | None
    max_cudagraph_capture_size: int | None
    max_logprobs: int
    max_lora_cls_labels: int | None
    max_lora_rank: int
    max_loras: int
    max_model_len: int | None
    max_num_active_seqs: int | None
    max_num_batched_tokens: int | None
    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None
    max_num_scheduled_tokens: int | None
    max_num_seqs: int | None
    max_parallel_loading_workers: int | None
    media_io_kwargs: dict[str, Any]
    mm_device_do_normalize: bool | None
    mm_encoder_attn_backend: Any
    mm_encoder_attn_dtype: str | None
    mm_encoder_fp8_scale_path: str | None
    mm_encoder_fp8_scale_save_margin: float
    mm_encoder_fp8_scale_save_path: str | None
    mm_encoder_only: bool
    mm_encoder_tp_mode: str
    mm_hasher_algorithm: str
    mm_ipc_gpu_memory_gb: float
    mm_processor_cache_gb: float
    mm_processor_cache_type: str | None
    mm_processor_device: str
    mm_processor_kwargs: dict[str, Any] | None
    mm_shm_cache_max_object_size_mb: int
    mm_tensor_ipc: str
    model_class_overrides: dict[str, Any]
    model_impl: str
    model_loader_extra_config: dict[str, Any]
    model_weights: str
    moe_backend: str
    monokernel: bool
    nnodes: int
    node_rank: int
    num_gpu_blocks_override: int | None
    numa_bind: bool
    numa_bind_cpus: list[str] | None
    numa_bind_nodes: list[int] | None
    offload_backend: str
    offload_group_size: int
    offload_num_in_group: int
    offload_params: Any
    offload_prefetch_step: int
    optimization_level: Any
    otlp_traces_endpoint: str | None
    override_generation_config: dict[str, Any]
    per_request_spec_decode_metrics: str
    performance_mode: str
    pipeline_parallel_size: int
    pooler_config: Any
    prefill_context_parallel_size: int
    prefill_schedule_interval: int
    prefix_cache_retention_interval: int | None
    prefix_caching_hash_algo: str
    prefix_match_unit: int | None
    profiler_config: Any
    pt_load_map_location: str | dict[str, Any]
    quantization: str | None
    quantization_config: Any
    ray_workers_use_nsight: bool
    reasoning_config: Any
    reasoning_parser: str
    reasoning_parser_plugin: str | None
    renderer_num_workers: int
    replayssm_buffer_len: int
    return_sampling_mask: bool
    revision: str | None
    runner: str
    safetensors_load_strategy: str | None
    safetensors_prefetch_block_size: int
    safetensors_prefetch_num_threads: int
    scheduler_cls: Any
    scheduler_reserve_full_isl: bool
    scheduling_policy: str
    seed: int
    served_model_name: str | list[str] | None
    show_hidden_metrics_for_version: str | None
    shutdown_timeout: int
    skip_mm_profiling: bool
    skip_tokenizer_init: bool
    sleep_mode_backend: str
    sleep_mode_offload_cudagraph: bool
    sleep_preserve_parameter_names: list[str]
    sparse_indexer_topk_backend: str
    spec_method: str | None
    spec_model: str | None
    spec_tokens: int | None
    specialize_active_lora: bool
    speculative_config: dict[str, Any] | None
    stream_interval: int
    structured_outputs_config: Any
    swa_bounded_replay: bool
    tensor_parallel_size: int
    tokenizer: str | None
    tokenizer_mode: str
    tokenizer_revision: str | None
    tokens_only: bool
    trust_remote_code: bool
    ubatch_size: int
    use_fp64_gumbel: bool
    use_replayssm: bool
    use_tqdm_on_load: bool
    video_pruning_method: str
    video_pruning_rate: float | None
    watchdog_config: Any
    watermark: float
    watermark_config: dict[str, Any] | None
    weight_transfer_config: Any
    worker_cls: str
    worker_extension_cls: str


_NEW: Final = {  # by the first minor version that has them
    "0.32": (
        *("custom_histogram_buckets", "enable_hc_sp", "enable_shm_tensor_arena", "sleep_mode_offload_cudagraph"),
        *("mm_payload", "return_mm_kwargs"),
    ),
    "0.33": ("monokernel", "sleep_mode_backend", "watchdog_config", "return_weight_versions"),
}
_LACKING: Final = frozenset(name for minor, names in _NEW.items() if is_older(minor) for name in names)


def known_engine_args() -> frozenset[str]:
    """The arguments that the installed vLLM has."""
    return frozenset(VllmArgs.__annotations__) - _LACKING


def check_engine_args(names: Iterable[str], own: Iterable[str] = ()) -> None:
    """Raise EngineStartError for the names that are no arguments of vLLM's, with the nearest that are."""
    known = known_engine_args()
    if wrong := _unknown(names, known, [*own, *known], "this is no argument", "these are no arguments"):
        raise EngineStartError(f"{wrong} of the engine or of vLLM's AsyncEngineArgs, which lists the further ones.")


# vLLM itself accepts any field of a chat request and ignores those that it does not know.
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
CHAT_FIELDS: Final = frozenset(_NAMES.split()) - _LACKING

# The front end fills these in. Of another value it would make no use.
FILLED_IN: Final = frozenset({"messages", "request_id", "session_id", "stream"})


def check_fields(names: Iterable[str], known: Collection[str]) -> None:
    """Raise InvalidRequestError for the request fields that are not among `known`, with the nearest that are."""
    if wrong := _unknown(names, known, known, "this is not a field", "these are not fields"):
        raise InvalidRequestError(
            f"{wrong} of the chat request that can be set here. The fields are those of vLLM's chat completions, such "
            "as temperature, max_tokens, top_p, seed, stop, min_tokens and structured_outputs."
        )


def _unknown(names: Iterable[str], known: Collection[str], meant: Collection[str], one: str, several: str) -> str:
    """What an error says of unknown names, with the nearest of those that may be meant; "" if all are known."""
    wrong = [name for name in names if name not in known]
    near = [(name, difflib.get_close_matches(name[:64], meant, n=1)) for name in wrong]  # by the square of the length
    said = ", ".join(f"{name:.80} (did you mean {found[0]}?)" if found else f"{name:.80}" for name, found in near)
    return f"{said}: {one if len(wrong) == 1 else several}" if wrong else ""


# Where versions define them: as fields of classes, or by their names.
_FILES: Final = ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py", "entrypoints/common/cli_args.py")
_FLAG: Final = re.compile(r"--?[a-z][\w-]*")


def serve_flags() -> frozenset[str]:
    """All options of `vllm serve`, read from the sources of the installed vLLM, and a few more, which its own
    parser refuses: versions name an option's opposite in other ways.

    vLLM must be installed.
    """
    spec = importlib.util.find_spec("vllm")
    roots = (spec is not None and spec.submodule_search_locations) or ()
    files = [file for root in roots for name in _FILES if (file := Path(root, name)).is_file()]
    flags = {flag for file in files for flag in _flags(ast.parse(file.read_text(encoding="utf-8")))}
    turned = {(turn, way) for turn in ("--enable-", "--disable-") for way in ("--enable-", "--disable-")}
    turned.add(("--", "--no-"))
    opposites = {way + each.removeprefix(turn) for turn, way in turned for each in flags if each.startswith(turn)}
    return frozenset(flags | opposites | {"-h"})


def _flags(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _FLAG.fullmatch(node.value):
            yield node.value
        for each in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.target.id[0] != "_":
                yield f"--{each.target.id.replace('_', '-')}"
