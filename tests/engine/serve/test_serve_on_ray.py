"""`weft serve --backend ray`: the same over HTTP, with the replica in a Ray actor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import url_of
from threads import ONE_THREAD
from tiny_engine import ENDLESS_TOKENS, LONG_CONTEXT_OPTIONS

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def client(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server that has started a Ray cluster of its own, on this machine."""
    log = tmp_path_factory.mktemp("ray") / "log"
    command = [
        *(sys.executable, "-m", "weft", "serve", str(tiny_model), "--served-model-name", "tiny", "--backend", "ray"),
        *("--host", "127.0.0.1", "--port", "0", "--max-num-seqs", "4", *LONG_CONTEXT_OPTIONS, "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(256 << 20), "--stealing"),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **ONE_THREAD})
    try:
        with httpx.Client(base_url=url_of(process, log), timeout=300) as client:
            yield client
    finally:
        process.terminate()
        assert process.wait(120) == 0, log.read_text()[-3000:]


def body(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hello"}]
    return {"model": "tiny", "messages": messages, "max_tokens": 20, "temperature": 0, "ignore_eos": True, **more}


def test_calls_streams_and_the_state_of_a_server_on_ray(client: httpx.Client) -> None:
    """A stream has the text of the whole answer, both belong to the program that they name, and the state shows it."""
    program = {"weft-program-id": "on-ray"}
    answer = client.post("/v1/chat/completions", json=body(), headers=program).json()
    assert answer["usage"]["completion_tokens"] == 20
    assert answer["weft"]["service_s"] > 0
    text = ""
    with client.stream("POST", "/v1/chat/completions", json=body(stream=True), headers=program) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    assert text == answer["choices"][0]["message"]["content"]
    state = client.get("/weft/state").json()
    assert [(each["program_id"], each["calls"]) for each in state["programs"]] == [("on-ray", 2)]
    assert [(each["state"], each["deaths"]) for each in state["replicas"]] == [("ready", 0)]
    late = client.post("/v1/chat/completions", json=body(max_tokens=ENDLESS_TOKENS), headers={"weft-timeout-s": "0.2"})
    assert late.status_code == 504
    assert "weft:replica_state" in client.get("/metrics").text


def test_a_program_in_a_ray_task_and_in_an_actor(client: httpx.Client) -> None:
    """A task and an actor of the same cluster, in processes of their own, connect and run a decorated program. Each is
    one program on the server, which has ended when its function has returned."""
    import ray

    import weft
    from weft.integrations.langchain import ChatWeft

    url = str(client.base_url).rstrip("/")

    @weft.program(name="in-ray")
    def two_calls(model: ChatWeft, program: weft.Program) -> list[str]:
        config: Any = program.config()
        return [str(model.invoke(text, config).content) for text in ("hello", "hello again")]

    def task() -> list[str]:
        with weft.connect(url) as engine:
            return two_calls(ChatWeft(engine=engine, max_tokens=4))

    class Actor:
        def __init__(self) -> None:
            self._engine = weft.connect(url)

        def run(self) -> list[str]:
            answers = two_calls(ChatWeft(engine=self._engine, max_tokens=4))
            self._engine.shutdown()
            return answers

    ray.init(address="auto", log_to_driver=False)
    try:
        actor: Any = ray.remote(num_cpus=0)(Actor).remote()
        in_task: Any = ray.remote(num_cpus=0)(task).remote()
        assert [len(answers) for answers in ray.get([in_task, actor.run.remote()])] == [2, 2]
    finally:
        ray.shutdown()
    counts = {
        sample.name: sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
        if sample.labels.get("program") == "in-ray"
    }
    assert (counts["weft:programs_ended_total"], counts["weft:calls_total"]) == (2, 4)
