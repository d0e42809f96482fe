"""What a host process and its children look like from outside: hygiene, forgotten shutdown, Ctrl-C, the demo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from background import TINY, Done, script

pytestmark = pytest.mark.engine

_CREATED = """
import asyncio, contextlib, json, logging, os, signal, sys
import psutil
import weft

with contextlib.suppress(ImportError):  # vLLM imports Ray where it is installed, and that changes the record factory
    import ray

ARGS = dict(max_num_seqs=2, max_model_len=512, enforce_eager=True, use_tqdm_on_load=False,
            kv_cache_memory_bytes=64 << 20)

def state():
    root = logging.getLogger()
    return {
        "handlers": [[type(h).__name__, h.stream is sys.stderr] for h in root.handlers],
        "level": root.level,
        "factory": logging.getLogRecordFactory().__name__,
        "policy": type(asyncio.get_event_loop_policy()).__name__,
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1)],
        "environ": {k: v for k, v in os.environ.items() if k != "VLLM_CONFIGURE_LOGGING"},
    }

if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    before = state()
    engine = weft.Engine(sys.argv[1], **ARGS)
    after = state()
    children = [p.pid for p in psutil.Process().children(recursive=True)]
    print(json.dumps({"before": before, "after": after, "children": children}), flush=True)
    if "busy" in sys.argv:
        request = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 400, "ignore_eos": True}
        with weft.Program("busy") as program:
            while True:
                engine.chat_sync(request, program, program.start_call("count"))
    # and exits without engine.shutdown()
"""


# Runs the script above, kills it while it is busy, if it is to be, and says which of its processes are left.
_WATCHED = f"""
import json, subprocess, sys, time
from pathlib import Path
import psutil

Path("host.py").write_text({_CREATED!r})
host = subprocess.Popen([sys.executable, "host.py", *sys.argv[1:]], stdout=subprocess.PIPE, text=True)
seen = json.loads(host.stdout.readline())
children = [psutil.Process(pid) for pid in seen["children"] if psutil.pid_exists(pid)]
if "busy" in sys.argv:
    time.sleep(3)
    assert host.poll() is None, "it ended before it could be killed"
    host.kill()
seen["exit_code"] = host.wait()
_, alive = psutil.wait_procs(children, timeout=30 if "busy" in sys.argv else 10)
seen["alive"] = [process.pid for process in alive if process.status() != psutil.STATUS_ZOMBIE]
for process in alive:
    process.kill()
print(json.dumps(seen))
"""
WATCHED = script(_WATCHED)


@pytest.mark.background(WATCHED, TINY)
def test_the_host_stays_as_it_was_and_a_forgotten_engine_ends_with_it(done: Done) -> None:
    """Logging, loop policy, signal handlers and environment are untouched by an engine start; no process is left."""
    seen = json.loads(done.printed())
    assert seen["after"] == seen["before"]
    assert len(seen["children"]) >= 2
    assert (seen["exit_code"], seen["alive"]) == (0, [])


@pytest.mark.background(WATCHED, TINY, "busy")
def test_killing_the_host_ends_its_engine(done: Done) -> None:
    """After `kill -9` nobody is left to shut the engine down; its processes see to it themselves."""
    seen = json.loads(done.printed())
    assert len(seen["children"]) >= 2
    assert (seen["exit_code"], seen["alive"]) == (-signal.SIGKILL, [])


NO_GUARD = script(
    "import sys, weft\nweft.Engine(sys.argv[1], max_model_len=512, enforce_eager=True, kv_cache_memory_bytes=64 << 20)"
)


@pytest.mark.background(NO_GUARD, TINY)
def test_a_script_without_the_main_guard_is_told_so(done: Done) -> None:
    """vLLM runs the script again in its processes; the message says what to write."""
    assert done.exit_code != 0
    assert 'if __name__ == "__main__"' in done.stderr


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@pytest.mark.parametrize(
    ("stage", "target"),
    [
        ("starting", "group"),
        pytest.param("starting", "parent", marks=pytest.mark.soak),
        ("running", "group"),
        pytest.param("running", "parent", marks=pytest.mark.soak),
    ],
)
def test_ctrl_c_ends_the_demo_and_every_process_of_its_engine(tiny_model: Path, target: str, stage: str) -> None:
    """Ctrl-C in a terminal reaches the whole group, a `kill -INT` only the parent; during the start or while agents
    run, nothing stays behind and no traceback is shown."""
    command = [sys.executable, "-m", "weft", "demo", "--model", str(tiny_model), "--programs", "2000"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # It is ignored, and stays so in children, where the tests run in a shell's background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    ) as process:
        try:
            if stage == "starting":
                while len(family(process)) < 2 and process.poll() is None:  # resource tracker, engine core
                    time.sleep(0.2)
            elif process.stdout is not None:
                process.stdout.readline()  # "2000 agents at once ...", once the engine has started
            time.sleep(3)
            assert process.poll() is None, "the demo ended before it could be interrupted"
            seen = family(process)
            (os.killpg if target == "group" else os.kill)(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, errors[-3000:]
    assert errors.rstrip().endswith("interrupted"), errors[-3000:]
    assert "Traceback" not in errors, errors[-3000:]
    _, alive = psutil.wait_procs(seen, timeout=10)
    assert alive == []


def test_the_demo_answers_and_shows_the_process_table(capfd: pytest.CaptureFixture[str]) -> None:
    """What `make demo` shows: real answers of the embedded model and a table whose rows differ."""
    done = subprocess.run(
        [sys.executable, "-m", "weft", "demo"], capture_output=True, text=True, timeout=600, check=False
    )
    with capfd.disabled():
        print(done.stdout)  # noqa: T201  CI's log shows the table
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr == ""
    assert "The Nile is 6650 kilometres long." in done.stdout
    table = done.stdout[done.stdout.index("process table") :]
    rows = [line.split() for line in table.splitlines() if line.rstrip().endswith("finished")]
    assert len(rows) == 10
    by_name = {row[0]: row for row in rows}
    assert [int(by_name[name][2]) for name in ("rivers", "deserts", "volcanoes", "divide")] == [10, 8, 4, 2]
    services, waits = [float(row[5]) for row in rows], [float(row[6]) for row in rows]
    assert len(set(services)) > 5
    assert len(set(waits)) > 5
    assert min(services[:6]) > max(services[7:]), "the long programs attain more service than the shortest"
    assert "4 programs of up to 2 questions took" in done.stdout
