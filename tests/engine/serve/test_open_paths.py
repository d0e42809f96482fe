"""What a server with API keys shows to those who have none: nothing that a client has sent."""

from __future__ import annotations

from pathlib import Path

import pytest
from doors import Doors

from weft.engine.serve.keys import OPEN_PATHS, make_key_ring

KEYS = """
[[key]]
key = "sk-trusted"
tenant = "research"
trusted = true

[[key]]
key = "sk-guest"
tenant = "guests"
"""
SENT = {
    "weft-program-id": "sent-program-id",
    "weft-program-name": "sent-name",
    "weft-session-id": "sent-session",
    "weft-parent-program-id": "sent-parent",
    "user-agent": "sent-agent",
    "x-request-id": "sent-request",
    "traceparent": "00-5e7f0000000000000000000000005e7f-5e7f000000005e7f-01",
}


@pytest.fixture
def used(tmp_path: Path) -> Doors:
    """A server whose clients have sent texts of each kind."""
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    path.chmod(0o600)
    return Doors(make_key_ring(file=path))


def use(doors: Doors) -> None:
    """Programs of both keys, open and ended, with calls, tools and refusals."""
    for secret in ("sk-trusted", "sk-guest"):
        for end in ("", "-2"):
            headers = {**SENT, "weft-program-id": f"sent-program-id{end}", "authorization": f"Bearer {secret}"}
            if secret.endswith("trusted"):
                headers["weft-tenant"] = "sent-tenant"
            told = {"thread_id": "sent-thread", "label": "sent-label", "tools": ["sent-tool"], "parents": ["sent-call"]}
            assert doors.chat(headers, **told).status_code == 200
            events = [["tool_started", f"sent-program-id{end}", "sent-tool", 1, 0.0]]
            body = {"type": "program_events", "events": events}
            assert doors.ask("POST", "/weft/events", json=body, headers=headers).status_code == 204
            assert doors.chat({**headers, "weft-timeout-s": "sent-time"}).status_code == 400
            assert doors.ask("GET", "/sent-path", headers=headers).status_code == 404
        assert doors.ask("DELETE", "/weft/programs/sent-program-id-2", headers=headers).status_code == 204


def test_an_open_path_shows_nothing_that_a_client_has_sent(used: Doors) -> None:
    """No id, no name, no text, no key, and nothing that the server has put before ids. All open paths are asked."""
    with used as doors:
        use(doors)
        for path in sorted(OPEN_PATHS):
            for asked in (path, f"{path}?sent-name=sent-value"):
                answer = doors.ask("GET", asked)
                shown = f"{answer.headers} {answer.text}"
                assert "sent-" not in shown, path
                assert "sk-" not in shown, path
                assert "5e7f" not in shown, path
                assert not any(key.scope in shown for key in doors.keys), path
        assert doors.ask("GET", "/metrics").status_code == doors.ask("GET", "/weft").status_code == 200


def test_metrics_without_a_key_have_the_sums_and_the_tenants_of_the_key_file(used: Doors) -> None:
    """Those are the operator's words. A key that is not trusted sees no more, because it may not know of other keys'
    programs."""
    with used as doors:
        use(doors)
        guest = {"authorization": "Bearer sk-guest"}
        for headers in (None, guest):
            labels = doors.labels(headers)
            assert {"research", "guests", "other"} <= labels
            assert not {"sent-name", "sent-tenant", "sent-tool"} & labels
            assert 'program="other"} 4.0' in doors.ask("GET", "/metrics", headers=headers).text


def test_metrics_with_a_trusted_key_have_all_names(used: Doors) -> None:
    """So Prometheus tells programs apart if its operator gives it such a key."""
    with used as doors:
        use(doors)
        labels = doors.labels({"authorization": "Bearer sk-trusted"})
        assert {"sent-name", "sent-tenant", "guests"} <= labels
        assert not any(key.scope in label for key in doors.keys for label in labels)


def test_a_server_without_keys_shows_all_names_in_its_metrics() -> None:
    """It shows its programs to everybody who reaches it anyway."""
    with Doors() as doors:
        assert doors.chat(SENT).status_code == 200
        assert "sent-name" in doors.labels()
