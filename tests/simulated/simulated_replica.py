"""Replicas for a simulated engine: vLLM's client and Weft's scheduler are real, and between them there is no process.

A replica is the real `LocalReplica` with a real `AsyncLLM` in it, whose sockets lead to an `EngineProcess`. This one
does what vLLM's engine core does, one step after the other, with the real `WeftScheduler` over vLLM's scheduler and KV
cache. Only the model is missing: `SimulatedWorker` derives each token from the KV that it reads. Messages travel as
msgpack, as they do to a real process. They arrive late and in their order, as ZMQ promises, and those of a process that
dies may be lost on the way.
"""

from __future__ import annotations

import asyncio
import math
import os
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

import numpy as np
from simulated_loop import TICK_S, World
from simulated_worker import Hosts, SimulatedWorker
from zmq import Frame

from weft.engine.kv_cache.shared import KEY_BYTES, VARIABLE
from weft.engine.processes.launch import Launch, start_cancelled
from weft.engine.replicas.launcher import LocalLauncher
from weft.engine.scheduler import WeftScheduler
from weft.engine.scheduler.journal import JournaledScheduler
from weft.engine.vllm.accounting import AccountingLLM
from weft.engine.vllm_compat.names import (
    AsyncMPClient,
    BackgroundResources,
    EngineCoreOutputs,
    EngineCoreProc,
    EngineCoreRequest,
    EngineCoreRequestType,
    FullAttentionSpec,
    InputProcessor,
    KVCacheConfig,
    KVCacheGroupSpec,
    MsgpackDecoder,
    MsgpackEncoder,
    OutputProcessor,
    Request,
    RequestStatus,
    SamplingParams,
    StructuredOutputManager,
    UtilityOutput,
    UtilityResult,
    get_request_block_hasher,
    init_none_hash,
    renderer_from_config,
    sha256,
)

BLOCK_TOKENS: Final = 16
BLOCKS: Final = 24  # of the KV cache; too few for two long calls
MAX_MODEL_LEN: Final = (BLOCKS - 2) * BLOCK_TOKENS
BLOCK_BYTES: Final = 2 * BLOCK_TOKENS * 4  # of one layer and one head of one float32
STEP_S: Final = 16 * TICK_S
_TASKS: Final = ("generate",)


class Channel:
    """Carries messages one way, in their order, each some ticks later.

    Args:
        world: Draws the pauses.
        deliver: Gets each message, outside of all loops.
    """

    def __init__(self, world: World, deliver: Callable[[Any], object]) -> None:
        self._world, self._deliver = world, deliver
        self._on_the_way: deque[Any] = deque()
        self._last_s = 0.0
        self.late_ticks = 2  # at most

    def send(self, message: Any) -> None:
        """Send a message."""
        self._last_s = max(self._last_s, self._world.now_s + self._world.pause_s(self.late_ticks))
        self._on_the_way.append(message)
        self._world.call_later(self._last_s - self._world.now_s, self._arrive)

    def _arrive(self) -> None:
        if self._on_the_way:  # timers of one moment run in any order, and messages do not
            self._deliver(self._on_the_way.popleft())

    def lose(self) -> None:
        """Lose what is on its way."""
        self._on_the_way.clear()


