"""`weft sim` and `weft trace`: the papers' examples, generated and converted traces, and one-line errors."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from timeline_parts import think_and_sum

from weft.core.trace.format import from_graph, read, write

WeftCommand = Callable[..., tuple[int, str, str]]


@pytest.fixture
def sim(weft: WeftCommand, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs `weft sim --unit-steps --json` on programs. A program is a list of calls: output lengths, or rows."""

    def run(programs: dict[str, list[Any]], *options: object) -> dict[str, Any]:
        path = tmp_path / "trace.jsonl"
        with path.open("w") as file:
            for name, rows in programs.items():
                calls = [
                    row if isinstance(row, dict) else {"id": f"{name}{number}", "output_tokens": row}
                    for number, row in enumerate(rows, 1)
                ]
                file.write(json.dumps({"program": name, "calls": calls}) + "\n")
        code, out, err = weft("sim", path, "--unit-steps", "--json", *options)
        assert (code, err) == (0, "")
        result: dict[str, Any] = json.loads(out)
        return result

    return run


Sim = Callable[..., dict[str, Any]]
FIGURE_2: dict[str, list[Any]] = {"A": [4, 3, 1, 1], "B": [3, 3, 4], "C": [1, 2], "D": [4]}
ASTRAEA: dict[str, list[Any]] = {"A": [3, 3, 3], "B": [4, 1, 2]}


def test_autellix_figure_2(sim: Sim) -> None:
    """Autellix Fig. 2: calls wait 18 units in all under FCFS, and 12 under PLAS with bounds 2 and 3."""
    fcfs = sim(FIGURE_2, "--policy", "fcfs", "--batch-size", 2)
    plas = sim(FIGURE_2, "--policy", "plas", "--batch-size", 2, "--queue-bounds", "2,3")
    assert (fcfs["policy"], fcfs["total_wait"], plas["policy"], plas["total_wait"]) == ("fcfs", 18, "plas", 12)
    assert plas["programs"]["C"] == {"arrival": 0, "finish": 5, "wait": 2, "service": 3, "calls": 2}
    assert plas["makespan"] == 14


def test_mlfq_waits_a_unit_less_than_in_autellix_figure_2(sim: Sim) -> None:
    """The paper has 18 units. The results page tells this deviation."""
    assert sim(FIGURE_2, "--policy", "mlfq", "--batch-size", 2, "--queue-bounds", "2,3")["total_wait"] == 17


def test_priority_serves_programs_in_turn(sim: Sim) -> None:
    """A and B keep both slots until their last calls end at 9 and 10, so C waits 9 units and D waits 10."""
    result = sim(FIGURE_2, "--policy", "priority", "--batch-size", 2)
    assert (result["policy"], result["preemptions"]) == ("priority", 0)
    assert {name: row["wait"] for name, row in result["programs"].items()} == {"A": 0, "B": 0, "C": 9, "D": 10}


def test_autellix_figure_9(sim: Sim) -> None:
    """Autellix Fig. 9: the program takes 14 units under FCFS, and 11 if the critical path is known. ATLAS knows only
    the path so far, on which all calls of a fork are equal, and takes 14 as well."""
    rows = {
        "root": (1, []),
        "b1": (3, ["root"]),
        "b2": (3, ["root"]),
        "b3": (4, ["root"]),
        "c1": (4, ["root"]),
        "c2": (3, ["c1"]),
        "c3": (3, ["c2"]),
    }
    program = [{"id": call, "output_tokens": work, "parents": parents} for call, (work, parents) in rows.items()]
    assert sim({"P": program}, "--policy", "fcfs", "--batch-size", 2)["makespan"] == 14
    assert sim({"P": program}, "--policy", "atlas", "--batch-size", 2)["makespan"] == 14
    assert sim({"P": program}, "--policy", "srpt", "--batch-size", 2)["makespan"] == 11


@pytest.mark.parametrize(
    ("options", "mean"),
    [(("--policy", "fcfs"), 15.0), (("--policy", "plas", "--queue-bounds", "4,6"), 14.5), (("--policy", "srpt"), 11.5)],
)
def test_astraea_figure_2(sim: Sim, options: tuple[str, ...], mean: float) -> None:
    """Astraea Fig. 2: the mean completion time is 15.0 under FCFS, 14.5 under PLAS and 11.5 under SRPT."""
    result = sim(ASTRAEA, "--batch-size", 1, *options)
    assert result["mean_latency"] == mean == (result["programs"]["A"]["finish"] + result["programs"]["B"]["finish"]) / 2


