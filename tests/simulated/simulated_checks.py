"""What must hold in a simulated life: while it lasts, when all is calm, and after the end."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

from history import check
from simulated_clients import MODEL
from simulated_loop import World

from weft.core.accounts import Account
from weft.core.policies.history import ProgramEnd
from weft.core.process_rows import CallRow, ProgramInfo, ProgramRow, ProgramState
from weft.core.program.graph import CallState, ProgramGraph
from weft.core.program.observer import ProgramObserver
from weft.core.trace.format import read

if TYPE_CHECKING:
    from simulated_life import Life


MOST_ON_WAY_S: Final = 1.0  # from a call's admission to its replica and back, with its prompt's rendering
SETTLED_S: Final = 3.0  # by then, a call's final account has come
OUTCOMES: Final = {"finished": CallState.FINISHED, "DeadlineError": CallState.FAILED}


class Witness(ProgramObserver):
    """Sees what the engine tells observers, and looks at the rows of programs now and then.

    Args:
        world: Its turns are noted.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.graphs: dict[str, ProgramGraph] = {}
        self.arrived: Counter[str] = Counter()
        self.arrived_s: dict[str, float] = {}
        self.left: defaultdict[str, list[tuple[CallRow, CallState]]] = defaultdict(list)
        self.told: dict[str, Account] = {}  # the latest account of each call
        self.started: Counter[str] = Counter()
        self.ended: defaultdict[str, list[ProgramRow]] = defaultdict(list)
        self.outputs: dict[str, dict[str, int]] = {}  # of each program that has ended: its calls' output tokens by then
        self.programs_of: dict[str, str] = {}
        self.left_s: dict[str, float] = {}
        self.ended_s: dict[str, float] = {}
        self.learned_from = 0  # programs
        self.wrong: list[str] = []  # what it saw at once
        self._removed: dict[str, int] = {}  # replicas that are being removed: how often that was begun
        self._seen: dict[str, tuple[float, float, float]] = {}

    def watch(self, group: Any) -> None:
        """See which replicas calls get, and which of them take calls."""
        states, queue = group.states, group._queue

        def chosen(method: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*args: Any) -> Any:
                result = method(*args)
                engine_id = args[0] if result is True else result
                if result and states.state(engine_id) != "ready":
                    self.wrong.append(f"a call goes to {engine_id}, which is {states.state(engine_id)}")
                return result

            return noted

        def dispatch(arrival: Any, avoid: Any) -> Any:
            deaths = {each.engine_id: each.deaths for each in states.health(0.0)}
            unharmed = [each for each in avoid if deaths.get(each) == 0 and states.state(each) == "ready"]
            if unharmed:
                self.wrong.append(f"a call avoids {unharmed}, on which it has not failed")
            return dispatched(arrival, avoid)

        def drain(engine_id: Any) -> None:
            self._removed[engine_id] = self._removed.get(engine_id, 0) + 1
            drained(engine_id)

        def resume(engine_id: Any, *args: Any, **kwargs: Any) -> None:
            self._removed.pop(engine_id, None)
            resumed(engine_id, *args, **kwargs)

        dispatched, drained, resumed = queue.dispatch, states.drain, states.resume
        states.dispatch, states.move = chosen(states.dispatch), chosen(states.move)
        states.drain, states.resume, queue.dispatch = drain, resume, dispatch

    def look_often(self, life: Life) -> None:
        """What can be wrong for a moment only."""
        engine: Any = life.engine
        group, loop = next(iter(engine._groups.values())), engine._loop._loop
        waiting = group._queue._waiting if not (loop.steps or loop.callbacks) else ()
        if any(call.assigned.cancelled() for call in waiting):
            self.wrong.append("a call that was cancelled waits for a replica")
        if self._removed:
            states = group.states
            for engine_id in list(self._removed):
                state = states.state(engine_id)
                if state not in (None, "draining"):
                    self.wrong.append(f"{engine_id} is {state} while it is being removed")
                if state != "draining":
                    del self._removed[engine_id]

    def accounts(self, on_account: Callable[[Any, Account], None]) -> Callable[[Any, Account], None]:
        """`on_account`, which is noted."""

        def note(call_id: Any, account: Account) -> None:
            if account.service_s < self.told.get(call_id, account).service_s - 1e-9:
                self.wrong.append(f"the account of {call_id} fell from {self.told[call_id]} to {account}")
            self.told[call_id] = account
            on_account(call_id, account)

        return note

    def begun(self, life: Life, call_id: str, said_s: float) -> None:
        """A replica begins to run a call, whose account says how long it has waited: here, for a replica, and on others
        before. A call that waits in a host which stands still is not known to wait, and the prompts of a replica's own
        start come from nobody."""
        if call_id not in self.arrived_s:
            return
        real_s = self._world.now_s - self.arrived_s[call_id]
        is_late = {"pause", "jump", "late"} & set(life.faults.happened)
        if not is_late and abs(real_s - said_s) > MOST_ON_WAY_S:
            self.wrong.append(f"{call_id} has waited {real_s} s, and its account says {said_s} s")

    def program_started(self, info: ProgramInfo, now_s: float) -> None:
        del now_s
        self.started[info.program_id] += 1

    def call_arrived(self, identity: Any, graph: ProgramGraph, now_s: float) -> None:
        self.arrived_s[identity.call_id] = now_s
        self.graphs[graph.program_id] = graph
        self.arrived[identity.call_id] += 1
        self.programs_of[identity.call_id] = identity.program_id

    def call_left(self, row: CallRow, outcome: CallState, now_s: float) -> None:
        del now_s
        self.left_s[row.identity.call_id] = self._running_s()
        self.left[row.identity.call_id].append((row, outcome))

    def program_ended(self, row: ProgramRow, state: ProgramState, now_s: float) -> None:
        del now_s
        program_id = row.info.program_id
        self.ended_s[program_id] = self._running_s()
        self.ended[program_id].append(row)
        own = [rows[0] for call_id, rows in self.left.items() if self.programs_of[call_id] == program_id]
        has_result = any(outcome is CallState.FINISHED for _, outcome in own)
        self.learned_from += has_result and state in (ProgramState.FINISHED, ProgramState.FAILED)
        left = [row for row, _ in own]
        tokens = {each.identity.call_id: each.account.output_tokens for each in left}
        self.outputs[program_id] = {call_id: count for call_id, count in tokens.items() if count}

    def _running_s(self) -> float:
        """The time without that in which the host stood still."""
        return self._world.now_s - self._world.stopped_s

    def look(self, life: Life) -> Iterator[str]:
        """What is wrong with the table and with the counts now."""
        engine: Any = life.engine
        engine.table.check_integrity()
        if life.remote is not None:
            life.remote.table.check_integrity()
        for row in engine.table:
            attained = row.attained
            now = attained.service_s, attained.total_service_s, attained.total_wait_s
            before = self._seen.get(row.info.program_id, (0.0, 0.0, 0.0))
            if any(old > new + 1e-9 for old, new in zip(before, now, strict=True)):
                yield f"the row of {row.info.name} went from {before} to {now}"
            self._seen[row.info.program_id] = now
        group = next(iter(engine._groups.values()))
        waiting = sum(not call.assigned.done() for call in group._queue._waiting)
        has_room = [each.engine_id for each in life.health() if each.calls < life.max_calls and each.state == "ready"]
        if waiting and has_room:
            yield f"{waiting} calls wait, and {has_room} have room"
        shown = sum(len(row.in_flight) for row in engine.table)
        if shown != len(engine._in_flight):
            yield f"{shown} calls are in the table, and {len(engine._in_flight)} are in flight"
        for call in engine._in_flight._calls.values():
            if call.of_program.end_s == call.of_program.end_s and not call.ended:
                yield f"{call.identity.call_id} goes on although its program has ended"
        calls, in_flight = group.endpoint.admission.calls, len(engine._in_flight)
        if life.server is not None:  # a request that was admitted has not made its call yet
            in_flight += sum(each.is_reserved for each in life.server.served.requests._requests.values())
        if calls != in_flight:
            yield f"{calls} calls are admitted, and {in_flight} are in flight"

    def problems(self) -> Iterator[str]:
        """What is wrong when all programs have ended."""
        yield from self._unlike_graphs()
        for call_id, count in self.arrived.items():
            if count != 1 or len(self.left[call_id]) != 1:
                yield f"call {call_id} arrived {count} times and left {len(self.left[call_id])} times"
        sums: defaultdict[str, float] = defaultdict(float)
        for call_id, rows in self.left.items():
            for row, outcome in rows:
                sums[self.programs_of[call_id]] += row.account.service_s
                service_s, told_s = row.account.service_s, self.told.get(call_id, Account()).service_s
                if service_s < told_s - 1e-9 and outcome is CallState.FINISHED:
                    yield f"call {call_id} has {service_s} s in its row, and its last output said {told_s} s"
        for program_id, count in self.started.items():
            if count != 1 or len(self.ended[program_id]) != 1:
                yield f"program {program_id} started {count} times and ended {len(self.ended[program_id])} times"
            for row in self.ended[program_id][:1]:
                if abs(row.account.service_s - sums[program_id]) > 1e-6:
                    yield f"{row.info.name} has {row.account.service_s} s, its calls have {sums[program_id]} s"

    def _unlike_graphs(self) -> Iterator[str]:
        """Calls whose states and accounts in the graphs of their programs are not those that they left with."""
        for graph in self.graphs.values():
            for node in graph.calls:
                if node.state in (CallState.NAMED, CallState.RUNNING):
                    yield f"call {node.call_id} is {node.state} in the graph of its program, which has ended"
                for row, outcome in self.left.get(node.call_id, ()):
                    if (node.state, node.account) != (outcome, row.account):
                        shown = f"{node.state} with {node.account}"
                        yield f"call {node.call_id} left {outcome} with {row.account}, and its graph has {shown}"


