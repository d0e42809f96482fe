"""Records the programs of an engine as a trace (`weft.core.trace.format`): one line for each program, at its end."""

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

# The environment variable that names the trace file of engines without a `record` argument.
VARIABLE: Final = "WEFT_RECORD"

_MAX_NAMES: Final = 1000  # a limit, because an application may name each program after its user


@dataclass(slots=True)
class _OpenProgram:
    """A program that has not ended."""

    info: ProgramInfo
    graph: ProgramGraph | None = None  # from its first call on
    prompts: dict[CallId, array[int]] = field(default_factory=dict)  # token ids
    outputs: dict[CallId, array[int]] = field(default_factory=dict)  # token ids; of several choices, those of the first


class Recorder:
    """Appends the programs of one engine to a trace file.

    Any thread may use a recorder, and several recorders may append to one file. `arrival_s` counts from the first call
    of the first program. `shared_prefix_tokens` is found by comparing token ids: those of a call with those of its
    first parent, or those of a call without parents with those of the first ended program of the same name. Texts are
    not recorded.

    After the start, errors are not raised: recording stops with one warning.

    Args:
        path: the file. It is created if it does not exist.

    Raises:
        TraceError: the file cannot be written, or is not a trace.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()  # because the application may change its working directory
        prepare(self._path)
        self._lock = threading.Lock()
        self._open: dict[ProgramId, _OpenProgram] = {}
        self._start_s: float | None = None
        self._first_prompts: dict[str, array[int]] = {}  # by program name, to compare other programs' prompts with
        self._stopped = False

    def begin(self, info: ProgramInfo) -> None:
        """Note that a program begins."""
        with self._lock:
            if not self._stopped:
                self._open[info.program_id] = _OpenProgram(info)

    def call_arrived(self, graph: ProgramGraph, now_s: float) -> None:
        """Note that a call of a program arrives. A program that has not begun, or has ended, is not recorded.

        Args:
            graph: the program's graph.
            now_s: the time, in seconds of the engine's clock.
        """
        with self._lock:
            self._start_s = now_s if self._start_s is None else self._start_s
            program = self._open.get(graph.program_id)
            if program is not None:
                program.graph = graph

    def note_tokens(
        self, program_id: ProgramId, call_id: CallId, *, prompt: Sequence[int] = (), output: Sequence[int] = ()
    ) -> None:
        """Add token ids of a call: its prompt, or more of its output. The ids of an unknown program are ignored."""
        with self._lock:
            program = self._open.get(program_id)
            if program is None:
                return
            if prompt:
                program.prompts[call_id] = array("i", prompt)
            program.outputs.setdefault(call_id, array("i")).extend(output)

    def end(self, program_id: ProgramId) -> None:
        """Write the line of a program that has ended.

        A program that has ended before, or that has no call with an output token, gets no line.
        """
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
        """Write the lines of all programs that have not ended, when the engine is shut down."""
        for program_id in list(self._open):
            self.end(program_id)

    def _trace(self, program: _OpenProgram, graph: ProgramGraph) -> TraceProgram | None:
        try:
            trace = from_graph(graph, start_s=self._start_s or 0.0, tenant=program.info.tenant)
        except TraceError:  # no call has an output token
            return None
        calls = (replace(call, shared_prefix_tokens=self._shared_tokens(program, call)) for call in trace.calls)
        return replace(trace, calls=tuple(calls))

    def _shared_tokens(self, program: _OpenProgram, call: TraceCall) -> int:
        prompt = program.prompts.get(CallId(call.call_id))
        if prompt is None:
            return 0
        if call.parents:
            parent = CallId(call.parents[0])
            before = program.prompts.get(parent, array("i")) + program.outputs.get(parent, array("i"))
            return _common_prefix(prompt, before)
        name = program.info.name
        if name in self._first_prompts:
            return _common_prefix(prompt, self._first_prompts[name])
        if len(self._first_prompts) < _MAX_NAMES:
            self._first_prompts[name] = prompt
        return 0


def prepare(path: Path) -> int:
    """Create a trace file, or check that an existing file can be written and is empty or a trace.

    Returns:
        The number of programs in the file.

    Raises:
        TraceError: the file cannot be written, or is not a trace.
    """
    if path.exists() and not path.is_file():
        raise TraceError(f"{path} is not a file; name a trace file to record into, or a new file.")
    try:
        with _locked(path) as file:
            size = os.fstat(file).st_size
            if not size:
                return 0
            programs = len(read(path))
            if os.pread(file, 1, size - 1) != b"\n":  # a file that was edited by hand may lack the last line break
                os.write(file, b"\n")
            return programs
    except OSError as error:
        raise TraceError(f"{path} cannot be recorded into: {error.strerror or error}. Choose another file.") from None


def _append(path: Path, line: str) -> None:
    data = f"{line}\n".encode()
    with _locked(path) as file:
        size = os.fstat(file).st_size
        if os.write(file, data) < len(data):  # the disk is full; half a line would make the file unreadable
            os.ftruncate(file, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open a file to append to, and lock it against other recorders until it is closed."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)


def _common_prefix(first: array[int], second: array[int]) -> int:
    """Return the length of the common prefix, by bisection."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