def test_the_gate_is_an_option_of_any_policy(sim: Sim) -> None:
    """With unit steps the KV cache has no bound, so the gate holds nothing back, and the schedule is the same."""
    for policy in ("fcfs", "learned"):
        without = sim(FIGURE_2, "--policy", policy, "--batch-size", 2)
        assert sim(FIGURE_2, "--policy", policy, "--batch-size", 2, "--gate") == without


def test_a_closed_loop(sim: Sim) -> None:
    """One program at a time: each arrives when the one before it has ended, so none waits."""
    result = sim(FIGURE_2, "--policy", "fcfs", "--batch-size", 2, "--concurrency", 1)
    rows = sorted(result["programs"].values(), key=lambda row: row["arrival"])
    assert [row["arrival"] for row in rows] == [0, *(row["finish"] for row in rows[:-1])]
    assert result["total_wait"] == 0


def test_a_leaderboard(weft: WeftCommand, tmp_path: Path) -> None:
    """Two traces: all rivals of each with their ratios, a verdict in words, and the means over both."""
    for name in ("one", "two"):
        rows = {key: [{"id": f"{n}", "output_tokens": n} for n in each] for key, each in (("A", [4, 3]), ("B", [2]))}
        lines = [json.dumps({"program": key, "calls": calls}) for key, calls in rows.items()]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    code, out, err = weft("sim", *files, "--leaderboard", "--batch-size", 2, "--json")
    assert code == 0, err
    boards = json.loads(out)
    assert list(boards) == [str(file) for file in files]
    for rows in boards.values():
        assert min(row["to_best_plain"] for row in rows if row["is_plain"]) == 1
        assert [row["policy"] for row in rows if row["is_default"]] == ["auto"]
    code, out, err = weft("sim", *files, "--leaderboard", "--batch-size", 2)
    assert code == 0, err
    assert out.count("the best plain rival,") == 2
    assert "over 2 traces" in out
    assert weft("sim", *files)[2].startswith("error: 2 traces are given; name one")


def test_beta_promotes(sim: Sim) -> None:
    """With beta inf, a program of short calls delays a long call to the end. With beta 1 the long call is promoted."""
    trace: dict[str, list[Any]] = {"long": [6, 6], "other": [1] * 20}
    options = ("--policy", "mlfq", "--batch-size", 1, "--queue-bounds", "3")
    never = sim(trace, *options, "--beta", "inf")["programs"]["long"]["finish"]
    soon = sim(trace, *options, "--beta", "1")["programs"]["long"]["finish"]
    assert soon < never


def test_a_picture(weft: WeftCommand, tmp_path: Path) -> None:
    """`--gantt` draws a bar for each execution of a call."""
    trace, picture = tmp_path / "trace.jsonl", tmp_path / "out.svg"
    trace.write_text('{"program": "A", "calls": [{"id": "a", "output_tokens": 3}]}\n')
    code, out, err = weft("sim", trace, "--unit-steps", "--gantt", picture)
    assert (code, err) == (0, "")
    assert "A" in out
    titles = [title.text for title in ET.parse(picture).getroot().iter("{http://www.w3.org/2000/svg}title")]  # noqa: S314
    assert titles == ["A a, engine 0: 0 to 3"]


def test_a_generated_trace(weft: WeftCommand, tmp_path: Path) -> None:
    """`weft trace` writes the same trace for the same seed, and `weft sim` shows it in a table, on several engines."""
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    for path, seed in zip(paths, (1, 1, 2), strict=True):
        options = ("--programs", 25, "--rate", 4, "--bursty", "--seed", seed)
        assert weft("trace", "tools", "--out", path, *options) == (0, f"{path}\n", "")
    assert paths[0].read_bytes() == paths[1].read_bytes() != paths[2].read_bytes()
    assert len(read(paths[0])) == 25
    code, out, err = weft("sim", paths[0], "--replicas", 3, "--balancer", "least_used", "--preemption", "swap")
    assert (code, err) == (0, "")
    assert "and 5 more" in out
    assert "of prompt tokens in the prefix cache" in out
    assert "95 %" in out


