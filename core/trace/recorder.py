"""Records what programs did on an engine as a trace (`trace.py`): a line for each program, when it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from weft.core.errors import TraceError
from weft.core.ids import CallId, ProgramId
from weft.core.log import get_logger
from weft.core.process_table import ProgramInfo
from weft.core.program.graph import ProgramGraph
from weft.core.trace.format import TraceCall, TraceProgram, dump, from_graph, read

VARIABLE: Final = "WEFT_RECORD"  # of the environment: the file into which engines record that are not told otherwise

_MOST_NAMES: Final = 1000  # whose first prompt is kept; somebody may name each program after its user


@dataclass(slots=True)
class _Open:
    """A program that has not ended."""

    info: ProgramInfo
    graph: ProgramGraph | None = None  # from its first call on
    prompts: dict[CallId, array[int]] = field(default_factory=dict)  # token ids
    outputs: dict[CallId, array[int]] = field(default_factory=dict)  # of the first answer, if a call asks for several


class Recorder:
    """Appends the programs of one engine to a trace file. Any thread may use it, and others may append to the file too.

    `arrival_s` counts from the first program's first call. `shared_prefix_tokens` is found by comparing token ids: of a
    call with those of its first parent, of one without parents with those of the first program of that name which
    ended. Texts are not recorded.

    Nothing that goes wrong after the start is raised: a warning says so, once, and recording stops.

    Args:
        path: the file; made if it is not there.

    Raises:
        TraceError: the file cannot be written, or holds something else than a trace.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()  # the program may change its folder
        prepare(self._path)
        self._lock = threading.Lock()
        self._open: dict[ProgramId, _Open] = {}
        self._start_s: float | None = None
        self._beginnings: dict[str, array[int]] = {}  # by name: a prompt that those of other programs are held against
        self._stopped = False

    def begin(self, info: ProgramInfo) -> None:
        """A program begins."""
        with self._lock:
            if not self._stopped:
                self._open[info.program_id] = _Open(info)

    def call_arrived(self, graph: ProgramGraph, now_s: float) -> None:
        """A call of the program with this graph arrives, at `now_s` seconds of the engine's clock.

        Of a program that did not begin, or has ended, nothing is recorded.
        """
        with self._lock:
            self._start_s = now_s if self._start_s is None else self._start_s
            program = self._open.get(graph.program_id)
            if program is not None:
                program.graph = graph

    def note_tokens(
        self, program_id: ProgramId, call_id: CallId, *, prompt: Sequence[int] = (), output: Sequence[int] = ()
    ) -> None:
        """Token ids of a call: its prompt, or more of what it gives."""
        with self._lock:
            program = self._open.get(program_id)
            if program is None:
                return
            if prompt:
                program.prompts[call_id] = array("i", prompt)
            program.outputs.setdefault(call_id, array("i")).extend(output)

    def end(self, program_id: ProgramId) -> None:
        """A program ended: write its line. One that ended before, or of which no call gave a token, has none."""
        with self._lock:
            program = self._open.pop(program_id, None)
            if program is None or program.graph is None or self._stopped:
                return
            try:
                trace = self._trace(program, program.graph)
                if trace is not None:
                    _append(self._path, dump(trace))
            except Exception as error:
                self._stopped = True
                self._open.clear()
                get_logger().warning(
                    "recording stopped; the programs recorded so far can be used, later ones are not recorded",
                    path=str(self._path),
                    reason=str(error),
                )

    def end_all(self) -> None:
        """The engine is shut down: write the programs that have not ended."""
        for program_id in list(self._open):
            self.end(program_id)

    def _trace(self, program: _Open, graph: ProgramGraph) -> TraceProgram | None:
        try:
            made = from_graph(graph, start_s=self._start_s or 0.0, tenant=program.info.tenant)
        except TraceError:  # no call of it gave a token
            return None
        calls = (replace(call, shared_prefix_tokens=self._shared_tokens(program, call)) for call in made.calls)
        return replace(made, calls=tuple(calls))

    def _shared_tokens(self, program: _Open, call: TraceCall) -> int:
        prompt = program.prompts.get(CallId(call.call_id))
        if prompt is None:
            return 0
        if call.parents:
            parent = CallId(call.parents[0])
            before = program.prompts.get(parent, array("i")) + program.outputs.get(parent, array("i"))
            return _common(prompt, before)
        name = program.info.name
        if name in self._beginnings:
            return _common(prompt, self._beginnings[name])
        if len(self._beginnings) < _MOST_NAMES:
            self._beginnings[name] = prompt
        return 0


def prepare(path: Path) -> int:
    """Make a file ready to be recorded into: it is there, can be written, and holds a trace or nothing.

    Returns:
        How many programs it holds.

    Raises:
        TraceError: it is not so.
    """
    if path.exists() and not path.is_file():
        raise TraceError(f"{path} is no file; name a trace file to record into, or one that is not there yet.")
    try:
        with _locked(path) as file:
            size = os.fstat(file).st_size
            if not size:
                return 0
            programs = len(read(path))
            if os.pread(file, 1, size - 1) != b"\n":  # written by hand; the next program needs a line of its own
                os.write(file, b"\n")
            return programs
    except OSError as error:
        raise TraceError(f"{path} cannot be recorded into: {error.strerror or error}. Choose another file.") from None


def _append(path: Path, line: str) -> None:
    data = f"{line}\n".encode()
    with _locked(path) as file:
        size = os.fstat(file).st_size
        if os.write(file, data) < len(data):  # no room for all of it; half a line would spoil the file
            os.ftruncate(file, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """A descriptor of the file to append to, while no other recorder does."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        yield file
    finally:
        os.close(file)


def _common(first: array[int], second: array[int]) -> int:
    """So many first items are the same in both."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
