"""docs/deploy says of the server what is so: linters know files, but not Weft."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from weft.commands.serve import serve
from weft.engine.models.weights import GGUF_MEMBER, GGUF_SHA256
from weft.engine.serve.keys import OPEN_PATHS
from weft.engine.vllm_compat.known_names import serve_flags
from weft.engine.vllm_compat.versions.version import is_tested

pytestmark = pytest.mark.engine  # `OPEN_PATHS` needs FastAPI, which vLLM brings along

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "docs/deploy"
OWN_FLAGS = {f"--{name.replace('_', '-')}" for name in inspect.signature(serve).parameters}
KUBERNETES: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
RAY: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "ray.yaml").read_text()))
PODS = [KUBERNETES[0]["spec"]["template"]["spec"], RAY[1]["spec"]["template"]["spec"]]


def seconds(arguments: list[str]) -> float:
    """The value of --shutdown-timeout."""
    (found,) = re.findall(r"--shutdown-timeout[= ](\d+)", " ".join(arguments))
    return float(found)


@pytest.mark.parametrize("name", ["cpu.Dockerfile", "gpu.Dockerfile"])
def test_an_image_runs_the_server_itself_as_nobody_special(name: str) -> None:
    """It gets the signals, without a shell. What it copies is not ignored, and its health check needs no key."""
    lines = (DEPLOY / name).read_text().splitlines()
    (entry,) = (json.loads(line.removeprefix("ENTRYPOINT ")) for line in lines if line.startswith("ENTRYPOINT "))
    assert entry[:2] == ["weft", "serve"]
    assert {word for word in entry if word.startswith("--")} <= serve_flags()
    assert [line for line in lines if line.startswith("USER ")] == ["USER 10001"]
    (path,) = re.findall(r"http://127\.0\.0\.1:8000(/\w+)", "".join(lines))
    assert path in OPEN_PATHS
    assert f"EXPOSE {entry[entry.index('--port') + 1]}" in lines
    kept = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    assert kept >= {"core", "engine", "integrations", "examples", "src", "csrc", "pyproject.toml", "CMakeLists.txt"}
    assert all((ROOT / each).exists() for each in kept)


def test_the_gpu_image_has_a_tested_vllm() -> None:
    """Another one is refused, or runs with a warning."""
    (version,) = re.findall(r"^ARG VLLM=v(.+)$", (DEPLOY / "gpu.Dockerfile").read_text(), re.MULTILINE)
    assert is_tested(version)


def test_pods_end_after_their_calls() -> None:
    """The pause, the drain and the last answers fit into the time that Kubernetes gives, and Compose."""
    for pod in PODS:
        (container,) = pod["containers"]
        pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pause + seconds(container["args"]) + 10 <= pod["terminationGracePeriodSeconds"]
    server = COMPOSE["services"]["weft"]
    assert seconds(server["command"]) + 10 <= float(server["stop_grace_period"].removesuffix("s"))


@pytest.mark.parametrize(("pod", "service"), [(PODS[0], KUBERNETES[1]), (PODS[1], RAY[2])])
def test_the_manifests_ask_what_the_server_has(pod: dict[str, Any], service: dict[str, Any]) -> None:
    """Paths without a key, options of `weft serve`, the port's name, and the user of the image."""
    (container,) = pod["containers"]
    asked = {container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    (endpoint,) = KUBERNETES[2]["spec"]["podMetricsEndpoints"]
    assert asked | {endpoint["path"]} <= OPEN_PATHS
    flags = {each.partition("=")[0] for each in container["args"] if each.startswith("--")}
    assert flags <= serve_flags() | OWN_FLAGS
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": 8000}
    assert {endpoint["port"], service["spec"]["ports"][0]["targetPort"]} == {"http"}
    assert pod["securityContext"]["runAsUser"] == 10001


def test_doors_find_the_cluster_of_their_manifest() -> None:
    """By the names that kuberay gives its service and its token, and with a node for each replica."""
    cluster, doors, service = RAY
    name, groups = cluster["metadata"]["name"], cluster["spec"]["workerGroupSpecs"]
    (door,) = PODS[1]["containers"]
    assert f"ray start --address={name}-head-svc:6379 " in door["command"][2]
    token = {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": {"name": name, "key": "auth_token"}}}
    assert cluster["spec"]["authOptions"]["mode"] == "token"
    assert door["env"] == [{"name": "RAY_AUTH_MODE", "value": "token"}, token]
    assert f"--replicas={sum(group['replicas'] for group in groups)}" in door["args"]
    assert service["spec"]["selector"].items() <= doors["spec"]["template"]["metadata"]["labels"].items()


def test_every_file_that_compose_mounts_exists() -> None:
    """Docker would make an empty folder instead."""
    mounted = [volume for service in COMPOSE["services"].values() for volume in service.get("volumes", ())]
    files = [volume.partition(":")[0] for volume in mounted if volume.startswith(".")]
    assert len(files) == 4
    assert all((DEPLOY / file).is_file() for file in files)
    (target,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"]
    assert target["targets"] == ["weft:8000"]


def test_a_release_has_the_checksum_of_the_embedded_model() -> None:
    """The line that the workflow adds to the checksums."""
    workflow = (ROOT / ".github/workflows/release.yml").read_text()
    (command,) = re.findall(r"(sed -n .*) >> SHA256SUMS", workflow)
    line = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert line == f"{GGUF_SHA256}  {Path(GGUF_MEMBER).name}\n"