def test_the_short_form_makes_a_trace_too(weft: WeftCommand, tmp_path: Path) -> None:
    """`weft trace SOURCE` is `weft trace make SOURCE`, with options before and after the source."""
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    assert weft("trace", "make", "chat", "--programs", 3, "--out", paths[0])[0] == 0
    assert weft("trace", "--programs", 3, "chat", "--out", paths[1])[0] == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_recording_is_exported_for_perfetto(weft: WeftCommand, tmp_path: Path) -> None:
    """Of a trace with measured times, and of a file of graphs. tests/core/show checks what is in it."""
    graph, out = think_and_sum(), tmp_path / "out.json"
    recording, graphs = tmp_path / "trace.jsonl", tmp_path / "graph.json"
    write([from_graph(graph)], recording)
    graphs.write_text(f"{graph.to_json()}\n{graph.to_json()}\n")
    for file, programs in ((recording, "1 program"), (graphs, "2 programs")):
        code, printed, err = weft("trace", "export", file, "--format", "perfetto", "--out", out)
        assert (code, err) == (0, "")
        assert printed.startswith(f"{out}: {programs};")
        slices = [event["name"] for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "X"]
        assert {"label of sum", "wait", "service", "web"} <= set(slices)


def test_a_trace_without_times_cannot_be_exported(weft: WeftCommand, tmp_path: Path) -> None:
    """The error says what is missing, and what to do."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"program": "A", "calls": [{"id": "a", "output_tokens": 3}]}\n')
    code, _, err = weft("trace", "export", trace, "--format", "perfetto", "--out", tmp_path / "out.json")
    assert code == 1
    assert "not when they ran" in err
    assert "weft record" in err


@pytest.mark.parametrize(
    "command", [("trace", "export", "--format", "perfetto"), ("trace", "export", "--format", "weka"), ("graph",)]
)
def test_a_file_is_not_replaced_by_what_is_made_of_it(
    weft: WeftCommand, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """A recording has more than any other form of it, and so has a file of several graphs."""
    file = tmp_path / "graphs.json"
    file.write_text(text := think_and_sum().to_json())
    (link := tmp_path / "link.json").symlink_to(file)
    code, _, err = weft(*command, file, "--out", link)
    assert code == 1
    assert "link.json is one of the files to read, and would be replaced; give another --out." in err
    assert file.read_text() == text


def test_a_public_trace(weft: WeftCommand, tmp_path: Path) -> None:
    """A file of tau-bench is imported as a trace whose programs arrive one after another."""
    messages = [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Good day to you"}]
    (tmp_path / "tau.json").write_text(json.dumps([{"task_id": number, "traj": messages} for number in range(5)]))
    out = tmp_path / "out.jsonl"
    assert weft("trace", "import", tmp_path / "tau.json", "--out", out, "--programs", 3, "--rate", 1)[0] == 0
    programs = read(out)
    assert [program.program for program in programs] == [f"tau-{number}-task-{number}" for number in range(3)]
    assert 0 < programs[0].arrival_s < programs[1].arrival_s < programs[2].arrival_s


def test_a_file_is_no_workload(weft: WeftCommand, tmp_path: Path) -> None:
    """The error names the command that reads files, which `weft trace FILE` once did itself."""
    code, _, err = weft("trace", "runs of mine.json", "--out", tmp_path / "out.jsonl")
    assert code == 1
    assert "there is no workload 'runs of mine.json'" in err
    assert "weft trace import 'runs of mine.json'" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batch-size", 0), "batch_size must be at least 1"),
        (("--concurrency", 0), "concurrency must be at least 1"),
        (("--concurrency", 2, "--load", 1), "give one of them"),
        (("--replicas", 999_999_999), "replicas must be at most 10000"),
        (("--queue-bounds", "2,3"), "--queue-bounds has no effect under auto; pass --policy with one of a"),
        (("--policy", "atlas", "--queue-bounds", "2,x"), "--queue-bounds is '2,x'; give numbers with commas"),
        (("--policy", "atlas", "--queue-bounds", "3,2"), "queue bounds must be positive, finite and increasing"),
        (("--policy", "rr", "--queue-bounds", ""), "rr needs a quantum"),
        (("--policy", "fcfs", "--beta", "2"), "--beta has no effect under fcfs; pass --policy with one of a"),
        (("--policy", "atlas", "--beta", -1), "beta must be > 0"),
        (("--kv-tokens", 2), "has 3 tokens, and the KV cache of a replica holds 2"),
        (("--load", "inf"), "such as 0.8, not inf"),
        (("--load", "0.8"), "one program has no rate of arrival"),
        (("--leaderboard", "--kv-policy", "lru"), "leave out --kv-policy"),
        (("--leaderboard", "--policy", "fcfs"), "leave out --policy"),
        (("--leaderboard", "--no-gate"), "leave out --gate"),
        (("--leaderboard", "--replay"), "leave out --replay"),
        (("--leaderboard", "--gantt", "out.svg"), "leave out --gantt"),
        (("--replay", "--kv-policy", "lru"), "leave out --kv-policy"),
        (("--replay", "--gantt", "out.svg"), "leave out --gantt"),
        (("--gantt", "out.png"), "name an .svg file"),
        (("--gantt", "no/such/folder.svg"), "folder.svg cannot be written"),
    ],
)
def test_wrong_options(weft: WeftCommand, tmp_path: Path, options: tuple[object, ...], message: str) -> None:
    """A wrong option gives one line on standard error, without a traceback."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"program": "A", "calls": [{"id": "a", "output_tokens": 3}]}\n')
    code, out, err = weft("sim", trace, *options)
    assert (code, out) == (1, ""), err
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1, err


