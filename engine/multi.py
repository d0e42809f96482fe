"""`weft.AsyncMultiLLMEngine`: several vLLM engines behind one, with one process table."""

from __future__ import annotations

import asyncio
import atexit
import os
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, Unpack

from weft.core.errors import EngineClosedError, EngineError, ReplicaError, UnknownModelError
from weft.core.ids import EngineId
from weft.core.kv_cache.stats import SwapStats
from weft.core.policies import PolicyConfig, registration
from weft.core.process_rows import ProgramRow, ProgramState
from weft.core.program.observer import ProgramObserver
from weft.core.routing import DEFAULT_BALANCER, BalancerConfig, StealingConfig
from weft.core.routing.admission import Admission
from weft.core.routing.placement import share_cores
from weft.core.routing.replicas import ReplicaHealth, ReplicaSet
from weft.core.testing.script import Script
from weft.engine.host.backend import Sessions
from weft.engine.host.create import Create
from weft.engine.host.frontend import FrontEnd
from weft.engine.host.in_flight import Link, ModelEndpoint, weakly
from weft.engine.options import EngineKeywords, EngineOptions, with_signature
from weft.engine.processes.fork import not_in_forks
from weft.engine.processes.launch import launch_environment, launch_lock
from weft.engine.processes.loop_thread import LoopThread
from weft.engine.replicas.launcher import CORES_VARIABLE, LocalLauncher, ScriptedLauncher
from weft.engine.replicas.ray.launcher import RayLauncher
from weft.engine.vllm.start import engine_arguments, most_host_gib, resolve_model, start_error, wait_unless
from weft.engine.vllm.start_progress import StartProgress
from weft.engine.vllm_compat.environment import START_WRITES, quiet
from weft.engine.vllm_compat.known_names import check_engine_args
from weft.engine.vllm_compat.versions.members import check_members
from weft.engine.watch import WatchedReplica

if TYPE_CHECKING:  # they import vLLM, which takes seconds
    from weft.engine.replicas.group import ReplicaGroup
    from weft.engine.replicas.router import RoutedLLM
    from weft.engine.vllm.accounting import OnAccount

T = TypeVar("T")

RAY_GIB: Final = 4.0  # of host memory for each worker, at most, on nodes of which nobody knows what they have free


