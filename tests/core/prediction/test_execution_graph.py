"""Execution graphs: counts of what programs did, against short reference functions, and what follows from them."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from weft.core.ids import CallId, ProgramId, ThreadId
from weft.core.prediction import Cost, ExecutionGraphs, Forecast, Node, Tier, execution_graph, foresight
from weft.core.prediction.execution_graph import MOST_CALLS, MOST_EDGES, MOST_NODES, ExecutionGraph, ProgramCursors
from weft.core.prediction.foresight import MOST_NAMES, MOST_SIZE
from weft.core.prediction.static_graph import StaticGraph, Targets
from weft.core.prediction.template import COLD_PROGRAMS, Template
from weft.core.process_rows import CallIdentity
from weft.core.trace.workloads import generate, poisson


def identity(call: str, parents: Sequence[str] = (), program: str = "p", thread: str = "t") -> CallIdentity:
    return CallIdentity(ProgramId(program), ThreadId(thread), CallId(call), tuple(map(CallId, parents)))


def chain(*tools: str, service_s: float = 1.0) -> ExecutionGraph:
    """The counts of a program whose calls came after these tools, one after another."""
    cursors = ProgramCursors()
    for number, tool in enumerate(tools):
        parents = [f"c{number - 1}"] if number else []
        cursors.arrive(identity(f"c{number}", parents), "", [tool] if tool else [], 3.0 * number)
        cursors.leave(CallId(f"c{number}"), Cost(service_s, 10, 5), 3.0 * number + 1)
    return cursors.finish()


def learned(*programs: ExecutionGraph, times: int = COLD_PROGRAMS) -> Template:
    template = Template()
    for _ in range(times):
        for program in programs:
            template.learn(program)
    return template


# -- counts


def test_the_counts_are_those_of_a_reference() -> None:
    """Of generated programs: consecutive tools as SAGA §3.3 counts them, C[a][b] += 1, and the end as a node."""
    rng = random.Random(3)
    graphs, reference = ExecutionGraphs(), Counter[tuple[str | None, str | None]]()
    for program in generate("tools", 60, poisson(rng, 1.0), rng):
        tools = [call.tool for call in program.calls]
        reference.update(zip(tools, [*tools[1:], "end"], strict=True))
        for call in program.calls:
            named = [call.tool] if call.tool else []
            graphs.arrive("tools", identity(call.call_id, call.parents, program.program), tools=named, now_s=0.0)
            graphs.leave(ProgramId(program.program), CallId(call.call_id), Cost(), 0.0)
        graphs.end(ProgramId(program.program))
    template = graphs.templates.get("tools")
    assert template is not None
    found = Counter[tuple[str | None, str | None]]()
    for node, tally in template.graph.lumped(lambda each: each.any_depth).nodes.items():
        found[next(iter(node.tools), None), "end"] += int(tally.ends)
        for target, edge in tally.edges.items():
            found[next(iter(node.tools), None), next(iter(target.tools), None)] += int(edge.first)
    assert +found == reference


def test_a_fork_and_its_join_count_once_each() -> None:
    """Three calls follow the first, of which one is first, and the join is shared among the three."""
    cursors = ProgramCursors()
    cursors.arrive(identity("plan"), "plan", [], 0.0)
    cursors.leave(CallId("plan"), Cost(), 1.0)
    for branch in "abc":
        cursors.arrive(identity(branch, ["plan"], thread=branch), "work", [], 1.0)
    assert [each.thread_id for each in cursors.cursors] == ["a", "b", "c"]
    for branch in "abc":
        cursors.leave(CallId(branch), Cost(), 2.0)
    cursors.arrive(identity("join", "abc"), "join", [], 2.0)
    (cursor,) = cursors.cursors
    assert cursor.node.label == "join"
    cursors.leave(CallId("join"), Cost(), 3.0)
    graph = cursors.finish()
    graph.check_integrity()
    plan, work, join = Node("plan"), Node("work", depth=1), Node("join", depth=2)
    assert (graph.nodes[plan].edges[work].first, graph.nodes[plan].edges[work].share) == (1, 3)
    assert graph.nodes[work].edges[join].first == 3
    assert graph.nodes[work].edges[join].share == pytest.approx(1)
    assert (graph.nodes[plan].starts, graph.nodes[join].ends) == (1, 1)


def test_a_call_that_also_follows_an_old_one_is_expected_by_the_latest_only() -> None:
    """A tree search that starts again at its root: the root has no cursor any more, so its share would be lost."""
    cursors = ProgramCursors()
    for number, parents in enumerate(([], ["c0"], ["c1", "c0"])):
        cursors.arrive(identity(f"c{number}", parents), f"round {number}", [], 0.0)
        cursors.leave(CallId(f"c{number}"), Cost(), 0.0)
    graph = cursors.finish()
    graph.check_integrity()
    third = Node("round 2", depth=2)
    assert graph.nodes[Node("round 1", depth=1)].edges[third].share == 1
    assert graph.nodes[Node("round 0")].edges[third].share == 0
    assert graph.chances(Node("round 0")) == {Node("round 1", depth=1): 1.0}


def test_a_call_without_a_result_gives_its_parents_their_cursors_back() -> None:
    """The next call has the same parents, as in the program's own graph."""
    cursors = ProgramCursors()
    cursors.arrive(identity("a"), "", [], 0.0)
    cursors.leave(CallId("a"), Cost(), 1.0)
    cursors.arrive(identity("b", ["a"]), "", [], 1.0)
    assert [each.call_id for each in cursors.cursors] == ["b"]
    cursors.leave(CallId("b"), None, 2.0)
    assert [each.call_id for each in cursors.cursors] == ["a"]
    assert cursors.finish().nodes[Node("")].ends == 1


