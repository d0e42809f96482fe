"""The names of vLLM that Weft, its tests and its benchmarks use. No module outside this package imports vLLM.

Importing this module takes seconds, and fails if vLLM is missing or older than those that Weft is tested with. The
members of vLLM's classes are listed in `weft.engine.vllm_compat.versions.members`.
"""

# ruff: noqa: E402
from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final

from weft.engine.vllm_compat.versions.version import require_vllm

require_vllm()

from vllm import AsyncEngineArgs, EngineArgs
from vllm.config import KVTransferConfig, VllmConfig
from vllm.config.logging import LoggingConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GenerationError, VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tool_parsers import ToolParserManager
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

# Names that only tests and benchmarks use. They are imported when they are first read, because some of their modules
# are slow to import, or belong to one platform.
_OFFLOADING: Final = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.common"
_FOR_TESTS: Final = {
    "AsyncMPClient": "vllm.v1.engine.core_client.AsyncMPClient",
    "BackgroundResources": "vllm.v1.engine.core_client.BackgroundResources",
    "ChatCompletionStreamResponse": "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionStreamResponse",
    "CPUModelRunner": "vllm.v1.worker.cpu_model_runner.CPUModelRunner",
    "CompletionOutput": "vllm.outputs.CompletionOutput",
    "EngineCoreProc": "vllm.v1.engine.core.EngineCoreProc",
    "EngineCoreRequest": "vllm.v1.engine.EngineCoreRequest",
    "EngineCoreRequestType": "vllm.v1.engine.EngineCoreRequestType",
    "EngineShutdownState": "vllm.v1.engine.core.EngineShutdownState",
    "KVConnectorFactory": "vllm.distributed.kv_transfer.kv_connector.factory.KVConnectorFactory",
    "MsgpackDecoder": "vllm.v1.serial_utils.MsgpackDecoder",
    "MsgpackEncoder": "vllm.v1.serial_utils.MsgpackEncoder",
    "OffloadingConnectorMetadata": f"{_OFFLOADING}.OffloadingConnectorMetadata",
    "OffloadingWorkerMetadata": f"{_OFFLOADING}.OffloadingWorkerMetadata",
    "RetryableRequestError": "vllm.exceptions.RetryableRequestError",
    "StructuredOutputsParams": "vllm.sampling_params.StructuredOutputsParams",
    "UtilityOutput": "vllm.v1.engine.UtilityOutput",
    "UtilityResult": "vllm.v1.serial_utils.UtilityResult",
    "cpu_worker": "vllm.v1.worker.cpu_worker",
    "get_request_block_hasher": "vllm.v1.core.kv_cache_utils.get_request_block_hasher",
    "init_none_hash": "vllm.v1.core.kv_cache_utils.init_none_hash",
    "load_general_plugins": "vllm.plugins.load_general_plugins",
    "sha256": "vllm.utils.hashing.sha256",
}

if not TYPE_CHECKING:  # else mypy would take every misspelt name for one of these

    def __getattr__(name: str) -> Any:
        if name not in _FOR_TESTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return resolve_name(_FOR_TESTS[name])
