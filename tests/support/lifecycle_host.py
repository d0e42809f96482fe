"""A host process with two engines that start at once, host processes of its own, and forks. It prints what it sees.

Run it with the folder of a model. It runs itself again as the host, and afterwards looks for processes that are left.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import psutil
from polling import until

import weft
from weft.engine.processes.tree import ProcessTree

with suppress(ImportError):  # vLLM imports Ray where Ray is installed, which changes the record factory
    importlib.import_module("ray")

ARGS: Final[dict[str, Any]] = {
    "max_num_seqs": 2,
    "max_model_len": 512,
    "enforce_eager": True,
    "use_tqdm_on_load": False,
    "kv_cache_memory_bytes": 64 << 20,
}
REQUEST: Final = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 2}
PATIENCE_S: Final = 60.0  # only prevents a hang


def state() -> dict[str, Any]:
    """What a start of an engine must leave alone."""
    root = logging.getLogger()
    return {
        "handlers": [[type(h).__name__, h.stream is sys.stderr] for h in root.handlers],  # type: ignore[attr-defined]
        "levels": [root.level, logging.getLogger("httpx").level],
        "factory": logging.getLogRecordFactory().__name__,  # type: ignore[attr-defined]
        "policy": type(asyncio.get_event_loop_policy()).__name__,
        "environ": dict(os.environ),
    }


def ask(engine: weft.Engine) -> bool:
    """Whether an engine answers a call."""
    with weft.Program("ask") as program:
        answer = engine.chat_sync(REQUEST, program, program.reports.start_call("ask"))
    return answer["usage"]["completion_tokens"] > 0


class HostProcesses:
    """Processes that the host starts for itself, in each of several ways, while engines start."""

    def __init__(self) -> None:
        self._processes: list[Any] = []

    def start(self) -> None:
        """Start a few. One of them has the name of vLLM's, and a thread that ends at once starts another."""
        context = multiprocessing.get_context("spawn")
        for name in ("EngineCore", "worker"):
            self._processes.append(context.Process(target=time.sleep, args=(600,), name=name, daemon=True))
        self._processes[0].start()
        starting = threading.Thread(target=self._processes[1].start)
        starting.start()
        starting.join()
        self._processes.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))

    def alive(self) -> list[bool]:
        return [
            psutil.pid_exists(each.pid) and psutil.Process(each.pid).status() != "zombie" for each in self._processes
        ]

    def end(self) -> None:
        for each in self._processes:
            each.kill()
            each.join() if hasattr(each, "join") else each.wait()


def child_pids() -> set[int]:
    return {process.pid for process in psutil.Process().children()}


async def start_two(model: str, host: HostProcesses) -> list[weft.Engine]:
    """Start two engines at once. Meanwhile the host starts processes and changes its environment."""
    before = child_pids()
    starting = [asyncio.create_task(weft.Engine.create(model, **ARGS)) for _ in range(2)]
    await until(lambda: len(child_pids() - before) > 1)  # multiprocessing's resource tracker, and a process of vLLM's
    host.start()
    os.environ["ADDED"] = os.environ["CHANGED"] = "by the host"
    del os.environ["REMOVED"]
    engines = await asyncio.gather(*starting)
    return list(engines)


async def abandon_start(model: str) -> list[str]:
    """Cancel a start when its process is there. Returns the names of the processes that are left of it."""
    before = child_pids()
    starting = asyncio.create_task(weft.Engine.create(model, **ARGS))
    await until(lambda: child_pids() - before)
    starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled()
    return [process.name() for process in psutil.Process().children() if process.pid not in before]


def in_fork(child: Callable[[], Any], *, exits: bool = True) -> dict[str, Any]:
    """Run a function in a forked child, and report its result and how the child ended.

    Args:
        child: Its result is written as JSON.
        exits: Whether the child exits as a script does, and so runs its finalisers. Its exit code is 7.
    """
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(readable)
        result = child()
        with os.fdopen(writable, "w") as pipe:
            json.dump(result, pipe)
        if not exits:
            os._exit(7)
        raise SystemExit(7)
    os.close(writable)
    ends = time.monotonic() + PATIENCE_S
    status: int | None = None
    while status is None and time.monotonic() < ends:
        ended, code = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
        time.sleep(0.05)
    if status is None:
        psutil.Process(pid).kill()
        os.waitpid(pid, 0)
    with os.fdopen(readable) as pipe:
        text = pipe.read()
    return {"exit_code": "it hangs" if status is None else status, "result": json.loads(text) if text else None}


