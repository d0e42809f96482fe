"""The page and the timelines of `weft serve`, as a client without a browser sees them."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import httpx
import pytest
from perfetto_rules import check
from served import Served

pytestmark = pytest.mark.engine


def ask(served: Served, program: str, **headers: str) -> None:
    """Make a call of a program."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    names = {"weft-program-id": program, **headers}
    assert served.client.post("/v1/chat/completions", json=body, headers=names).status_code == 200


def timeline(served: Served, program: str) -> dict[str, Any]:
    answer = served.client.get(f"/weft/programs/{quote(program)}/timeline")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def test_a_program_has_a_timeline(served: Served) -> None:
    """Its calls in their order, with what they cost, where they ran and what came before; then also after its end."""
    for _ in range(2):
        ask(served, "timeline-1", **{"weft-program-name": "shown"})
    made = timeline(served, "timeline-1")
    assert (made["program_id"], made["name"], made["is_open"]) == ("timeline-1", "shown", True)
    first, second = made["calls"]
    assert first["start_s"] < first["end_s"] <= second["start_s"] < second["end_s"] <= made["length_s"]
    assert second["parents"] == [{"call_id": first["call_id"], "is_exact": True}]
    assert first["service_s"] > 0
    assert first["output_tokens"] == 4
    assert first["replica"].startswith("engine-")
    assert made["critical_path"]["calls"] == [first["call_id"], second["call_id"]]
    served.client.delete("/weft/programs/timeline-1")
    ended = timeline(served, "timeline-1")
    assert (ended["state"], ended["is_open"]) == ("finished", False)
    assert ended["calls"] == made["calls"]


def test_a_program_has_a_perfetto_trace(served: Served) -> None:
    """A file whose name holds nothing that a client could use."""
    program = 'a/"b"\\c'
    ask(served, program)
    answer = served.client.get(f"/weft/programs/{quote(program)}/perfetto")
    assert answer.headers["content-disposition"] == 'attachment; filename="a-b-c.perfetto-trace.json"'
    check(answer.json())
    assert "service" in {event["name"] for event in answer.json()["traceEvents"]}


@pytest.mark.parametrize("what", ["timeline", "perfetto"])
def test_another_key_sees_no_timeline(served: Served, what: str) -> None:
    """Nor does a client without a key. An unknown program has the same answer as another key's."""
    ask(served, "timeline-2")
    url = f"{served.url}/weft/programs/timeline-2/{what}"
    assert httpx.get(url).status_code == 401
    answer = httpx.get(url, headers={"authorization": "Bearer key-2"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "program_unknown"
    assert served.client.get(f"/weft/programs/none/{what}").status_code == 404


def test_the_start_names_the_page(served: Served) -> None:
    """Or only readers of the documentation would know of it."""
    assert f"(web page: {served.url}/weft; Ctrl-C or SIGTERM ends the server)" in served.log.read_text()


def test_the_page_needs_no_key_and_nothing_from_elsewhere(served: Served) -> None:
    """Its policy allows this server's scripts and styles only. It says that the server wants a key."""
    page = httpx.get(f"{served.url}/weft")
    assert page.status_code == 200
    assert "data-needs-key" in page.text
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    for name in ("main.js", "programs.js", "program.js", "timeline.js", "server.js", "dom.js", "page.css", "icon.svg"):
        assert httpx.get(f"{served.url}/weft/page/{name}").status_code == 200
    assert httpx.get(f"{served.url}/weft/page/../routes.py").status_code == 401
    for path in ("/weft/", "/"):  # people type the address that the server's start names
        assert httpx.get(f"{served.url}{path}", follow_redirects=True).text == page.text