class RemoteWitness(ProgramObserver):
    """Sees which accounts a client of `weft.connect` has of its finished calls."""

    def __init__(self) -> None:
        self.finished: dict[str, Account] = {}

    def call_left(self, row: CallRow, outcome: CallState, now_s: float) -> None:
        del now_s
        if outcome is CallState.FINISHED:
            self.finished[row.identity.call_id] = row.account

    def unlike(self, life: Life) -> Iterator[str]:
        """Calls whose costs are others here than at the server. Who breaks a stream off does not hear of its last."""
        at_server = {call_id.rpartition("/")[2]: rows for call_id, rows in life.witness.left.items()}  # without scopes
        whole = {event.call for event in life.history.events if (event.kind, event.value) == ("return", "finished")}
        for call_id, account in self.finished.items():
            for row, _ in at_server[call_id] if call_id in whole else ():
                mine, its = ((each.service_s, each.output_tokens) for each in (account, row.account))
                if abs(mine[0] - its[0]) > 1e-6 or mine[1] != its[1]:
                    yield f"call {call_id} cost {mine} for its client, and {its} for the server"


def at_rest(life: Life) -> Iterator[str]:
    """What is left of programs when all have ended and nothing fails any more, and which replicas do not run."""
    engine: Any = life.engine
    group = next(iter(engine._groups.values()))
    live = [each for each in life.launcher.processes if each.is_alive()]
    health = group.states.health(life.world.now_s)
    left = {
        "calls in flight": len(engine._in_flight),
        "admitted calls": group.endpoint.admission.calls,
        "dispatched calls": sum(each.calls for each in health),
        "waiting calls": len(group._queue),
        "unanswered calls": len(group.llm.unanswered._calls),
        "failures of calls": len(group.llm.failures),
        "rows": len(engine.table),
        "sessions": len(engine.sessions),
        "replicas that are not ready": sum(each.state != "ready" for each in health),
        "processes without a replica": len(live) - len(health),
        "unsent messages": 0 if engine.programs.messages.is_idle else 1,
        "requests in front ends": sum(
            len(replica.llm.output_processor.request_states) for replica in group.supervisor.replicas() if replica.llm
        ),
        "tasks of clients": sum(task.get_loop() is life.users for task in life.world.tasks),
        "HTTP requests": len(life.server.served.requests._requests) if life.server is not None else 0,
        "programs of HTTP clients": len(life.server.served.programs) if life.server is not None else 0,
        "idle checks": len(engine.programs.idle),
        "programs with a forecast": len(engine.forecasts),
    }
    if life.remote is not None:
        remote: Any = life.remote
        left |= {
            "rows at the client": len(remote.table),
            "calls in flight at the client": len(remote._in_flight),
            "unsent messages of the client": 0 if remote.programs.messages.is_idle else 1,
            "programs with a forecast at the client": len(remote.forecasts),
        }
    in_processes = [found for each in live for found in each.left()]
    yield from (f"{count} {what} are left" for what, count in [*left.items(), *in_processes] if count)
    engine.table.check_integrity()


