"""Fuzz targets with atheris, guided by the coverage of Weft's modules.

    make fuzz SECONDS=600 T="trace csrc"                    # every target in a process of its own; all without T
    python tests/fuzz/run.py repeat trace build/fuzz/trace/crash-...   # one input again, without atheris

A target is a module `fuzz_NAME.py` with `one_input(data)`, which raises only if it found a bug, and `seeds()`. The
corpus in `build/fuzz/NAME/corpus` is kept between runs. A target stops at its first finding.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
OUT: Final = ROOT / "build" / "fuzz"
TARGETS: Final = sorted(path.stem.removeprefix("fuzz_") for path in HERE.glob("fuzz_*.py"))
INSTRUMENTED: Final = ["weft", "vllm.entrypoints", "fuzz_csrc", "values"]  # not the compiled part: GCC cannot
MEMORY: Final = Path("/dev/shm")  # noqa: S108  the target of traces writes a file for each input
STATUS: Final = re.compile(r"#(\d+)\s.*\bcov: (\d+) ft: (\d+) corp: (\d+)")  # libFuzzer's
FINDING: Final = re.compile(r"Test unit written to (\S+)")

app = typer.Typer(add_completion=False)


@dataclass
class Found:
    """What the fuzzing of one target came to."""

    inputs: int = 0
    coverage: int = 0
    features: int = 0
    corpus: int = 0
    finding: Path | None = None
    exit_code: int | None = None


@app.command("all")
def run_all(
    targets: Annotated[list[str] | None, typer.Argument(help="Names of targets; default: all.")] = None,
    seconds: Annotated[int, typer.Option(min=1, help="How long each target runs.")] = 600,
    jobs: Annotated[int, typer.Option(min=1, help="How many targets run at once.")] = os.cpu_count() or 1,
) -> None:
    """Fuzz targets, each in a process of its own."""
    names = targets or TARGETS
    if unknown := set(names) - set(TARGETS):
        raise typer.BadParameter(f"there is no target {', '.join(sorted(unknown))}. Choose from {', '.join(TARGETS)}.")
    console = Console()
    found = {name: Found() for name in names}
    columns = (TextColumn("{task.fields[name]:14}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(jobs) as pool:
        bars = {name: progress.add_task("waiting", name=name, total=seconds, start=False) for name in names}
        work = [pool.submit(_fuzz, name, seconds, found[name], progress, bars[name]) for name in names]
        for each in work:
            each.result()
    table = Table("target", "inputs", "coverage", "features", "corpus", "finding")
    for name, each in found.items():
        figures = (each.inputs, each.coverage, each.features, each.corpus)
        finding = str(each.finding or (f"exit code {each.exit_code}" if each.exit_code else ""))
        table.add_row(name, *(f"{figure:,}" for figure in figures), finding)
    console.print(table)
    for name, each in found.items():
        if each.finding is not None:
            console.print(f"repeat it: python tests/fuzz/run.py repeat {name} {each.finding}", soft_wrap=True)
        if each.exit_code:
            console.print(f"its output: {OUT / name / 'log.txt'}", soft_wrap=True)
    sys.exit(any(each.exit_code for each in found.values()))


def _fuzz(name: str, seconds: int, found: Found, progress: Progress, bar: Any) -> None:
    folder = OUT / name
    folder.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    if name != "csrc":
        environment.pop("WEFT_CSRC", None)  # a build with a sanitizer
    if MEMORY.is_dir():
        environment["TMPDIR"] = str(MEMORY)
    progress.start_task(bar)
    start_s = time.monotonic()
    command = [sys.executable, __file__, "one", name, "--seconds", str(seconds)]
    with (
        (folder / "log.txt").open("w") as log,
        subprocess.Popen(
            command, env=environment, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as child,
    ):
        for line in child.stdout or ():
            log.write(line)
            if status := STATUS.match(line):
                found.inputs, found.coverage, found.features, found.corpus = map(int, status.groups())
            if written := FINDING.search(line):
                found.finding = Path(written[1])
            text = f"{found.inputs:,} inputs, coverage {found.coverage}, features {found.features}"
            progress.update(bar, completed=time.monotonic() - start_s, description=text)
    found.exit_code = child.returncode
    progress.update(bar, completed=seconds)


@app.command()
def one(name: str, seconds: Annotated[int, typer.Option(min=1)] = 600) -> None:
    """Fuzz one target in this process."""
    import atheris

    # Atheris does not instrument what the finder of an editable installation loads.
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
    sys.path.insert(0, str(ROOT / "src"))
    os.environ.setdefault("WEFT_CSRC", str(Path(sysconfig.get_path("platlib"), "weft")))
    corpus = OUT / name / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    with atheris.instrument_imports(include=INSTRUMENTED):
        target = _target(name)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    limits = [
        f"-max_total_time={seconds}",
        "-timeout=120",
        "-report_slow_units=120",
        "-rss_limit_mb=4096",
        "-max_len=8192",
    ]
    flags = [*limits, f"-artifact_prefix={OUT / name}/", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], target.one_input)
    atheris.Fuzz()


@app.command()
def repeat(name: str, files: list[Path]) -> None:
    """Give inputs to a target again, without atheris."""
    target = _target(name)
    for file in files:
        target.one_input(file.read_bytes())
    Console().print(f"no finding in {len(files)} inputs")


def _target(name: str) -> Any:
    if "WEFT_CSRC" in os.environ:
        importlib.import_module("built_csrc")
    return importlib.import_module(f"fuzz_{name}")


if __name__ == "__main__":
    app()
