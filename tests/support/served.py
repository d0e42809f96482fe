"""A `weft serve` in a process of its own, for tests."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
from otlp import SpanReceiver

KEY = "key-1"
MAX_CALLS = 10
LIMITED_KEY, LIMITED_CALLS, LIMITED_PROGRAMS, LIMITED_BYTES = "key-limited", 2, 4, 20_000
TRUSTED_KEY = "key-trusted"
HEAVY_KEY, LIGHT_KEY, HEAVY_WEIGHT = "key-heavy", "key-light", 3
KEY_FILE = f"""
[[key]]
key = "{LIMITED_KEY}"
tenant = "guests"
max_calls = {LIMITED_CALLS}
max_programs = {LIMITED_PROGRAMS}
max_body_bytes = {LIMITED_BYTES}

[[key]]
key = "{TRUSTED_KEY}"
tenant = "gateway"
trusted = true

[[key]]
key = "{HEAVY_KEY}"
tenant = "heavy"
weight = {HEAVY_WEIGHT}

[[key]]
key = "{LIGHT_KEY}"
tenant = "light"
"""


@dataclass
class Served:
    """The server's process, its log, a client with one of its keys, its spans, and the file for `sizes`."""

    process: subprocess.Popen[bytes]
    log: Path
    client: httpx.Client
    spans: SpanReceiver
    sizes_file: Path

    @property
    def url(self) -> str:
        return str(self.client.base_url).rstrip("/")

    def sizes(self) -> dict[str, int]:
        """How many of each thing the server keeps now (`sized_server`)."""
        self.sizes_file.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        while not self.sizes_file.exists():
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.01)
        found: dict[str, int] = json.loads(self.sizes_file.read_text())
        return found

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
