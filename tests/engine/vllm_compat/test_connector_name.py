"""vLLM finds Weft as one of its plugins, and with it the KV connector."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.engine  # imports vLLM, but starts no engine


def test_vllms_plugins_bring_the_connector() -> None:
    """vLLM itself calls the entry point `vllm.general_plugins`. A configuration then names the connector only."""
    from weft.engine.kv_cache.connector import SwapConnector
    from weft.engine.vllm_compat.names import KVConnectorFactory, KVTransferConfig, load_general_plugins

    load_general_plugins()
    config = KVTransferConfig(kv_connector="SwapConnector", kv_role="kv_both")
    assert KVConnectorFactory.get_connector_class(config) is SwapConnector