def test_no_bar_is_shown_where_colours_are_forced(
    weft: WeftCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CI sets FORCE_COLOR, though standard error is a file there."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"program": "A", "calls": [{"id": "a", "output_tokens": 3}]}\n')
    assert weft("sim", trace, "--unit-steps", "--json")[::2] == (0, "")


def test_a_wrong_trace(weft: WeftCommand, tmp_path: Path) -> None:
    """The error for a wrong trace names the file and the line."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"program": "A", "calls": [{"id": "a", "output_tokens": -3}]}\n')
    code, out, err = weft("sim", trace)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {trace}, line 1: program 'A', call 1 ('a'): output_tokens is -3; give")
    code, out, err = weft("trace", "chess")
    assert (code, out) == (1, "")
    assert "there is no workload 'chess'" in err
    assert "choose one of chat, tools" in err, "it may be a misspelled workload"
    _, _, err = weft("trace", "tools", "--rate", 0)
    assert err == "error: 0.0 programs a second: give finite numbers above 0.\n"


def test_a_replay_compares_the_kv_policies(weft: WeftCommand, tmp_path: Path) -> None:
    """`weft sim --replay` prints each KV policy with its ratio to Bélády's rule, as a table or as JSON."""
    path = tmp_path / "trace.jsonl"
    assert weft("trace", "tools", "--programs", 4, "--rate", 2, "--out", path)[0] == 0
    code, out, err = weft("sim", path, "--policy", "fcfs", "--kv-tokens", 16384, "--replay")
    assert (code, err) == (0, "")
    rows = {line.strip().split("  ")[0]: line.rstrip() for line in out.splitlines() if line.strip()}
    assert {"lru", "ended-first", "least-waste", "ttl", "wa-lru", "next-use", "belady (oracle)"} <= rows.keys()
    assert rows["belady (oracle)"].endswith("1.000")
    code, out, _ = weft("sim", path, "--policy", "fcfs", "--kv-tokens", 16384, "--replay", "--json")
    ratios = {name: row["ratio"] for name, row in json.loads(out)["rules"].items()}
    assert code == 0
    assert min(ratios.values()) == ratios["belady (oracle)"] == 1.0
    assert weft("sim", path, "--unit-steps", "--replay")[0] == 1


def workers_of(process: subprocess.Popen[str]) -> list[str]:
    """The ids of its worker processes. Other children end at once."""
    found = []
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        with suppress(OSError):  # it has ended
            found += [pid] if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text() else []
    return found


def test_ctrl_c_ends_the_workers_of_a_leaderboard_without_tracebacks(tmp_path: Path) -> None:
    """A terminal sends it to them as well, also while they start: Python would raise KeyboardInterrupt there."""

    def has_started(pid: str) -> bool:
        """Whether Python has its handler, which raises KeyboardInterrupt, or the worker its own."""
        masks = dict(re.findall(r"^(SigCgt|SigBlk):\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
        catches, blocks = (bool(int(masks[name], 16) & 1 << signal.SIGINT - 1) for name in ("SigCgt", "SigBlk"))
        return catches or not blocks

    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"program": "A", "calls": [{"id": "a", "output_tokens": 1000000}]}\n')
    command = [sys.executable, "-m", "weft", "sim", trace, "--leaderboard", "--kv-tokens", "2000000"]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A process that a script has started in the background ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    ) as process:
        while not any(map(has_started, workers_of(process))):
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")


def test_ctrl_c_is_ignored_by_the_workers_of_a_leaderboard_in_the_background(tmp_path: Path) -> None:
    """There the command ignores it, and cannot go on without them."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"program": "A", "calls": [{"id": "a", "output_tokens": 10}]}\n')
    with subprocess.Popen(
        [sys.executable, "-m", "weft", "sim", trace, "--leaderboard"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # noqa: PLW1509
    ) as process:
        while not workers_of(process):
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert "the best plain rival" in out
