"""What `weft serve` makes of its options, and what it refuses, before it starts anything."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.commands import cli
from weft.core.errors import EngineStartError, ReplicaError
from weft.core.kv_cache.config import SwapConfig
from weft.core.policies import PolicyConfig
from weft.core.routing.liveness import DEFAULT_HANG_TIMEOUT_S
from weft.engine.serve import server
from weft.engine.serve.options import gpus_of_replicas, parse_options
from weft.engine.serve.server import listening
from weft.engine.vllm_compat import names
from weft.engine.wire.scheduler_config import SchedulerConfig, decode_config, encode_config


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's platform of NVIDIA GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(names, "current_platform", SimpleNamespace(is_cuda=lambda: True, is_cpu=lambda: False))


@contextmanager
def gpus(monkeypatch: pytest.MonkeyPatch, count: int, visible: str | None) -> Iterator[None]:
    """A machine of which this process sees `count` GPUs."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: count)
        if visible is not None:
            patch.setenv("CUDA_VISIBLE_DEVICES", visible)
        yield


def engine_options(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    """The arguments of the engine that `weft serve` would start with these options."""
    found: list[Any] = []
    monkeypatch.setattr(server, "serve", lambda _options, make_engine, *_: found.append(make_engine.keywords))
    monkeypatch.setattr(sys, "argv", ["weft", "serve", "some/model", *arguments])
    before = asyncio.get_event_loop_policy()
    try:
        assert cli.main() == 0
    finally:
        asyncio.set_event_loop_policy(before)
    (options,) = found
    return dict(options)


def test_the_kv_settings_and_the_history_reach_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Like `kv_policy=`, `swap=` and `history=` in process."""
    history = tmp_path / "history.json"
    found = engine_options(
        monkeypatch, "--kv-policy", "next-use", "--host-kv-gib", "16.5", "--history", str(history), "--port", "8001"
    )
    assert (found["kv_policy"], found["swap"], found["history"]) == ("next-use", SwapConfig(space_gib=16.5), history)


def test_the_kv_settings_are_the_engines_own_without_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same defaults as in process, and 0 turns host memory off."""
    found = engine_options(monkeypatch)
    assert (found["kv_policy"], found["swap"], found["history"]) == (None, SwapConfig(), None)
    assert engine_options(monkeypatch, "--host-kv-gib", "auto")["swap"] == SwapConfig(space_gib="auto")
    assert engine_options(monkeypatch, "--host-kv-gib", "0")["swap"] is None


@pytest.mark.parametrize("policy", ["auto", "fcfs", "fair"])
def test_the_gate_reaches_the_engine(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """`--gate` and `--no-gate` are `gate=True` and `gate=False` of the policy; without either it is as by default."""
    for arguments, gate in ((["--gate"], True), (["--no-gate"], False), ([], None)):
        config = engine_options(monkeypatch, "--policy", policy, *arguments)["policy"]
        assert config == PolicyConfig(policy, gate=gate)
        assert decode_config({"weft": encode_config(SchedulerConfig(config))}).policy == config


@pytest.mark.parametrize(
    ("arguments", "code", "shown"),
    [
        (("--host-kv-gib", "-1"), 1, "error: --host-kv-gib is -1. Give the GiB for each worker, 0 for no host memory"),
        (("--host-kv-gib", "much"), 1, "error: --host-kv-gib is much. Give"),
        (("--host-kv-gib", "nan"), 1, "error: --host-kv-gib is nan. Give"),
        (("--host-kv-gib", "inf"), 1, "error: --host-kv-gib is inf. Give"),
        (("--kv-policy", "mru"), 2, "'mru'"),
    ],
)
def test_a_kv_setting_that_makes_no_sense_is_refused(
    arguments: tuple[str, str],
    code: int,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Before vLLM is imported, which takes seconds."""
    monkeypatch.setattr(sys, "argv", ["weft", "serve", *arguments])
    assert cli.main() == code
    assert shown in capfd.readouterr().err


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("count", "visible", "arguments", "expected"),
    [
        (4, None, [], ["0", "1"]),
        (4, None, ["--tensor-parallel-size", "2"], ["0,1", "2,3"]),
        (4, None, ["--tensor-parallel-size", "1", "--pipeline-parallel-size", "2"], ["0,1", "2,3"]),
        (3, "6, 2,GPU-5e", [], ["6", "2"]),
        (2, "3,1,9", [], ["3", "1"]),  # there is no GPU 9, and CUDA ignores what follows
        (1, None, ["--gpu-memory-utilization", "0.5"], []),
    ],
)
def test_each_replica_gets_gpus_of_its_own(
    count: int, visible: str | None, arguments: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as it has ranks, of those that the server sees. Too few are shared where the memory lets them."""
    options, _for_engine = parse_options(arguments)
    with gpus(monkeypatch, count, visible):
        assert gpus_of_replicas(options, 2) == expected


@pytest.mark.usefixtures("cuda")
def test_too_few_gpus_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """All replicas would start on the same GPU, whose memory the first one takes."""
    options, _for_engine = parse_options(["--tensor-parallel-size", "2"])
    with gpus(monkeypatch, 3, "0,1,2"), pytest.raises(ReplicaError) as caught:
        gpus_of_replicas(options, 2)
    assert str(caught.value) == (
        "2 replicas with 2 GPUs each need 4, and the server sees 3. Pass fewer --replicas, or --backend ray with a "
        "cluster that has more. To let all replicas share GPUs, pass a --gpu-memory-utilization of at most 0.5."
    )
    assert gpus_of_replicas(options, 1) == []


def test_replicas_on_cpus_get_no_gpus() -> None:
    """And a machine without GPUs is no error there."""
    options, _for_engine = parse_options([])
    assert gpus_of_replicas(options, 2) == []


@pytest.mark.usefixtures("cuda")
def test_the_engine_gets_the_gpus_of_its_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this host. Ray assigns GPUs itself."""
    with gpus(monkeypatch, 4, None):
        assert engine_options(monkeypatch, "--replicas", "3")["devices"] == ["0", "1", "2"]
        assert engine_options(monkeypatch, "--replicas", "9", "--backend", "ray")["devices"] == []


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
        with listening(options) as (_address, bound):
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
    with pytest.raises(EngineStartError, match=r"port must be 0-65535\. Compare --host"), listening(options):
        pass
    gc.collect()


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # vLLM leaves the socket that it could not bind
def test_a_taken_port_is_named() -> None:
    """Before an engine starts. The usual cause is a second server on the default port."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        options, _for_engine = parse_options(["--host", "127.0.0.1", "--port", str(port)])
        with pytest.raises(EngineStartError, match=f"listens at port {port}. Stop it, or"), listening(options):
            pass
    gc.collect()


def test_the_hang_time_out_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the name and the default that it has in process; 0 stands for never."""
    assert engine_options(monkeypatch)["hang_timeout_s"] == DEFAULT_HANG_TIMEOUT_S
    assert engine_options(monkeypatch, "--hang-timeout-s", "7.5")["hang_timeout_s"] == 7.5
    assert engine_options(monkeypatch, "--hang-timeout-s", "0")["hang_timeout_s"] is None