class AsyncMultiLLMEngine(FrontEnd):
    """Several vLLM engines, each with its own processes, that programs use like one `weft.Engine`.

    ::

        async with await weft.AsyncMultiLLMEngine.create("Qwen/Qwen2.5-7B-Instruct", replicas=2) as engine:
            model = ChatWeft(engine=engine)

    A balancer sends each call to a replica. All replicas share the process table, so a program's service counts all of
    its calls, wherever they ran. A replica that dies is started again while the others serve.

    Args:
        model: As for `weft.Engine`.
        replicas: How many engines, 1 or more.
        models: Several models instead of one. A request names its model.
        balancer: A name in `weft.core.routing.BALANCERS`, or a `BalancerConfig`. Each model has its own balancer.
        stealing: When calls that have not begun move to a replica without a queue; None: never.
        start_timeout_s: Seconds that a replica may take to start, and that a call may wait while no replica is ready.
        devices: For each replica the GPUs it sees, as in CUDA_VISIBLE_DEVICES; empty: all see all. Not with Ray.
        backend: "mp": replicas are processes of this host. "ray": each is in a Ray actor, on any node of a cluster. A
            `Script`: no model runs, and the script answers (`weft.testing.ScriptedServer`).
        ray_address: The cluster, as for `ray.init`. A connection that this process already has is used as it is.
        ray_actor_options: For Ray's `.options()`, e.g. `{"num_gpus": 1, "resources": {"a100": 1}}`.
        **options: As for `weft.Engine`. `max_calls` is for each replica. One that hangs is started again.

    Raises:
        ReplicaError: Zero replicas or calls, two models of one name, or arguments that do not go together.
        ClusterError: Ray is not installed, or its cluster does not answer.
        BalancerError: An unknown balancer.
        ModelNotFoundError, EngineStartError, UnsupportedVllmError, VllmUnavailableError, PolicyError, TraceError,
            HistoryError, ListenError: See `weft.core.errors`. If a replica did not become ready in time, the message
            names its log.
    """

    @with_signature
    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        replicas: int = 2,
        models: Sequence[ServedModel] = (),
        balancer: str | BalancerConfig = DEFAULT_BALANCER,
        stealing: StealingConfig | None = None,
        start_timeout_s: float = 600.0,
        devices: Sequence[str] = (),
        backend: Literal["mp", "ray"] | Script = "mp",
        ray_address: str | None = None,
        ray_actor_options: Mapping[str, Any] | None = None,
        **options: Unpack[EngineKeywords],
    ) -> None:
        given = EngineOptions.of(options, AsyncMultiLLMEngine.__init__)
        for each in models:
            check_engine_args(each.engine_args)
        super().__init__(given)
        self.policy: PolicyConfig = given.policy
        self._balancer = balancer if isinstance(balancer, BalancerConfig) else BalancerConfig(balancer)
        wanted = resolved(models or [ServedModel(model, replicas, tool_call_parser=given.tool_call_parser)])
        self._stealing = stealing
        self.model = str(wanted[0].name)
        self._start_timeout_s = start_timeout_s
        total = sum(each.replicas for each in wanted)
        self._groups: dict[str, ReplicaGroup] = {}
        self._launcher = make_launcher(
            backend,
            self.engine_id,
            replicas=total,
            devices=devices,
            ray_address=ray_address,
            ray_actor_options=ray_actor_options,
            hang_timeout_s=given.hang_timeout_s,
            on_account=weakly(self._in_flight.account),
        )
        self._most_gib: float | None = None
        if given.swap is not None and given.swap.space_gib == "auto":
            here = [({**given.engine_args, **each.engine_args}, each.replicas) for each in wanted]
            self._most_gib = most_host_gib(here) if backend == "mp" else RAY_GIB
        self._start_loop()
        self._connect(_Replicas(self._groups, self.model, given), learns=given.learns)
        self.observe(_Balancers(self._groups, self._loop, self.programs.sessions))
        started: list[ReplicaGroup] = []
        self._finalizer = weakref.finalize(self, not_in_forks(_shut_down), started, self._loop, self._launcher)
        # At exit this must run before vLLM's own finalizers, and those of restarted replicas are registered later.
        atexit.register(self._finalizer)
        try:
            with StartProgress() as progress:
                progress.stage(f"starting {total} engines" if total > 1 else "starting the engine")
                for each in wanted:
                    self._groups[str(each.name)] = self._start_group(each, started)
                self.host_kv_gib = self._measured_host_kv()
                progress.ready(", ".join(self._groups), self.host_kv_gib)
        except BaseException:
            self._launcher.keep_logs = True  # the error names a log
            self._stop_listening()
            self._finalizer()
            raise
        self._has_started()
        self._log.info(
            "engine started",
            models=list(self._groups),
            replicas=total,
            balancer=self._balancer.name,
            host_kv_gib=round(self.host_kv_gib, 1),
        )

    create = Create(__init__)
    """Start an engine without blocking the caller's event loop. Cancelling the start ends its processes."""

    def _start_group(self, wanted: ServedModel, started: list[ReplicaGroup]) -> ReplicaGroup:
        """Start the replicas of a model, one after the other."""
        with launch_lock.held(self._start_abandoned), launch_environment(START_WRITES, quiet()):
            check_members()
            from weft.engine.replicas.group import ReplicaGroup
            from weft.engine.vllm.chat import check_tool_call_parser

        check_tool_call_parser(wanted.tool_call_parser)
        name, model, table, launcher = str(wanted.name), str(wanted.model), self.table, self._launcher
        try:
            engine_args = {**self._options.engine_args, **wanted.engine_args, "served_model_name": name}
            options = replace(self._options, engine_args=engine_args)
            arguments = engine_arguments(model, options, most_gib=self._most_gib)
        except Exception as error:
            raise start_error(name, error) from error

        def forget(engine_id: EngineId, gone: bool) -> None:
            table.lose_engine(engine_id)
            if gone:
                launcher.release(engine_id)
            else:  # it has died; the warning names its log
                launcher.keep_logs = True

        group = ReplicaGroup(
            name,
            ReplicaSet(self._balancer.make(), max_calls=self._options.max_calls),
            make=lambda: launcher.make(name, arguments),
            forget=forget,
            start_timeout_s=self._start_timeout_s,
            clock=self._options.clock,
        )
        started.append(group)
        shares, on_assigned = registration(self.policy.name).kind.has_shares, weakly(self._in_flight.assign)
        start = group.start(wanted.replicas, wanted.tool_call_parser, self._stealing, on_assigned, has_shares=shares)
        self._wait(self._loop.submit(start))
        return group

    def _wait(self, future: Future[T]) -> T:
        """Wait for a result of the engine's event loop.

        Raises:
            EngineStartError: The start was cancelled.
        """
        wait_unless(self._start_abandoned, future)
        return future.result()

    @property
    def admissions(self) -> dict[str, Admission]:
        return {model: group.endpoint.admission for model, group in self._groups.items()}

    # -- what a server asks

    def served(self, model: str | None = None) -> tuple[ModelEndpoint, RoutedLLM]:
        """The endpoint of a model (None: of the first) and the router to its replicas, for the engine's event loop."""
        group = _group(self._groups, model or self.model)
        return group.endpoint, group.llm

    # -- replicas

    @property
    def models(self) -> list[str]:
        return list(self._groups)

    @property
    def is_ready(self) -> bool:
        """Whether every model has a replica that is ready. While a model has none, its calls wait."""
        return self.is_alive and all(len(group.states.loads) for group in self._groups.values())

    def health(self) -> dict[str, list[ReplicaHealth]]:
        """By model, every replica: its state, its calls in flight, how often it died and why, its log."""
        self._life.check_process()
        now_s = self.now_s()
        return {
            model: [replace(each, log=group.supervisor.log(each.engine_id)) for each in group.states.health(now_s)]
            for model, group in self._groups.items()
        }

    def watched(self) -> Sequence[WatchedReplica]:
        now_s = self.now_s()
        return [
            WatchedReplica(model, health, replica.send_to_scheduler)
            for model, group in self._groups.items()
            for healths in [{each.engine_id: each for each in group.states.health(now_s)}]
            for replica in group.supervisor.replicas()
            if (health := healths.get(replica.engine_id)) is not None
        ]

    async def add_replica(self, model: str | None = None) -> EngineId:
        """Start one more replica of a model (None: of the first), and wait until it takes calls.

        Returns:
            The replica's name.

        Raises:
            UnknownModelError, EngineClosedError: There is no such model, or the engine was shut down.
            EngineStartError, ModelNotFoundError: The replica did not start. The others are not affected.
        """
        replica = await self._on_loop(_group(self._groups, model or self.model).supervisor.add())
        return replica.engine_id

    async def remove_replica(self, engine_id: EngineId, timeout_s: float | None = None) -> None:
        """Remove a replica: it gets no further calls, finishes those it has, and its processes end.

        Args:
            engine_id: The replica's name, as `health` gives it.
            timeout_s: Seconds to wait for the replica's calls, None for ever. A call that is left begins again on
                another replica or, if a part of its answer was delivered, ends with `ReplicaLostError`.

        Raises:
            ReplicaError: There is no such replica, or it is the last one of its model.
            EngineClosedError: The engine was shut down.
        """
        for group in self._groups.values():
            if group.states.state(engine_id) is not None:
                await self._on_loop(group.supervisor.remove(engine_id, timeout_s))
                return
        names = [health.engine_id for replicas in self.health().values() for health in replicas]
        raise ReplicaError(f"there is no replica {engine_id!r}; there are: {', '.join(names)}.")

    async def _on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            self._life.check_process()
            if self._life.is_closed:
                raise EngineClosedError
        except EngineError:
            coroutine.close()
            raise
        return await self._loop.run(coroutine)

    def __repr__(self) -> str:
        return f"<weft.AsyncMultiLLMEngine {self.engine_id} {self.models} {self.policy.name} {self._balancer.name}>"


