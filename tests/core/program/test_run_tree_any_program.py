"""Any program of branches and sequences, and any tree of runs: the graph is exact, or a DAG in order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Generator, Hashable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from named_runs import Runs, content_of

from weft.core.ids import CallId, ThreadId
from weft.core.program.structure.lineage import NOTHING
from weft.core.program.structure.run_tree import ROOT
from weft.core.program.structure.runs import RunKind

# -- any program of branches and sequences


class Plan:
    """A program of branches in sequences in branches, which runs in any order that it allows."""

    def __init__(self, seed: random.Random) -> None:
        self.seed = seed
        self.runs = Runs()
        self.expected: dict[str, set[str]] = {}
        self.names = (f"n{number}" for number in itertools.count())

    def make(self, depth: int) -> Any:
        """Make a call (a name), or a tuple of kind, name and parts."""
        kind = self.seed.choice(["call", "sequence", "stream", "fork"]) if depth else "call"
        if kind == "call":
            return next(self.names)
        return kind, next(self.names), [self.make(depth - 1) for _ in range(self.seed.randint(1, 3))]

    def open(self, part: Any, parent: Hashable, kind: RunKind) -> None:
        """Start the run of a part; a stream also starts the runs of all its parts."""
        name = part if isinstance(part, str) else part[1]
        self.runs.start(name, parent, kind=kind, stage="fork" if kind is RunKind.STAGE else None)
        if not isinstance(part, str) and part[0] == "stream":
            for each in part[2]:
                self.open(each, name, RunKind.STEP)

    def branch(self, part: Any, parent: Hashable, entry: set[str]) -> Generator[None, None, set[str]]:
        """Run a branch of a fork."""
        self.open(part, parent, RunKind.STAGE)
        return (yield from self.run(part, entry))

    def run(self, part: Any, entry: set[str]) -> Generator[None, None, set[str]]:
        """Run a part and yield wherever another part may continue. Return the calls that the next part waits for."""
        if isinstance(part, str):
            self.runs.open(part, part)
            self.expected[part] = entry
            yield
            self.runs.finish(part)
            return {part}
        kind, name, parts = part
        if kind == "fork":
            exits: set[str] = set()
            waiting = [self.branch(each, name, entry) for each in parts]
            running: list[Generator[None, None, set[str]]] = []
            most = self.seed.randint(1, 3)
            while waiting or running:
                while waiting and len(running) < most:
                    running.append(waiting.pop())
                branch = self.seed.choice(running)
                try:
                    next(branch)
                except StopIteration as stop:
                    running.remove(branch)
                    exits |= stop.value
                yield
        else:
            exits = entry
            for each in parts:
                if kind == "sequence":
                    self.open(each, name, self.seed.choice([RunKind.CODE, RunKind.STEP]))
                exits = yield from self.run(each, exits)
        self.runs.end(name)
        return exits


@given(st.randoms(use_true_random=False))
def test_the_graph_of_a_structured_program_is_exact(seed: random.Random) -> None:
    """For sequences and branches nested to any depth, in any interleaving, the edges are exactly the expected ones,
    without guesses, and the threads are chains."""
    plan = Plan(seed)
    top = ("sequence", "top", [plan.make(4) for _ in range(3)])
    plan.open(top, None, RunKind.CODE)
    for _ in plan.run(top, set()):
        pass
    assert plan.runs.parents == plan.expected
    assert not any(plan.runs.inexact.values())
    check_threads(plan.runs)


def check_threads(runs: Runs) -> None:
    """Assert that threads are chains, and that a call which can continue a thread does not begin a new one."""
    tails: dict[ThreadId, str] = {}
    for call, parents in runs.parents.items():  # in the order they started
        thread = runs.threads[call]
        if thread in tails:
            assert tails[thread] in parents
        else:
            assert not parents & set(tails.values())
        tails[thread] = call


@given(st.randoms(use_true_random=False), st.booleans())
def test_strands_in_one_run(seed: random.Random, with_lineage: bool) -> None:
    """Chains of calls run concurrently in one run, which does not report them. If the inputs show the chains, the exact
    edges and the threads are those of the chains, and calls of other chains that had ended are guesses. If not, each
    call comes after all possible parents, as guesses."""
    runs = Runs()
    runs.start("node")
    strands = [[f"{letter}{number}" for number in range(seed.randint(1, 4))] for letter in "abcd"[: seed.randint(2, 4)]]
    truth = {call: set(strand[max(0, n - 1) : n]) for strand in strands for n, call in enumerate(strand)}
    for first, *_ in strands:
        runs.open("node", first)
    in_flight = {strand[0]: strand[1:] for strand in strands}
    waiting: list[tuple[str, list[str]]] = []
    while in_flight or waiting:
        if waiting and (not in_flight or seed.random() < 0.5):
            before, (call, *rest) = waiting.pop(seed.randrange(len(waiting)))
            runs.open("node", call, inputs=content_of(before) if with_lineage else NOTHING)
            in_flight[call] = rest
        else:
            call = seed.choice(list(in_flight))
            rest = in_flight.pop(call)
            runs.tree.end_call(CallId(call), content_of(call))
            if rest:
                waiting.append((call, rest))
    above = ancestors(runs)
    if with_lineage:
        assert {call: parents - runs.inexact[call] for call, parents in runs.parents.items()} == truth
        assert {frozenset(each) for each in threads_of(runs)} == set(map(frozenset, strands))
    for call, parents in truth.items():
        assert parents <= above[call], "no true edge is lost"
        assert runs.parents[call] - runs.inexact[call] <= parents, "an exact edge is a true edge"
    runs.end("node")
    runs.call("join")
    assert {last for *_, last in strands} <= above.setdefault("join", ancestors(runs)["join"])
    assert runs.inexact["join"] == set()
    check_threads(runs)


def threads_of(runs: Runs) -> list[list[str]]:
    """Return the calls of each thread."""
    threads: dict[ThreadId, list[str]] = {}
    for call, thread in runs.threads.items():
        threads.setdefault(thread, []).append(call)
    return list(threads.values())


def ancestors(runs: Runs, *, with_guesses: bool = True) -> dict[str, set[str]]:
    """Return the ancestors of each call, by way of guesses or not."""
    above: dict[str, set[str]] = {}
    for call, found in runs.parents.items():
        parents = found if with_guesses else found - runs.inexact[call]
        above[call] = set(parents).union(*(above[parent] for parent in parents))
    return above


step = st.tuples(st.sampled_from(["start", "begin", "open", "finish", "fail", "end"]), st.integers(0, 1_000_000))


@given(st.lists(step, min_size=10, max_size=80), st.sampled_from([1, 1000]))
def test_any_tree_of_runs_gives_a_dag_in_order(steps: list[tuple[str, int]], keep: int) -> None:
    """Runs nest, overlap, outlive each other and fail at random, with random inputs and with little or much memory. The
    parents of a call had finished before it, and each thread is a chain. No parent is an ancestor of another, unless it
    is a certain parent and an ancestor by way of guesses only."""
    runs = Runs()
    runs.tree._ancestry._keep = runs.tree._ancestry._limit = keep
    containers: list[Hashable] = [ROOT, "never reported"]
    in_flight: list[str] = []
    finished: list[str] = []
    names = itertools.count()
    for action, number in steps:
        parent = containers[number % len(containers)]
        kind = list(RunKind)[number % 3]
        if action == "start":
            fresh = next(names)
            runs.start(fresh, parent, kind=kind)
            containers.append(fresh)
        elif action in ("begin", "open"):
            call = f"c{next(names)}"
            known = content_of(*(each for each in finished if (number >> finished.index(each) % 20) & 1), *in_flight)
            if action == "begin":
                runs.begin(call, parent, inputs=known, kind=kind)
            else:
                runs.open(parent, call, inputs=known)
            assert runs.parents[call] <= set(finished)
            in_flight.append(call)
        elif action in ("finish", "fail") and in_flight:
            call = in_flight.pop(number % len(in_flight))
            if action == "finish":
                was_open = CallId(call) in runs.tree._calls  # its run may have ended
                runs.finish(call)
                finished += [call] if was_open else []
            else:
                runs.tree.drop_call(CallId(call))
                runs.end(call)
        elif action == "end" and parent != ROOT:
            runs.end(parent)
            containers.remove(parent)

    possible, certain = ancestors(runs), ancestors(runs, with_guesses=False)
    pairs = ((call, *pair) for call, parents in runs.parents.items() for pair in itertools.permutations(parents, 2))
    for call, parent, other in pairs:
        above = possible[other] if parent in runs.inexact[call] else certain[other]
        assert parent not in above, "a parent is an ancestor of another parent"
    last: dict[ThreadId, str] = {}
    for call, parents in runs.parents.items():
        before = last.get(runs.threads[call])
        assert before is None or before in parents or before not in finished, (
            "a thread is a chain, except for failed attempts"
        )
        if call in finished:
            last[runs.threads[call]] = call
