"""Whether programs that move between two real replicas find their KV there: under load, and though one of them dies.

    python benchmarks/bench_moves_live.py --out moves.json                # both replicas on this host
    python benchmarks/bench_moves_live.py --ray --out moves_ray.json      # each on a node of a Ray cluster, all here

Programs whose contexts grow call one engine, few at once and then many. What moves them is the default balancer,
stealing, the death of a replica, which is started again, or its removal, after which another one joins. A call has
moved if the call before it of its program ran on another replica, or on the same one before that died. It should
compute no more than what is new and one block. What is new comes after the longest common beginning of its prompt and
the prompt and answer before. Calls that have only a block of old tokens cannot compute too much, and are counted apart.
The model is the tests' tiny random Llama on CPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple
from unittest import mock

import psutil
import typer
from common import TINY_ENGINE_ARGS, machine
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import weft
from weft.core.ids import CallId, EngineId
from weft.core.process_rows import CallRow
from weft.core.process_table import ProcessTable
from weft.core.routing import Arrival
from weft.engine.models.tiny import make_tiny_llama
from weft.engine.replicas.launcher import LocalLauncher
from weft.engine.replicas.router import Router
from weft.engine.replicas.stealer import UnansweredCalls
from weft.engine.wire.control import CallKey

BLOCK_TOKENS: Final = 128  # of vLLM on CPU
OUTPUT_TOKENS: Final = 16
WORDS: Final = ("river", "stone", "lamp", "seven", "cloud", "paper", "green", "window", "salt", "morning", "hill")
EVENTS: Final = ("none", "death", "removal")
LOADS: Final = {"light": 8, "heavy": 48}  # programs at once
NODE: Final[dict[str, Any]] = {"num_cpus": 1, "object_store_memory": 100 << 20}


class Place(NamedTuple):
    """Where a call ran."""

    engine_id: EngineId
    deaths: int  # of that replica before


class Call(NamedTuple):
    """A call that came after another one of its program."""

    why: str  # it ran elsewhere: "balancer", "stealing", "death" or "removal"; "stayed" if it did not
    new: int  # tokens of its prompt
    computed: int
    prompt: int
    fetched: int  # of the tokens that it did not compute, those that came from host memory
    at_s: float  # since the round began

    @property
    def is_short(self) -> bool:
        """Whether it could not have computed more than that."""
        return self.prompt <= self.new + BLOCK_TOKENS

    @property
    def is_right(self) -> bool:
        """Whether it computed at most what is new and a block."""
        return self.computed <= self.new + BLOCK_TOKENS


@dataclass
class Round:
    """One load with one event."""

    load: str
    event: str
    calls: list[Call] = field(default_factory=list)
    failed: int = 0  # calls


class Agents:
    """Programs on one engine, until they are told to stop."""

    def __init__(self, engine: weft.AsyncMultiLLMEngine, done: Round, rng: random.Random, turns: int) -> None:
        self._engine = engine
        self._done = done
        self._rng = rng
        self._turns = turns
        self._began_s = time.monotonic()
        self.is_over = False
        self.places: dict[CallId, Place] = {}
        self.stolen: set[CallId] = set()

    async def run(self, think_s: float) -> None:
        """Make one program after another."""
        while not self.is_over:
            with weft.Program("agent") as program:
                try:
                    await self._talk(program, think_s)
                except weft.WeftError:
                    self._done.failed += 1

    async def _talk(self, program: weft.Program, think_s: float) -> None:
        messages: list[dict[str, str]] = []
        known: list[int] = []
        before: Place | None = None
        for _ in range(self._turns):
            messages.append(
                {"role": "user", "content": " ".join(self._rng.choices(WORDS, k=self._rng.randint(20, 120)))}
            )
            identity = program.reports.start_call("talk")
            body = {"messages": messages, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0}
            answer = await self._engine.chat(body | {"return_token_ids": True}, program, identity)
            program.reports.end_call("talk", identity)
            choice, account = answer["choices"][0], answer["weft"]
            place, prompt = self.places.pop(identity.call_id), answer["prompt_token_ids"]
            if before is not None:
                same = next((n for n, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b), len(known))
                why = self._why(before, place, identity.call_id)
                computed = account["prompt_tokens"] - account["cached_tokens"]
                at_s = time.monotonic() - self._began_s
                call = Call(why, len(prompt) - same, computed, len(prompt), account["fetched_tokens"], at_s)
                self._done.calls.append(call)
            before, known = place, prompt + choice["token_ids"][:-1]
            messages.append({"role": "assistant", "content": choice["message"]["content"]})
            await asyncio.sleep(self._rng.expovariate(1 / think_s))

    def _why(self, before: Place, place: Place, call_id: CallId) -> str:
        now = {each.engine_id: each for each in self._engine.health()[self._engine.model]}
        if before.engine_id not in now or now[before.engine_id].state == "draining":
            return "removal"
        if now[before.engine_id].deaths > before.deaths and before != place:
            return "death"
        if before == place:
            return "stayed"
        return "stealing" if call_id in self.stolen else "balancer"


@contextmanager
def noted(engine: weft.AsyncMultiLLMEngine, agents: Agents) -> Iterator[None]:
    """Note where calls go, and which are stolen."""
    assign, move, states = ProcessTable.assign, UnansweredCalls.move, engine._groups[engine.model].states  # noqa: SLF001

    def assigning(self: ProcessTable, call: CallRow, engine_id: EngineId) -> EngineId | None:
        deaths = {each.engine_id: each.deaths for each in states.health(0.0)}
        agents.places[call.identity.call_id] = Place(engine_id, deaths.get(engine_id, 0))
        return assign(self, call, engine_id)

    def moving(self: UnansweredCalls, engine_id: EngineId, call: CallKey, to: EngineId) -> Arrival | None:
        agents.stolen.add(call[1])
        return move(self, engine_id, call, to)

    with mock.patch.object(ProcessTable, "assign", assigning), mock.patch.object(UnansweredCalls, "move", moving):
        yield


@contextmanager
def nothing_moves() -> Iterator[None]:
    """Programs that move take no KV along, as before replicas shared host memory."""

    async def bring_nothing(*_: Any) -> None:
        pass

    with (
        mock.patch.object(LocalLauncher, "_share", return_value={}),
        mock.patch.object(Router, "_bring_kv", bring_nothing),
    ):
        yield


async def ready(engine: weft.AsyncMultiLLMEngine) -> None:
    """Wait until both replicas are ready."""
    while [each.state for each in engine.health()[engine.model]] != ["ready", "ready"]:  # noqa: ASYNC110  no event
        await asyncio.sleep(0.05)


async def lose(engine: weft.AsyncMultiLLMEngine, victim: EngineId, cluster: Any) -> None:
    """Kill the process of a replica, or its node, for which another one joins the cluster."""
    deaths = sum(each.deaths for each in engine.health()[engine.model])
    replica: Any = next(iter(engine._groups.values())).supervisor.replica(victim)  # noqa: SLF001
    if cluster is None:
        psutil.Process(next(iter(replica._processes)).pid).kill()  # noqa: SLF001
    else:
        import ray

        actors = {each["ActorID"]: each for each in cluster.global_state.actor_table(None).values()}
        at = actors[replica.llm.actor._actor_id.hex()]["Address"]["NodeID"]  # noqa: SLF001
        assert at != ray.get_runtime_context().get_node_id()  # noqa: S101  this process would end with it
        node = next(node for node in cluster.worker_nodes if node.node_id == at)
        await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
        cluster.add_node(**NODE)  # Ray sets signal handlers, for which it needs this thread
    while sum(each.deaths for each in engine.health()[engine.model]) == deaths:  # noqa: ASYNC110  no event
        await asyncio.sleep(0.02)


async def play(
    engine: weft.AsyncMultiLLMEngine, done: Round, options: Options, rng: random.Random, cluster: Any
) -> None:
    """Have programs running, and let the event happen in their midst."""
    agents = Agents(engine, done, rng, options.turns)
    count = LOADS[done.load]
    with noted(engine, agents):
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                tasks.create_task(agents.run(options.think_s))
            await asyncio.sleep(options.part_s)
            victim = rng.choice(engine.health()[engine.model]).engine_id
            if done.event == "death":
                await lose(engine, victim, cluster)
            elif done.event == "removal":
                await engine.remove_replica(victim)
                await asyncio.sleep(options.part_s / 2)
                await engine.add_replica()
            await ready(engine)
            await asyncio.sleep(options.part_s)
            agents.is_over = True


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    turns: int
    think_s: float
    part_s: float
    kv_mib: int
    host_gib: float
    rounds: int
    seed: int
    ray: bool
    moves_kv: bool


@contextmanager
def nodes() -> Iterator[Any]:
    """A Ray cluster: a head without room for a replica, and two nodes with room for one each."""
    os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    os.environ.update(RAY_worker_niceness="0")
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        head = {**NODE, "num_cpus": 0, "include_dashboard": False, "temp_dir": folder}
        cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(2):
                cluster.add_node(**NODE)
            yield cluster
        finally:
            cluster.shutdown()


@asynccontextmanager
async def started(options: Options, cluster: Any) -> AsyncIterator[weft.AsyncMultiLLMEngine]:
    """Two replicas of the tiny model, with host memory."""
    with tempfile.TemporaryDirectory() as folder:
        arguments: dict[str, Any] = {**TINY_ENGINE_ARGS, "max_model_len": 4096, "max_num_seqs": 8}
        arguments["kv_cache_memory_bytes"] = options.kv_mib << 20
        if cluster is not None:
            arguments |= {"backend": "ray", "ray_address": cluster.address}
        async with await weft.AsyncMultiLLMEngine.create(
            make_tiny_llama(Path(folder)),
            replicas=2,
            swap=weft.SwapConfig(space_gib=options.host_gib, min_tokens=0),
            stealing=weft.StealingConfig(),
            hang_timeout_s=60.0,
            **arguments,
        ) as engine:
            yield engine


async def measure(options: Options, loads: list[str], events: list[str], out: Path | None) -> None:
    """All rounds, one after the other on one engine. `out` has those that are done."""
    rounds = [Round(load, event) for load in loads for event in events for _ in range(options.rounds)]
    with ExitStack() as stack:
        cluster = stack.enter_context(nodes()) if options.ray else None
        if not options.moves_kv:
            stack.enter_context(nothing_moves())
        progress = stack.enter_context(Progress(console=Console(stderr=True)))
        task = progress.add_task("rounds", total=len(rounds))
        async with started(options, cluster) as engine:
            for number, each in enumerate(rounds):
                progress.update(task, description=f"{each.load}, {each.event}")
                await ready(engine)
                await play(engine, each, options, random.Random(f"{options.seed} {number}"), cluster)
                progress.advance(task)
                write(rounds[: number + 1], options, out)


def write(rounds: list[Round], options: Options, out: Path | None) -> None:
    """Print the table, and write the calls."""
    show(rounds)
    if out is not None:
        done = [asdict(each) | {"calls": [call._asdict() for call in each.calls]} for each in rounds]
        out.write_text(json.dumps({"machine": machine(), "options": asdict(options), "rounds": done}, indent=1))


def show(rounds: list[Round]) -> None:
    """By load and by what moved them, the calls that moved."""
    table = Table("load", "event", "moved by", "short", "calls", "right", "share", "new", "computed", "prompt")
    for load, event in dict.fromkeys((each.load, each.event) for each in rounds):
        calls = [call for each in rounds if (each.load, each.event) == (load, event) for call in each.calls]
        for why in dict.fromkeys(sorted(call.why for call in calls)):
            of = [call for call in calls if call.why == why]
            long = [call for call in of if not call.is_short]
            right = sum(call.is_right for call in long)
            counts = (len(of) - len(long), len(long), right)
            sums = (sum(getattr(call, name) for call in long) for name in ("new", "computed", "prompt"))
            share = f"{right / len(long):.3f}" if long else "-"
            table.add_row(load, event, why, *map(str, counts), share, *(f"{each:,}" for each in sums))
    Console(width=130).print(table)


def main(
    load: Annotated[str, typer.Option(help="light, heavy or both.")] = "both",
    event: Annotated[str, typer.Option(help="none, death, removal or all.")] = "all",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each load and event.")] = 1,
    turns: Annotated[int, typer.Option(min=2, help="Calls of a program.")] = 8,
    think_s: Annotated[float, typer.Option(help="Mean seconds between a program's calls.")] = 0.5,
    part_s: Annotated[float, typer.Option(help="Seconds before an event, and after it.")] = 15.0,
    kv_mib: Annotated[int, typer.Option(help="KV cache of each replica in MiB, at 2 KiB per token.")] = 24,
    host_gib: Annotated[float, typer.Option(help="Host memory of each replica in GiB.")] = 0.25,
    seed: Annotated[int, typer.Option(help="Of the words and pauses.")] = 1,
    ray: Annotated[bool, typer.Option(help="Whether the replicas are on nodes of a Ray cluster.")] = False,
    moves_kv: Annotated[bool, typer.Option(help="Whether programs take their KV along.")] = True,
    out: Annotated[Path | None, typer.Option(help="JSON file for the calls.")] = None,
) -> None:
    """Measure, print the table and write JSON."""
    options = Options(turns, think_s, part_s, kv_mib, host_gib, rounds, seed, ray, moves_kv)
    loads, events = list(LOADS) if load == "both" else [load], list(EVENTS) if event == "all" else [event]
    asyncio.run(measure(options, loads, events, out))


if __name__ == "__main__":
    typer.run(main)
