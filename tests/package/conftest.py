"""The sdist and the wheel that `make package` has built, and environments into which the wheel is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from installed import Environment
from lock import pins

ROOT = Path(__file__).parents[2]


def built(pattern: str) -> Path:
    """The one file in dist with a name of this pattern."""
    found = list((ROOT / "dist").glob(pattern))
    assert len(found) == 1, f"run make package: dist holds {found or 'nothing'}"
    return found[0]


@pytest.fixture(scope="session")
def sdist() -> Path:
    return built("vllm_weft-*.tar.gz")


@pytest.fixture(scope="session")
def wheel() -> Path:
    return built("vllm_weft-*.whl")


@pytest.fixture(scope="session")
def pip_install(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Has pip install into an environment, in the versions of the lock."""
    constraints = tmp_path_factory.mktemp("constraints") / "constraints.txt"
    constraints.write_text("".join(f"{pin.requirement}\n" for pin in pins("cpu.txt").values()))

    def install(venv: Path, *arguments: str | Path) -> None:
        pip = (sys.executable, "-m", "pip", "--python", venv, "--disable-pip-version-check")
        done = subprocess.run(
            [*pip, "install", "--quiet", "--constraint", constraints, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout

    return install


@pytest.fixture(scope="session")
def without_engine(
    tmp_path_factory: pytest.TempPathFactory, wheel: Path, pip_install: Callable[..., None]
) -> Environment:
    """`pip install vllm-weft` in a clean environment: the wheel and what it requires, no vLLM, no model."""
    folder = tmp_path_factory.mktemp("without")
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=120)
    pip_install(venv, wheel)
    (folder / "work").mkdir()
    return Environment(venv, folder / "work", WEFT_CACHE_DIR=str(folder / "cache"))


@pytest.fixture(scope="session")
def with_engine(tmp_path_factory: pytest.TempPathFactory, wheel: Path, pip_install: Callable[..., None]) -> Environment:
    """The wheel, and the locked packages of this environment by a path file, which are gigabytes to install again.

    A path file does not read the path files in the folders that it adds, so the checkout, which is installed there as
    editable, is not importable.
    """
    folder = tmp_path_factory.mktemp("with")
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=120)
    pip_install(venv, "--no-deps", "--no-index", wheel)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "locked.pth").write_text(sysconfig.get_path("purelib") + os.linesep)
    (folder / "work").mkdir()
    return Environment(venv, folder / "work")
