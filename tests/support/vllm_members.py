"""The members of vLLM's classes that only tests and benchmarks use. A change of one stops them, but harms no user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from weft.engine.vllm_compat.versions.members import Uses

TEST_MEMBERS: Final[Mapping[str, Uses]] = {
    # -- schedulers without a model
    "vllm.v1.core.sched.scheduler.Scheduler": Uses(
        called={"has_requests": "(self) -> bool", "has_unfinished_requests": "(self) -> bool"}
    ),
    "vllm.v1.request.Request": Uses(
        called={
            "__init__": "(self, request_id, prompt_token_ids, sampling_params, pooling_params) -> None",
            "from_engine_core_request": "(cls, request, block_hasher) -> Request",
        },
        read=("_all_token_ids _output_token_ids is_prefill_chunk num_in_flight_tokens num_output_placeholders"),
        written="num_computed_tokens",
        passed=(
            "arrival_time block_hasher cache_salt client_index lora_request pooling_params priority resumable "
            "sampling_params session_id"
        ),
    ),
    "vllm.v1.core.kv_cache_utils": Uses(
        called={
            "get_request_block_hasher": "(hash_block_size, caching_hash_fn) -> Callable[[Request], list[BlockHash]]",
            "init_none_hash": "(hash_fn)",
        }
    ),
    "vllm.utils.hashing": Uses(called={"sha256": "(input) -> bytes"}),
    "vllm.v1.core.sched.output.SchedulerOutput": Uses(read="kv_connector_metadata"),
    "vllm.v1.core.sched.output.NewRequestData": Uses(read="block_ids"),
    "vllm.v1.core.sched.output.CachedRequestData": Uses(read="all_token_ids new_block_ids resumed_req_ids"),
    "vllm.v1.engine.EngineCoreOutput": Uses(read="new_token_ids"),
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorRole": Uses(read="WORKER"),
    "vllm.distributed.kv_transfer.kv_connector.factory.KVConnectorFactory": Uses(
        called={"get_connector_class": "(cls, kv_transfer_config)"}
    ),
    "vllm.plugins": Uses(called={"load_general_plugins": "()"}),
    "vllm.v1.outputs.KVConnectorOutput": Uses(passed="finished_recving invalid_block_ids kv_connector_worker_meta"),
    "vllm.v1.outputs.ModelRunnerOutput": Uses(
        called={"__init__": "(self, req_ids, req_id_to_index, sampled_token_ids=<factory>) -> None"},
        passed="kv_connector_output",
    ),
    # -- engines in the test's process
    "vllm.v1.engine.llm_engine.LLMEngine": Uses(
        called={
            "from_vllm_config": "(cls, vllm_config, disable_log_stats=False) -> LLMEngine",
            "has_unfinished_requests": "(self) -> bool",
        }
    ),
    "vllm.v1.engine.core_client.InprocClient": Uses(called={"shutdown": "(self) -> None"}),
    "vllm.v1.engine.core.EngineCore": Uses(read="batch_queue model_executor structured_output_manager"),
    "vllm.v1.structured_output.StructuredOutputManager": Uses(written="_use_async_grammar_compilation"),
    "vllm.v1.executor.uniproc_executor.UniProcExecutor": Uses(read="driver_worker"),
    "vllm.v1.worker.worker_base.WorkerWrapperBase": Uses(read="worker"),
    "vllm.v1.worker.cpu_worker": Uses(written="CPUModelRunner"),
    "vllm.v1.worker.cpu_model_runner.CPUModelRunner": Uses(
        overridden={"__init__": "(self, vllm_config, device)"}, read="requests sampler"
    ),
    "vllm.v1.worker.gpu_input_batch.InputBatch": Uses(read="req_ids"),
    "vllm.v1.worker.gpu_input_batch.CachedRequestState": Uses(read="output_token_ids"),
    "vllm.v1.sample.sampler.Sampler": Uses(
        called={
            "sample": "(self, logits, sampling_metadata, logprobs_mode_override=None) -> tuple[Tensor, Tensor | None]"
        }
    ),
    "vllm.v1.sample.metadata.SamplingMetadata": Uses(read="generators"),
    "vllm.distributed.kv_transfer.kv_transfer_state": Uses(
        called={"get_kv_transfer_group": "() -> KVConnectorBase_V1"}
    ),
    "vllm.outputs.CompletionOutput": Uses(read="finish_reason index logprobs stop_reason text"),
    "vllm.logprobs.Logprob": Uses(read="decoded_token logprob rank"),
    "vllm.lora.request.LoRARequest": Uses(passed="lora_int_id lora_name lora_path"),
    "vllm.sampling_params.RequestOutputKind": Uses(read="CUMULATIVE"),
    "vllm.sampling_params.StructuredOutputsParams": Uses(passed="choice json regex"),
    "vllm.sampling_params.SamplingParams": Uses(
        passed=(
            "frequency_penalty include_stop_str_in_output logprobs min_p min_tokens n presence_penalty "
            "repetition_penalty seed stop stop_token_ids structured_outputs top_k top_p"
        )
    ),
    # -- the control channel, without an engine
    "vllm.v1.engine.EngineCoreRequestType": Uses(read="ABORT ADD UTILITY"),
    "vllm.v1.engine.core.EngineShutdownState": Uses(read="RUNNING"),
    "vllm.v1.engine.core.EngineCoreProc": Uses(read="ENGINE_CORE_DEAD", written="output_queue shutdown_state"),
    "vllm.v1.engine.EngineCoreOutputs": Uses(read="utility_output", passed="utility_output"),
    "vllm.v1.engine.UtilityOutput": Uses(read="failure_message result", passed="failure_message result"),
    "vllm.v1.serial_utils.UtilityResult": Uses(read="result"),
    "vllm.v1.serial_utils.MsgpackEncoder": Uses(called={"encode": "(self, obj)"}),
    "vllm.v1.serial_utils.MsgpackDecoder": Uses(called={"decode": "(self, bufs)"}),
    # -- engines in processes of their own
    "vllm.v1.engine.async_llm.AsyncLLM": Uses(
        called={"get_num_unfinished_requests": "(self) -> int", "reset_prefix_cache": "(self) -> bool"},
        read="output_processor",
        written=("admission_stats log_requests log_stats logger_manager observability_config scheduler_config"),
    ),
    # -- their client and their engine core, without a process
    "vllm.v1.engine.core_client.AsyncMPClient": Uses(
        overridden={"shutdown": "(self, timeout=None) -> None"},
        written=(
            "client_count client_index core_engine core_engines decoder encoder input_socket outputs_queue "
            "resources utility_results vllm_config"
        ),
    ),
    "vllm.v1.engine.core_client.BackgroundResources": Uses(
        read="output_queue_task", written="engine_dead", passed="output_socket"
    ),
    "vllm.v1.engine.output_processor.OutputProcessor": Uses(read="request_states"),
    "vllm.v1.engine.output_processor.RequestState": Uses(read="detokenizer"),
    "vllm.v1.engine.detokenizer.IncrementalDetokenizer": Uses(called={"num_output_tokens": "(self) -> int"}),
    "vllm.engine.arg_utils.EngineArgs": Uses(passed="hf_overrides worker_cls"),
}
