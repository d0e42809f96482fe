"""Any files are traces of other tools that become valid programs, or a `TraceError` that names the file.

    PYTHONPATH=tests/support python tests/fuzz/fuzz_importers.py --runs 20000   # spoiled files of every format

A finding is a seed; `--first SEED --runs 1` repeats it. With atheris (tests/fuzz/run.py), the bytes are a file, or the
seed of a spoiled one.
"""

from __future__ import annotations

import random
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from trace_samples import SAMPLES, Files, spoiled

from weft.core.errors import TraceError
from weft.core.trace.format import dump, parse, path_tokens
from weft.core.trace.importers import IMPORTERS, ImportOptions, TraceImport
from weft.core.trace.prefixes import block_hashes

_FOLDER: Final = tempfile.TemporaryDirectory()
_RAW: Final = b"\x00\x00"  # before a format's number and the bytes of a file


def one_input(data: bytes) -> None:
    """Import a file: the bytes themselves as a file of each format, or files that they spoil."""
    if data.startswith(_RAW):
        name = list(IMPORTERS)[data[2] % len(IMPORTERS)] if len(data) > 2 else "weka"
        check(name, {"raw.jsonl": data[3:]})
        return
    rng = random.Random(data)
    name = rng.choice(list(SAMPLES))
    check(name, spoiled(SAMPLES[name], rng), rng)


def check(name: str, files: Files, rng: random.Random | None = None) -> str:
    """Import files as what they look like and as what they are said to be.

    Returns:
        "imported" if either gave programs, otherwise "refused".
    """
    folder = Path(_FOLDER.name)
    for each, data in files.items():
        (folder / each).write_bytes(data)
    path = folder / next(iter(files))
    options = ImportOptions(
        max_context_tokens=rng.choice([20, 10**18]), max_turns=rng.choice([2, 10**6]), gap_cap_s=rng.choice([1.0, 1e18])
    ) if rng is not None else ImportOptions()  # fmt: skip
    done = "refused"
    for given in (None, name):
        try:
            programs = list(TraceImport([path, path], options, given))
        except TraceError as error:
            message = str(error)
            assert str(folder) in message or "the first calls of all" in message, message
            assert len(message) < 1000, message
            continue
        done = "imported"
        assert len({program.program for program in programs}) == len(programs)
        for program in programs:
            assert parse(dump(program), "here") == program
            assert path_tokens(program.calls) > 0
            for number, call in enumerate(program.calls):
                assert set(call.parents) <= {each.call_id for each in program.calls[:number]}
            if program.block_tokens is not None:
                block_hashes(program)
    return done


def seeds() -> list[bytes]:
    """Good files of each format, as bytes, and seeds of spoiled ones."""
    good = [_RAW + bytes([list(IMPORTERS).index(name)]) + next(iter(files.values())) for name, files in SAMPLES.items()]
    # Turns that have more tokens together than a trace can hold.
    failed = bytes.fromhex("033106711a35dcdcdcdc5ddcdcdc")
    return [*good, _RAW, b"", failed, *(str(seed).encode() for seed in range(200))]


def main(
    runs: Annotated[int, typer.Option(min=1, help="How many files to spoil.")] = 10_000,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
) -> None:
    """Import spoiled files, and fail if any is neither imported nor refused."""
    console = Console(soft_wrap=True, markup=False, highlight=False)
    done: Counter[str] = Counter()
    findings: list[int] = []
    for seed in range(first, first + runs):
        rng = random.Random(seed)
        name = rng.choice(list(SAMPLES))
        try:
            done[f"{name} {check(name, spoiled(SAMPLES[name], rng), rng)}"] += 1
        except Exception:
            findings.append(seed)
            console.print(f"seed {seed}: {name}\n{traceback.format_exc(limit=-4)}")
    console.print(f"{dict(sorted(done.items()))}; findings: {findings}")
    sys.exit(bool(findings))


if __name__ == "__main__":
    typer.run(main)
