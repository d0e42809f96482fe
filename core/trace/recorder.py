"""Records the programs of an engine as a trace (`weft.core.trace.format`): one line for each program, at its end.

Lines are appended to the file on a thread of its own, so that no caller waits for the disk or for the file's lock.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import functools
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from weft.core.errors import TraceError
from weft.core.ids import CallId, ProgramId
from weft.core.locks import fork_safe
from weft.core.log import get_logger
from weft.core.process_rows import CallIdentity, ProgramInfo, ProgramRow, ProgramState
from weft.core.program.graph import ProgramGraph
from weft.core.program.observer import ProgramObserver
from weft.core.trace.format import dump, from_graph, read
from weft.core.trace.prefixes import TokenChain

MOST_WAITING: Final = 1000  # programs that may wait to be written
MOST_WAITING_CALLS: Final = 50_000  # calls of these programs
FLUSH_S: Final = 5.0  # the longest wait at the end of an engine or of the interpreter
_POLL_S: Final = 0.02  # between attempts to lock a file that another process has locked


class TraceWriter:
    """Writes lines in the order in which they were given. Any thread may use a writer, and no method raises.

    After an error there is one warning, and nothing more is written. A line is written whole or not at all.

    Attributes:
        stopped: whether nothing more is written.
        dropped: how many programs were not written because too many waited.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed = threading.Condition(fork_safe(threading.RLock()))
        self._waiting: deque[tuple[Callable[[], str | None], int]] = deque()
        self._calls = 0  # calls of the programs that wait
        self._is_writing = False
        self._gives_up = threading.Event()
        self.stopped = False
        self.dropped = 0
        _writers.add(self)

    def put(self, line: Callable[[], str | None], calls: int) -> None:
        """Write a line soon, unless too many wait.

        Args:
            line: makes the line on the writer's thread. It returns None if there is nothing to write.
        """
        with self._changed:
            if self.stopped:
                return
            if len(self._waiting) >= MOST_WAITING or (self._waiting and self._calls + calls > MOST_WAITING_CALLS):
                self.dropped += 1
                if self.dropped == 1:
                    self._warn("programs end faster than their records can be written; some are not recorded")
                return
            self._waiting.append((line, calls))
            self._calls += calls
            if self._is_writing:
                return
            self._is_writing = True
        try:
            threading.Thread(target=self._write_all, name="weft-trace-writer", daemon=True).start()
        except RuntimeError:  # the interpreter is ending
            self._write_all()

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until all lines are written.

        Args:
            timeout_s: the longest wait, in seconds. Lines that are not written by then are dropped with a warning.

        Returns whether nothing waits any more.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: not self._is_writing, timeout_s)
            missing = len(self._waiting) + (not done)
            if done:
                return True
            self._waiting.clear()
            self._calls = 0
            self.stopped = True
        self._gives_up.set()
        self._warn(
            "recording stopped; another process holds the lock of the file, or the disk is slow", missing=missing
        )
        return False

    def abandon(self) -> None:
        """Write nothing more. For a forked child, because the writer's thread is in the parent process."""
        self.stopped, self._is_writing = True, False
        self._waiting.clear()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._is_writing = False
                    self._changed.notify_all()
                    return
                line, calls = self._waiting.popleft()
                self._calls -= calls
            try:
                text = line()
                if text is not None:
                    append(self._path, text, self._gives_up)
            except Exception as error:
                with self._changed:
                    is_first, self.stopped = not self.stopped, True
                    self._waiting.clear()
                    self._calls = 0
                if is_first:
                    self._warn(
                        "recording stopped; the programs recorded so far can be used, later ones are not recorded",
                        reason=str(error),
                    )

    def _warn(self, message: str, **values: object) -> None:
        with suppress(Exception):  # a log that cannot be written must not end the writer's thread
            get_logger().warning(message, path=str(self._path), **values)


_writers: weakref.WeakSet[TraceWriter] = weakref.WeakSet()


@atexit.register
def _flush_all() -> None:
    """Wait for all writers when the interpreter ends, `FLUSH_S` at most."""
    end_s = time.monotonic() + FLUSH_S
    for writer in list(_writers):
        writer.flush(max(0.0, end_s - time.monotonic()))


def _stop_all() -> None:
    """Stop all writers in a forked child, which has none of their threads."""
    for writer in list(_writers):
        writer.abandon()


os.register_at_fork(after_in_child=_stop_all)


