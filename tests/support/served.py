"""A `weft serve` in a process of its own, for tests."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
from otlp import SpanReceiver

KEY = "key-1"
MAX_CALLS = 6


@dataclass
class Served:
    """The server's process, its log, a client with one of its keys, and the spans that it sends."""

    process: subprocess.Popen[bytes]
    log: Path
    client: httpx.Client
    spans: SpanReceiver

    @property
    def url(self) -> str:
        return str(self.client.base_url).rstrip("/")

    def stop(self) -> int:
        """End it, and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def url_of(process: subprocess.Popen[bytes], log: Path) -> str:
    """The address that the server prints when it is ready."""
    deadline = time.monotonic() + 600
    while True:
        found = re.search(r"^tiny at (http://\S+)", log.read_text(), re.MULTILINE)
        if found is not None:
            return found[1]
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.2)
