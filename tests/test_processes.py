"""Host processes and their children seen from outside: side effects, missing shutdown, Ctrl-C, the demo."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from background import TINY, CommandResult, script
from recorded_host import recorded_host, report_of

from weft.core.policies import DEFAULT_POLICY

pytestmark = pytest.mark.engine

_HOST = """
import json, os, sys, time
from multiprocessing import resource_tracker
import psutil
import weft

ARGS = dict(max_num_seqs=2, max_model_len=512, enforce_eager=True, use_tqdm_on_load=False,
            kv_cache_memory_bytes=64 << 20)

if __name__ == "__main__":
    engine = weft.Engine(sys.argv[1], **ARGS)
    # The fork keeps the pipe of multiprocessing's resource tracker open. The tracker ends when nobody has it open.
    tracker = resource_tracker._resource_tracker._pid
    children = [p.pid for p in psutil.Process().children(recursive=True) if p.pid != tracker]
    forked = os.fork()
    if forked == 0:
        time.sleep(600)
        os._exit(0)
    request = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 400, "ignore_eos": True}
    report = {"children": children, "forked": forked, "tracker": tracker}
    with weft.Program("busy") as program:
        while True:
            for _ in engine.chat_stream_sync(request, program, program.reports.start_call("count")):
                if report:  # the first call generates
                    print(json.dumps(report), flush=True)
                    report = None
"""


# Runs the script above, kills it during a call, and prints which processes of the script are left.
_WATCHER = f"""
import json, os, signal, subprocess, sys
from pathlib import Path
import psutil

Path("host.py").write_text({_HOST!r})
host = subprocess.Popen([sys.executable, "host.py", *sys.argv[1:]], stdout=subprocess.PIPE, text=True)
report = json.loads(host.stdout.readline())
children = [psutil.Process(pid) for pid in report["children"] if psutil.pid_exists(pid)]
assert host.poll() is None, "the host ended before it could be killed"
host.kill()
report["exit_code"] = host.wait()
_, alive = psutil.wait_procs(children, timeout=120)
report["alive"] = [process.pid for process in alive if process.status() != psutil.STATUS_ZOMBIE]
report["fork_lives"] = psutil.pid_exists(report["forked"])
tracker = psutil.Process(report["tracker"])
for process in [*alive, psutil.Process(report["forked"])]:
    process.kill()
report["alive"] += [process.pid for process in psutil.wait_procs([tracker], timeout=120)[1]]
print(json.dumps(report))
"""
WATCHER = script(_WATCHER)


@pytest.mark.background(WATCHER, TINY)
def test_killing_the_host_ends_its_engine(command_result: CommandResult) -> None:
    """After `kill -9` no one can shut the engine down, so its processes end by themselves. This holds also if a forked
    child of the host lives on, which has the host's pipes open; multiprocessing's resource tracker alone waits for it.
    """
    report = json.loads(command_result.printed())
    assert len(report["children"]) >= 2
    assert report["fork_lives"]
    assert (report["exit_code"], report["alive"]) == (-signal.SIGKILL, [])


NO_GUARD = script(
    "import sys, weft\nweft.Engine(sys.argv[1], max_model_len=512, enforce_eager=True, kv_cache_memory_bytes=64 << 20)"
)


@pytest.mark.background(NO_GUARD, TINY)
def test_a_script_without_the_main_guard(command_result: CommandResult) -> None:
    """vLLM imports the script again in its processes, so a script without a main guard gets a message that says how
    to write one. It is the last message, and there is no other error above it."""
    assert command_result.exit_code == 1, command_result
    last = command_result.stderr.rstrip().splitlines()[-1]
    assert last.startswith("weft.core.errors.EngineStartError: "), command_result.stderr
    assert 'if __name__ == "__main__"' in last, last
    assert command_result.stderr.count("Traceback") == 1
    assert "Engine core initialization failed" not in command_result.stderr


@recorded_host
def test_an_engine_prints_nothing_and_ends_in_order(command_result: CommandResult) -> None:
    """What vLLM says is in the log file, though a call is in flight at the end. Its processes end by themselves, or,
    where the machine is too busy for them to notice that they should, when vLLM asks them to. It kills none of them.
    The temporary folder is empty again."""
    report = report_of(command_result)
    recorded = f"recorded 5 programs; see: weft sim {command_result.folder / 'runs.jsonl'}\n"
    assert command_result.stderr == recorded, "all that is printed is what `weft record` says"
    assert (report["processes"], report["left"], report["files_left"]) == (2, [], [])
    assert "Starting to load model" in report["log"]  # the worker
    said = ("all workers exited gracefully", "sending SIGTERM")
    assert any(each in report["log"] for each in said)  # by the engine core
    assert "SIGKILL" not in report["log"]
    assert "vllm" in "".join(line for line in report["log"].splitlines() if line.startswith("(MainProcess"))
    assert "killing" not in report["log"]
    assert "leaked" not in report["log"]


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes below a process."""
    assert process.poll() is None, "the demo ended before it could be interrupted"
    return psutil.Process(process.pid).children(recursive=True)


