"""Faults planted in Weft's own code, one after the other, and after how many lives each is found.

PYTHONPATH=tests/support:tests/simulated:tests/fuzz python tests/simulated/mutations.py --seeds 300

A planted fault that no life finds is a hole in the simulation, or code that nothing needs. First, each life is lived
without a fault, to see which of the faults' lines it reaches: any other fault would not change it, so it is not lived
again for that.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Annotated, Any, Final, NamedTuple

import typer
from rich.console import Console
from simulate import quiet
from simulated_life import Life


class Mutation(NamedTuple):
    """A fault: in a module of Weft, one text stands in place of another."""

    module: str
    old: str
    new: str

    @property
    def name(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.module}: {old} → {new}" if new != "pass" else f"{self.module} without: {old}"


_HOST, _REPLICAS, _ROUTING = "weft.engine.host.", "weft.engine.replicas.", "weft.core.routing."
_KV: Final = "weft.engine.kv_cache."

MUTATIONS: Final = (
    # -- calls and programs in the front end
    Mutation(_HOST + "in_flight", "call.endpoint.admission.leave(now_s)", "pass"),
    Mutation(_HOST + "in_flight", "self.table.leave(call.row, now_s)", "pass"),
    Mutation(_HOST + "in_flight", "self.ended = True\n        if", "if"),
    Mutation(_HOST + "in_flight", "if not scope.expired():\n                raise", "pass"),
    Mutation(_HOST + "in_flight", "call.row.account = account", "pass"),
    Mutation(_HOST + "in_flight", "for call in calls:\n            call.abort()", "pass"),
    Mutation(_HOST + "call_path", "call.outcome = CallState.FINISHED\n        except", "pass\n        except"),
    Mutation(_HOST + "call_path", "call.future.add_done_callback(lambda _future: self.leave(call))", "pass"),
    Mutation(_HOST + "call_path", "finally:\n            future.cancel()", "finally:\n            pass"),
    Mutation(_HOST + "call_path", "if call.awaits_account(outcome):", "if False:"),
    Mutation(_HOST + "call_path", "undo.callback(endpoint.admission.leave, now_s)", "pass"),
    Mutation(_HOST + "call_path", "if not math.isnan(call.of_program.end_s):", "if False:"),
    Mutation(_HOST + "call_path", "program.reports.call_left(identity.call_id, now_s, Account(), state)", "pass"),
    Mutation(_HOST + "scheduler_messages", "program.reports.call_settled(row.identity.call_id, row.account)", "pass"),
    Mutation(_HOST + "in_flight", "if self.ended or not math.isnan(self.of_program.end_s):", "if False:"),
    Mutation(_HOST + "backend", "self.in_flight.abort(program_id)  #", "pass  #"),
    Mutation(_HOST + "learning", "if self._table.get(identity.program_id) is None:", "if False:"),
    Mutation(
        _HOST + "in_flight",
        "        now_s = self._clock()\n        account",
        "        outcome = call.outcome\n        now_s = self._clock()\n        account",
    ),
    Mutation(_HOST + "backend", "self.sessions.end(row.info)", "pass"),
    Mutation(_HOST + "backend", "self.messages.program_ended(program_id, state)", "pass"),
    Mutation(_HOST + "backend", "self.in_flight.abort(program_id)\n        self.idle", "self.idle"),
    Mutation(_HOST + "scheduler_messages", "self._is_sending = False\n                    return", "return"),
    Mutation(_HOST + "scheduler_messages", "program, row = waiting.pop(key)", "program, row = waiting[key]"),
    Mutation("weft.core.process_table", "row.attained.total_service_s += more.service_s", "pass"),
    Mutation("weft.core.process_table", "or more_s < 0", ""),
    Mutation("weft.core.process_table", "row.account += call.account", "pass"),
    Mutation(
        "weft.core.process_table",
        "row.attained.fold(call.inherited",
        "row.attained.service_s = 0.0\n            row.attained.fold(Attained()",
    ),
    Mutation(
        "weft.core.process_table", "del row.in_flight[call_id], thread.active[call_id]", "del thread.active[call_id]"
    ),
    # -- replicas
    Mutation(
        _REPLICAS + "dispatch_queue",
        "self.replicas.leave(engine_id)\n        self.dispatch_waiting()",
        "self.replicas.leave(engine_id)",
    ),
    Mutation(_REPLICAS + "dispatch_queue", "self.leave(call.assigned.result())", "pass"),
    Mutation(_REPLICAS + "dispatch_queue", "self._waiting.remove(call)", "pass"),
    Mutation(
        _REPLICAS + "router",
        "finally:\n                    self._queue.leave(engine_id)",
        "finally:\n                    pass",
    ),
    Mutation(_REPLICAS + "router", "if delivered.has_begun or len(tried)", "if len(tried)"),
    Mutation(
        _REPLICAS + "router",
        "thief = moved.engine_id if self._queue.replicas.move(moved.engine_id) else None",
        "thief = moved.engine_id",
    ),
    Mutation(_REPLICAS + "router", "tried.pop()", "pass"),
    Mutation(
        _REPLICAS + "router", "params = _sent_later(sampling_params, now_s() - since_s)", "params = sampling_params"
    ),
    Mutation("weft.engine.vllm.accounting", "self.has_begun = True", "pass"),
    Mutation(_REPLICAS + "router", "delivered.add(output)", "pass"),
    Mutation(_REPLICAS + "router", "if delivered.is_whole", "if False"),
    Mutation(_REPLICAS + "router", "yield output", "yield output; yield output"),
    Mutation(_REPLICAS + "router", "self._on_death(engine_id)", "pass"),
    Mutation(_REPLICAS + "router", "len(tried) == ReplicaLostError.MOST_ATTEMPTS", "False"),
    Mutation(_REPLICAS + "router", "raise ReplicaLostError(engine_id, delivered.tokens, len(tried))", "raise OSError"),
    Mutation(
        _REPLICAS + "router",
        "output = await anext(outputs, None)\n                    return",
        "output = None\n                    return",
    ),
    Mutation(_REPLICAS + "router", "self.failures[call_id] = error", "pass"),
    Mutation(_REPLICAS + "stealer", "waiting.scope.reschedule(asyncio.get_running_loop().time())", "pass"),
    Mutation(_REPLICAS + "stealer", "del mine[call]", "pass"),
    Mutation(_REPLICAS + "stealer", 'answer["taken"] if answer is not None else ()', "calls"),
    Mutation(
        _REPLICAS + "supervisor",
        "task.cancel()\n        await asyncio.gather(*tasks",
        "pass\n        await asyncio.gather(*tasks",
    ),
    Mutation(_REPLICAS + "supervisor", "self._starting[engine_id] = task", "pass"),
    Mutation(_REPLICAS + "local", "for handle in list(self._handles):\n            handle.cancel()", "pass"),
    Mutation(_REPLICAS + "local", "self._waits_for_vllm = True", "pass"),
    Mutation(_REPLICAS + "local", "await settled(in_thread(launch.abandon))", "pass"),
    Mutation(_ROUTING + "replicas", "if self.loads.calls(engine_id) is None:", "if engine_id not in self._replicas:"),
    Mutation(
        _ROUTING + "replicas",
        "if replica.state is ReplicaState.STARTING:\n            self._enter",
        "if True:\n            self._enter",
    ),
    Mutation(_ROUTING + "admission", "self._calls -= 1", "self._calls -= 2"),
    # -- vLLM's front end
    Mutation("weft.engine.vllm.accounting", "told = report.account or told", "told = report.account or {}"),
    Mutation("weft.engine.vllm.accounting", "self.on_account(call_id, account)", "pass"),
    Mutation(
        "weft.engine.vllm.chat",
        "return self._failures.pop(CallId(request.request_id), None)",
        "return self._failures.get(CallId(request.request_id))",
    ),
    Mutation("weft.engine.vllm.chat", "raise asyncio.CancelledError", "pass"),
    Mutation("weft.engine.vllm.watchdog", "kill_tree(processes)", "pass"),
    Mutation("weft.engine.vllm_compat.control", "if llm.errored and not answer.done():", "if False:"),
    # -- the scheduler
    Mutation("weft.engine.scheduler.call_table", "if program.requests == 0:", "if program.requests < 0:"),
    Mutation("weft.engine.scheduler.call_table", "program.has_ended = True", "pass"),
    # -- host memory
    Mutation(_KV + "store", "self.shared.withdraw(slot)", "pass"),
    Mutation(_KV + "store", "or self._plan_of[slot] > self._reported + 1", ""),
    Mutation(_KV + "store", "slot in self._going_out or", ""),
    Mutation(_KV + "store", "self.tier.unpin(end)", "pass"),
    Mutation(_KV + "store", "if slot in lost:\n                    self._lose(slot, key)", "pass"),
    Mutation(_KV + "store", "self._out[slot] = self._spill.pop(slot)", "continue"),
    Mutation(_KV + "ahead", "self._store.has_kept(keys, fetch.slots, fetch.number)", "True"),
    Mutation(_KV + "ahead", "pool.touch(there)\n        self._make_room(count, store.now_s)", "pass"),
    # -- files
    Mutation("weft.core.trace.recorder", "os.ftruncate(file, size)", "pass"),
    Mutation("weft.core.files", "new.unlink(missing_ok=True)", "pass"),
    Mutation(_HOST + "learning", "self._path.replace(aside)", "pass"),
    Mutation(_HOST + "learning", "os.fsync(file.fileno())", "self._is_saved = True; os.fsync(file.fileno())"),
    Mutation(
        _HOST + "learning",
        "with replacing(self._path, 0o600) as file:",
        "self._is_saved, self._saved_graphs = True, learned\n        with replacing(self._path, 0o600) as file:",
    ),
    # -- `weft.connect`
    Mutation("weft.engine.remote.chat", "self._on_account(CallId(request.request_id), account)", "pass"),
)


def functions_of(module: Any) -> Iterator[FunctionType]:
    """The functions and methods that a module defines."""
    owners = [module, *(each for each in vars(module).values() if inspect.isclass(each))]
    for owner in owners:
        if getattr(owner, "__module__", module.__name__) == module.__name__:
            for each in vars(owner).values():
                found = each.fget if isinstance(each, property) else getattr(each, "__func__", each)
                found = inspect.unwrap(found) if callable(found) else found
                if isinstance(found, FunctionType) and found.__module__ == module.__name__:
                    yield found


def _codes(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)


@contextmanager
def planted(mutation: Mutation) -> Iterator[None]:
    """The fault is in the code during the block.

    Raises:
        ValueError: The text is not there exactly once, or is in no function.
    """
    module = importlib.import_module(mutation.module)
    source = inspect.getsource(module)
    if source.count(mutation.old) != 1:
        raise ValueError(f"{mutation.name}: the text is there {source.count(mutation.old)} times")
    compiled = compile(source.replace(mutation.old, mutation.new), str(module.__file__), "exec", dont_inherit=True)
    changed = {code.co_qualname: code for code in _codes(compiled)}
    before = {function: function.__code__ for function in functions_of(module)}
    begins = source[: source.index(mutation.old)].count("\n") + 1
    hit = [each for each, code in before.items() if code.co_firstlineno <= begins and each.__qualname__ in changed]
    function = max(hit, key=lambda each: each.__code__.co_firstlineno, default=None)
    if function is None:
        raise ValueError(f"{mutation.name}: the text is in no function")
    try:
        function.__code__ = changed[function.__qualname__]
        yield
    finally:
        function.__code__ = before[function]


def reached(seed: int, mutations: Sequence[Mutation]) -> set[Mutation]:
    """The faults whose lines a life without any of them reaches."""
    places: dict[str, dict[int, list[Mutation]]] = {}  # by file and line
    for mutation in mutations:
        module = importlib.import_module(mutation.module)
        source = inspect.getsource(module)
        begin = source.index(mutation.old)
        for line in range(source[:begin].count("\n"), source[: begin + len(mutation.old)].count("\n") + 1):
            places.setdefault(str(module.__file__), {}).setdefault(line + 1, []).append(mutation)
    found: set[Mutation] = set()

    def in_function(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            found.update(places[frame.f_code.co_filename].get(frame.f_lineno, ()))
        return in_function

    sys.settrace(lambda frame, _event, _: in_function if frame.f_code.co_filename in places else None)
    try:
        Life(seed).run()
    finally:
        sys.settrace(None)
    return found


def lives_until_found(mutation: Mutation, most: int, seeds: Container[int] | None = None) -> tuple[int, str]:
    """How many lives it took to find a planted fault, and what was wrong; 0 if no life did.

    Args:
        mutation: The fault.
        most: Lives, from seed 0 on.
        seeds: Those that reach the fault; None: any may.
    """
    with planted(mutation):
        for seed in range(most):
            if seeds is not None and seed not in seeds:
                continue
            try:
                problems = Life(seed).run()
            except Exception as error:
                problems = [f"{type(error).__name__}: {error}"]
            if problems:
                return seed + 1, problems[0]
    return 0, ""


def main(
    seeds: Annotated[int, typer.Option(min=1, help="The most lives for each fault.")] = 300,
    only: Annotated[str, typer.Option(help="Only faults whose name has this.")] = "",
) -> None:
    """Plant each fault, live until it is found, and print a line for each."""
    quiet()
    console = Console(soft_wrap=True, markup=False, highlight=False)
    mutations = [mutation for mutation in MUTATIONS if only in mutation.name]
    by_seed = [reached(seed, mutations) for seed in range(seeds)]
    missed = []
    for mutation in mutations:
        begin_s = time.monotonic()
        reach = {seed for seed, those in enumerate(by_seed) if mutation in those}
        lives, problem = lives_until_found(mutation, seeds, reach)
        result = f"{lives:4} lives" if lives else " not found"
        took_s = time.monotonic() - begin_s
        console.print(f"{result}  {mutation.name}  ({len(reach)} reach it, {took_s:.0f} s) {problem:.150}")
        missed += [] if lives else [mutation.name]
    console.print(f"{len(missed)} of {len(mutations)} were not found in {seeds} lives")


if __name__ == "__main__":
    typer.run(main)
