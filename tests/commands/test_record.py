"""`weft record`: the command's own exit code and signals, and a trace of what it ran."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.core.trace.format import read

Run = Callable[..., tuple[int, str, str]]

# An agent whose engine is the recorder alone. Its arguments: how many programs it runs, and its exit code.
AGENT = """
import os, sys, time
from weft.core.program.graph import CallNode, CallState
from weft.core.process_table import Account
from weft.core.program import Program
from weft.core.trace.recorder import Recorder

recorder = Recorder(os.environ["WEFT_RECORD"])
for number in range(int(sys.argv[1])):
    program = Program("agent")
    class Backend:
        def start_session(self, info):
            recorder.begin(info)
        def end_session(self, program_id, state):
            recorder.end(program_id)
    identity = program.start_call("run")
    program.bind(Backend())
    recorder.call_arrived(program.graph, 1.0)
    program.call_arrived(identity.call_id, 1.0)
    program.call_left(identity.call_id, 2.0, Account(prompt_tokens=5, output_tokens=2), CallState.FINISHED)
    program.end()
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
    """The command line of an agent, but for its two arguments."""
    script = tmp_path / "my_agent.py"
    script.write_text(AGENT)
    return [sys.executable, str(script)]


def test_a_command_is_recorded(weft: Run, agent: list[str], tmp_path: Path) -> None:
    """Its exit code and output are its own; the trace can be simulated, and a second run is appended to it."""
    out = tmp_path / "my runs.jsonl"
    code, printed, said = weft("record", out, "--", *agent, 2, 0)
    assert (code, printed, said) == (0, "ready\n", f"recorded 2 programs; see: weft sim '{out}'\n")
    code, _, said = weft("record", out, "--", *agent, 1, 3)
    assert (code, said) == (3, f"recorded 1 program; see: weft sim '{out}'\n")
    recorded = read(out)
    assert len({program.program for program in recorded}) == 3
    assert [(p.name, p.calls[0].prompt_tokens, p.calls[0].output_tokens) for p in recorded] == [("agent", 5, 2)] * 3
    code, printed, said = weft("sim", out, "--policy", "fcfs")
    assert (code, said) == (0, "")
    assert recorded[2].program in printed


def test_options_after_the_dashes_are_the_commands(weft: Run, tmp_path: Path) -> None:
    """`--help` too; a command that runs no program is told so."""
    code, printed, said = weft("record", tmp_path / "out.jsonl", "--", sys.executable, "--help")
    assert code == 0
    assert printed.startswith("usage: ")
    assert "Usage: weft" not in printed
    assert said.startswith("recorded no program: ")


def test_what_cannot_be_recorded_is_told(weft: Run, agent: list[str], tmp_path: Path) -> None:
    """A file that is no trace stays as it is, and the command is not run; nor is there one without a command."""
    script = Path(agent[1])
    code, printed, said = weft("record", script, "--", *agent, 1, 0)
    assert (code, printed) == (1, "")
    assert said.startswith(f"error: {script}, line 2: no JSON")
    assert script.read_text() == AGENT
    code, _, said = weft("record", tmp_path / "out.jsonl", "--", tmp_path / "no-such-agent")
    assert (code, said) == (1, f"error: {tmp_path}/no-such-agent cannot be started: No such file or directory. "
                               "Name a command to run.\n")  # fmt: skip
    assert weft("record", tmp_path / "out.jsonl")[0] == 2


@pytest.mark.parametrize(
    ("number", "to_all", "code"), [(signal.SIGINT, True, 7), (signal.SIGTERM, False, 128 + signal.SIGTERM)]
)
def test_signals_end_the_command(
    number: signal.Signals, to_all: bool, code: int, agent: list[str], tmp_path: Path
) -> None:
    """A Ctrl-C, which a terminal sends to both, ends the agent in its own way; a SIGTERM to `weft record` is passed on.
    What was recorded by then is told."""
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
        _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert said == f"recorded 1 program; see: weft sim {out}\n"
    assert len(read(out)) == 1
