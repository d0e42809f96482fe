"""What an engine does with a vLLM that is newer than those that Weft is tested with."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from weft.core.errors import UnsupportedVllmError
from weft.engine.vllm_compat.versions import members, version
from weft.engine.vllm_compat.versions.members import Uses, changed_members

OWNER = f"{__name__}.Newer"


class Newer:
    """A class of a newer vLLM."""

    def preempt(self, request: Any, reason: str) -> None: ...


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A vLLM that is newer than all that are tested."""
    members._check.cache_clear()
    monkeypatch.setattr(version, "installed_vllm", lambda: "99.1.0")
    monkeypatch.setattr(members, "importlib", SimpleNamespace(import_module=str))  # names.py would import a real vLLM
    monkeypatch.delenv("WEFT_UNTESTED_VLLM", raising=False)
    return monkeypatch


def use_table(newer: pytest.MonkeyPatch, uses: Uses) -> None:
    newer.setattr(members, "changed_members", lambda **options: changed_members({OWNER: uses}, **options))


def test_a_tested_version_is_not_looked_at(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its members are checked by the tests, and it runs silently."""
    monkeypatch.setattr(version, "installed_vllm", lambda: version.TESTED_VLLM[0] + ".7+cpu")
    monkeypatch.setattr(members, "changed_members", lambda **_: pytest.fail("members were checked"))
    members.check_members()
    assert caplog.records == []


def test_a_newer_one_that_has_changed_nowhere_runs_with_one_warning(
    newer: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning says which versions are tested and how to compare. A second engine does not repeat it."""
    use_table(newer, Uses(overridden={"preempt": "(self, request, reason) -> None"}))
    members.check_members()
    members.check_members()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "vLLM 99.1.0 is newer" in record.getMessage()
    assert "weft doctor --engine" in record.getMessage()


def test_a_changed_member_that_is_only_called_is_in_the_warning(
    newer: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A call with the wrong arguments raises; it cannot make an output wrong."""
    use_table(newer, Uses(called={"preempt": "(self, request)"}))
    members.check_members()
    assert "Newer.preempt (called) has the signature (self, request, reason)" in caplog.records[0].getMessage()


def test_a_changed_member_that_weft_overrides_ends_the_start(newer: pytest.MonkeyPatch) -> None:
    """The error lists all changes, and says what to install and how to go on."""
    use_table(newer, Uses(overridden={"preempt": "(self, request)"}, read="gone"))
    with pytest.raises(UnsupportedVllmError, match="WEFT_UNTESTED_VLLM=1") as caught:
        members.check_members()
    assert [change.split(" ")[0] for change in caught.value.changes] == ["Newer.preempt", "Newer.gone"]


def test_the_variable_goes_on_regardless(newer: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The warning has the changes."""
    use_table(newer, Uses(overridden={"preempt": "(self, request)"}))
    newer.setenv("WEFT_UNTESTED_VLLM", "1")
    members.check_members()
    assert "Newer.preempt (overridden)" in caplog.records[0].getMessage()


@pytest.mark.parametrize(("found", "error"), [("0.30.9", True), ("0.31.0", False), ("0.33.1+cpu", False), ("?", True)])
def test_an_older_one_is_refused(monkeypatch: pytest.MonkeyPatch, found: str, error: bool) -> None:
    """The error says which versions are tested and what to install. So is a version that cannot be read."""
    monkeypatch.setattr(version, "installed_vllm", lambda: found)
    if not error:
        assert version.check_vllm() == found
        return
    with pytest.raises(UnsupportedVllmError, match=r"tested with 0\.31, .* run .pip install"):
        version.check_vllm()


@pytest.mark.parametrize(("found", "older_than"), [("0.31.0", ["0.32"]), ("0.32.0", []), (None, [])])
def test_what_came_later_than_a_version(
    monkeypatch: pytest.MonkeyPatch, found: str | None, older_than: list[str]
) -> None:
    """Names that came later are left out of its lists. Without a vLLM, as in a client, nothing is."""
    monkeypatch.setattr(version, "installed_vllm", lambda: found)
    assert [minor for minor in ("0.31", "0.32") if version.is_older(minor)] == older_than
