"""Weft's KV connector, by a name that vLLM knows: `--kv-transfer-config '{"kv_connector": "SwapConnector", …}'`."""

from __future__ import annotations

from weft.core.errors import EngineError
from weft.engine.vllm_compat.versions.version import check_vllm


def register_connector() -> None:
    """Register it, unless Weft refuses this vLLM."""
    try:
        check_vllm()
    except EngineError:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    KVConnectorFactory.register_connector("SwapConnector", "weft.engine.kv_cache.connector", "SwapConnector")
