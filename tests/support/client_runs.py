"""Runs a real client against a scripted server, and says which programs the server has seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Final
from unittest import mock

from client_packages import Package, installed

from weft.core.testing.script import AnyReply, ScriptedCall
from weft.engine.serve import server as serving
from weft.testing import ScriptedServer

APPS: Final = Path(__file__).parents[1] / "clients" / "apps"
RESULTS: Final = Path("build/clients")  # a JSON file a case, from which the table of the documents is made
RECORDINGS: Final = "WEFT_RECORD_CLIENTS"  # a folder for the requests and answers of each case, to replay them
_RUN_S: Final = 300

Answer = Callable[[Mapping[str, Any]], AnyReply]


@dataclass(frozen=True)
class Case:
    """What a client does, and what the server should see of it.

    Attributes:
        package: The client.
        name: Of the case, as the table shows it.
        answer: The model's answers.
        programs: Each program's calls in the order of their arrival, such as "a b0 b1 a2": a letter for the thread,
            and the numbers of the calls that had to finish before this one. Programs in the order of their texts.
        or_program: How the only program looks if threads of the client came in their other order.
        names: The programs' names, in any order.
        ends: The states that programs have when the server has ended, in any order. No client ends its own.
        command: Of the client's process, from the server's address and a folder of the case's own; () for the script in
            `apps` with the package's name.
        environment: Variables for it; {url} is the address.
        prepare: Writes the client's files into the folder, given the address.
        api: The API that it uses.
        identified_by: What names its program.
        expects_exit: The status that the client's processes end with; None: any.
        is_left: The client is interrupted when its first call has arrived.
    """

    package: Package
    name: str
    answer: Answer
    programs: tuple[str, ...]
    names: tuple[str, ...] = ("openai-python",)
    ends: tuple[str, ...] = ("finished",)
    or_program: str = ""
    command: Callable[[str, Path], Sequence[Sequence[str]]] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[str, Path], None] | None = None
    api: str = "chat"
    identified_by: str = "lineage"
    expects_exit: int | None = 0
    is_left: bool = False


@dataclass(frozen=True)
class Seen:
    """What the server has seen of a case."""

    programs: tuple[str, ...]
    names: tuple[str, ...]
    in_flight: int
    ends: tuple[str, ...] = ()


def run(case: Case, folder: Path) -> Seen:
    """Run a case, and note its result."""
    package = installed(case.package)
    with ExitStack() as stack:
        if RECORDINGS in os.environ:
            target = Path(os.environ[RECORDINGS]) / f"{case.package.name}-{case.name.replace(' ', '-')}.jsonl"
            target.unlink(missing_ok=True)
            stack.enter_context(_recorded(target))
        server = stack.enter_context(ScriptedServer(case.answer))
        commands = case.command(server.url, folder) if case.command else [[package.program, str(_app(case)), case.name]]
        if case.prepare is not None:
            case.prepare(server.url, folder)
        _run_all(case, commands, server, folder)
        while any(row.in_flight for row in server.programs):  # a stream that was left
            time.sleep(0.01)
        seen, rows = _seen(server), server.programs
    seen = replace(seen, ends=tuple(sorted({str(row.state) for row in rows})))
    _note(case, seen)
    return seen


def _app(case: Case) -> Path:
    return APPS / f"{case.package.name.replace('-', '_')}_app.py"


def _run_all(case: Case, commands: Sequence[Sequence[str]], server: ScriptedServer, folder: Path) -> None:
    """Run commands one after the other; a list in place of a word means several at once."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
        "HOME": str(folder),
        "PWD": str(folder),  # where OpenCode works
        "OPENAI_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": "none",
        "PYTHONWARNINGS": "ignore",
        "LITELLM_LOCAL_MODEL_COST_MAP": "true",  # and not from the network
        **{name: value.format(url=server.url) for name, value in case.environment.items()},
    }
    environment.pop("PYTHONPATH", None)
    for command in commands:
        together = command if command and not isinstance(command[0], str) else [command]
        processes = [
            subprocess.Popen(
                list(each),  # type: ignore[arg-type]
                cwd=folder,
                env={**environment, "XDG_DATA_HOME": str(folder / f"data-{number}")},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                process_group=0,
            )
            for number, each in enumerate(together)  # OpenCodes that start at once cannot make one database
        ]
        try:
            for process in processes:
                if case.is_left:
                    _interrupt(process, server)
                output, _ = process.communicate(timeout=_RUN_S)
                (folder / f"{process.pid}.log").write_text(output)
                assert case.expects_exit in (None, process.returncode), output[-4000:]
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.communicate()


