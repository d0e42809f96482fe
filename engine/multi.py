"""`weft.AsyncMultiLLMEngine`: several vLLM engines behind one, with one process table."""

from __future__ import annotations

import asyncio
import atexit
import os
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from weft.core.errors import EngineClosedError, ReplicaError, UnknownModelError
from weft.core.ids import EngineId
from weft.core.kv_cache.config import SwapConfig
from weft.core.kv_cache.stats import SwapStats
from weft.core.policies import PolicyConfig
from weft.core.process_table import ProgramInfo
from weft.core.routing.admission import Admission
from weft.core.routing.config import BalancerConfig
from weft.core.routing.replicas import ReplicaHealth, ReplicaSet
from weft.engine.backends import Launcher, make_launcher
from weft.engine.engine import DEFAULT_SWAP, Engine
from weft.engine.frontend.calls import Served
from weft.engine.frontend.frontend import FrontEnd, weakly
from weft.engine.frontend.start import engine_arguments, resolve_model, start_error, wait_unless
from weft.engine.processes.loop_thread import LoopThread

if TYPE_CHECKING:  # they import vLLM, which takes seconds
    from weft.engine.replicas.router import RoutedLLM
    from weft.engine.replicas.supervisor import Supervisor

T = TypeVar("T")


@dataclass(frozen=True)
class ServedModel:
    """One of several models that an `AsyncMultiLLMEngine` serves.

    Args:
        model: as for `weft.Engine`.
        replicas: how many engines, 1 or more.
        name: what requests call it; None: as `model` is given.
        tool_call_parser: as for `weft.Engine`.
        engine_args: vLLM's arguments for this model, on top of those for all.
    """

    model: str | os.PathLike[str] | None = None
    replicas: int = 1
    name: str | None = None
    tool_call_parser: str | None = "hermes"
    engine_args: Mapping[str, Any] = field(default_factory=dict)


class _Group(NamedTuple):
    """A model and what runs it."""

    served: Served
    states: ReplicaSet
    supervisor: Supervisor
    llm: RoutedLLM


