"""Threads that a client names: what their calls come after, and what comes after them."""

from __future__ import annotations

import pytest

from weft.core.accounts import Account
from weft.core.ids import CallId, ThreadId
from weft.core.process_rows import CallIdentity
from weft.core.program import Program
from weft.core.program.graph import CallState
from weft.core.program.structure.named_threads import MOST_OPEN, NamedThreads


class Agents:
    """A program whose calls are named by letters."""

    def __init__(self) -> None:
        self.program = Program()
        self.threads = NamedThreads()
        self.names: dict[CallId, str] = {}
        self.identities: dict[str, CallIdentity] = {}

    def begin(self, name: str, thread: str | None = None, parent: str | None = None) -> list[ThreadId]:
        """Returns the threads that end."""
        identity, ended = self.threads.start_call(
            self.program.reports, ThreadId(thread) if thread else None, ThreadId(parent) if parent else None, label=name
        )
        self.identities[name], self.names[identity.call_id] = identity, name
        return ended

    def finish(self, name: str) -> None:
        identity = self.identities[name]
        self.program.reports.end_call(identity.call_id, identity)
        self.threads.leave(identity)

    def call(self, name: str, thread: str | None = None, parent: str | None = None) -> None:
        self.begin(name, thread, parent)
        self.finish(name)

    def after(self, name: str) -> str:
        """The calls that a call comes after, in their order; guesses have a question mark."""
        edges = self.program.graph[self.identities[name].call_id].parents
        return " ".join(self.names[edge.parent] + ("" if edge.exact else "?") for edge in edges)


@pytest.fixture
def agents() -> Agents:
    return Agents()


def test_a_sub_agent_forks_from_its_parent_and_the_parent_goes_on_after_it(agents: Agents) -> None:
    """Two sub-agents that take turns do not come after each other."""
    agents.call("main", "m")
    for name, thread in (("left", "l"), ("right", "r"), ("left again", "l"), ("right again", "r")):
        agents.call(name, thread, "m")
    agents.call("main again", "m")
    assert agents.after("left") == agents.after("right") == "main"
    assert (agents.after("left again"), agents.after("right again")) == ("left", "right")
    assert agents.after("main again") == "left again right again"


def test_the_calls_without_a_thread_are_the_parent_of_threads_without_one(agents: Agents) -> None:
    """Claude Code names its sub-agents only, and the parents of nested ones."""
    agents.call("main")
    agents.call("sub", "s")
    agents.call("nested", "n", "s")
    agents.call("sub again", "s")
    agents.call("main again")
    assert (agents.after("sub"), agents.after("nested")) == ("main", "sub")
    assert (agents.after("sub again"), agents.after("main again")) == ("nested", "sub again")


def test_the_calls_without_a_thread_are_one_thread_whichever_sub_agent_ends_first(agents: Agents) -> None:
    """Claude Code's main agent asks several at once, and goes on after the last one, or beside one that goes on."""
    agents.call("main")
    agents.call("left", "l")
    agents.call("right", "r")
    agents.call("right again", "r")
    agents.call("left again", "l")
    agents.call("main again")
    agents.begin("slow", "s")
    agents.call("main beside it")
    agents.finish("slow")
    agents.call("main after it")
    own = {agents.identities[name].thread_id for name in ("main", "main again", "main beside it", "main after it")}
    assert len(own) == 1
    assert len(agents.program.graph.threads) == 4


def test_another_agent_that_names_no_thread_has_one_of_its_own(agents: Agents) -> None:
    """Also beside agents that name theirs, such as one to which a conversation was handed on."""
    agents.call("main")
    agents.call("sub", "s")
    agents.call("main again")
    identity, _ended = agents.threads.start_call(agents.program.reports, None, agent=1)
    assert identity.thread_id == f"{agents.identities['main'].thread_id}.1"


def test_calls_without_a_thread_that_overlap_are_several_threads(agents: Agents) -> None:
    """No client of one thread makes two calls at once."""
    agents.call("main")
    agents.call("sub", "s")
    agents.begin("main again")
    agents.begin("main, too")
    assert agents.identities["main again"].thread_id != agents.identities["main, too"].thread_id


def test_a_call_says_which_threads_it_has_ended(agents: Agents) -> None:
    """Those that its own thread has started, and that are not busy."""
    agents.call("main")
    agents.call("left", "l")
    agents.begin("right", "r")
    assert agents.begin("main again") == ["l"]
    agents.finish("main again")
    agents.finish("right")
    assert agents.begin("right again", "r") == []


def test_the_graph_and_the_call_have_the_name_of_the_thread(agents: Agents) -> None:
    """Lanes of the timeline and rows of the process table are the client's threads."""
    agents.call("main")
    agents.call("sub", "s")
    identity = agents.identities["sub"]
    assert identity.thread_id == agents.program.graph[identity.call_id].thread_id == "s"
    assert agents.program.graph[identity.call_id].label == "sub"
    assert len(agents.program.graph.threads) == 2


def test_a_sub_agent_in_the_background_is_not_waited_for(agents: Agents) -> None:
    """It is busy while its parent goes on; what it has done since comes before the parent's call after its end."""
    agents.call("main", "m")
    agents.begin("sub", "s", "m")
    agents.call("main 2", "m")
    agents.finish("sub")
    agents.call("main 3", "m")
    assert agents.after("main 2") == "main"
    assert agents.after("main 3").replace("?", "") == "sub main 2"


def test_a_call_that_failed_comes_before_nothing(agents: Agents) -> None:
    """The next one of its thread has its parents."""
    agents.call("main", "m")
    agents.begin("broken", "s", "m")
    identity = agents.identities["broken"]
    agents.program.reports.call_left(identity.call_id, 0.0, Account(), CallState.FAILED)
    agents.threads.leave(identity)
    agents.call("again", "s", "m")
    assert agents.after("again") == "main"


@pytest.mark.parametrize("parent", ["s", "unknown"])
def test_a_parent_that_makes_no_sense_is_the_top(agents: Agents, parent: str) -> None:
    """A thread may name itself, or one that made no call here."""
    agents.call("main")
    agents.call("sub", "s", parent)
    agents.call("main again")
    assert (agents.after("sub"), agents.after("main again")) == ("main", "sub")


def test_threads_do_not_grow_without_bound(agents: Agents) -> None:
    """A client may name a new thread with each call, each one inside the one before: the longest unused ends."""
    for number in range(3 * MOST_OPEN):
        agents.call(f"c{number}", f"t{number}", f"t{number - 1}")
        assert len(agents.threads) <= MOST_OPEN
    assert agents.after(f"c{3 * MOST_OPEN - 1}") == f"c{3 * MOST_OPEN - 2}"


def test_busy_threads_are_kept(agents: Agents) -> None:
    """Their number is that of the calls in flight, however deep they are in each other."""
    depth = 3 * MOST_OPEN
    for number in range(depth):
        agents.begin(f"c{number}", f"t{number}", f"t{number - 1}")
    for number in range(depth):
        agents.finish(f"c{number}")
    agents.call("last")
    assert len(agents.threads) == 0