def prepare(path: Path) -> int:
    """Create a trace file, or check that an existing one can be written and is empty or a trace. Returns how many
    programs it has. Raises TraceError if it is none of that, or locked by another process for longer than 5 s."""
    if path.exists() and not path.is_file():
        raise TraceError(f"{path} is not a file; name a trace file to record into, or a new file.")
    try:
        with _locked(path, threading.Event(), FLUSH_S) as file:
            size = os.fstat(file).st_size
            if not size:
                return 0
            programs = len(read(path))
            if os.pread(file, 1, size - 1) != b"\n":  # a file that was edited by hand may lack the last line break
                os.write(file, b"\n")
            return programs
    except OSError as error:
        raise TraceError(f"{path} cannot be recorded into: {error.strerror or error}. Choose another file.") from None


def append(path: Path, line: str, gives_up: threading.Event) -> None:
    """Append a line, without its end, to a file, whole or not at all. When `gives_up` is set, the wait for the
    file's lock ends. Raises OSError if the file cannot be written or locked."""
    data = f"{line}\n".encode()
    with _locked(path, gives_up) as file:
        size = os.fstat(file).st_size
        try:
            written = os.write(file, data)
            while written < len(data):  # the disk is full, or the write was interrupted
                more = os.write(file, data[written:])
                if not more:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                written += more
        except OSError:
            os.ftruncate(file, size)  # half a line would make the file unreadable
            raise


@contextmanager
def _locked(path: Path, gives_up: threading.Event, timeout_s: float | None = None) -> Iterator[int]:
    """Open a file to append to, and lock it against other recorders until it is closed."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if gives_up.wait(_POLL_S) or (end_s is not None and time.monotonic() > end_s):
                    raise OSError(errno.EAGAIN, "another process holds its lock") from None
        yield file
    finally:
        os.close(file)


__all__ = ["VARIABLE", "Recorder", "prepare"]

# The environment variable that names the trace file of engines without a `record` argument.
VARIABLE: Final = "WEFT_RECORD"

_MAX_NAMES: Final = 1000  # a limit, because an application may name each program after its user
_MAX_BLOCKS: Final = 1 << 16  # blocks of one program whose hashes are kept: 512 KiB, for a million tokens


@dataclass(slots=True)
class _OpenProgram:
    """A program that has not ended."""

    info: ProgramInfo
    graph: ProgramGraph | None = None  # None until its first call
    shared: dict[CallId, int] = field(default_factory=dict)  # by call: the tokens that its prompt shares
    chains: dict[CallId, TokenChain] = field(default_factory=dict)  # the call used least recently first
    blocks: int = 0  # of all chains

    def add(self, call_id: CallId, chain: TokenChain) -> None:
        """Keep the chain of a call, and forget the chains that were used longest ago."""
        self.chains[call_id] = chain
        self.blocks += len(chain)
        self.forget()

    def forget(self) -> None:
        """Drop chains, and shared tokens of calls that the graph has dropped, beyond the bounds."""
        while self.blocks > _MAX_BLOCKS and len(self.chains) > 1:
            self.blocks -= len(self.chains.pop(next(iter(self.chains))))
        if self.graph is not None and len(self.shared) > 2 * len(self.graph) + _MAX_NAMES:  # the graph forgets as well
            self.shared = {call_id: shared for call_id, shared in self.shared.items() if call_id in self.graph}

    def chain_before(self, call_id: CallId) -> TokenChain | None:
        """The chain of a call's first parent in the trace; None if it has no parent, or if the chain is forgotten."""
        parent = self.first_parent(call_id)
        chain = self.chains.pop(parent, None) if parent is not None else None
        if parent is not None and chain is not None:
            self.chains[parent] = chain  # used most recently
        return chain

    def first_parent(self, call_id: CallId) -> CallId | None:
        """The first parent that a call has in the trace. Calls without output are not in the trace."""
        graph, seen = self.graph, {call_id}
        if graph is None or call_id not in graph:
            return None
        waiting = [iter(graph[call_id].parents)]
        while waiting:
            edge = next(waiting[-1], None)
            if edge is None:
                waiting.pop()
            elif edge.parent in graph and edge.parent not in seen:
                if graph[edge.parent].account.output_tokens > 0:
                    return edge.parent
                seen.add(edge.parent)
                waiting.append(iter(graph[edge.parent].parents))
        return None


