"""`make gpu-check`: build the swap kernel on a machine with a GPU, test it there, and measure it.

    python3 benchmarks/gpu_check.py [--step build] [--step tests] [--step sanitizer] [--step benchmark]

Needs Python 3.11, torch for CUDA and nvcc, and neither vLLM nor a network. Other packages come from the wheels that
`make gpu-check-wheels` has put into build/gpu-wheels, or from this Python. See docs/how-to/gpu-check.md.

Exit code 0: every step passed. 1: a step failed. 2: something is missing on this machine, or the arguments are wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

from gpu_machine import ROOT, WORK, Machine, MissingError, environment, install_wheels, look, printed

STEPS: Final = ("build", "tests", "sanitizer", "benchmark")
TESTS: Final = tuple(f"tests/engine/kv_cache/test_swap_{name}.py" for name in ("kernel", "order", "pool"))
RESERVE_S: Final = 15.0  # of the budget, for what follows the last command
BENCHMARK_RESERVE_S: Final = 40.0  # for its start, the case under way when its time ends, and the picture
LIBRARY: Final = WORK / "libgpu_copies.so"
USES_BUILT: Final = "import built_csrc; from weft import _csrc; print(_csrc.has_cuda, _csrc.cuda_available())"


@dataclass
class Result:
    """How a step ended: "passed", "failed", or "missing" if its tool is; with a line that says more."""

    step: str
    status: str
    seconds: float
    detail: str


class Check:
    """Runs the steps within a time budget.

    Args:
        machine: what is there.
        out: the folder for results.
        budget_s: for all steps together, in seconds from now.
        seed: of the benchmark.
        execute: runs a command (`execute` below, or a recording in tests).
        clock: seconds.
    """

    def __init__(
        self, machine: Machine, out: Path, budget_s: float, seed: int, execute: Execute, clock: Callable[[], float]
    ) -> None:
        self.machine, self.out, self._seed = machine, out, seed
        self._execute, self._clock, self._end_s = execute, clock, clock() + budget_s

    def left_s(self) -> float:
        """Seconds that the next command may take."""
        return self._end_s - RESERVE_S - self._clock()

    def run(self, steps: Sequence[str]) -> list[Result]:
        """Run steps in their order. Without a build, no later step is tried."""
        results: list[Result] = []
        for step in (step for step in STEPS if step in steps):
            start_s = self._clock()
            if results and results[0].step == "build" and results[0].status != "passed":
                status, detail = "failed", "not tried, because the build failed"
            elif self.left_s() <= 0:
                status, detail = "failed", f"not tried, because the time was over: run --step {step} alone"
            else:
                print(f"==> {step}", flush=True)
                status, detail = getattr(self, f"_{step}")()
            results.append(Result(step, status, round(self._clock() - start_s, 1), detail))
            self._write(results)
        return results

    def _log(self, name: str) -> Path:
        """An empty file for output."""
        path = self.out / name
        path.write_text("")
        return path

    def _command(self, log: Path, *command: str | Path, **more_env: str) -> int:
        return self._execute([str(each) for each in command], log, self.left_s(), environment() | more_env)

    def _build(self) -> tuple[str, str]:
        found = printed([sys.executable, "-m", "nanobind", "--cmake_dir"])
        architecture = [f"-DCMAKE_CUDA_ARCHITECTURES={self.machine.capability}"] if self.machine.capability else []
        nvcc = str(self.machine.nvcc)
        configure = ("cmake", "--fresh", "-S", ROOT, "-B", WORK / "csrc", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
                     f"-DCMAKE_CUDA_COMPILER={nvcc}", "-DCMAKE_CUDA_FLAGS=-lineinfo", *architecture,
                     f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={found}",
                     "-DSKBUILD_PROJECT_VERSION=gpu-check")  # fmt: skip
        copies = (nvcc, "-O2", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-o", LIBRARY,
                  ROOT / "benchmarks/gpu_copies.cpp")  # fmt: skip
        log = self._log("build.txt")
        for command in (configure, ("cmake", "--build", WORK / "csrc"), copies, (sys.executable, "-c", USES_BUILT)):
            code = self._command(log, *command)
            if code:
                return failed(f"{Path(command[0]).name} {command[1]}", code, log)
        has_cuda, available = log.read_text().split()[-2:]
        if has_cuda != "True":
            return "failed", f"nvcc does not work, so CUDA was left out: see {log}"
        if self.machine.gpu and available != "True":
            return "failed", "the compiled part sees no GPU, but torch does: nvcc's CUDA may be newer than the driver"
        return "passed", f"with {nvcc}" + (f" for {self.machine.gpu}" if self.machine.gpu else ", for every major GPU")

    def _pytest(self, log: Path, *options: str, before: Sequence[str] = (), **more_env: str) -> tuple[str, str]:
        report = WORK / f"{log.stem}.xml"
        report.unlink(missing_ok=True)
        command = (*before, sys.executable, "-m", "pytest", "-p", "built_csrc", "-p", "no:cacheprovider", "-o",
                   "filterwarnings=default", f"--junitxml={report}", "-m", "gpu", *options, *TESTS)  # fmt: skip
        return ended(self._command(log, *command, **more_env), count_tests(report), log)

    def _tests(self) -> tuple[str, str]:
        return self._pytest(self._log("tests.txt"))

    def _sanitizer(self) -> tuple[str, str]:
        if self.machine.sanitizer is None:
            return "missing", "there is no compute-sanitizer: it comes with the CUDA toolkit, add its folder to PATH"
        details = []
        for tool in ("memcheck", "racecheck"):
            before = (self.machine.sanitizer, f"--tool={tool}", "--error-exitcode=86", "--report-api-errors=no")
            log = self._log(f"{tool}.txt")
            # Without PyTorch's cache each tensor is an allocation of its own, whose bounds memcheck knows.
            status, detail = self._pytest(log, "-k", "cuda", before=before, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
            found = re.findall(r"SUMMARY: (.*)", log.read_text(errors="replace"))
            if status == "passed" and not found:
                status, detail = "failed", f"no summary of compute-sanitizer in {log}"
            details.append(f"{tool}: {', '.join([detail, *found[-1:]])}")
            if status != "passed":
                return status, "; ".join(details)
        return "passed", "; ".join(details)

    def _benchmark(self) -> tuple[str, str]:
        data, log = self.out / "benchmark.json", self._log("benchmark.txt")
        data.unlink(missing_ok=True)
        script, budget_s = ROOT / "benchmarks/gpu_measure.py", max(1.0, self.left_s() - BENCHMARK_RESERVE_S)
        options = ("--out", data, "--library", LIBRARY, "--seed", str(self._seed), "--budget-s", f"{budget_s:.0f}")
        code = self._command(log, sys.executable, script, *options)
        if code:
            return failed("the benchmark", code, log)
        result = json.loads(data.read_text())
        picture = ROOT / "benchmarks/gpu_picture.py"
        if self._command(WORK / "picture.txt", sys.executable, picture, data) != 0:
            print(f"The picture was not drawn. Draw it elsewhere: python {picture.relative_to(ROOT)} {data.name}")
        return "passed", f"{len(result['results'])} cases measured, {len(result['left_out'])} left out, in {data}"

    def _write(self, results: Sequence[Result]) -> None:
        summary = {"machine": asdict(self.machine), "results": [asdict(result) for result in results]}
        (self.out / "summary.json").write_text(json.dumps(summary, indent=1))


Execute = Callable[[list[str], Path, float, dict[str, str]], int]
"""Runs a command: its words, the file for its output, the seconds that it may take, and its environment."""
OUT_OF_TIME: Final = -1


def execute(command: list[str], log: Path, limit_s: float, env: dict[str, str]) -> int:
    """Run a command, show its output and add it to a file. Gives its exit code, or OUT_OF_TIME."""
    with (
        log.open("a") as file,
        subprocess.Popen(
            command, cwd=ROOT, env=env, text=True, errors="replace", bufsize=1, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process,
    ):  # fmt: skip

        def show() -> None:
            for line in process.stdout or ():
                file.write(line)
                file.flush()
                print(line, end="", flush=True)

        reader = threading.Thread(target=show, daemon=True)
        reader.start()
        try:
            return process.wait(max(limit_s, 1.0))
        except subprocess.TimeoutExpired:
            return OUT_OF_TIME
        finally:  # also what the command has left behind, which would keep the pipe open
            end_group(process.pid)
            reader.join()


def end_group(group: int) -> None:
    """End a group of processes, if there still is one."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def failed(what: str, code: int, log: Path) -> tuple[str, str]:
    """Status and detail of a command that did not end well."""
    return "failed", f"{what} {'ran out of time' if code == OUT_OF_TIME else f'ended with code {code}'}: see {log}"


