"""What `weft serve` refuses before it starts anything."""

from __future__ import annotations

import gc
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


def test_a_malformed_value_is_an_error_in_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """The usage, and what is wrong. vLLM's own usage would hide the latter below 150 lines."""
    with pytest.raises(SystemExit, match="2"):
        parse_options(["--port", "abc"])
    usage, error = capsys.readouterr().err.splitlines()
    assert usage == "usage: weft serve [MODEL] [OPTIONS]"
    assert error == "weft serve: error: argument --port: invalid int value: 'abc'"


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # vLLM leaves the socket that it could not bind
def test_a_port_that_is_none_is_an_error() -> None:
    """The reason of the operating system ends in a full stop, and the error adds no second one."""
    options, _for_engine = parse_options(["--host", "127.0.0.1", "--port", "70000"])
    with pytest.raises(EngineStartError, match=r"port must be 0-65535\. Compare --host"), _socket(options):
        pass
    gc.collect()


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # vLLM leaves the socket that it could not bind
def test_a_taken_port_is_named() -> None:
    """Before an engine starts. The usual cause is a second server on the default port."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        options, _for_engine = parse_options(["--host", "127.0.0.1", "--port", str(port)])
        with pytest.raises(EngineStartError, match=f"listens at port {port}. Stop it, or"), _socket(options):
            pass
    gc.collect()
