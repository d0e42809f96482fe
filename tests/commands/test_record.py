"""`weft record`: the command keeps its exit code and signals, and its programs are in the trace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.core.trace.format import read

WeftCommand = Callable[..., tuple[int, str, str]]

# An agent that reports its programs to the recorder itself, without an engine. Its arguments are the number of programs
# and the exit code.
AGENT = """
import os, sys, time
from weft.core.program.graph import CallNode, CallState
from weft.core.accounts import Account
from weft.core.program import Program
from weft.core.trace.recorder import Recorder

recorder = Recorder(os.environ["WEFT_RECORD"])
for number in range(int(sys.argv[1])):
    program = Program("agent")
    class Backend:
        def start_session(self, info):
            recorder.program_started(info, 0.0)
        def end_session(self, program_id, state):
            recorder.end(program_id)
    identity = program.reports.start_call("run")
    program.reports.bind(Backend())
    recorder.call_arrived(identity, program.graph, 1.0)
    program.reports.call_arrived(identity.call_id, 1.0)
    program.reports.call_left(identity.call_id, 2.0, Account(prompt_tokens=5, output_tokens=2), CallState.FINISHED)
    program.end()
recorder.flush()
how = sys.argv[2]
try:
    print("ready", flush=True)
    time.sleep(60 if how == "wait" else 0)
except KeyboardInterrupt:
    sys.exit(7)
sys.exit(int(how))
"""


@pytest.fixture
def agent(tmp_path: Path) -> list[str]:
    """The command line of an agent, without its two arguments."""
    script = tmp_path / "my_agent.py"
    script.write_text(AGENT)
    return [sys.executable, str(script)]


def test_a_command_is_recorded(weft: WeftCommand, agent: list[str], tmp_path: Path) -> None:
    """The command keeps its exit code and output. The trace can be simulated, and a second command appends to it."""
    out = tmp_path / "my runs.jsonl"
    code, printed, errors = weft("record", out, "--", *agent, 2, 0)
    assert (code, printed, errors) == (0, "ready\n", f"recorded 2 programs; see: weft sim '{out}'\n")
    code, _, errors = weft("record", out, "--", *agent, 1, 3)
    assert (code, errors) == (3, f"recorded 1 program; see: weft sim '{out}'\n")
    recorded = read(out)
    assert len({program.program for program in recorded}) == 3
    assert [(p.name, p.calls[0].prompt_tokens, p.calls[0].output_tokens) for p in recorded] == [("agent", 5, 2)] * 3
    code, printed, errors = weft("sim", out, "--policy", "fcfs")
    assert (code, errors) == (0, "")
    assert recorded[2].program in printed


def test_options_after_the_dashes_are_the_commands(weft: WeftCommand, tmp_path: Path) -> None:
    """Options after `--`, even `--help`, are the command's. A command that runs no program gets a message."""
    code, printed, errors = weft("record", tmp_path / "out.jsonl", "--", sys.executable, "--help")
    assert code == 0
    assert printed.startswith("usage: ")
    assert "Usage: weft" not in printed
    assert errors.startswith("recorded no program: ")


def test_what_cannot_be_recorded(weft: WeftCommand, agent: list[str], tmp_path: Path) -> None:
    """A file that is not a trace is left alone, and the command is not run. A command is required."""
    script = Path(agent[1])
    code, printed, errors = weft("record", script, "--", *agent, 1, 0)
    assert (code, printed) == (1, "")
    assert errors.startswith(f"error: {script}, line 2: not JSON")
    assert script.read_text() == AGENT
    code, _, errors = weft("record", tmp_path / "out.jsonl", "--", tmp_path / "no-such-agent")
    assert (code, errors) == (1, f"error: {tmp_path}/no-such-agent cannot be started: No such file or directory. "
                                 "Name a command to run.\n")  # fmt: skip
    for forgotten in ((), ("python", "-c", "pass")):
        code, _, errors = weft("record", tmp_path / "out.jsonl", *forgotten)
        assert code == 2
        assert "weft record [OPTIONS] {out} {-- COMMAND}..." in errors


@pytest.mark.parametrize(
    ("number", "to_all", "code"), [(signal.SIGINT, True, 7), (signal.SIGTERM, False, 128 + signal.SIGTERM)]
)
def test_signals_end_the_command(
    number: signal.Signals, to_all: bool, code: int, agent: list[str], tmp_path: Path
) -> None:
    """A terminal sends Ctrl-C to both processes, and the agent handles it. `weft record` passes a SIGTERM on.

    In both cases `weft record` reports how many programs it recorded.
    """
    out = tmp_path / "out.jsonl"
    with subprocess.Popen(
        [sys.executable, "-m", "weft", "record", str(out), "--", *agent, "1", "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if to_all:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert errors == f"recorded 1 program; see: weft sim {out}\n"
    assert len(read(out)) == 1
