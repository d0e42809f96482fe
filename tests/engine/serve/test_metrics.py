"""The metrics of a real server, as Prometheus' own parser reads them."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import LIMITED_BYTES, LIMITED_CALLS, LIMITED_KEY, MAX_CALLS, TRUSTED_KEY, Served

pytestmark = pytest.mark.engine

CALL = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "ignore_eos": True}


def metrics(served: Served, key: str = "") -> dict[tuple[str, ...], float]:
    """The samples of `/metrics` by name and labels, without the label `engine`.

    Args:
        served: The server.
        key: The API key to send; none: the client's.
    """
    response = served.client.get("/metrics", headers={"authorization": f"Bearer {key}"} if key else {})
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()) if name != "engine")): (
            sample.value
        )
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def total(samples: dict[tuple[str, ...], float], name: str, *labels: str) -> float:
    """The sum over all series with these labels, because other tests use the server, too, and names have a bound."""
    return sum(value for key, value in samples.items() if key[0] == name and set(labels) <= set(key))


def test_the_route_of_vllms_metrics_has_wefts(served: Served) -> None:
    """Programs, calls, queues, the KV cache and replicas, next to vLLM's own. Counters do not fall."""
    headers = {"weft-program-id": "measured", "weft-program-name": "measured"}
    before = metrics(served)
    for _ in range(2):
        response = served.client.post("/v1/chat/completions", json=CALL, headers=headers)
        assert response.status_code == 200, response.text
    found = metrics(served)

    def more(name: str, *labels: str) -> float:
        return total(found, name, *labels) - total(before, name, *labels)

    assert total(found, "weft:programs_open", "state=idle") >= 1
    assert {part for key in found for part in key if part.startswith("program=")} == {"program=other"}
    trusted = metrics(served, TRUSTED_KEY)
    assert {part for key in trusted for part in key if part.startswith("program=")} - {"program=other"}
    assert more("weft:calls_total", "outcome=finished") == 2
    assert more("weft:generation_tokens_total") == 10
    assert more("vllm:generation_tokens_total") == 10
    assert more("weft:call_service_seconds_count") == 2
    assert more("weft:tenant_service_seconds_total") > 0
    assert more("weft:level_starts_total") == 2
    assert more("weft:level_service_seconds_total") > 0
    assert found["weft:calls_limit", "model_name=tiny"] == MAX_CALLS
    assert total(found, "weft:replica_state", "state=ready") == 1
    assert total(found, "weft:kv_host_capacity_bytes") > 0
    assert served.client.delete("/weft/programs/measured").status_code == 204
    after = metrics(served)
    ended = (total(each, "weft:programs_ended_total", "state=finished") for each in (after, found))
    assert next(ended) == next(ended) + 1
    counters = {key for key in before if key[0].startswith("weft:") and key[0].endswith("_total")}
    assert all(before[key] <= found[key] <= after[key] for key in counters)


def test_requests_that_were_refused_are_counted(served: Served) -> None:
    """By reason, and by the tenant of the key; a key itself is in no metric."""
    limited = {"authorization": f"Bearer {LIMITED_KEY}"}
    many = {"model": "tiny", "prompt": ["a"] * (LIMITED_CALLS + 1), "max_tokens": 1}
    requests: tuple[tuple[int, str, str, dict[str, str], dict[str, object]], ...] = (
        (401, "no_api_key", "", {}, CALL),
        (401, "wrong_api_key", "", {"authorization": "Bearer key-unknown"}, CALL),
        (413, "max_body_bytes", "guests", limited, {**CALL, "user": "x" * LIMITED_BYTES}),
        (400, "malformed", "guests", {**limited, "weft-program-id": "x" * 300}, CALL),
        (429, "max_calls", "guests", limited, many),
    )
    before = metrics(served)
    for status, _reason, _tenant, headers, body in requests:
        path = "/v1/completions" if body is many else "/v1/chat/completions"
        assert httpx.post(f"{served.url}{path}", json=body, headers=headers).status_code == status
    found = metrics(served)
    for _status, reason, tenant, _headers, _body in requests:
        key = ("weft:requests_refused_total", f"reason={reason}", f"tenant={tenant}")
        assert found[key] == before.get(key, 0) + 1, key
    assert not any(secret in label for key in found for label in key for secret in (LIMITED_KEY, "key-unknown"))