def after_end(life: Life) -> Iterator[str]:
    """After the engine's end, nobody waits, no task and no process is left, and the trace tells what happened."""
    if life.world.tasks:
        yield f"tasks are left: {life.world.waits()}"
    alive = [each.name for each in life.launcher.processes if each.is_alive()]
    if alive:
        yield f"the processes {alive} are left"
    names = life.call_names
    for problem in [*check(life.history.events), *life.witness.problems()]:
        yield reduce(lambda text, call: text.replace(*call), names.items(), problem)
    # When a host stands still, the second of two steps may end together with the first, and its service is zero.
    may_be_free = any(each._most_steps > 1 for each in life.launcher.processes)
    for event in life.history.events if life.door != "http" else ():
        if event.kind != "return" or event.value not in OUTCOMES:
            continue
        if life.door == "connect" and event.value != "finished":  # its deadlines are its own
            continue
        left = life.witness.left.get(event.call, [])
        if {outcome for _, outcome in left} - {OUTCOMES[event.value]}:
            yield f"{names[event.call]} ended for its client with {event.value}, and for the engine {left[0][1]}"
        tokens = sum(each.kind == "token" and each.call == event.call for each in life.history.events)
        for account in (row.account for row, _ in left if event.value == "finished"):
            of_choices = (tokens, 2 * tokens)  # of one choice, or of two
            if not (account.service_s or may_be_free) or account.output_tokens not in of_choices:
                yield f"{names[event.call]} finished with {tokens} tokens, and its account is {account}"
    yield from _unsettled(life)
    yield from _recorded(life)
    yield from life.remote_witness.unlike(life)
    if life.earlier is not None and hasattr(life, "engine"):
        learned = life.witness.learned_from
        if life.engine.forecasts.learned != learned:
            yield f"the engine has learned from {life.engine.forecasts.learned} programs of {learned}"
        # What ends after a sudden end of the engine is saved when the process ends.
        history: Any = life.engine._history
        if life.disk_fails_at_end:  # what could not be written is in memory until it can
            life.disk.fault = ""
            history.save()
            life.disk.fault = "unsynced"
            history.add(MODEL, [ProgramEnd(None, "late", 1, is_known=True)])  # as a scheduler reports it
            history.save()
            life.disk.fault = ""
            history.save()
        yield from life.earlier.problems(
            learned, history._history.to_json(), is_saved=not (life.disk.fault or life.wants_shutdown)
        )


