"""`backend="ray"`: two replicas of the embedded model on a cluster of several nodes, all of them on this machine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import psutil
import pytest
from background import is_background
from polling import until
from replica_chaos import HELD_BACK, assert_ended_programs_are_forgotten, body, both_ready, content, idle

import weft
from weft.core.errors import (
    ClusterError,
    ContextLengthError,
    EngineStartError,
    InvalidRequestError,
    ReplicaError,
    ReplicaLostError,
)
from weft.core.ids import EngineId
from weft.core.trace.format import read
from weft.engine.replicas.ray.cluster import default_resources
from weft.engine.replicas.ray.launcher import RayLauncher

pytestmark = [pytest.mark.engine, pytest.mark.anyio]

QUESTION = "Count from one to ten."
CONTEXT_TOKENS = 8192  # the most that the embedded model knows
ENDLESS_TOKENS = 8000  # of a call that a test ends; they take minutes
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20}


# -- before there is a cluster


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at '127.0.0.1:1': .*refused"),
        ("127.0.0.1:70000", "no Ray cluster answers"),
        ("nonsense", "no Ray cluster answers at 'nonsense'"),
        ("ray://127.0.0.1:10001", "Ray Client"),
    ],
)
def test_an_address_that_does_not_answer(address: str, message: str) -> None:
    """The error comes within seconds, and no process has been started."""
    launcher = partial(RayLauncher, EngineId("e"), address, {}, 1, lambda *_: None, hang_timeout_s=None)
    with pytest.raises(ClusterError, match=message):
        launcher()


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError, match=r"Run `pip install 'ray>=[\d.]+'` on every node"):
        RayLauncher(EngineId("e"), None, {}, 1, lambda *_: None, hang_timeout_s=None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "slurm"}, "unknown backend 'slurm'"),
        ({"backend": "ray", "devices": ["0"]}, "ray_actor_options"),
        ({"ray_address": "auto"}, "go with backend='ray'"),
    ],
)
def test_arguments_that_do_not_go_together(tiny_model: Path, arguments: dict[str, Any], message: str) -> None:
    """They are refused before anything is started."""
    with pytest.raises(ReplicaError, match=message):
        weft.AsyncMultiLLMEngine(tiny_model, **arguments)


def test_default_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica gets a GPU for each rank, or on CPU the most cores of living nodes that all replicas can have."""
    import ray

    from weft.engine.vllm_compat import names as vllm_api

    arguments: Any = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=3)
    monkeypatch.setattr(vllm_api, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    assert default_resources(arguments, 4) == {"num_gpus": 6}
    nodes = [{"Resources": {"CPU": 8.0}, "Alive": True}, {"Resources": {"CPU": 4.0}, "Alive": True}]
    nodes += [{"Resources": {"CPU": 64.0}, "Alive": False}, {"Resources": {}, "Alive": True}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(vllm_api, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    assert default_resources(arguments, 3) == {"num_cpus": 4}


# -- on a cluster


def engine_processes() -> set[psutil.Process]:
    """vLLM's scheduler processes on this machine. A worker of Ray may have another parent than this test.

    vLLM names its processes, and goes on without a name where the system does not let it.
    """
    found = set()
    for process in psutil.process_iter():
        try:
            command, parent = " ".join(process.cmdline()), process.parent()
            is_named = "EngineCore" in process.name() or "EngineCore" in command
            is_nameless = "spawn_main" in command and parent is not None and "ReplicaHost" in " ".join(parent.cmdline())
            if (is_named or is_nameless) and not is_background(process):
                found.add(process)
        except psutil.NoSuchProcess:
            pass
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without resources, and two nodes with resources for one replica each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(**NODE)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def started(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[weft.AsyncMultiLLMEngine]:
    """Two replicas, which leave nothing in the cluster when they are shut down. Their programs are recorded."""
    import ray

    trace = tmp_path_factory.mktemp("recorded") / "trace.jsonl"

    before = engine_processes()
    with weft.AsyncMultiLLMEngine(
        replicas=2,
        backend="ray",
        ray_address=cluster.address,
        balancer="least_used",
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=8,
        enforce_eager=True,
        use_tqdm_on_load=False,
        disable_log_stats=True,
        hang_timeout_s=20,
        swap=weft.SwapConfig(space_gib=0.25, min_tokens=0),
        record=trace,
    ) as engine:
        # On a busy machine it takes minutes until Ray's processes and vLLM's have imported what they need.
        anyio.run(until, lambda: len(engine_processes() - before) >= 2 or any(deaths(engine)), 800)
        assert deaths(engine) == [0, 0], engine.health()
        processes = engine_processes() - before
        yield engine
        processes |= engine_processes() - before
    _, alive = psutil.wait_procs(processes, timeout=120)  # the timeout only prevents a hang
    assert alive == []
    assert not ray.is_initialized()
    recorded = read(trace)
    assert {row.info.program_id for row in engine.table.ended() if row.account.output_tokens} == {
        program.program for program in recorded
    }


@pytest.fixture
async def pair(started: weft.AsyncMultiLLMEngine) -> AsyncIterator[weft.AsyncMultiLLMEngine]:
    """The engine. After each test, no call and no program is left in it."""
    yield started
    await idle(started)
    assert len(started.table) == 0
    assert len(started._in_flight) == 0


def deaths(engine: weft.AsyncMultiLLMEngine) -> list[int]:
    return [health.deaths for health in engine.health()[engine.model]]


def lose_a_node(cluster: Any) -> None:
    import ray

    own = ray.get_runtime_context().get_node_id()  # the test's process would end with this node
    cluster.remove_node(next(node for node in cluster.worker_nodes if node.node_id != own), allow_graceful=False)


def engine_ids(engine: weft.AsyncMultiLLMEngine) -> set[EngineId]:
    return {health.engine_id for health in engine.health()[engine.model]}


@pytest.mark.slow
async def test_the_react_example_runs_unchanged(pair: weft.AsyncMultiLLMEngine) -> None:
    """Two agents that use tools run at once. Together they use both replicas, and each program has its own row."""
    from weft.examples.react_langchain import react
    from weft.integrations.langchain import ChatWeft

    chat = ChatWeft(engine=pair, temperature=0, max_tokens=48)
    (product,), (everest,) = await asyncio.gather(
        react(["What is 12 * 7?"], chat), react(["How high is Everest?"], chat)
    )
    assert "84" in product
    assert "8849" in everest
    rows = pair.table.ended()[:2]
    assert [row.calls for row in rows] == [2, 2]
    assert all(row.account.service_s > 0 and row.account.output_tokens > 0 for row in rows)
    assert {engine_id for row in rows for engine_id in row.engine_ids} == engine_ids(pair)


@pytest.mark.slow
async def test_a_stream_comes_as_it_is_made_and_ends_when_it_is_closed(pair: weft.AsyncMultiLLMEngine) -> None:
    """The pieces make up the whole answer, and closing a stream ends its call in the engine, too."""
    with weft.Program("stream") as program:
        whole = await pair.chat(body(QUESTION), program, program.reports.start_call("whole"))
        stream = pair.chat_stream(body(QUESTION), program, program.reports.start_call("stream"))
        pieces = [choice["delta"].get("content") or "" async for chunk in stream for choice in chunk["choices"]]
        assert "".join(pieces) == content(whole)
        endless = pair.chat_stream(
            body(QUESTION, max_tokens=ENDLESS_TOKENS), program, program.reports.start_call("endless")
        )
        assert "choices" in await anext(endless)
        await endless.aclose()
        await idle(pair)


async def ask_on(pair: weft.AsyncMultiLLMEngine, replica: EngineId, program: weft.Program, **fields: Any) -> Any:
    """Make a call on this replica. A stream of another program keeps the other one busy meanwhile."""
    with weft.Program("busy") as busy:
        streams = {}
        for number in range(2):  # one on each replica
            identity = busy.reports.start_call(f"{number}")
            stream = pair.chat_stream(body(QUESTION, max_tokens=ENDLESS_TOKENS), busy, identity)
            await anext(stream)
            row = busy.row
            assert row is not None
            streams[row.in_flight[identity.call_id].engine_id] = stream
        await streams.pop(replica).aclose()
        await until(lambda: sum(health.calls for health in pair.health()[pair.model]) == 1)
        answer = await pair.chat(body(**fields), program, program.reports.start_call(f"{fields}"))
        assert program.row is not None
        assert program.row.engine_ids[-1] == replica
        for stream in streams.values():
            await stream.aclose()
    return answer


@pytest.mark.slow
async def test_a_program_that_moves_takes_its_kv_along(
    pair: weft.AsyncMultiLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the other node and back, it computes what is new and at most a block. The answers are those of an engine that
    computes everything. On a busy machine a copy may take longer than a call waits for it by default."""
    for module in ("router", "ray.replica"):
        monkeypatch.setattr(f"weft.engine.replicas.{module}.MOST_COPY_S", 60.0)
    one, other = sorted(engine_ids(pair))
    text = "one two three four five " * 100
    with weft.Program("moves") as program, weft.Program("reference") as reference:
        for replica in (one, other, one):
            answer = await ask_on(pair, replica, program, text=text, max_tokens=8)
            alone = await ask_on(pair, replica, reference, text=text, max_tokens=8, cache_salt=f"{len(text)}")
            assert alone["weft"]["cached_tokens"] == 0
            assert content(answer) == content(alone)
            if len(text) > 2400:
                assert answer["weft"]["prompt_tokens"] - answer["weft"]["cached_tokens"] < 128 + 16
            text += "six seven "


@pytest.mark.slow
async def test_the_schedulers_forget_a_program_that_has_ended(pair: weft.AsyncMultiLLMEngine) -> None:
    """The end of a program reaches every scheduler process at once. A program that has not ended is still known."""
    await assert_ended_programs_are_forgotten(pair)


@pytest.mark.slow
async def test_a_cancelled_call_is_aborted_and_its_cost_is_charged(pair: weft.AsyncMultiLLMEngine) -> None:
    """The scheduler in the actor's node tells the account when it is asked."""
    with weft.Program("cancelled") as program, weft.Program("observer") as observer:
        identity = program.reports.start_call("cancelled")
        task = asyncio.create_task(pair.chat(body(QUESTION, max_tokens=ENDLESS_TOKENS), program, identity))
        await until(lambda: any(health.calls for health in pair.health()[pair.model]))
        # Streams on both replicas show that the engines have made steps since the call began.
        requests = [body(QUESTION, max_tokens=ENDLESS_TOKENS) for _ in range(2)]
        start_call = observer.reports.start_call
        streams = [pair.chat_stream(each, observer, start_call(f"{n}")) for n, each in enumerate(requests)]
        for _ in range(5):
            await asyncio.gather(*(anext(stream) for stream in streams))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for stream in streams:
            await stream.aclose()
        await idle(pair)
        keys = [f"after-{n}" for n in range(2)]  # one on each replica
        answers = await asyncio.gather(
            *(pair.chat(body("Hi.", max_tokens=2), program, program.reports.start_call(key)) for key in keys)
        )
        row = program.row
        assert row is not None
        answers_s = sum(answer["weft"]["service_s"] for answer in answers)
        assert row.account.service_s - answers_s > 1e-6, "more than a rounding error"


@pytest.mark.slow
async def test_wrong_requests_are_refused_as_elsewhere(pair: weft.AsyncMultiLLMEngine) -> None:
    """The renderer runs in this process and raises the same errors as without Ray."""
    with weft.Program("wrong") as program:
        with pytest.raises(ContextLengthError):
            await pair.chat(body("hello " * 3 * CONTEXT_TOKENS), program, program.reports.start_call("long"))
        with pytest.raises(InvalidRequestError):
            await pair.chat(body("hello", temperature=-1), program, program.reports.start_call("cold"))
    assert [health.deaths for health in pair.health()[pair.model]] == [0, 0]


@pytest.mark.slow
async def test_a_replica_that_fits_on_no_node_is_an_error(
    pair: weft.AsyncMultiLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both nodes are in use. The error names the resources that are needed, and the other replicas go on."""
    (group,) = pair._groups.values()
    monkeypatch.setattr(group.supervisor, "_start_timeout_s", 2.0)
    with pytest.raises(EngineStartError, match=r"no node for replica .* within 2 s: it needs num_cpus 1"):
        await pair.add_replica()
    assert pair.is_ready
    assert len(pair.health()[pair.model]) == 2


@pytest.mark.slow
async def test_a_node_is_lost(pair: weft.AsyncMultiLLMEngine, cluster: Any) -> None:
    """Whole calls begin again on the other node. Streams that had begun fail with the number of tokens delivered."""
    with weft.Program("survivor") as program:
        expected = content(await pair.chat(body(QUESTION), program, program.reports.start_call("reference")))
        delivered: dict[str, int] = {}

        async def whole(key: str) -> str:
            return content(await pair.chat(body(QUESTION), program, program.reports.start_call(key)))

        async def streamed(key: str) -> None:
            options = {"include_usage": True, "continuous_usage_stats": True}
            request = body(QUESTION, max_tokens=ENDLESS_TOKENS, stream_options=options)
            async for chunk in pair.chat_stream(request, program, program.reports.start_call(key)):
                delivered[key] = chunk["usage"]["completion_tokens"]

        streams = {key: asyncio.create_task(streamed(key)) for key in ("one", "two", "three", "four")}
        await until(lambda: len(delivered) == 4 and min(delivered.values()) > 1)
        wholes = [asyncio.create_task(whole(f"whole-{n}")) for n in range(4)]
        await until(lambda: all(health.calls == 4 for health in pair.health()[pair.model]))
        lose_a_node(cluster)
        assert await asyncio.gather(*wholes) == [expected] * 4
        await until(lambda: sum(stream.done() for stream in streams.values()) == 2)
        lost = {key: stream.exception() for key, stream in streams.items() if stream.done()}
        for stream in streams.values():  # those on the other node go on
            stream.cancel()
        await asyncio.wait(streams.values())
        assert sum(stream.cancelled() for stream in streams.values()) == 2
        for key, error in lost.items():
            assert isinstance(error, ReplicaLostError)
            assert delivered[key] <= error.delivered_tokens <= delivered[key] + HELD_BACK
        # The replica may have been started again on the lost node, before Ray noticed the loss.
        assert sum(health.deaths > 0 for health in pair.health()[pair.model]) == 1


@pytest.mark.soak
async def test_a_replica_comes_back_when_there_is_a_free_node(pair: weft.AsyncMultiLLMEngine, cluster: Any) -> None:
    """The replica starts on a node that has just joined, and calls go to both replicas again."""
    if pair.health()[pair.model][0].state == pair.health()[pair.model][1].state:  # the previous test did not run
        lose_a_node(cluster)
        await until(lambda: any(health.deaths for health in pair.health()[pair.model]))
    cluster.add_node(**NODE)
    await both_ready(pair)
    with weft.Program("back") as program:
        keys = [f"call-{n}" for n in range(4)]
        identities = [program.reports.start_call(key) for key in keys]
        answers = await asyncio.gather(*(pair.chat(body(QUESTION), program, each) for each in identities))
        assert len({content(answer) for answer in answers}) == 1
        assert program.row is not None
        assert set(program.row.engine_ids) == engine_ids(pair)


@pytest.mark.soak
async def test_an_engine_process_is_killed_inside_its_actor(pair: weft.AsyncMultiLLMEngine) -> None:
    """The actor lives on and reports the death, and the replica is started again in a new actor."""
    before = {health.engine_id: health.deaths for health in pair.health()[pair.model]}
    with weft.Program("killed") as program:
        identities = [program.reports.start_call(f"call-{n}") for n in range(4)]
        calls = [asyncio.create_task(pair.chat(body(QUESTION, max_tokens=200), program, each)) for each in identities]
        await until(lambda: all(health.calls == 2 for health in pair.health()[pair.model]))
        next(iter(engine_processes())).kill()
        texts = {content(answer) for answer in await asyncio.gather(*calls)}
        assert len(texts) == 1
    await both_ready(pair)
    deaths = [health.deaths - before[health.engine_id] for health in pair.health()[pair.model]]
    assert sorted(deaths) == [0, 1]


@pytest.mark.soak
async def test_an_actor_hangs(pair: weft.AsyncMultiLLMEngine) -> None:
    """Its process is stopped. Ray goes on to take it for alive, but the host gets no answer and has it killed."""
    before = {health.engine_id: health.deaths for health in pair.health()[pair.model]}
    actor = next(process for process in psutil.process_iter() if "ray::ReplicaHost" in " ".join(process.cmdline()))
    with weft.Program("hung") as program:
        identities = [program.reports.start_call(f"call-{n}") for n in range(4)]
        calls = [asyncio.create_task(pair.chat(body(QUESTION, max_tokens=200), program, each)) for each in identities]
        await until(lambda: all(health.calls == 2 for health in pair.health()[pair.model]))
        actor.suspend()
        texts = {content(answer) for answer in await asyncio.gather(*calls)}
        assert len(texts) == 1
    await until(lambda: any(health.deaths > before[health.engine_id] for health in pair.health()[pair.model]))
    (reason,) = [health.reason for health in pair.health()[pair.model] if health.deaths > before[health.engine_id]]
    assert reason is not None
    assert reason.startswith("its Ray actor hung: no answer for 20 s")
    await both_ready(pair)
    await until(lambda: not actor.is_running())