class EngineProcess:
    """vLLM's engine core in its process, and what its parent sees of the process.

    Args:
        world: Its clock, and the order of events.
        config: vLLM's.
        name: The replica's.
        note: Gets what happens to calls: a kind, the call's program and id, and a value.
        hosts: What replicas have in host memory.
    """

    pid = None  # it has no number, so nobody reads what it uses of the CPU

    def __init__(self, world: World, config: Any, name: str, note: Callable[..., object], hosts: Hosts) -> None:
        self.world, self.name, self._note, self._hosts = world, name, note, hosts
        self.exitcode: int | None = None
        self.died_s = math.inf
        self.is_hung = False
        self._reads_at_once = True  # a wait in a message that it has not read is not known to it
        self.step_s = STEP_S
        self._told_of = set[tuple[str, str]]()  # calls whose final accounts were asked for, and told
        self.aborted_s: dict[str, float] = {}  # the service of each call that was aborted
        self.inputs = Channel(world, self._take)
        self.outputs: Channel
        self.on_death: Callable[[], object]
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=config.model_config.dtype)
        kind = JournaledScheduler if "journal" in config.additional_config["weft"] else WeftScheduler
        self.scheduler: Any = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=False,
        )
        self.scheduler.set_clock(lambda: world.now_s)
        self.worker = SimulatedWorker(BLOCKS, self.scheduler.connector, hosts, world.rng.random())
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._encoder = MsgpackEncoder()
        self._waiting: deque[tuple[Any, Any]] = deque()  # messages that are read before the next step
        self._most_steps = 2 if config.scheduler_config.async_scheduling else 1  # at once
        self._steps: deque[_Step] = deque()  # that the model computes
        self._awaits_step = False
        self._is_awake = False
        self._new: dict[str, bool] = {}  # requests that have not begun; whether each is the first of its call

    # -- what others see of a process

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        """Die at once. The parent notices some time later."""
        if self.exitcode is None:
            self.exitcode, self.died_s = -9, self.world.now_s
            self.world.note(f"{self.name} is dead")
            if self.world.rng.random() < 0.5:
                self.outputs.lose()
            self.world.call_later(self.world.pause_s(64), self.note_death)

    terminate = kill

    def note_death(self) -> None:
        """The parent notices that the process has ended."""
        self.on_death()

    def join(self, timeout: float | None = None) -> None:
        """Nothing to wait for: it is dead once it was told to be."""
        del timeout

    def crash(self) -> None:
        """Die with a last message, as vLLM's engine core does of an error."""
        if self.exitcode is None:
            self.exitcode, self.died_s = 1, self.world.now_s
            self.outputs.send([EngineCoreProc.ENGINE_CORE_DEAD])
            self.world.call_later(self.world.pause_s(64), self.note_death)

    def hang(self) -> None:
        """Make no further step, and answer nothing."""
        self.is_hung, self._reads_at_once = True, False

    def resume(self) -> None:
        """Go on after a hang."""
        self.is_hung = False
        self._wake()

    # -- vLLM's loop

    def _take(self, frames: Any) -> None:
        kind = EngineCoreRequestType(bytes(frames[0]))
        decoder = MsgpackDecoder(EngineCoreRequest) if kind == EngineCoreRequestType.ADD else MsgpackDecoder()
        self._waiting.append((kind, decoder.decode(frames[1:])))
        self._wake()

    def _wake(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            self.world.call_later(0.0, self._go_on)

    def _go_on(self) -> None:
        self._is_awake = False
        if self.exitcode is None and not self.is_hung:
            try:
                self._run_once()
            except Exception as error:
                self.world.complain(f"engine {self.name} died of an error", error)
                self.crash()

    def _run_once(self) -> None:
        """End the oldest step if its time has come, read messages, and begin as many steps as the model takes at once.
        With two, the second begins before the outputs of the first are known."""
        if self._awaits_step:
            self._awaits_step = False
            self._end_step()
        while True:
            while self._waiting:
                self._handle(*self._waiting.popleft())
            if self.scheduler.has_requests():
                is_full = not self._begin_step()
            elif not self._steps:
                return
            else:
                is_full = True
            if is_full or not self.scheduler.has_requests():
                break
        self._is_awake = self._awaits_step = True
        self.world.call_later(max(0.0, self._steps[0].end_s - self.world.now_s), self._go_on)

    def _begin_step(self) -> bool:
        """Form a step. Returns whether the model takes another one."""
        plan = self.scheduler.schedule(False)
        for request_id in plan.num_scheduled_tokens:
            if self._new.pop(request_id, None):
                self._tell("begin", request_id)
                ledger = self.scheduler._entries[request_id].ledger
                if self._reads_at_once and self.step_s == STEP_S:
                    self._note("wait", ledger.program_id, ledger.call_id, ledger.wait_s)
        begin_s = max(self.world.now_s, self._steps[-1].end_s if self._steps else 0.0)
        step = _Step(plan, begin_s + (self.step_s if plan.total_num_scheduled_tokens else TICK_S))
        self._steps.append(step)
        if self.world.rng.random() < 0.5:
            self._compute()
        else:  # it reads its plan from a message, and may come to it only at the end of the step
            step.sent = pickle.dumps(plan)
        self.scheduler.get_grammar_bitmask(plan)
        return len(self._steps) < self._most_steps

    def _compute(self) -> None:
        """The worker computes the steps that it has got, in their order."""
        for step in self._steps:
            if step.output is None:
                plan = step.plan if step.sent is None else pickle.loads(step.sent)  # noqa: S301  our own bytes
                step.output = self.worker.run(plan)

    def _end_step(self) -> None:
        self._compute()
        step = self._steps.popleft()
        for kind, message in self._waiting:
            if kind == EngineCoreRequestType.ABORT:  # vLLM reads these before it takes the step's outputs
                self._abort(message)
        self._send(self.scheduler.update_from_output(step.plan, step.output))
        self.scheduler.check_integrity()
        self._check_content()

    def _check_content(self) -> None:
        """Assert that each block which can be found, here or elsewhere, holds the tokens that it is found by."""
        worker, store = self.worker, self.scheduler._swap
        for request in self.scheduler.requests.values():
            for index, key in enumerate(request.block_hashes):
                if key not in self._hosts.tokens:
                    tokens = request.all_token_ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
                    self._hosts.tokens[key] = list(tokens)
        if any(step.output is None for step in self._steps) or (worker.failures and self._steps):
            return  # what is not computed yet is not known, nor what has failed and was not reported
        for block in self.scheduler.kv_cache_manager.block_pool.blocks:
            if block.block_hash is not None:
                self._check_holds(bytes(block.block_hash[:KEY_BYTES]), worker.content(block.block_id), block)
        if store is not None:
            written = store._out.keys() | store._going_out.keys()
            for key, slot in store.tier.slots.items():
                if isinstance(key, bytes) and slot not in written:
                    self._check_holds(key, worker.host[slot], f"slot {slot}")
            if store.shared is not None:
                part = store.shared._own
                for slot in map(int, np.flatnonzero(part.generations % 2)):
                    self._check_holds(part.key(slot), worker.host[slot], f"the published slot {slot}")

    def _check_holds(self, key: bytes, content: Any, what: Any) -> None:
        tokens = self._hosts.tokens.get(key)
        assert tokens in (None, content), f"{what} holds {content} in place of {tokens}"

    def _handle(self, kind: Any, message: Any) -> None:
        if kind == EngineCoreRequestType.ADD:
            request = Request.from_engine_core_request(message, self._hasher)
            self.scheduler.add_request(request)
            # A call with n = 2 is two requests, and the first may have ended when the second comes.
            self._new[request.request_id] = is_first = not request.request_id.startswith("1_")
            if is_first:
                self._tell("attempt", request.request_id)
        elif kind == EngineCoreRequestType.ABORT:
            self._abort(message)
        elif kind == "reset":
            self._reset(*message)
        else:
            _, call_id, name, arguments = message
            for asked in arguments if name == "scheduler" else ():
                again = self._told_of & {tuple(each) for each in asked.get("calls", ())}
                assert not (again and asked["type"] == "aborted_calls"), f"the accounts of {again} were told before"
            try:
                answer = self.scheduler(*arguments) if name == "scheduler" else _TASKS
                for program, call, _ in answer.get("aborted", ()) if isinstance(answer, dict) else ():
                    self._told_of.add((program, call))
                if isinstance(answer, dict) and answer.get("taken"):
                    for program, call in answer["taken"]:
                        self._note("taken", program, call, self.name)
                output = UtilityOutput(call_id, result=UtilityResult(answer))
            except Exception as error:
                output = UtilityOutput(call_id, failure_message=str(error))
            self._send({0: EngineCoreOutputs(utility_output=output)})

    @property
    def is_computing(self) -> bool:
        """Whether a step is in flight. vLLM keeps the blocks of its calls, also of those that were aborted."""
        return bool(self._steps)

    def _abort(self, request_ids: list[str]) -> None:
        entries = self.scheduler._entries
        ledgers = [entries[request_id].ledger for request_id in request_ids if request_id in entries]
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        self.aborted_s |= {ledger.call_id: ledger.account().service_s for ledger in ledgers}
        for request_id in request_ids:
            self._new.pop(request_id, None)

    def reset(self, *, running: bool, host: bool) -> None:
        """Forget all KV, as vLLM does when weights have changed."""
        self._waiting.append(("reset", (running, host)))
        self._wake()

    def _reset(self, running: bool, host: bool) -> None:
        try:
            self.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=host)
        except RuntimeError:  # vLLM cannot reset calls whose steps are in flight
            if not self._steps:
                raise

    def programs(self) -> list[str]:
        """The programs that its scheduler knows and of which it has not heard that they have ended."""
        table = self.scheduler._table
        return [each for each in (*table._programs, *table._idle) if table.knows(each)]

    def ask(self, program_id: str, tokens: int) -> None:
        """Another client asks for so many tokens, for a program that it shares with the others."""
        key = f"guest {next(self.world.numbers)}"
        params = SamplingParams(
            max_tokens=tokens, ignore_eos=True, extra_args={"program_id": program_id, "call_id": key}
        )
        prompt = [*range(100, 110)]
        request = Request(key, prompt, params, None, client_index=1, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        self._wake()

    def left(self) -> Iterator[tuple[str, int]]:
        """What is left when all programs have ended, and how much of it."""
        pool, store = self.scheduler.kv_cache_manager.block_pool, self.scheduler._swap
        yield "requests in schedulers", len(self.scheduler.requests)
        yield "programs in schedulers", not self.scheduler._table.is_empty
        yield "blocks that nobody has", len(pool.blocks) - 1 - pool.get_num_free_blocks()
        if store is not None:  # where copies run beside steps, what programs have left makes way later
            contexts = store.tier.tree.contexts()
            yield "contexts in host memory", sum(context.is_needed for context in contexts)
            yield "blocks in host memory", 0 if store.copies_beside else store.stats().used

    def _send(self, outputs: dict[int, Any]) -> None:
        if 0 in outputs:  # what others asked for goes to them
            self.outputs.send(list(map(bytes, self._encoder.encode(outputs[0]))))

    def _tell(self, kind: str, request_id: str) -> None:
        ledger = self.scheduler._entries[request_id].ledger
        self._note(kind, ledger.program_id, ledger.call_id, self.name)


class _Step:
    """A step that the model computes.

    Args:
        plan: vLLM's.
        end_s: When its outputs are known.
    """

    def __init__(self, plan: Any, end_s: float) -> None:
        self.plan, self.end_s = plan, end_s
        self.sent: bytes | None = None  # the plan as it was when it was formed, if the worker reads it later
        self.output: Any = None  # None: the worker has not come to it


class _Socket:
    """An end of both channels, with the methods of a socket that vLLM's client uses."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self._frames: asyncio.Queue[Any] = asyncio.Queue()
        process.outputs = Channel(process.world, self._put)
        self.loop: Any = None

    def _put(self, frames: list[bytes]) -> None:
        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._frames.put_nowait, [Frame(each) for each in frames])

    def send_multipart(self, message: tuple[Any, ...], copy: bool) -> asyncio.Future[None]:
        del copy
        self.loop = asyncio.get_running_loop()
        self._process.inputs.send([bytes(each) for each in message[1:]])
        sent = self.loop.create_future()
        sent.set_result(None)
        return sent  # type: ignore[no-any-return]

    async def recv_multipart(self, copy: bool) -> Any:
        del copy
        return await self._frames.get()


class _MemoryClient(AsyncMPClient):  # type: ignore[misc]
    """vLLM's client, with sockets that lead to an `EngineProcess`."""

    def __init__(self, config: Any, process: EngineProcess) -> None:
        self.vllm_config = config
        self.encoder, self.decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        self.input_socket = _Socket(process)
        self.resources = BackgroundResources(None, output_socket=self.input_socket)
        self.core_engine = b"\0\0"
        self.core_engines = [self.core_engine]
        self.client_count, self.client_index = 1, 0
        self.utility_results: dict[int, Any] = {}
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()
        self._process = process
        process.on_death = self._cleaned_up

    def shutdown(self, timeout: float | None = None) -> None:
        del timeout
        self._process.kill()
        self._cleaned_up()

    def _cleaned_up(self) -> None:
        """What vLLM's monitor does when it sees that the process has ended, on a thread."""
        self.resources.engine_dead = True
        reader = self.resources.output_queue_task
        if reader is not None and not reader.get_loop().is_closed():
            reader.get_loop().call_soon_threadsafe(reader.cancel)


class SimulatedLLM(AccountingLLM):
    """The host's half of a replica: vLLM's front end as it is, but for its client."""

    def __init__(self, config: Any, process: EngineProcess) -> None:
        self.vllm_config, self.model_config = config, config.model_config
        self.scheduler_config, self.observability_config = config.scheduler_config, config.observability_config
        self.log_requests = self.log_stats = False
        self.logger_manager = self.admission_stats = self.output_handler = None
        self.renderer, self.input_processor = _front_of(config)
        self.output_processor = OutputProcessor(self.renderer.tokenizer, log_stats=False)
        self.engine_core = _MemoryClient(config, process)

    def shutdown(self, timeout: float | None = None) -> None:
        self.engine_core.shutdown(timeout)
        handler = self.output_handler
        if handler is not None and not handler.get_loop().is_closed():
            handler.get_loop().call_soon_threadsafe(handler.cancel)


_fronts: dict[int, tuple[Any, Any]] = {}
_renderers: list[Any] = []


def _front_of(config: Any) -> tuple[Any, Any]:
    """The renderer of all models, which are one, and an input processor. They keep nothing of a request, and take long
    to make."""
    if not _renderers:
        _renderers.append(renderer_from_config(config))
    if id(config) not in _fronts:
        _fronts[id(config)] = _renderers[0], InputProcessor(config, _renderers[0])
    return _fronts[id(config)]


_configs: dict[str, Any] = {}


def _config_of(arguments: Any) -> Any:
    transfer = arguments.kv_transfer_config
    memory = transfer and {**transfer.kv_connector_extra_config, "most_gib": None}  # what is free differs by run
    options = arguments.enable_prefix_caching, arguments.max_num_seqs, arguments.async_scheduling
    key = repr((arguments.additional_config, options, memory))
    if key not in _configs:
        init_none_hash(sha256)
        _configs[key] = config = arguments.create_engine_config()
        config.cache_config.num_gpu_blocks, config.cache_config.block_size = BLOCKS, BLOCK_TOKENS
        config.scheduler_config.async_scheduling = bool(arguments.async_scheduling)
    return _configs[key]


class _InOrder(dict[Any, None]):
    """A set of objects in the order in which they came, which does not depend on their addresses."""

    def add(self, each: Any) -> None:
        self[each] = None

    def discard(self, each: Any) -> None:
        self.pop(each, None)


class SimulatedLauncher(LocalLauncher):
    """Makes replicas whose processes are simulated.

    Attributes:
        processes: All that were ever started.
        starts: What becomes of the next starts; a start succeeds if the list is empty.
    """

    def __init__(
        self, engine_id: Any, on_account: Any, world: World, note: Callable[..., object], **options: Any
    ) -> None:
        super().__init__(engine_id, (), (), on_account, **options)
        self._world, self._note = world, note
        self.processes: list[EngineProcess] = []
        self.starts: list[str] = []
        self._hosts = Hosts()

    def make(self, model: str, arguments: Any) -> Any:
        replica = super().make(model, arguments)
        replica._handles = _InOrder()  # type: ignore[assignment]
        replica._construct = lambda launch: self._construct(launch, replica)  # type: ignore[method-assign]
        return replica

    def _construct(self, launch: Launch, replica: Any) -> SimulatedLLM:
        if launch._abandoned.is_set():
            raise start_cancelled()
        fate = self.starts.pop(0) if self.starts else ""
        if fate == "fail":
            raise self._world.rng.choice([OSError(28, "no space left on device"), RuntimeError("boom")])
        config = _config_of(replica._arguments)
        name = replica.engine_id.rpartition("/")[2]
        with mock.patch.dict(os.environ, {key: each for key, each in replica.environment.items() if key == VARIABLE}):
            process = EngineProcess(self._world, config, name, self._note, self._hosts)
        if fate == "hang":
            process.hang()
        self.processes.append(process)
        launch.processes.add(process)  # type: ignore[arg-type]
        launch.engine = SimulatedLLM(config, process)
        return launch.engine  # type: ignore[no-any-return]