class _Replicas(Link):
    """The way to the replicas of all models."""

    def __init__(self, groups: Mapping[str, ReplicaGroup], model: str, options: EngineOptions) -> None:
        self.hears_events = options.predicts
        self._groups = groups
        self._model = model

    def endpoint(self, model: str | None) -> ModelEndpoint:
        return _group(self._groups, model or self._model).endpoint

    async def send(self, message: Mapping[str, Any]) -> list[Any]:
        replicas = [replica for group in self._groups.values() for replica in group.supervisor.replicas()]
        return await asyncio.gather(*(replica.send_to_scheduler(message) for replica in replicas))

    def swap_stats(self) -> SwapStats | None:
        replicas = [replica for group in self._groups.values() for replica in group.supervisor.replicas()]
        found = [replica.llm.swap_stats for replica in replicas if replica.llm is not None]
        return SwapStats.together(each for each in found if each is not None)


def _group(groups: Mapping[str, ReplicaGroup], model: str) -> ReplicaGroup:
    group = groups.get(model)
    if group is None:
        raise UnknownModelError(model, list(groups))
    return group


class _Balancers(ProgramObserver):
    """Tells the balancers which programs and sessions have ended."""

    def __init__(self, groups: Mapping[str, ReplicaGroup], loop: LoopThread, sessions: Sessions) -> None:
        self._groups = groups
        self._loop = loop
        self._sessions = sessions

    def program_ended(self, row: ProgramRow, state: ProgramState, now_s: float) -> None:
        for group in self._groups.values():
            balancer = group.states.balancer
            self._loop.call_soon(partial(balancer.end_program, row.info.program_id))
            if not self._sessions.is_open(row.info.session_id):
                self._loop.call_soon(partial(balancer.end_session, row.info.session_id))


