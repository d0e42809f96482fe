"""Reads the files of pinned packages in requirements/."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parents[2] / "requirements"
LOCKS = ("cpu.txt", "torch-cpu.txt")


class Pin(NamedTuple):
    """One package of a lock."""

    requirement: Requirement
    checksums: list[str]  # sha256, of every file that may be installed

    @property
    def version(self) -> str:
        (pin,) = self.requirement.specifier
        assert pin.operator == "=="
        return pin.version


def pins(*files: str) -> dict[str, Pin]:
    """The packages of files in requirements/, by name."""
    found = {}
    for file in files or LOCKS:
        for line in (FOLDER / file).read_text().replace("\\\n", "").splitlines():
            if line and not line.lstrip().startswith("#"):
                text, *checksums = line.split("--hash=sha256:")
                requirement = Requirement(text)
                found[canonicalize_name(requirement.name)] = Pin(requirement, [each.strip() for each in checksums])
    return found