def errors_of(uses: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """For each use of an engine, the name of the error that it raises."""
    errors = {}
    for name, use in uses.items():
        try:
            errors[name] = f"none: {use()!r}"
        except BaseException as error:  # SystemExit would be as wrong as a missing error
            errors[name] = type(error).__name__
    return errors


def uses(engine: weft.Engine) -> dict[str, Callable[[], Any]]:
    """Every public use of an engine."""

    def with_program(use: Callable[[weft.Program, Any], Any]) -> Callable[[], Any]:
        def run() -> Any:
            program = weft.Program("child")
            return use(program, program.reports.start_call("ask"))

        return run

    async def stream(program: weft.Program, identity: Any) -> list[Any]:
        return [chunk async for chunk in engine.chat_stream(REQUEST, program, identity)]

    return {
        "chat": with_program(lambda program, identity: asyncio.run(engine.chat(REQUEST, program, identity))),
        "chat_sync": with_program(lambda program, identity: engine.chat_sync(REQUEST, program, identity)),
        "chat_stream": with_program(lambda program, identity: asyncio.run(stream(program, identity))),
        "chat_stream_sync": with_program(
            lambda program, identity: list(engine.chat_stream_sync(REQUEST, program, identity))
        ),
        "count_prompt_tokens": lambda: engine.count_prompt_tokens(REQUEST),
        "tokenize": lambda: engine.tokenize("count"),
        "max_model_len": lambda: engine.max_model_len,
        "sessions": lambda: engine.sessions,
        "swap_stats": lambda: engine.swap_stats,
        "shutdown": engine.shutdown,
    }


def use_in_child(engine: weft.Engine) -> None:
    """The target of a process that multiprocessing forks."""
    sys.exit(f"{errors_of(uses(engine))['chat_sync']}")


def fork_with_locks_held(engine: weft.Engine) -> dict[str, Any]:
    """Fork while other threads hold every lock that a call takes."""
    from weft.engine.processes.launch import launch_lock

    program = weft.Program("forked")
    ask(engine)
    locks: list[Any] = [
        program._shared.lock,
        engine.table._lock,
        engine.programs.sessions._lock,
        engine._in_flight._lock,
    ]
    locks += [engine.programs.messages._ended._lock, engine._loop._lock, launch_lock._lock]
    release = threading.Event()

    def hold(lock: Any, held: threading.Event) -> None:
        with lock:
            held.set()
            release.wait()

    def call() -> None:
        engine.chat_sync(REQUEST, program, program.reports.start_call("ask"))

    for lock in locks:
        held = threading.Event()
        threading.Thread(target=hold, args=(lock, held)).start()
        held.wait()
    try:
        return in_fork(lambda: errors_of({"chat_sync": call}))
    finally:
        release.set()


def fork_in_blocks(engine: weft.Engine) -> dict[str, Any]:
    """A child leaves the blocks of a program and of the engine on its way out."""

    def leave() -> None:
        with ExitStack() as stack:
            stack.enter_context(weft.Program("left"))
            program = stack.enter_context(weft.Program("bound"))
            program._shared.backend = engine.programs
            stack.push(engine)  # its __exit__ alone

    return in_fork(leave)


def fork_and_collect(holder: list[weft.Engine]) -> dict[str, Any]:
    """A child drops the engine and collects garbage."""

    def collect() -> bool:
        holder.clear()
        gc.collect()
        return True

    return in_fork(collect)


def run_host(model: str) -> None:
    """Go through all that can happen, and print a report. The host ends without `engine.shutdown()`."""
    report: dict[str, Any] = {}
    logging.basicConfig(level=logging.ERROR)
    os.environ["CHANGED"] = os.environ["REMOVED"] = "before"
    report["before"] = state()
    host = HostProcesses()
    first, second = asyncio.run(start_two(model, host))
    report["after"] = state()
    report["processes"] = [len(first._children), len(second._children), len(first._children & second._children)]
    report["same_logging"] = first._llm.vllm_config.logging_config == second._llm.vllm_config.logging_config
    shared = [Path(file) for file in ProcessTree(child.pid or 0 for child in first._children)._shared_memory]
    first.shutdown()
    report["shared_memory"] = [len(shared), [str(file) for file in shared if file.exists()]]
    report["after_shutdown"] = {"second": ask(second), "host": host.alive()}
    report["left_of_abandoned"] = asyncio.run(abandon_start(model))
    report["after_abandoned"] = {"second": ask(second), "host": host.alive()}
    host.end()
    forks: dict[str, Any] = {}
    holder = [second]
    for name, fork in {
        "exit": lambda: in_fork(lambda: None),
        "use": lambda: in_fork(lambda: errors_of(uses(second))),
        "alive": lambda: in_fork(lambda: second.is_alive),
        "locks": lambda: fork_with_locks_held(second),
        "blocks": lambda: fork_in_blocks(second),
        "collect": lambda: fork_and_collect(holder),
        "_exit": lambda: in_fork(lambda: None, exits=False),
    }.items():
        forks[name] = {**fork(), "serves": second.is_alive and ask(second)}
    process = multiprocessing.get_context("fork").Process(target=use_in_child, args=(second,))
    process.start()
    process.join(PATIENCE_S)
    forks["multiprocessing"] = {"exit_code": process.exitcode, "serves": ask(second)}
    if process.exitcode is None:
        process.kill()
    report["forks"] = forks
    report["children"] = [process.pid for process in psutil.Process().children(recursive=True)]
    sys.stdout.write(f"{json.dumps(report)}\n")
    sys.stdout.flush()


def watch_host(model: str) -> None:
    """Run the host, and add to its report how it ended and which of its processes are left."""
    with subprocess.Popen([sys.executable, __file__, model, "host"], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        lines = host.stdout.readlines()
    report = json.loads(lines[-1])
    left = []
    for pid in report["children"]:
        with suppress(psutil.NoSuchProcess):
            left.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(left, timeout=120)
    report["alive"] = [process.pid for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    for process in alive:
        process.kill()
    report["host_exit_code"] = host.returncode
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    (run_host if sys.argv[-1] == "host" else watch_host)(sys.argv[1])
