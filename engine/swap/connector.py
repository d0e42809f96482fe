"""The public path of the KV connector, for `kv_connector_module_path` of vLLM."""

from __future__ import annotations

from weft.engine.kv_cache.connector import SwapConnector, transfer_config

__all__ = ["SwapConnector", "transfer_config"]