def _unsettled(life: Life) -> Iterator[str]:
    """Calls that were aborted, whose final account their replica knows and the table does not. Who leaves early aborts
    the call."""
    witness = life.witness
    for name in life.left_early:
        call_id = next(call_id for call_id, each in life.call_names.items() if each == name)
        if any(outcome is CallState.FINISHED for _, outcome in witness.left[call_id]):
            yield f"{name} went on when its client had left"
    if {"hang", "freeze", "slow", "late", "start_hangs"} & set(life.faults.happened):
        return  # the question may take long
    alive = (each for each in life.launcher.processes if each.died_s > life.calm_s)
    final_s = {call_id: service_s for each in alive for call_id, service_s in each.aborted_s.items()}
    for call_id, service_s in final_s.items():
        rows = witness.left.get(call_id, [])
        program_id = witness.programs_of.get(call_id, "")
        has_time = witness.ended_s.get(program_id, 0.0) > witness.left_s.get(call_id, 0.0) + SETTLED_S
        if has_time and rows and abs(rows[0][0].account.service_s - service_s) > 1e-6:
            said_s = rows[0][0].account.service_s
            yield f"{life.call_names.get(call_id, call_id)} has {said_s} s, and its replica counts {service_s} s"


def _recorded(life: Life) -> Iterator[str]:
    """The trace has each program that has ended, with its calls that had an output by then."""
    has_lines = life.trace_file.exists() and life.trace_file.stat().st_size > 0
    recorded = {each.program: each for each in read(life.trace_file)} if has_lines else {}
    expected = {program_id: calls for program_id, calls in life.witness.outputs.items() if calls}
    if "disk" in life.faults.happened or life.disk_fails_at_end:  # after an error nothing more is written
        expected = {program_id: calls for program_id, calls in expected.items() if program_id in recorded}
    for program_id in recorded.keys() | expected.keys():
        calls = recorded[program_id].calls if program_id in recorded else ()
        found = {call.call_id: call.output_tokens for call in calls}
        wanted = {**expected.get(program_id, {})}
        for call_id in found.keys() - wanted.keys():  # they were leaving when the program was ended
            if life.witness.programs_of.get(call_id) == program_id and life.witness.left[call_id]:
                wanted[call_id] = life.witness.left[call_id][0][0].account.output_tokens
        if found != wanted:
            yield f"the trace has the outputs {found} of {program_id}, and there were {wanted}"