def computed_s(processes: list[psutil.Process]) -> float:
    """The CPU time of processes, in seconds."""
    return sum(each.cpu_times().user for each in processes)


@pytest.mark.parametrize(
    ("stage", "target"),
    [
        pytest.param("starting", "group", marks=pytest.mark.slow),
        pytest.param("starting", "parent", marks=pytest.mark.soak),
        pytest.param("running", "group", marks=pytest.mark.slow),
        pytest.param("running", "parent", marks=pytest.mark.soak),
    ],
)
def test_ctrl_c_ends_the_demo_and_every_process_of_its_engine(tiny_model: Path, target: str, stage: str) -> None:
    """Ctrl-C in a terminal reaches the whole process group, and `kill -INT` the parent only.

    Either way, during the start or while agents run, no process is left and no traceback is shown.
    """
    command = [sys.executable, "-m", "weft", "demo", "--model", str(tiny_model), "--programs", "1000"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell that runs the tests in the background ignores SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    ) as process:
        try:
            if stage == "starting":
                # vLLM names its process when it has imported all it needs, and starts the model then.
                while not any(each.name().startswith("VLLM") for each in descendants(process)):
                    time.sleep(0.05)
            elif process.stdout is not None:
                process.stdout.readline()  # "1000 agents at once ...": the engine has started
                engine = descendants(process)
                idle_s = computed_s(engine)
                while descendants(process) and computed_s(engine) < idle_s + 1.0:  # the calls of the agents
                    time.sleep(0.05)
            started = descendants(process)
            (os.killpg if target == "group" else os.kill)(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, errors[-3000:]
    assert errors.rstrip().endswith("interrupted"), errors[-3000:]
    assert "Traceback" not in errors, errors[-3000:]
    _, alive = psutil.wait_procs(started, timeout=120)
    assert alive == []


@pytest.mark.slow
@pytest.mark.background("-m", "weft", "demo")
def test_the_demo_answers_and_compares_two_policies(
    command_result: CommandResult, capfd: pytest.CaptureFixture[str]
) -> None:
    """The demo prints real answers of the embedded model, a process table for fcfs and for the default policy, whose
    rows differ, and how long programs took under each."""
    printed = command_result.printed()
    with capfd.disabled():
        print(printed)  # noqa: T201  so that the log of CI shows the tables
    assert command_result.stderr == ""
    assert "The Nile is 6650 kilometres long." in printed
    tables = printed.split("process table")[1:]
    assert len(tables) == 2
    for table in tables:
        rows = [line.split() for line in table.splitlines() if line.rstrip().endswith("finished")]
        assert len(rows) == 10
        by_name = {row[0]: row for row in rows}
        assert [int(by_name[name][2]) for name in ("rivers", "volcanoes", "divide")] == [6, 4, 2]
        services, waits = [float(row[4]) for row in rows], [float(row[5]) for row in rows]
        assert len(set(services)) > 5
        assert min(waits) < max(waits), "ten programs do not fit at once, so some wait longer than others"
        # One short program may take longer than one long program where other work runs, so all of them are compared.
        long_s, short_s = statistics.fmean(services[:6]), statistics.fmean(services[7:])
        assert long_s > short_s, "the long programs attain more service than the shortest"
    assert "forecasts" not in printed
    summary = printed[printed.index("tokens that the engine wrote") :]
    took_tokens = [
        list(map(int, found))
        for found in re.findall(r"(?:questions: 4|than 2: 6) +(\d+) +(\d+)$", summary, re.MULTILINE)
    ]
    (short_fcfs, short_policy), (long_fcfs, _long_policy) = took_tokens
    assert short_policy < short_fcfs < long_fcfs, "short programs gain, whatever else the machine does"
    assert ("seconds from a program's start" in summary) != ("The machine was busy" in summary)
    sentence = " ".join(summary.split()).rpartition("Under ")[2]
    assert re.fullmatch(
        rf"{DEFAULT_POLICY}, the short programs end after \d+% fewer tokens, and .* own order\.", sentence
    )