def _interrupt(process: subprocess.Popen[str], server: ScriptedServer) -> None:
    """Interrupt a client in its first call, and end it if it does not leave: as a terminal does, with its children."""
    while not server.calls and process.poll() is None:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def _seen(server: ScriptedServer) -> Seen:
    by_program: dict[str, list[ScriptedCall]] = {}
    for call in server.calls:
        by_program.setdefault(call.program_id, []).append(call)
    return Seen(
        tuple(sorted(map(_shape, by_program.values()))),
        tuple(sorted({row.info.name for row in server.programs})),
        sum(len(row.in_flight) for row in server.programs),
    )


def _shape(calls: Sequence[ScriptedCall]) -> str:
    numbers = {call.call_id: number for number, call in enumerate(calls)}
    letters: dict[str, str] = {}
    words = []
    for call in calls:
        number = len(letters)
        letter = letters.setdefault(call.thread_id, ascii_lowercase[number] if number < 26 else f"?{number}")
        words.append(
            letter + ",".join(str(numbers[parent]) for parent in sorted(call.parents, key=numbers.__getitem__))
        )
    return " ".join(words)


def _note(case: Case, seen: Seen) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    found = {
        "client": case.package.name,
        "version": case.package.version,
        "case": case.name,
        "api": case.api,
        "identified_by": case.identified_by,
        "expected": list(seen.programs) if seen.programs == (case.or_program,) else sorted(case.programs),
        "seen": list(seen.programs),
        "names": list(seen.names),
        "ends": list(seen.ends),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
    }
    (RESULTS / f"{case.package.name}-{case.name.replace(' ', '-')}.json").write_text(json.dumps(found, indent=1))


# -- recordings


def _recorded(target: Path) -> Any:
    """Write each request, with the answer that it got, as a line of JSON."""
    target.parent.mkdir(parents=True, exist_ok=True)
    guarded = serving.guarded
    numbers = count()

    def recording(app: Any, *arguments: Any) -> Any:
        inner = guarded(app, *arguments)

        async def outer(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await inner(scope, receive, send)
                return
            record: dict[str, Any] = {
                "number": next(numbers),
                "begin_s": time.monotonic(),
                "method": scope["method"],
                "path": scope["path"],
                "peer": scope.get("client"),
                "headers": _decoded(scope["headers"]),
                "body": "",
                "status": None,
                "answer": "",
                "is_whole": False,
            }

            async def heard() -> Any:
                message = await receive()
                record["body"] += message.get("body", b"").decode(errors="replace")
                return message

            async def said(message: Any) -> None:
                record["status"] = message.get("status", record["status"])
                record["answer"] += message.get("body", b"").decode(errors="replace")
                if message["type"] == "http.response.start":
                    record["answer_headers"] = [
                        [n.decode("latin-1"), v.decode("latin-1")] for n, v in message["headers"]
                    ]
                record["is_whole"] = message["type"] == "http.response.body" and not message.get("more_body", False)
                await send(message)

            try:
                await inner(scope, heard, said)
            finally:
                record["end_s"] = time.monotonic()
                with target.open("a") as file:
                    file.write(json.dumps(record) + "\n")

        return outer

    return mock.patch.object(serving, "guarded", recording)


def _decoded(headers: Sequence[tuple[bytes, bytes]]) -> list[list[str]]:
    return [[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers]
