"""Programs for the tests of the simulator: the papers' examples, and random ones."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from weft.core.sim import TraceCall, TraceProgram


def chain(name: str, output_tokens: Sequence[int], arrival_s: float = 0.0) -> TraceProgram:
    """A program of calls one after another, with these output lengths."""
    calls = tuple(
        TraceCall(f"{name.lower()}{n}", (f"{name.lower()}{n - 1}",) if n > 1 else (), tokens)
        for n, tokens in enumerate(output_tokens, 1)
    )
    return TraceProgram(name, calls, arrival_s)


# Autellix, Figure 2.
FIGURE_2 = [chain("A", (4, 3, 1, 1)), chain("B", (3, 3, 4)), chain("C", (1, 2)), chain("D", (4,))]

# Autellix, Figure 9. The paper's text does not give the figure's numbers; this graph has the same two makespans.
FIGURE_9 = [
    TraceProgram(
        "P",
        (
            TraceCall("root", (), 1),
            TraceCall("b1", ("root",), 3),
            TraceCall("b2", ("root",), 3),
            TraceCall("b3", ("root",), 4),
            TraceCall("c1", ("root",), 4),  # the critical path: root, c1, c2, c3
            TraceCall("c2", ("c1",), 3),
            TraceCall("c3", ("c2",), 3),
        ),
    )
]

# Astraea, Figure 2.
ASTRAEA_2 = [chain("A", (3, 3, 3)), chain("B", (4, 1, 2))]


@st.composite
def programs(draw: st.DrawFn, *, most: int = 6, unit: bool = False) -> list[TraceProgram]:
    """Random programs of up to six calls, with shared prefixes, gaps and any parents.

    Args:
        most: The most programs.
        unit: Whether gaps and arrivals are multiples of 1 s. Otherwise they are multiples of 1/4 s. Sums of either are
            exact.
    """
    grain_s = 1.0 if unit else 0.25
    drawn = []
    for number in range(draw(st.integers(1, most))):
        calls: list[TraceCall] = []
        for index in range(draw(st.integers(1, 6))):
            parents = draw(st.lists(st.sampled_from(calls), max_size=2, unique=True)) if calls else []
            most_shared = parents[0].prompt_tokens + parents[0].output_tokens if parents else 8
            shared = draw(st.integers(0, most_shared))
            calls.append(
                TraceCall(
                    call_id=f"c{index}",
                    parents=tuple(parent.call_id for parent in parents),
                    output_tokens=draw(st.integers(1, 9)),
                    prompt_tokens=shared + draw(st.integers(0, 12)),
                    gap_s=draw(st.sampled_from((0, 0, 1, 3, 7))) * grain_s,
                    shared_prefix_tokens=shared,
                )
            )
        arrival_s = draw(st.integers(0, 20)) * grain_s
        name = draw(st.sampled_from((None, "one", "two")))
        deadline_s = draw(st.sampled_from((None, 1.0, 20.0)))
        drawn.append(TraceProgram(f"P{number}", tuple(calls), arrival_s, name, deadline_s=deadline_s))
    return drawn
