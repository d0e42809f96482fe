"""A program has one id and one tenant, whichever surface shows it: those that its client knows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from doors import Doors
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from polling import until

from weft import ProgramSpans
from weft.engine.serve.keys import KeyRing, make_key_ring

KEYS = """
[[key]]
key = "sk-a"
tenant = "research"
trusted = true

[[key]]
key = "sk-b"
tenant = "guests"
"""
IDS = {
    "weft-program-id": "p",
    "weft-program-name": "agent",
    "weft-session-id": "s",
    "weft-tenant": "alice",
    "weft-parent-program-id": "o",
}


@pytest.fixture(params=["without keys", "with keys"])
def keys(request: pytest.FixtureRequest, tmp_path: Path) -> KeyRing:
    if request.param == "without keys":
        return make_key_ring()
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    path.chmod(0o600)
    return make_key_ring(file=path)


def test_a_program_has_one_id_and_one_tenant_on_every_surface(keys: KeyRing, caplog: pytest.LogCaptureFixture) -> None:
    """State, list, timeline, answer, header, metrics, spans and log agree, and none shows what the server has put
    before the id to tell API keys apart."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    headers = {**IDS, "authorization": "Bearer sk-a"}
    with Doors(keys) as doors:
        ProgramSpans(doors.engine, provider)
        (key,) = {each.scope for each in doors.keys if each.is_trusted} or {"-"}
        answer = doors.chat(headers, call_id="c", thread_id="t", tools=["search"])
        doors.served.programs.of(key)[0].log.warning("odd")
        assert answer.status_code == 200, answer.text
        event = {"type": "program_events", "events": [["tool_started", "p", "search", 1, 0.0]]}
        assert doors.ask("POST", "/weft/events", json=event, headers=headers).status_code == 204
        surfaces: dict[str, Any] = {
            "state": doors.ask("GET", "/weft/state", headers=headers).json()["programs"],
            "list": doors.ask("GET", "/weft/programs", headers=headers).json()["programs"],
            "timeline": doors.ask("GET", "/weft/programs/p/timeline", headers=headers).json(),
            "answer": [answer.json()["weft"], dict(answer.headers)],
        }
        assert doors.ask("DELETE", "/weft/programs/p", headers=headers).status_code == 204
        surfaces["ended"] = doors.ask("GET", "/weft/state", headers=headers).json()["ended"]
        surfaces["metrics"] = sorted(doors.labels(headers))
        doors.engine.submit(until(lambda: len(exporter.get_finished_spans()) >= 3)).result()
        surfaces["spans"] = [[span.name, dict(span.attributes or {})] for span in exporter.get_finished_spans()]
    surfaces["log"] = caplog.text
    texts = {name: json.dumps(surface, default=str) for name, surface in surfaces.items()}
    scoped = {name: re.findall(rf'[^"\s]*{key}/[^"\s]*', text) for name, text in texts.items()}
    assert not any(scoped.values()), scoped
    (state,), (listed,), (ended,) = surfaces["state"], surfaces["list"], surfaces["ended"]
    for shown in (state, ended):
        found = [shown[name] for name in ("program_id", "session_id", "tenant", "parent_program_id")]
        assert found == ["p", "s", "alice", "o"]
    assert (listed["program_id"], listed["tenant"], state["tools"]) == ("p", "alice", ["search"])
    assert surfaces["timeline"]["program_id"] == surfaces["answer"][0]["program_id"] == "p"
    assert (surfaces["answer"][0]["call_id"], answer.headers["weft-program-id"]) == ("c", "p")
    assert [tool["name"] for tool in surfaces["timeline"]["tools"]] == ["search"]
    assert {"alice", "agent"} <= set(surfaces["metrics"])
    spans = dict(surfaces["spans"])
    assert spans["invoke_workflow agent"]["weft.program.id"] == "p"
    assert spans["invoke_workflow agent"]["weft.tenant"] == "alice"
    assert spans["invoke_workflow agent"]["gen_ai.conversation.id"] == "s"
    assert "execute_tool search" in spans
    assert "program_id=p session_id=s" in surfaces["log"]


def test_programs_of_two_keys_may_have_one_id(tmp_path: Path) -> None:
    """The server tells them apart by something that says nothing of the keys, and differs after each start."""
    (tmp_path / "keys.toml").write_text(KEYS)
    (tmp_path / "keys.toml").chmod(0o600)
    rings = [make_key_ring(file=tmp_path / "keys.toml") for _start in range(2)]
    assert len({key.scope for ring in rings for key in ring}) == 4
    with Doors(rings[0]) as doors:
        a, b = ({"weft-program-id": "p", "authorization": f"Bearer sk-{name}"} for name in "ab")
        for headers in (a, b, b):
            assert doors.chat(headers).status_code == 200
        counts = [doors.ask("GET", "/weft/state", headers=each).json()["programs"][0]["calls"] for each in (a, b)]
        assert counts == [1, 2]


def test_an_error_names_a_program_as_its_client_knows_it(tmp_path: Path) -> None:
    """Also where vLLM's route, and not Weft, writes the error."""
    (tmp_path / "keys.toml").write_text(KEYS)
    (tmp_path / "keys.toml").chmod(0o600)
    with Doors(make_key_ring(file=tmp_path / "keys.toml")) as doors:
        headers = {"weft-program-id": "p", "authorization": "Bearer sk-a"}
        assert doors.chat(headers, call_id="c").status_code == 200
        doors.engine.submit(_end(doors)).result()
        answer = doors.chat(headers, call_id="c2")
        assert answer.status_code == 409, answer.text
        assert "'p'" in answer.text or " p " in answer.text, answer.text
        assert not any(key.scope in answer.text for key in doors.keys)


async def _end(doors: Doors) -> None:
    """End all programs behind the server's back."""
    for row in list(doors.engine.table):
        doors.engine.end_program(row.info.program_id)