class Recorder(ProgramObserver):
    """Appends the programs of one engine to a trace file, on a thread of its own.

    Any thread may use a recorder, and several recorders may append to one file. Only `end_all` and `flush` wait for the
    file. `arrival_s` counts from the first call of the first program. `shared_prefix_tokens` is found by comparing
    hashes of blocks of tokens. A call is compared with its first parent, and a call without parents with the first call
    of a program of the same name. Neither texts nor token ids are kept.

    After the start, errors are not raised: recording stops with one warning. If programs end faster than they can be
    written, some are not recorded, with one warning.

    Raises:
        TraceError: the file cannot be written, is not a trace, or is locked by another process for longer than 5 s.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        absolute = Path(path).absolute()  # because the application may change its working directory
        prepare(absolute)
        self._writer = TraceWriter(absolute)
        self._lock = fork_safe(threading.Lock())
        self._open: dict[ProgramId, _OpenProgram] = {}
        self._start_s: float | None = None
        self._first_prompts: dict[str, TokenChain] = {}  # by program name, to compare other programs' prompts with

    def program_started(self, info: ProgramInfo, now_s: float) -> None:
        with self._lock:
            if not self._writer.stopped:
                self._open[info.program_id] = _OpenProgram(info)

    def call_arrived(self, identity: CallIdentity, graph: ProgramGraph, now_s: float) -> None:
        """A call was admitted. A program that has not begun, or has ended, is not recorded."""
        with self._lock:
            self._start_s = now_s if self._start_s is None else self._start_s
            program = self._get(graph.program_id)
            if program is not None:
                program.graph = graph

    def note_tokens(
        self, program_id: ProgramId, call_id: CallId, *, prompt: Sequence[int] = (), output: Sequence[int] = ()
    ) -> None:
        """Add token ids of a call: its prompt, or more of its output. The ids of an unknown program are ignored."""
        with self._lock:
            program = self._get(program_id)
            if program is None:
                return
            if call_id not in program.shared:  # these are its first tokens
                chain = TokenChain(prompt)
                program.shared[call_id] = self._shared_tokens(program, call_id, chain, prompt)
                program.add(call_id, chain)
            known = program.chains.get(call_id)
            if known is not None and output:
                program.blocks -= len(known)
                known.extend(output)
                program.add(call_id, known)

    def program_ended(self, row: ProgramRow, state: ProgramState, now_s: float) -> None:
        self.end(row.info.program_id)

    def end(self, program_id: ProgramId) -> None:
        """Have the line of a program that has ended written soon.

        A program that has ended before, or that has no call with an output token, gets no line.
        """
        with self._lock:
            program = self._get(program_id)
            if program is None:
                return
            del self._open[program_id]
            if program.graph is None:
                return
            graph = program.graph.copy()  # because aborted calls change it later
        self._writer.put(functools.partial(self._line, program, graph), len(graph))

    def end_all(self) -> None:
        """Write the lines of all programs that have not ended, when the engine is shut down.

        Waits 5 s at most until they are written. What is not written by then is dropped with a warning.
        """
        for program_id in list(self._open):
            self.end(program_id)
        self.flush()

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until the programs that have ended are written.

        Args:
            timeout_s: the longest wait, in seconds. After it, recording stops with a warning.

        Returns whether they are written.
        """
        return self._writer.flush(timeout_s)

    def _get(self, program_id: ProgramId) -> _OpenProgram | None:
        if self._writer.stopped:
            self._open.clear()
            self._first_prompts.clear()
        return self._open.get(program_id)

    def _line(self, program: _OpenProgram, graph: ProgramGraph) -> str | None:
        try:
            info, due_after_s = program.info, program.info.due_after_s
            deadline_s = due_after_s if due_after_s < math.inf else None
            trace = from_graph(graph, start_s=self._start_s or 0.0, tenant=info.tenant, deadline_s=deadline_s)
        except TraceError:  # no call has an output token
            return None
        shared = ((call, program.shared.get(CallId(call.call_id), 0)) for call in trace.calls)
        return dump(replace(trace, calls=tuple(replace(call, shared_prefix_tokens=tokens) for call, tokens in shared)))

    def _shared_tokens(self, program: _OpenProgram, call_id: CallId, chain: TokenChain, prompt: Sequence[int]) -> int:
        if program.first_parent(call_id) is not None:
            before = program.chain_before(call_id)
            return before.shared_tokens(chain, prompt) if before is not None else 0
        name = program.info.name
        if name in self._first_prompts:
            return self._first_prompts[name].shared_tokens(chain, prompt)
        if prompt and len(self._first_prompts) < _MAX_NAMES:
            self._first_prompts[name] = chain.of_prompt()
        return 0