def _shut_down(started: list[ReplicaGroup], loop: LoopThread, launcher: Launcher) -> None:
    """End every replica and the event loop; also at interpreter exit, for an engine that was never shut down."""

    async def stop() -> None:
        for group in started:
            await group.stop()

    try:
        loop.submit(stop()).result(timeout=120)
    finally:
        loop.stop()
        launcher.close()


Launcher = LocalLauncher | RayLauncher | ScriptedLauncher


def make_launcher(
    backend: str | Script,
    engine_id: EngineId,
    *,
    replicas: int,
    devices: Sequence[str],
    ray_address: str | None,
    ray_actor_options: Mapping[str, Any] | None,
    hang_timeout_s: float | None,
    on_account: OnAccount,
) -> Launcher:
    """Make the launcher for `backend`. The arguments are those of `AsyncMultiLLMEngine`.

    Raises:
        ReplicaError: The backend is unknown, or an argument belongs to the other backend.
        ClusterError: Ray is not installed, or its cluster does not answer.
    """
    if isinstance(backend, Script):
        return ScriptedLauncher(engine_id, backend, on_account)
    if backend == "ray":
        if devices:
            raise ReplicaError(
                "Ray assigns GPUs to replicas; pass ray_actor_options={'num_gpus': 1} instead of devices."
            )
        return RayLauncher(
            engine_id, ray_address, ray_actor_options or {}, replicas, on_account, hang_timeout_s=hang_timeout_s
        )
    if backend != "mp":
        raise ReplicaError(f"unknown backend {backend!r}; choose 'mp' for processes of this host, or 'ray'.")
    if ray_address is not None or ray_actor_options is not None:
        raise ReplicaError("ray_address and ray_actor_options go with backend='ray'; pass it, or leave them out.")
    cores = share_cores(os.sched_getaffinity(0), replicas) if CORES_VARIABLE not in os.environ else []
    return LocalLauncher(engine_id, cores, devices, on_account, hang_timeout_s=hang_timeout_s)


# -- `weft.ServedModel`: one of several models of an engine


@dataclass(frozen=True)
class ServedModel:
    """One of several models that an `AsyncMultiLLMEngine` serves.

    Args:
        model: As for `weft.Engine`.
        replicas: How many engines, 1 or more.
        name: The name that requests give; None: `model` as it is given.
        tool_call_parser: As for `weft.Engine`.
        engine_args: vLLM's arguments for this model, in addition to those for all models.
    """

    model: str | os.PathLike[str] | None = None
    replicas: int = 1
    name: str | None = None
    tool_call_parser: str | None = "hermes"
    engine_args: Mapping[str, Any] = field(default_factory=dict)


def resolved(models: Sequence[ServedModel]) -> list[ServedModel]:
    """The models with the paths and names that they are served by. Raises ReplicaError if two have the same name, or
    one has no replica. Raises ModelNotFoundError if there is no such model."""
    found = [
        replace(each, model=path, name=each.name or path) for each in models for path in [resolve_model(each.model)]
    ]
    names = [each.name for each in found]
    if len(set(names)) < len(names):
        raise ReplicaError(f"two models have the same name; give each a name of its own: {names}.")
    for each in found:
        if each.replicas < 1:
            raise ReplicaError(f"{each.name!r} has {each.replicas} replicas; give it 1 or more.")
    return found
