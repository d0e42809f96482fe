"""The metrics of a real server, as Prometheus' own parser reads them."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import MAX_CALLS, Served

pytestmark = pytest.mark.engine

CALL = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "ignore_eos": True}


def metrics(served: Served) -> dict[tuple[str, ...], float]:
    """The samples of `/metrics` by name and labels, without the label `engine`."""
    response = served.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()) if name != "engine")): (
            sample.value
        )
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_the_route_of_vllms_metrics_has_wefts(served: Served) -> None:
    """Programs, calls, queues, the KV cache and replicas, in the format of Prometheus; a scrape changes nothing."""
    headers = {"weft-program-id": "measured", "weft-program-name": "tourist"}
    for _ in range(2):
        response = served.client.post("/v1/chat/completions", json=CALL, headers=headers)
        assert response.status_code == 200, response.text
    found = metrics(served)
    assert found["weft:programs_open", "program=tourist", "state=idle"] == 1
    assert found["weft:calls_total", "outcome=finished", "program=tourist"] == 2
    assert found["weft:generation_tokens_total", "program=tourist"] == 10
    assert found["weft:call_service_seconds_count", "program=tourist"] == 2
    assert found["weft:calls_limit", "model_name=tiny"] == MAX_CALLS
    service_s = max(value for key, value in found.items() if key[0] == "weft:tenant_service_seconds_total")
    assert service_s > 0
    (replica,) = [key[2] for key in found if key[0] == "weft:replica_calls"]
    labels = ("model_name=tiny", replica)
    assert found["weft:replica_state", *labels, "state=ready"] == 1
    assert found["weft:level_starts_total", "level=0", *labels] >= 2
    assert found["weft:level_service_seconds_total", "level=0", *labels] >= service_s
    assert found["weft:kv_host_capacity_bytes", *labels] > 0
    assert served.client.delete("/weft/programs/measured").status_code == 204
    after = metrics(served)
    assert after["weft:programs_ended_total", "program=tourist", "state=finished"] == 1
    counters = {key for key in found if key[0].endswith("_total") and key[0].startswith("weft:")}
    assert all(after[key] >= found[key] for key in counters)
