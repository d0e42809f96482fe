"""A `weft serve` of a tiny model, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import sized_server
from otlp import SpanReceiver
from served import KEY, KEY_FILE, MAX_CALLS, Served, url_of
from threads import ONE_THREAD
from tiny_engine import LONG_CONTEXT_OPTIONS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the test that ends the server be the last one that uses it."""
    places = [place for place, item in enumerate(items) if "served" in getattr(item, "fixturenames", ())]
    users = sorted(
        (items[place] for place in places), key=lambda item: "last_served" in getattr(item, "fixturenames", ())
    )
    for place, item in zip(places, users, strict=True):
        items[place] = item


@pytest.fixture
def last_served(served: Served) -> Served:
    """The server, for a test that ends it."""
    return served


@pytest.fixture(scope="package")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for the tests of this folder, because it takes half a minute to start."""
    folder = tmp_path_factory.mktemp("serve")
    log, sizes, keys = folder / "log", folder / "sizes", folder / "keys.toml"
    keys.write_text(KEY_FILE)
    keys.chmod(0o600)
    command = [
        *(sys.executable, str(Path(sized_server.__file__)), "serve", str(tiny_model)),
        *("--max-calls", str(MAX_CALLS), "--policy", "fair"),  # of one tenant's calls it is auto
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", "0", "--api-key", KEY, "key-2"),
        *("--api-key-file", str(keys), "--h11-max-incomplete-event-size", "65536"),
        *("--max-num-seqs", "4", *LONG_CONTEXT_OPTIONS, "--enforce-eager", "--kv-cache-memory-bytes", "268435456"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--tool-strict-level", "parameter"),
        # A random model would write white space for ever.
        *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
    ]
    spans = SpanReceiver()
    command += ["--otlp-traces-endpoint", spans.url]
    protocol = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "200"}
    environment = {**os.environ, **ONE_THREAD, **protocol, "WEFT_TEST_SIZES": str(sizes)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        url = url_of(process, log)
        with httpx.Client(base_url=url, timeout=120, headers={"authorization": f"Bearer {KEY}"}) as client:
            yield Served(process, log, client, spans, sizes)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        finally:
            spans.close()
