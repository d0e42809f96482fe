"""The life of an engine, simulated: it starts, serves a few programs while things fail, and is shut down.

All that is random comes from the seed: the order of events, what the clients do, and the faults. The engine is the real
`AsyncMultiLLMEngine` with its router, dispatch queue, stealer, supervisor, admission, process table, recorder and chat
endpoint; `simulated_replica.py` says how its replicas are simulated, and `simulated_disk.py` how its disk fails.
`simulated_checks.py` says what must hold.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

from history import History
from simulated_checks import RemoteWitness, Witness, after_end, at_rest
from simulated_clients import MODEL, Client, model_folder
from simulated_disk import Disk, HistoryOfEarlier
from simulated_faults import Fault, Faults, faults_of
from simulated_loop import DeadlockError, SimulatedLoopThread, World, simulated_threading
from simulated_replica import BLOCK_BYTES, MAX_MODEL_LEN, SimulatedLauncher
from simulated_server import HttpClient, Server, Transport

import weft
from weft.core.errors import EngineStartError
from weft.core.kv_cache.policies import KV_POLICIES
from weft.core.routing.replicas import ReplicaHealth, ReplicaState
from weft.engine.multi import ServedModel
from weft.engine.options import EngineOptions
from weft.engine.vllm_compat.versions.version import installed_vllm

LIMIT_S: Final = 300.0  # of virtual time, in which some client must get something
_HEARD: Final = {"open", "invoke", "token", "return", "close"}  # events of clients
CALM_S: Final = 150.0  # after which all replicas run again, and every message has arrived
# The modules whose locks keep threads apart that the world interrupts.
_LOCKING: Final = (
    *(f"core.{name}" for name in ("prediction.foresight", "process_table", "program.idle", "program.state")),
    *(f"core.{name}" for name in ("routing.admission", "trace.recorder")),
    *(f"engine.host.{name}" for name in ("backend", "idle_checks", "in_flight", "learning", "scheduler_messages")),
)
_MEMORIES: Final = (
    weft.SwapConfig(),
    *(weft.SwapConfig(slots * BLOCK_BYTES / 2**30, min_tokens=0) for slots in (6, 20, 100)),
)


class Life:
    """One life.

    Args:
        seed: Of all that is random.
        faults: What goes wrong; None: what the seed says.
        trace: Gets each event as a line.
        journal: A folder for the journals of the schedulers.

    Attributes:
        problems: What is wrong, a sentence for each fault.
    """

    def __init__(
        self,
        seed: int,
        faults: Sequence[Fault] | None = None,
        trace: Callable[[str], object] | None = None,
        journal: Path | None = None,
    ) -> None:
        self.seed = seed
        self.journal = journal
        # How clients make their calls: to the engine, or to a server, over HTTP or through `weft.connect`.
        self.door = ("engine", "engine", "engine", "connect", "http")[seed % 5]
        self.server: Server | None = None
        self.remote: weft.RemoteEngine | None = None
        self.planned = list(faults_of(seed) if faults is None else faults)
        self.faults = Faults(self, self.planned)
        self.world = World(seed, trace)
        self.history = History()
        self.problems: list[str] = []
        self.call_names: dict[str, str] = {}
        self.witness = Witness(self.world)
        self.remote_witness = RemoteWitness()
        self.left_early: list[str] = []  # calls whose clients broke them off long before their ends
        self.calm_s = math.inf  # when nothing failed any more
        self.wants_shutdown = False
        self._rng = random.Random(f"life {seed}")
        self.max_calls = self._rng.choice([2, 4, 8])  # on one replica
        self.disk = Disk()
        self.disk_fails_at_end = random.Random(f"last disk {seed}").random() < 0.1
        self.earlier: HistoryOfEarlier | None = None
        self.swap = self._rng.choice([None, None, *_MEMORIES])

    def run(self) -> list[str]:
        """Live. Returns `problems`."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-simulated-")))
            self.trace_file = folder / "trace.jsonl"
            if self._rng.random() < 0.5:
                self.earlier = HistoryOfEarlier(folder / "history.json", self._rng)
            stack.enter_context(self._in_place_of_threads())
            try:
                self._live()
            except (DeadlockError, AssertionError) as error:
                self.problems.append(f"{type(error).__name__}: {error}")
        self.world.close()
        # What nobody waits for complains when it is collected. Old objects are looked at now and then only.
        gc.collect(0 if self.seed % 16 else 2)
        self.problems += self.world.complaints
        return self.problems

    @contextmanager
    def _in_place_of_threads(self) -> Iterator[None]:
        world = self.world

        def launcher(_backend: str, engine_id: Any, *, on_account: Any, hang_timeout_s: float, **_: Any) -> Any:
            self.launcher = SimulatedLauncher(
                engine_id, self.witness.accounts(on_account), world, self._on_event, hang_timeout_s=hang_timeout_s
            )
            return self.launcher

        def new_log(name: str) -> Path:
            """Not among the user's logs: a process keeps its own, and each start looks at all."""
            log = self.trace_file.with_name(f"{name}.log")
            log.touch()
            return log

        loop_thread = partial(SimulatedLoopThread, world)
        listener = _Complaints(world)
        with ExitStack() as stack:
            # vLLM gives up a prompt that was not rendered within 30 s, which a suspended machine makes of a moment.
            stack.enter_context(mock.patch.dict(os.environ, VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT="600"))
            for name, value in {
                "weft.engine.host.frontend.LoopThread": lambda _name: loop_thread(f"engine{len(world.loops) or ''}"),
                "anyio.to_thread.run_sync": _in_executor,  # for routes that are no coroutines
                "weft.engine.remote.engine.EngineOptions": partial(EngineOptions, clock=lambda: world.now_s),
                "weft.engine.remote.engine.time": SimpleNamespace(monotonic=lambda: world.now_s),
                "weft.engine.remote.connection.httpx2.AsyncHTTPTransport": lambda **_: Transport(self),
                "weft.engine.multi.make_launcher": launcher,
                "weft.engine.replicas.launcher.new_log": new_log,
                "weft.engine.processes.loop_thread.threading": simulated_threading(world),
                "weft.engine.kv_cache.shared.threading": simulated_threading(world),
                "weft.core.trace.recorder.threading": simulated_threading(world),
                "weft.core.trace.recorder.os": self.disk,
                "weft.core.files.os": self.disk,
                "weft.engine.host.learning.os": self.disk,
                "weft.engine.vllm_compat.versions.version.installed_vllm": cache(installed_vllm),  # it reads a file
                # vLLM reads its files again and again for these, which takes a tenth of a life.
                "vllm.config.model.ModelConfig.try_get_generation_config": lambda _config: {},
                "vllm.entrypoints.serve.utils.fingerprint.build_system_fingerprint": lambda *_: None,
                **{f"weft.{name}.fork_safe": world.lock for name in _LOCKING},
            }.items():
                stack.enter_context(mock.patch(name, value))
            logging.getLogger("weft").addHandler(listener)
            stack.callback(logging.getLogger("weft").removeHandler, listener)
            yield

    def _on_event(self, kind: str, program_id: str, call_id: str, value: Any) -> None:
        if kind == "wait":
            self.witness.begun(self, call_id, value)
            return
        if call_id in self.call_names:  # an HTTP client does not know its calls' ids, and an engine measures itself
            self.history.add(kind, program_id, call_id, value)
        self.world.note(f"{value}: {kind} {self.call_names.get(call_id, '')}")

    def _live(self) -> None:
        world, rng = self.world, self._rng
        try:
            self.engine = weft.AsyncMultiLLMEngine(
                models=[ServedModel(model_folder(), rng.choice([1, 2, 2, 3]), MODEL)],
                balancer=rng.choice(["least_used", "locality", "affinity", "round_robin", "adaptive_locality"]),
                stealing=weft.StealingConfig(cooldown_s=0.2) if rng.random() < 0.7 else None,
                start_timeout_s=20.0,
                policy=rng.choice(["atlas", "auto", "fcfs", "fair"]),
                swap=self.swap,
                kv_policy=rng.choice([None, None, None, *KV_POLICIES]),
                async_scheduling=rng.random() < 0.5,
                max_calls=self.max_calls,
                call_timeout_s=60.0 if rng.random() < 0.3 else None,
                hang_timeout_s=8.0,
                clock=lambda: world.now_s,
                record=self.trace_file,
                journal=self.journal,
                history=self.earlier.path if self.earlier is not None else None,
                max_num_seqs=rng.choice([1, 2, 3]),
                max_num_batched_tokens=64,
                max_model_len=MAX_MODEL_LEN,
                enable_prefix_caching=rng.random() < 0.7,
                enforce_eager=True,
            )
        except EngineStartError:
            self.problems += after_end(self)
            return
        self.engine.observe(self.witness)
        self.witness.watch(next(iter(self.engine._groups.values())))
        self.users = world.new_loop("users")
        if self.door != "engine":
            self.server = Server(self)
        if self.door == "connect":
            self.remote = weft.connect("http://localhost")
            self.remote.observe(self.remote_witness)
        kind = HttpClient if self.door == "http" else Client
        self.clients = [kind(self, number) for number in range(rng.choice([1, 3, 6]))]
        self.running = [self.users.create_task(client.run()) for client in self.clients]
        start = world.turns
        world.before_turn = lambda: self._before_turn(world.turns - start)
        if not self._come_to_end():
            self.problems.append(f"clients wait for ever: {world.waits()}")
        elif not self.wants_shutdown:
            self.faults.end()
            self.calm_s = world.now_s
            if self.door == "http":
                self.problems += self.server.problems(self.clients)
            if self.remote is not None:
                world.run_until(lambda: self.remote.programs.messages.is_idle, world.now_s + CALM_S)
            if self.server is not None:
                self.server.stop()
            while not self._stays_calm() and world.now_s < self.calm_s + CALM_S:
                pass
            self.problems += at_rest(self)
        world.before_turn = lambda: None
        if self.server is not None:
            self.server.stop()
        if self.disk_fails_at_end:
            self.disk.fault = "broken"
        self.engine.shutdown()
        with suppress(DeadlockError):
            world.run_until(self._is_over, world.now_s + LIMIT_S)
        if self.remote is not None:
            self.remote.shutdown()
        self.problems += self.witness.wrong
        self.problems += after_end(self)

    def _come_to_end(self) -> bool:
        """Run until all clients have their answers, or the engine is to be shut down. Returns False if no client gets
        anything any more. A slow replica may take long for what clients ask of it, and goes on all the time."""
        got = -1
        while got < (got := sum(event.kind in _HEARD for event in self.history.events)):
            if self.world.run_until(lambda: self.wants_shutdown or self._is_over(), self.world.now_s + LIMIT_S):
                return True
        return False

    def _stays_calm(self) -> bool:
        """Run until all replicas do and know what they are told, then for a while. A replica that hung until now may
        yet be killed for it, and one that was slow ends its step first."""
        self.world.run_until(self._is_calm, self.calm_s + CALM_S)
        self.world.run_until(lambda: False, self.world.now_s + 2.0)
        return self._is_calm()

    def _is_calm(self) -> bool:
        states = [each.state for each in self.health()]
        alive = [each for each in self.launcher.processes if each.is_alive()]
        is_told = self.engine.programs.messages.is_idle and not any(each.is_computing for each in alive)
        return is_told and set(states) == {ReplicaState.READY} and len(states) == len(alive)

    def _is_over(self) -> bool:
        return all(task.done() for task in self.running)

    def health(self) -> list[ReplicaHealth]:
        """The replicas' states."""
        return self.engine.health()[MODEL]

    def _before_turn(self, turn: int) -> None:
        self.faults.before(turn)
        self.witness.look_often(self)
        if turn % 64 == 0:
            self.problems += self.witness.look(self)


async def _in_executor(function: Callable[..., Any], *args: Any, **_: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, function, *args)


class _Complaints(logging.Handler):
    """Errors that Weft logs are faults of Weft, and so are observers that fail."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.ERROR or "observer" in text:
            self._world.complain(f"logged: {text}", record.exc_info[1] if record.exc_info else None)
