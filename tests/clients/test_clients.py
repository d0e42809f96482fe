"""Real clients, as their users install them, against the scripted server: `make test-clients`."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import CASES, WRONG
from client_runs import Case, run

pytestmark = pytest.mark.clients


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=f"{case.package.name}: {case.name}", marks=[pytest.mark.small] if case.package.is_small else []
        )
        for case in CASES
    ],
)
def test_a_client_is_seen_as_it_is(case: Case, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Each run is one program with its threads, its name and its end, and no call is left in flight."""
    if why := WRONG.get((case.package.name, case.name)):
        request.applymarker(pytest.mark.xfail(strict=True, reason=why, raises=AssertionError))
    seen = run(case, tmp_path)
    assert seen.programs in (tuple(sorted(case.programs)), (case.or_program,))
    assert seen.names == case.names
    assert seen.in_flight == 0
    assert seen.ends == case.ends