def ended(code: int, counts: str, log: Path) -> tuple[str, str]:
    """Status and detail of a run of pytest. A test that was skipped has not run, so that is a failure here."""
    if code:
        status, detail = failed("pytest", code, log)
        return status, f"{counts}; {detail}"
    if " 0 skipped" not in counts or counts.startswith("0 "):
        return "failed", f"{counts}: a test that needs the GPU did not run, see {log}"
    return "passed", counts


def count_tests(report: Path) -> str:
    """The counts in a report of pytest, in words."""
    if not report.exists():
        return "no report"
    suite = next(ET.parse(report).iter("testsuite"))  # noqa: S314  pytest's own file
    tests, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return f"{tests} tests, {bad} failed, {skipped} skipped"


def summary(results: Sequence[Result]) -> str:
    """A line for each step."""
    return "\n".join(f"{each.step:10} {each.status:8} {each.seconds:6.1f} s  {each.detail}" for each in results)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description="Build, test and measure the swap kernel on a machine with a GPU.")
    parser.add_argument("--step", action="append", choices=STEPS, help="only this step; may be given several times")
    parser.add_argument("--out", type=Path, default=WORK / "results", help="folder for the results")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds for all steps together, at least 60")
    parser.add_argument("--seed", type=int, default=0, help="of the benchmark's choice of blocks")
    options = parser.parse_args(arguments)
    if not options.budget_s >= 60:
        parser.error(f"--budget-s {options.budget_s:g} is too short: pass 60 or more.")
    options.out = options.out.absolute()
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    steps = options.step or STEPS
    try:
        install_wheels()
        machine = look()
        machine.require(steps)
        if "build" not in steps and not LIBRARY.exists():
            raise MissingError("Nothing is built here yet: add --step build.")
    except MissingError as error:
        print(error, file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    results = Check(machine, options.out, options.budget_s, options.seed, execute, time.monotonic).run(steps)
    print(f"\n{summary(results)}")
    return 0 if all(result.status == "passed" for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
