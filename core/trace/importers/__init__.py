"""Imports traces of other tools: `weft trace import` and whatever else reads a user's own traces.

Each format has an `Importer` in a module of its own; it is added to `_ALL`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from weft.core.errors import TraceError
from weft.core.trace.format import MOST, TraceCall, TraceProgram
from weft.core.trace.importers.agentic_mooncake import AGENTIC_MOONCAKE
from weft.core.trace.importers.benchmarks import BFCL, SWE_AGENT, TAU_BENCH
from weft.core.trace.importers.claude_code import CLAUDE_CODE
from weft.core.trace.importers.contract import Blocks, Importer, LeftOut
from weft.core.trace.importers.contract import ImportOptions as ImportOptions
from weft.core.trace.importers.langfuse import LANGFUSE
from weft.core.trace.importers.mooncake import AIPERF, MOONCAKE
from weft.core.trace.importers.opentelemetry import OPENTELEMETRY
from weft.core.trace.importers.request_logs import AZURE, LITELLM, VLLM_LOG
from weft.core.trace.importers.weka import WEKA

_ALL: Final = (
    WEKA,
    AGENTIC_MOONCAKE,
    MOONCAKE,
    AIPERF,
    AZURE,
    CLAUDE_CODE,
    OPENTELEMETRY,
    LANGFUSE,  # its inputs and outputs may quote what is in LiteLLM's logs
    LITELLM,
    VLLM_LOG,
    TAU_BENCH,
    BFCL,
    SWE_AGENT,
)
IMPORTERS: Final = {each.name: each for each in _ALL}  # in the order in which they look

_HEAD_BYTES: Final = 1 << 18
_BESIDE: Final = ("*.answers.jsonl", "agent-*.jsonl", "agent-*.meta.json")  # files that are read with another one


@dataclass(slots=True)
class ImportCounts:
    """What an import has found so far."""

    programs: int = 0
    calls: int = 0
    programs_left_out: int = 0  # with their first calls beyond a cap
    calls_left_out: int = 0  # of the programs that were kept
    calls_unused: int = 0  # that failed, or whose tokens the files do not tell, or that were in an earlier file


class TraceImport:
    """Finds the files to import, and how to read them. Iterate over it to import their programs, once.

    Programs come one by one, logs with dates in the order of their beginnings, and no file is held whole, except a
    file that is one JSON document. Programs of one id get ids of their own: the second one's ends in `-2`. The
    iteration raises TraceError if a file is wrong or has no program, or if the caps leave none. A file without a
    program may be in a folder.

    Args:
        paths: files, and folders of files. In a folder, files of other formats are left out.
        format: the format's name. Without it, the format is found by looking at each file.
        arrivals: the arrival times of the programs in seconds. By default programs arrive as recorded: from the start
            of each file, or from the first of all logs whose times are dates.

    Attributes:
        files: the files, each with its importer.
        left_out: the files in folders that are of no known format.
        empty: the files in folders that have no program, as far as they are read.

    Raises:
        TraceError: there is no such format, a file has no known format, or a folder has no file with one.
    """

    def __init__(
        self,
        paths: Iterable[Path],
        options: ImportOptions | None = None,
        format: str | None = None,  # noqa: A002  the option's name
        arrivals: Iterator[float] | None = None,
        advance: Callable[[int], object] = lambda _: None,
    ) -> None:
        if format is not None and format not in IMPORTERS:
            raise TraceError(f"there is no format {format!r:.40}; choose one of {', '.join(IMPORTERS)}.")
        self.files: list[tuple[Path, Importer]] = []
        self.left_out: list[Path] = []
        self.empty: list[Path] = []
        self._named: set[Path] = set()
        self.counts = ImportCounts()
        self._options = options or ImportOptions()
        self._arrivals = arrivals
        self.advance = advance
        for path in paths:
            self._find(path, format)

    @property
    def bytes(self) -> int:
        """How many bytes will be read."""
        return sum(path.stat().st_size for path, _ in self.files)

    def __iter__(self) -> Iterator[TraceProgram]:
        blocks, times = Blocks(), dict[str, int]()  # how often each id has come
        dated = [(path, importer.start_s) for path, importer in self.files if importer.start_s is not None]
        starts_s = {path: each for path, of in dated if (each := of(path)) is not None}
        start_s = min(starts_s.values(), default=0.0)
        # The log that begins first has the calls that later ones repeat.
        for path, importer in sorted(self.files, key=lambda file: starts_s.get(file[0], 0.0)):
            is_empty, offset_s = True, start_s if importer.start_s is not None else 0.0
            for found in importer.read(path, blocks, self.advance):
                is_empty = False
                if isinstance(found, LeftOut):
                    self.counts.calls_unused += found.calls
                    continue
                if any(call.prompt_tokens > MOST for call in found.calls):  # a sum of what the file says
                    raise TraceError(f"{path}: a prompt of {found.program!r:.40} adds up to over {MOST:.0e} tokens.")
                program = self._capped(found)
                if program is None:
                    continue
                program_id = program.program
                while program_id in times:
                    times[program.program] += 1
                    program_id = f"{program.program}-{times[program.program]}"
                times[program_id] = 1
                arrival_s = max(0.0, round(program.arrival_s - offset_s, 6)) if offset_s else program.arrival_s
                yield replace(
                    program, program=program_id, arrival_s=arrival_s if self._arrivals is None else next(self._arrivals)
                )
            if is_empty and path in self._named:
                raise TraceError(f"{path} has no program; expected {importer.description}.")
            if is_empty:
                self.empty.append(path)
        if not self.counts.programs:
            raise TraceError(self._why_none())

    def _why_none(self) -> str:
        if self.counts.programs_left_out:
            return (
                f"the first calls of all {self.counts.programs_left_out} programs have more than "
                f"{self._options.max_context_tokens:.0f} tokens; allow more of them, or give other files."
            )
        return (
            f"{self.files[0][0]} and the other files have no program, and {self.counts.calls_unused} calls that failed "
            "or have no token counts; give files with calls that were answered."
        )

    def _find(self, path: Path, name: str | None) -> None:
        if not path.is_dir():
            self.files.append((path, _importer(path, name)))
            self._named.add(path)
            return
        known = len(self.files)
        # A session that has a folder for its sub-agents comes before those that repeat its calls without them.
        files = (each for each in path.rglob("*") if each.is_file())
        for each in sorted(files, key=lambda each: (not each.with_suffix("").is_dir(), each)):
            try:
                self.files.append((each, _importer(each, name, is_named=False)))
            except TraceError:
                if not any(each.match(pattern) for pattern in _BESIDE):
                    self.left_out.append(each)
        if len(self.files) == known:
            raise TraceError(f"{path} has no file in a known format; give a folder with {name or _FORMATS}.")

    def _capped(self, program: TraceProgram) -> TraceProgram | None:
        options, kept = self._options, dict[str, TraceCall]()
        for call in program.calls:
            if len(kept) >= options.max_turns:
                break
            fits = call.prompt_tokens + call.output_tokens <= options.max_context_tokens
            if fits and all(parent in kept for parent in call.parents):
                is_longer = call.gap_s > options.gap_cap_s
                kept[call.call_id] = replace(call, gap_s=options.gap_cap_s) if is_longer else call
        if not kept:
            self.counts.programs_left_out += 1
            return None
        self.counts.programs += 1
        self.counts.calls += len(kept)
        self.counts.calls_left_out += len(program.calls) - len(kept)
        end_known = program.end_known and not options.ends_unknown
        return replace(program, calls=tuple(kept.values()), end_known=end_known)


_FORMATS: Final = ", ".join(IMPORTERS)


def _importer(path: Path, name: str | None, is_named: bool = True) -> Importer:
    """Return the importer of a file, which is that of the format if the file was named together with it."""
    if path.exists() and not path.is_file():
        raise TraceError(f"{path} is a pipe or a device, and a file is read twice; write it to a file first.")
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES).decode("utf-8", "replace").removeprefix("\ufeff")
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}. Name another file.") from None
    if name is not None and is_named:
        return IMPORTERS[name]
    choices = IMPORTERS.values() if name is None else (IMPORTERS[name],)
    found = next((each for each in choices if each.matches(path, head)), None)
    if found is None:
        if not head:
            raise TraceError(f"{path} is empty. Name a file with traces.")
        if re.match(r'\s*\{"version": \d+, "program":', head):
            raise TraceError(f"{path} is a program trace already; give it to weft sim, advise or bench as it is.")
        raise TraceError(
            f"{path} is in no known format; it begins with {head[:40]!r}. Give a file in one of these: {_FORMATS}; or "
            "say with --format which it is."
        )
    return found