class AsyncMultiLLMEngine(Engine):
    """Several vLLM engines, each with its own processes, that programs use like one `weft.Engine`.

    ::

        async with await weft.AsyncMultiLLMEngine.create("Qwen/Qwen2.5-7B-Instruct", replicas=2) as engine:
            model = ChatWeft(engine=engine)

    A balancer sends each call to a replica. All share the process table, so a program has one service wherever its
    calls ran. A replica that dies is started again while the others serve (docs/engines.md).

    Args:
        model: as for `weft.Engine`.
        replicas: how many engines, 1 or more.
        models: several models instead of one; requests name theirs.
        balancer: a name in `weft.core.balancer.BALANCERS`, or a `BalancerConfig`. Each model has its own.
        max_calls: how many calls may be in flight on one replica, its queue included; more are refused.
        start_timeout_s: how long a replica may take to start, and a call may wait when none is ready.
        devices: for each replica the GPUs it sees, as in CUDA_VISIBLE_DEVICES; empty: all see all. Not with Ray.
        backend: "mp": replicas are processes of this host; "ray": each is in a Ray actor, on any node of a cluster.
        ray_address: of the cluster, as for `ray.init`. A connection that this process has already is used as it is.
        ray_actor_options: for Ray's `.options()`, e.g. `{"num_gpus": 1, "resources": {"a100": 1}}`.
        policy, swap, tool_call_parser, call_timeout_s, program_timeout_s, clock, record, **engine_args: as for
            `weft.Engine`.

    Raises:
        ReplicaError: zero replicas, two models of one name, or arguments that do not go together.
        ClusterError: Ray is not installed, or its cluster does not answer.
        BalancerError: an unknown balancer.
        ModelNotFoundError, EngineStartError, UnsupportedVllmError, VllmUnavailableError, PolicyError, TraceError: see
            `weft.core.errors`. A replica that did not become ready in time: the message names its log.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        replicas: int = 2,
        models: Sequence[ServedModel] = (),
        balancer: str | BalancerConfig = "locality",
        max_calls: int = 256,
        start_timeout_s: float = 600.0,
        devices: Sequence[str] = (),
        backend: Literal["mp", "ray"] = "mp",
        ray_address: str | None = None,
        ray_actor_options: Mapping[str, Any] | None = None,
        policy: str | PolicyConfig = "atlas",
        swap: SwapConfig | None = DEFAULT_SWAP,
        tool_call_parser: str | None = "hermes",
        call_timeout_s: float | None = None,
        program_timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        record: str | os.PathLike[str] | None = None,
        **engine_args: Any,
    ) -> None:
        # Not Engine's, which starts one vLLM engine.
        FrontEnd.__init__(self, policy, call_timeout_s, program_timeout_s, clock, record)
        self._balancer = balancer if isinstance(balancer, BalancerConfig) else BalancerConfig(balancer)
        wanted = [
            replace(each, model=path, name=each.name or path)
            for each in models or [ServedModel(model, replicas, tool_call_parser=tool_call_parser)]
            for path in [resolve_model(each.model)]
        ]
        _check(wanted, max_calls)
        self.model = str(wanted[0].name)
        self._max_calls = max_calls
        self._start_timeout_s = start_timeout_s
        self._swap = swap
        total = sum(each.replicas for each in wanted)
        self._groups: dict[str, _Group] = {}
        self._launcher = make_launcher(
            backend,
            self.engine_id,
            replicas=total,
            devices=devices,
            ray_address=ray_address,
            ray_actor_options=ray_actor_options,
            on_account=weakly(self._on_account),
        )
        self._loop = LoopThread(self.engine_id)
        started: list[Supervisor | RoutedLLM] = []
        self._finalizer = weakref.finalize(self, _shut_down, started, self._loop, self._launcher)
        # At exit, before vLLM's own finalizers, some of which are always later ones: of replicas started again.
        atexit.register(self._finalizer)
        try:
            for each in wanted:
                self._groups[str(each.name)] = self._start_group(each, engine_args, started)
        except BaseException:
            self._closed = True
            self._launcher.keep_logs = True  # the error names one
            self._finalizer()
            raise
        first = self._groups[self.model]
        self._llm: Any = first.llm
        self._endpoint = first.served.endpoint
        self._log.info("engine started", models=list(self._groups), replicas=total, balancer=self._balancer.name)

    def _start_group(
        self, wanted: ServedModel, common: Mapping[str, Any], started: list[Supervisor | RoutedLLM]
    ) -> _Group:
        """Start the replicas of a model, one after the other, and what routes to them."""
        from weft.engine.frontend.chat import ChatEndpoint
        from weft.engine.replicas.dispatch_queue import DispatchQueue
        from weft.engine.replicas.router import RoutedLLM
        from weft.engine.replicas.supervisor import Supervisor

        name, model, table, launcher = str(wanted.name), str(wanted.model), self.table, self._launcher
        try:
            arguments = engine_arguments(
                model, self.policy, self._swap, {**common, **wanted.engine_args, "served_model_name": name}
            )
        except Exception as error:
            raise start_error(name, error) from error

        def forget(engine_id: EngineId, gone: bool) -> None:
            table.lose_engine(engine_id)
            if gone:
                launcher.release(engine_id)

        states = ReplicaSet(self._balancer.make(), max_calls=self._max_calls)
        line = DispatchQueue(name, states)
        supervisor = Supervisor(
            name,
            replicas=states,
            line=line,
            make=lambda: launcher.make(name, arguments),
            forget=forget,
            start_timeout_s=self._start_timeout_s,
            clock=self._clock,
        )
        started.append(supervisor)
        first = self._wait(self._loop.submit(supervisor.begin(wanted.replicas)))

        async def route() -> tuple[RoutedLLM, ChatEndpoint]:
            assert first.llm is not None  # noqa: S101  it has just started
            config = first.llm.vllm_config
            llm = RoutedLLM(config, line, supervisor.replica, weakly(self._on_placed), supervisor.note_death)
            started.append(llm)
            supervisor.watch()
            return llm, ChatEndpoint(llm, name, wanted.tool_call_parser, llm.failures)

        llm, endpoint = self._wait(self._loop.submit(route()))
        return _Group(Served(endpoint, Admission(lambda: states.capacity), None), states, supervisor, llm)

    def _wait(self, future: Future[T]) -> T:
        """A result of the engine's loop; a start that is cancelled is ended first.

        Raises:
            EngineStartError: it was cancelled.
        """
        wait_unless(self._start_abandoned, future)
        return future.result()

    # -- what FrontEnd asks

    def _served(self, model: str | None) -> Served:
        return self._group(model).served

    def _group(self, model: str | None) -> _Group:
        group = self._groups.get(model or self.model)
        if group is None:
            raise UnknownModelError(str(model), self.models)
        return group

    def _program_ended(self, info: ProgramInfo, *, session_ended: bool) -> None:
        for group in self._groups.values():
            balancer = group.states.balancer
            self._loop.call_soon(partial(balancer.end_program, info.program_id))
            if session_ended:
                self._loop.call_soon(partial(balancer.end_session, info.session_id))

    # -- replicas

    @property
    def models(self) -> list[str]:
        """The names of the models it serves; a request that names none gets the first."""
        return list(self._groups)

    @property
    def is_alive(self) -> bool:
        """Whether it takes calls. While no replica is ready they wait."""
        return not self._closed

    @property
    def is_ready(self) -> bool:
        """Whether every model has a replica that is ready."""
        return not self._closed and all(group.states.ready_count for group in self._groups.values())

    def health(self) -> dict[str, list[ReplicaHealth]]:
        """By model, every replica: its state, its calls in flight, how often it died and why, its log."""
        now_s = self._clock()
        return {
            model: [replace(each, log=group.supervisor.log(each.engine_id)) for each in group.states.health(now_s)]
            for model, group in self._groups.items()
        }

    @property
    def swap_stats(self) -> SwapStats | None:
        """What the swap of all replicas has done together, each as of its call that ended last."""
        engines = [llm for group in self._groups.values() for llm in group.supervisor.engines()]
        return SwapStats.together(llm.swap_stats for llm in engines if llm.swap_stats is not None)

    async def add_replica(self, model: str | None = None) -> EngineId:
        """Start one more replica of a model (None: of the first), and wait until it takes calls.

        Returns:
            Its name.

        Raises:
            UnknownModelError, EngineClosedError: there is no such model, or the engine was shut down.
            EngineStartError, ModelNotFoundError: it did not start; the others are not affected.
        """
        replica = await self._on_loop(self._group(model).supervisor.add())
        return replica.engine_id

    async def remove_replica(self, engine_id: EngineId, timeout_s: float | None = None) -> None:
        """Take a replica away: it gets no more calls, finishes those it has, and its processes end.

        Args:
            engine_id: its name, as `health` tells it.
            timeout_s: seconds to wait for its calls, None for ever; those left are begun again on another replica or,
                if something of their answer was delivered, end with `ReplicaLostError`.

        Raises:
            ReplicaError: there is no such replica, or it is the last one of its model.
            EngineClosedError: the engine was shut down.
        """
        for group in self._groups.values():
            if group.states.state(engine_id) is not None:
                await self._on_loop(group.supervisor.remove(engine_id, timeout_s))
                return
        there = [health.engine_id for replicas in self.health().values() for health in replicas]
        raise ReplicaError(f"there is no replica {engine_id!r}; there are: {', '.join(there)}.")

    async def _on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            coroutine.close()
            raise EngineClosedError
        return await asyncio.wrap_future(self._loop.submit(coroutine))

    def __repr__(self) -> str:
        return f"<weft.AsyncMultiLLMEngine {self.engine_id} {self.models} {self.policy.name} {self._balancer.name}>"


def _check(wanted: Sequence[ServedModel], max_calls: int) -> None:
    names = [each.name for each in wanted]
    if len(set(names)) < len(names):
        raise ReplicaError(f"two models have the same name; give each a name of its own: {names}.")
    for each in wanted:
        if each.replicas < 1:
            raise ReplicaError(f"{each.name!r} has {each.replicas} replicas; give it 1 or more.")
    if max_calls < 1:
        raise ReplicaError(f"max_calls is {max_calls}; a replica must be allowed 1 or more.")


def _shut_down(started: list[Supervisor | RoutedLLM], loop: LoopThread, launcher: Launcher) -> None:
    """End every replica and the event loop; also at interpreter exit, for a forgotten engine."""

    async def stop() -> None:
        for part in started:
            await part.stop()

    try:
        loop.submit(stop()).result(timeout=120)
    finally:
        loop.stop()
        launcher.close()