def test_the_pause_before_a_call_is_counted() -> None:
    """From the end of its parent to its arrival: 2 s here."""
    assert chain("", "search").nodes[Node("", ("search",), 1)].mean.pause_s == 2.0


def test_names_of_no_bound_fill_a_bounded_graph() -> None:
    """A label that names the user: further nodes count as one, and no visit is lost."""
    cursors = ProgramCursors()
    for number in range(5 * MOST_CALLS):
        parents = [f"c{number - 1}"] if number else []
        cursors.arrive(identity(f"c{number}", parents), f"user {number}", [f"tool {number % 7}"] * 9, 0.0)
        cursors.leave(CallId(f"c{number}"), Cost(), 0.0)
        assert len(cursors.cursors) == 1
    cursors.check_integrity()
    graph = cursors.finish()
    graph.check_integrity()
    assert len(graph) <= MOST_NODES
    assert graph.edges <= MOST_EDGES
    assert sum(tally.visits for tally in graph.nodes.values()) == 5 * MOST_CALLS


def test_successions_of_no_bound_fill_a_bounded_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that follows another in a way too many counts as a beginning, and the other as an end."""
    monkeypatch.setattr(execution_graph, "MOST_EDGES", 3)
    labels = ["a", "b", "c", "b", "a", "c"]
    cursors = ProgramCursors()
    for number, label in enumerate(labels):
        cursors.arrive(identity(f"c{number}", [f"c{number - 1}"] if number else []), label, (), 0.0)
        cursors.leave(CallId(f"c{number}"), Cost(), 0.0)
    graph = cursors.finish()
    graph.check_integrity()
    assert graph.edges == 3
    assert sum(tally.visits for tally in graph.nodes.values()) == 6
    assert sum(tally.starts for tally in graph.nodes.values()) == 1 + 2
    assert sum(tally.ends for tally in graph.nodes.values()) == 1 + 2


def test_a_call_counts_once_and_one_that_never_ends_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports may come twice, or for a call that is not known. The oldest calls are forgotten, running ones as well."""
    monkeypatch.setattr(execution_graph, "MOST_CALLS", 4)
    cursors = ProgramCursors()
    for number in range(7):
        for _ in range(2):
            cursors.arrive(identity(f"c{number}"), "a", (), 0.0)
        if number:
            for _ in range(2):
                cursors.leave(CallId(f"c{number}"), Cost(), 0.0)
    cursors.leave(CallId("unknown"), Cost(), 0.0)
    cursors.check_integrity()
    (tally,) = cursors.finish().nodes.values()
    assert (tally.visits, tally.starts, tally.ends) == (6, 6, 6)


