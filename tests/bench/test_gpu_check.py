"""`make gpu-check` as far as it goes without a GPU: its options, what it says is missing, its steps and its summary."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gpu_check
import gpu_machine
import gpu_wheels
import pytest
import torch
from gpu_check import OUT_OF_TIME, Check, Result
from gpu_machine import Machine, MissingError

from weft.testing import FakeClock

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/gpu_check.py"
COMPLETE = Machine(torch="2.11", cuda="13.0", gpu="H100", capability="90", nvcc="/cuda/bin/nvcc", sanitizer="/bin/cs")


class Commands:
    """Records the commands in place of running them, and writes what each would."""

    def __init__(self, clock: FakeClock, codes: dict[str, int] | None = None) -> None:
        self.clock, self.codes = clock, codes or {}
        self.words: list[list[str]] = []
        self.limits_s: list[float] = []
        self.environments: list[dict[str, str]] = []
        self.counts = 'tests="33" failures="0" errors="0" skipped="0"'
        self.takes_s = 10.0

    def __call__(self, command: list[str], log: Path, limit_s: float, env: dict[str, str]) -> int:
        self.words.append(command)
        self.limits_s.append(limit_s)
        self.environments.append(env)
        self.clock.advance(self.takes_s)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.write("True True\n" if gpu_check.USES_BUILT in command else "========= ERROR SUMMARY: 0 errors\n")
        for option in command:
            if option.startswith("--junitxml="):
                report = f"<testsuites><testsuite {self.counts}/></testsuites>"
                Path(option.partition("=")[2]).write_text(report)
        if "--library" in command:
            out = Path(command[command.index("--out") + 1])
            out.write_text(json.dumps({"results": [{}, {}], "left_out": [{}]}))
        return next((code for word, code in self.codes.items() if word in " ".join(command)), 0)


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Check, Commands]]:
    """A check of a machine that has everything, whose commands are recorded."""
    monkeypatch.setattr(gpu_check, "WORK", tmp_path)

    def make(machine: Machine = COMPLETE, codes: dict[str, int] | None = None, budget_s: float = 540) -> object:
        clock = FakeClock()
        commands = Commands(clock, codes)
        return Check(machine, tmp_path, budget_s, 0, commands, clock), commands

    return make


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_gets_one_sentence(tmp_path: Path) -> None:
    """The command says what is missing and what to do, without a traceback, and ends with code 2."""
    command = [sys.executable, str(SCRIPT), "--step", "tests", "--out", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(f"torch {torch.__version__} ")
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("machine", "steps", "message"),
    [
        (Machine(nvcc="nvcc"), ["tests"], "has no torch: name a Python that has one"),
        (Machine(broken="libcudart.so.13"), ["tests"], r"cannot import its torch \(libcudart.so.13\): name another"),
        (Machine(torch="2.13.0+cpu"), ["tests"], "built without CUDA: name a Python whose torch has CUDA"),
        (Machine(torch="2.11", cuda="13.0"), ["benchmark"], "sees no GPU: run this on .* driver for CUDA 13.0"),
        (Machine(torch="2.11", cuda="13.0", gpu="H100"), ["build", "tests"], "no nvcc: install the CUDA toolkit"),
        (Machine(missing=["cmake"], nvcc="nvcc"), ["build"], r"lacks cmake: run `make gpu-check-wheels GPU_P"),
        (Machine(nvcc="nvcc", headers=False), ["build"], "has no Python.h: install its headers"),
    ],
)  # fmt: skip
def test_each_missing_thing_has_its_sentence(machine: Machine, steps: list[str], message: str) -> None:
    """The sentence names what is missing and what to do about it."""
    with pytest.raises(MissingError, match=message):
        machine.require(steps)


def test_a_build_needs_no_gpu() -> None:
    """Whether csrc compiles can be tried anywhere."""
    Machine(nvcc="nvcc").require(["build"])
    COMPLETE.require(gpu_check.STEPS)


def test_nothing_is_tested_before_it_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A later step alone, on a fresh machine, asks for the build."""
    monkeypatch.setattr(gpu_check, "look", lambda: COMPLETE)
    monkeypatch.setattr(gpu_check, "install_wheels", lambda: None)
    monkeypatch.setattr(gpu_check, "LIBRARY", tmp_path / "no.so")
    assert gpu_check.main(["--step", "tests", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "Nothing is built here yet: add --step build.\n"


@pytest.mark.parametrize("options", [["--step", "profile"], ["--budget-s", "5"], ["--budget-s", "nan"], ["--sed", "x"]])
def test_wrong_options_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong option ends with code 2 and a message."""
    with pytest.raises(SystemExit) as caught:
        gpu_check.parse(options)
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_all_steps_run_in_their_order(check: Callable[..., tuple[Check, Commands]], tmp_path: Path) -> None:
    """Without --step everything is built, tested under both tools and measured, and the summary is written."""
    all_steps, commands = check()
    results = all_steps.run(gpu_check.STEPS)
    assert [result.step for result in results] == ["build", "tests", "sanitizer", "benchmark"]
    assert {result.status for result in results} == {"passed"}
    assert [words[0] for words in commands.words[:3]] == ["cmake", "cmake", "/cuda/bin/nvcc"]
    assert "-DCMAKE_CUDA_ARCHITECTURES=90" in commands.words[0]
    pytests = [words for words in commands.words if "pytest" in words]
    assert [words[:2] for words in pytests[1:]] == [["/bin/cs", "--tool=memcheck"], ["/bin/cs", "--tool=racecheck"]]
    assert (
        json.loads((tmp_path / "summary.json").read_text())["results"][1]["detail"] == "33 tests, 0 failed, 0 skipped"
    )
    assert all(str(ROOT / "src") in env["PYTHONPATH"] for env in commands.environments)


def test_steps_run_one_by_one(check: Callable[..., tuple[Check, Commands]]) -> None:
    """Only what was asked for runs, whatever its order on the command line."""
    assert [result.step for result in check()[0].run(["tests", "build"])] == ["build", "tests"]
    assert [result.step for result in check()[0].run(gpu_check.parse(["--step", "benchmark"]).step)] == ["benchmark"]


def test_no_command_may_outlast_the_budget(check: Callable[..., tuple[Check, Commands]]) -> None:
    """Each command may take what is left, less a reserve; when nothing is left, a step is not tried."""
    steps, commands = check(budget_s=100)
    commands.takes_s = 20
    results = steps.run(gpu_check.STEPS)
    assert commands.limits_s == [85, 65, 45, 25, 5]
    assert [result.status for result in results] == ["passed", "passed", "failed", "failed"]
    assert results[2].detail == "not tried, because the time was over: run --step sanitizer alone"


def test_the_benchmark_gets_less_than_what_is_left(check: Callable[..., tuple[Check, Commands]]) -> None:
    """It ends by itself before its command would be stopped."""
    steps, commands = check(budget_s=540)
    steps.run(["benchmark"])
    assert commands.words[0][commands.words[0].index("--budget-s") + 1] == "485"
    assert commands.limits_s[0] == 525


def test_a_failed_build_ends_the_check(check: Callable[..., tuple[Check, Commands]]) -> None:
    """What cannot be built is not tested, and the summary says so."""
    results = check(codes={"--build": 1})[0].run(gpu_check.STEPS)
    assert [result.status for result in results] == ["failed"] * 4
    assert results[0].detail.startswith("cmake --build ended with code 1: see ")
    assert results[3].detail == "not tried, because the build failed"


def test_a_step_that_fails_does_not_stop_the_next(check: Callable[..., tuple[Check, Commands]]) -> None:
    """A test that fails or runs out of time, and a finding of a sanitizer, are told apart."""
    results = check(codes={"--tool=memcheck": 86, "--library": OUT_OF_TIME})[0].run(gpu_check.STEPS)
    assert [result.status for result in results] == ["passed", "passed", "failed", "failed"]
    assert "pytest ended with code 86" in results[2].detail
    assert "the benchmark ran out of time" in results[3].detail


def test_a_test_that_was_skipped_is_a_failure(check: Callable[..., tuple[Check, Commands]]) -> None:
    """A machine with a GPU has to run every test that needs one."""
    for counts in ('tests="33" failures="0" errors="0" skipped="1"', 'tests="0"'):
        steps, commands = check()
        commands.counts = counts
        (result,) = steps.run(["tests"])
        assert result.status == "failed"
        assert "a test that needs the GPU did not run" in result.detail


def test_a_missing_sanitizer_is_told_plainly(check: Callable[..., tuple[Check, Commands]]) -> None:
    """The step is neither passed nor failed, and the other steps run."""
    machine = Machine(**{**vars(COMPLETE), "sanitizer": None})
    results = check(machine)[0].run(gpu_check.STEPS)
    assert [result.status for result in results] == ["passed", "passed", "missing", "passed"]
    assert results[2].detail.startswith("there is no compute-sanitizer: it comes with the CUDA toolkit")


def test_the_summary_has_a_line_for_each_step() -> None:
    """Step, status, seconds and detail."""
    results = [Result("build", "passed", 31.2, "with nvcc"), Result("tests", "failed", 5.0, "1 failed")]
    assert gpu_check.summary(results).splitlines() == [
        "build      passed     31.2 s  with nvcc",
        "tests      failed      5.0 s  1 failed",
    ]


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_tells_whether_all_passed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, passed: bool, code: int
) -> None:
    """0 if every step passed, otherwise 1."""
    monkeypatch.setattr(gpu_check, "look", lambda: COMPLETE)
    monkeypatch.setattr(gpu_check, "install_wheels", lambda: None)
    results = [Result("build", "passed" if passed else "missing", 1.0, "")]
    monkeypatch.setattr(gpu_check.Check, "run", lambda *_: results)
    assert gpu_check.main(["--step", "build", "--out", str(tmp_path / "a/b")]) == code


def test_a_command_is_shown_recorded_and_ended_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its output is on the terminal and in the log; one that runs too long is killed with what it has started."""
    log = tmp_path / "log.txt"
    env = gpu_machine.environment()
    assert gpu_check.execute([sys.executable, "-c", "print('ä'); raise SystemExit(3)"], log, 60, env) == 3
    sleeper = "import subprocess; subprocess.run(['sleep', '600'])"
    assert gpu_check.execute([sys.executable, "-c", sleeper], log, 1, env) == OUT_OF_TIME
    assert log.read_text() == capsys.readouterr().out == "ä\n"


def test_every_test_of_the_gpu_is_in_the_list() -> None:
    """The check names the files with tests that need a GPU, because other files import vLLM when they are collected."""
    uses = re.compile(r"mark\.gpu\b|\bkernel: Kernel\b|\bno_gpu\b")
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != Path(__file__) and uses.search(path.read_text())
    }
    assert found == set(gpu_check.TESTS)


def test_the_wheels_are_pinned_with_checksums() -> None:
    """Each package that is brought along is an entry of requirements/, whose checksums pip then demands."""
    lines = gpu_wheels.pinned(gpu_wheels.NAMES).splitlines()
    assert len(lines) == len(gpu_wheels.NAMES)
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+( --hash=sha256:[0-9a-f]{64})+", line) for line in lines)
    needed = {name.replace("_", "-") for name in (*gpu_machine.PACKAGES, *gpu_machine.PROGRAMS)}
    assert needed <= set(gpu_wheels.NAMES)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
def test_the_copies_compile_with_nvcc(tmp_path: Path) -> None:
    """CUDA's own headers accept the baselines, so the fake runtime's do not hide a wrong call."""
    command = ["nvcc", "-std=c++17", "-Werror", "all-warnings", "-c", "-o", str(tmp_path / "copies.o")]
    subprocess.run([*command, ROOT / "benchmarks/gpu_copies.cpp"], check=True)


@pytest.mark.soak
@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
def test_the_build_step_compiles_everything(tmp_path: Path) -> None:
    """With nvcc and without a GPU, the compiled part is built with CUDA, and so are the benchmark's baselines."""
    command = [sys.executable, str(SCRIPT), "--step", "build", "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads((tmp_path / "summary.json").read_text())["results"][0]["status"] == "passed"
    assert gpu_check.LIBRARY.exists()
