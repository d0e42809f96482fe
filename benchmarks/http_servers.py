"""The servers of `bench_http.py`: vLLM's own, stock or with Weft's scheduler, and `vllm-router` in front of one."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_S = 600
BLOCK_TOKENS = 32  # vLLM on CPU requires a multiple of 32
MODEL = "tiny"
# Two threads, each bound to a core, would wait for each other and for the other server.
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # adds /reset_prefix_cache
}


@dataclass(frozen=True)
class Capacity:
    """What a vLLM server can hold."""

    slots: int
    kv_tokens: int
    chunk_tokens: int
    max_model_len: int


def router_command() -> str | None:
    """The `vllm-router` on the path, or next to this Python. None: it is not installed."""
    return shutil.which("vllm-router", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


@contextmanager
def vllm_server(model: Path, capacity: Capacity, log: Path, weft: dict[str, str] | None = None) -> Iterator[str]:
    """vLLM's own server, which is stopped at the end; yields its address.

    Args:
        weft: the settings of Weft's scheduler. None: vLLM's own scheduler, which is FCFS.
    """
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *_options(capacity, port),
    ]
    if weft is not None:
        command += ["--scheduler-cls", "weft.engine.scheduler.WeftScheduler"]
        command += ["--additional-config", json.dumps({"weft": weft})]
    with _running(command, f"http://127.0.0.1:{port}", log) as address:
        yield address


@contextmanager
def weft_server(model: Path, capacity: Capacity, log: Path, *more: str) -> Iterator[str]:
    """`weft serve` with its default policy and more options, which is stopped at the end; yields its address."""
    port = free_port()
    command = [sys.executable, "-m", "weft", "serve", str(model), *_options(capacity, port), *more]
    with _running(command, f"http://127.0.0.1:{port}", log) as address:
        yield address


def _options(capacity: Capacity, port: int) -> list[str]:
    """What all vLLM servers are started with."""
    return [
        *("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", str(capacity.max_model_len)),
        *("--max-num-seqs", str(capacity.slots), "--max-num-batched-tokens", str(capacity.chunk_tokens)),
        *("--block-size", str(BLOCK_TOKENS), "--kv-cache-memory-bytes", str(1 << 28)),
        # vLLM keeps one block for itself.
        *("--num-gpu-blocks-override", str(capacity.kv_tokens // BLOCK_TOKENS + 1)),
        "--disable-uvicorn-access-log",
    ]


@contextmanager
def router(command: str, worker: str, capacity: Capacity, log: Path) -> Iterator[str]:
    """`vllm-router` with program scheduling in front of a vLLM server; yields its address.

    Without `token_capacity_per_dp_rank` it knows no capacity and never pauses a program.
    """
    port = free_port()
    config = {"token_capacity_per_dp_rank": capacity.kv_tokens}
    arguments = [
        *(command, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())),
        *("--worker-urls", worker, "--enable-program-scheduling"),
        *("--program-scheduling-config-json", json.dumps(config)),
    ]
    with _running(arguments, f"http://127.0.0.1:{port}", log) as address:
        yield address


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def _running(command: Sequence[str], address: str, log: Path) -> Iterator[str]:
    environment = {**os.environ, **ENVIRONMENT}
    with (
        log.open("wb") as output,
        subprocess.Popen(  # noqa: S603  no shell, and the commands are ours
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        ) as process,
    ):
        try:
            deadline_s = time.monotonic() + START_S
            while not _is_up(address):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise SystemExit(f"{command[0]} did not start:\n{log.read_text()[-3000:]}")
                time.sleep(0.5)
            yield address
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:  # while vLLM's server starts, it ignores SIGTERM
                process.kill()


def _is_up(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=2) as answer:  # noqa: S310  a loopback address
            return bool(answer.status == 200)
    except OSError:
        return False
