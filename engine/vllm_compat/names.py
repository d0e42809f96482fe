"""The one door to vLLM: every name of vLLM that Weft uses, behind a check of the version.

When vLLM moves, this list is what has to be looked at again.
"""

# ruff: noqa: E402
from weft.engine.vllm_compat.version import require_vllm

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
from vllm.exceptions import VLLMClientError
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

__all__ = [
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncScheduler",
    "BaseModelPath",
    "ChatCompletionRequest",
    "EngineArgs",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineDeadError",
    "ErrorResponse",
    "FullAttentionSpec",
    "InputProcessor",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorRole",
    "KVConnectorWorkerMetadata",
    "KVTransferConfig",
    "LLMEngine",
    "LoggingConfig",
    "ModelRunnerOutput",
    "OnlineRenderer",
    "OpenAIServingChat",
    "OpenAIServingModels",
    "PauseState",
    "Request",
    "RequestOutput",
    "RequestOutputKind",
    "RequestQueue",
    "RequestStatus",
    "SamplingParams",
    "SchedulerOutput",
    "StructuredOutputManager",
    "SupportsHMA",
    "VLLMClientError",
    "VllmConfig",
    "current_platform",
    "kv_transfer_state",
    "renderer_from_config",
]