def test_names_and_programs_in_use_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were used longest ago are forgotten: of names beyond their number, and beyond the size of all graphs;
    and of running programs, which teach nothing then."""
    monkeypatch.setattr(foresight, "MOST_NAMES", 8)
    monkeypatch.setattr(foresight, "_MOST_NEW", 2)
    monkeypatch.setattr(foresight, "MOST_PROGRAMS", 5)
    graphs = ExecutionGraphs()
    for number in range(10):
        for _ in range(3):
            graphs.templates.learn(f"n{number}", chain("", "a"))
    assert [name for name, _ in graphs.templates] == ["n4", "n5", "n6", "n7", "n8", "n9"]
    graphs.check_integrity()
    monkeypatch.setattr(foresight, "MOST_SIZE", 8)
    graphs.templates.learn("n9", chain("", "b"))
    assert [name for name, _ in graphs.templates] == ["n8", "n9"]
    graphs.check_integrity()
    for number in range(8):
        graphs.arrive("n9", identity("c", program=f"p{number}"), now_s=0.0)
    for number in range(8):
        graphs.leave(ProgramId(f"p{number}"), CallId("c"), Cost(), 0.0)
        graphs.end(ProgramId(f"p{number}"))
    assert (len(graphs), graphs.learned) == (0, 5)


def test_program_names_of_no_bound_do_not_drive_out_those_in_use() -> None:
    """A program that has ended three times stays, whatever is made up, and all together stay below a size."""
    graphs = ExecutionGraphs()
    for number in range(3 + 4 * MOST_NAMES):
        program, name = f"p{number}", "chat" if number < 3 else f"made up {number}"
        for call in range(40):
            graphs.arrive(name, identity(f"c{call}", program=program), label=f"{number} {call}", now_s=0.0)
            graphs.leave(ProgramId(program), CallId(f"c{call}"), Cost(), 0.0)
        graphs.end(ProgramId(program))
    graphs.check_integrity()
    assert graphs.rows()[0].name == "chat"
    assert len(graphs.templates) <= MOST_NAMES
    assert sum(template.graph.size for _, template in graphs.templates) <= MOST_SIZE


def test_old_programs_count_less() -> None:
    """An agent changes: after 512 programs the counts are halved, and what is new soon outweighs what was."""
    template = learned(chain("", "a"), times=2000)
    template.graph.check_integrity()
    assert template.ended == 2000
    assert template.graph.nodes[Node("")].visits <= 512
    for _ in range(700):
        template.learn(chain("", "b"))
    found = template.forecast(Node(""))
    assert found is not None
    assert found.likeliest == Node("", ("b",))


# -- forecasts


def test_the_first_30_programs_of_a_name_have_no_forecast() -> None:
    """SAGA §3.3: cold start. The tier says so."""
    template = Template()
    for _ in range(COLD_PROGRAMS - 1):
        template.learn(chain("", "a"))
        assert (template.tier, template.forecast(Node("")), template.left(Node(""))) == (Tier.COLD, None, None)
    template.learn(chain("", "a"))
    assert template.tier is Tier.INFERRED
    assert template.forecast(Node("")) is not None


def test_chances_are_counts_and_add_up_to_one() -> None:
    """Of programs that end after the first call in two cases of three."""
    found = learned(chain(""), chain("", "a", "a"), chain("")).forecast(Node(""))
    assert found is not None
    assert sum(each.chance for each in found.successors) + found.end == pytest.approx(1)
    assert found.end == pytest.approx(2 / 3, abs=0.02)
    assert found.likeliest is None
    assert found.successors[0].pause_s == 2.0


@pytest.mark.parametrize("length", [1, 2, 7, 40])
def test_a_chain_of_n_steps_ends_with_chance_1_in_n(length: int) -> None:
    """SAGA §3.2, ReAct: P(next) = 1 - p_term. At any depth p_term is 1 / n, so n - 1 calls are left after one."""
    template = learned(chain(*["a"] * length))
    any_depth = template.graph.lumped(lambda node: node.any_depth)
    assert any_depth.chances(Node("", ("a",)))[None] == pytest.approx(1 / length)
    left = template.left(Node("", ("a",)))
    assert left is not None
    assert left.after.calls.mean == pytest.approx(length - 1)
    assert left.with_call.service_s.mean == pytest.approx(length)


def test_what_is_left_has_the_mean_and_the_spread_of_a_geometric_chain() -> None:
    """Chains that go on with chance 1/2: 1 more call on average, with the deviation √2, and each takes 3 ± 1 s."""
    counts = ExecutionGraph()
    node = Node("loop")
    for _ in range(512):
        counts.visit(node, [], Cost(2.0))
        counts.visit(node, [(node, True, 1.0)], Cost(4.0))
        counts.end(node)
    counts.check_integrity()
    left = learned(counts).left(node)
    assert left is not None
    assert left.after.calls == pytest.approx((1, math.sqrt(2)), rel=0.01)
    assert left.after.service_s == pytest.approx((3, math.sqrt(1 * 1 + 2 * 9)), rel=0.01)


def test_the_depth_of_a_call_tells_how_much_is_left() -> None:
    """Programs of exactly 8 calls: after the first there are 7, after the eighth none, though all nodes are alike."""
    template = learned(chain(*["a"] * 8))
    lefts = [template.left(Node.of("", ["a"], before)) for before in (0, 1, 4)]
    means = [each.after.calls.mean for each in lefts if each is not None]
    assert means == sorted(means, reverse=True)
    assert means[0] == pytest.approx(7, abs=0.5)


def test_a_step_that_was_never_seen_is_taken_for_any() -> None:
    """A new tool says nothing, and the program is still one of its name."""
    template = learned(chain("", "a", "b"))
    found, left = template.forecast(Node("", ("new",), 3)), template.left(Node("", ("new",), 3))
    assert found is not None
    assert left is not None
    assert left.after.calls.mean == pytest.approx(2)


def test_what_is_left_of_a_program_is_that_of_its_threads() -> None:
    """Two workers and a join: a worker that runs, and the join, are left. Few visits leave the estimate 1 % off."""
    graphs = ExecutionGraphs()
    for number in range(COLD_PROGRAMS + 1):
        program = f"p{number}"
        graphs.arrive("map", identity("plan", (), program), label="plan", now_s=0.0)
        graphs.leave(ProgramId(program), CallId("plan"), Cost(1.0), 1.0)
        for branch in "ab":
            graphs.arrive("map", identity(branch, ["plan"], program, branch), label="work", now_s=1.0)
        graphs.leave(ProgramId(program), CallId("a"), Cost(10.0), 2.0)
        if number == COLD_PROGRAMS:
            break
        graphs.leave(ProgramId(program), CallId("b"), Cost(10.0), 2.0)
        graphs.arrive("map", identity("join", "ab", program), label="join", now_s=2.0)
        graphs.leave(ProgramId(program), CallId("join"), Cost(4.0), 3.0)
        graphs.end(ProgramId(program))
    left = graphs.remaining_service(ProgramId(program))
    assert left == pytest.approx((14.0, 0.0), abs=0.2)
    assert graphs.remaining_service(ProgramId(program), served_s=9.0) == pytest.approx((5.0, 0.0), abs=0.2)
    found = graphs.successors(ProgramId(program))
    assert [each.likeliest for each in found.values()] == [Node("join")] * 2


def test_programs_that_are_unknown_or_cold_have_no_forecast() -> None:
    """Nor have those that are given up: what was cancelled says little of others."""
    graphs = ExecutionGraphs()
    graphs.arrive("chat", identity("a"), now_s=0.0)
    assert (graphs.successors(ProgramId("p")), graphs.remaining(ProgramId("p"))) == ({}, None)
    assert (graphs.successors(ProgramId("x")), graphs.remaining_service(ProgramId("x"))) == ({}, None)
    graphs.leave(ProgramId("p"), CallId("a"), Cost(), 0.0)
    graphs.end(ProgramId("p"), learn=False)
    assert (graphs.rows(), len(graphs), graphs.tier("chat")) == ([], 0, Tier.COLD)


def test_learning_the_same_programs_gives_the_same_forecasts() -> None:
    """No order of a set or of a dictionary shows."""

    def forecasts() -> list[Forecast | None]:
        template = learned(chain("", "a", "b"), chain("", "b"), chain("a"))
        return [template.forecast(Node("", (tool,), 1)) for tool in "ab"]

    assert forecasts() == forecasts()


# -- hints

PLAN = StaticGraph(
    {
        "plan": Targets(always=("search", "read")),
        "search": Targets(always=("write",)),
        "read": Targets(always=("write",)),
        "write": Targets(one_of=("plan", "")),
    }
)


def test_a_static_graph_forecasts_before_any_program_has_ended() -> None:
    """The tier is hints until 30 programs have ended; then it is inferred from them."""
    template = Template()
    template.use_hint(PLAN)
    assert template.tier is Tier.HINTS
    found = template.forecast(Node("write", ("tool",), 3))
    assert found is not None
    assert [(each.node, each.chance) for each in found.successors] == [(Node("plan"), 0.5)]
    assert found.end == 0.5
    assert template.forecast(Node("elsewhere")) is None
    assert template.left(Node("write")) is None, "what a call costs is not known"
    for _ in range(COLD_PROGRAMS):
        template.learn(chain("", "a"))
    assert template.tier is Tier.INFERRED


def test_what_a_static_graph_leaves_is_counted_in_calls_that_were_seen() -> None:
    """After one program of another node: 4 calls a round, and half of the rounds are followed by one more."""
    template = Template()
    template.use_hint(PLAN)
    template.learn(chain("", service_s=2.0))
    left = template.left(Node("plan"))
    assert left is not None
    assert left.after.calls.mean == pytest.approx(3 + 4)
    assert left.after.service_s.mean == pytest.approx(14)


def test_a_loop_without_an_end_leaves_nothing_to_say_how_much_is_left() -> None:
    """The next node is still known."""
    template = Template()
    template.use_hint(StaticGraph({"a": Targets(always=("b",)), "b": Targets(always=("a",))}))
    template.learn(chain(""))
    assert template.left(Node("a")) is None
    found = template.forecast(Node("a"))
    assert found is not None
    assert found.likeliest == Node("b")


def test_nodes_that_make_no_call_are_left_out_once_programs_have_shown_it() -> None:
    """A router between two agents: after three programs none of its calls has been seen."""
    template = Template()
    template.use_hint(
        StaticGraph(
            {"a": Targets(always=("route",)), "route": Targets(one_of=("b", "")), "b": Targets(), "c": Targets()}
        )
    )
    found = template.forecast(Node("a"))
    assert found is not None
    assert found.likeliest == Node("route")
    cursors = ProgramCursors()
    cursors.arrive(identity("1"), "b", [], 0.0)
    cursors.leave(CallId("1"), Cost(), 0.0)
    counts = cursors.finish()
    for _ in range(3):
        template.learn(counts)
    found = template.forecast(Node("a"))
    assert found is None, "a was not seen either"
    cursors = ProgramCursors()
    cursors.arrive(identity("1"), "a", [], 0.0)
    cursors.leave(CallId("1"), Cost(), 0.0)
    template.learn(cursors.finish())
    found = template.forecast(Node("a", ("tool",)))
    assert found is not None
    assert [(each.node, each.chance) for each in found.successors] == [(Node("b"), 0.5)]


def test_the_counts_of_a_step_that_was_seen_outweigh_a_static_graph() -> None:
    """From three calls on: the graph says what can happen, and they say what does."""
    template = Template()
    template.use_hint(StaticGraph({"": Targets(one_of=("x", "y"))}))
    for _ in range(3):
        template.learn(chain("", "a"))
    found = template.forecast(Node(""))
    assert found is not None
    assert found.likeliest == Node("", ("a",))
