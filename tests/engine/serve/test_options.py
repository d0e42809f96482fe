"""What `weft serve` refuses before it starts anything."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from weft.core.errors import EngineStartError
from weft.engine.serve.options import parse_options
from weft.engine.serve.server import _socket


def test_files_of_metrics_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the variable, vLLM's route would serve the files in that folder, and nothing of Weft."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    with pytest.raises(EngineStartError, match="unset"):
        parse_options([])


def test_an_answer_waits_for_no_acknowledgement() -> None:
    """Connections send small pieces at once. Otherwise the body of an answer would come 40 ms after its headers."""
    options, _for_engine = parse_options(["--host", "127.0.0.1", "--port", "0"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with _socket(options) as (_address, bound):
            bound.listen()
            with socket.create_connection(bound.getsockname()), bound.accept()[0] as accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    finally:
        signal.signal(signal.SIGTERM, before)  # vLLM's function sets one
