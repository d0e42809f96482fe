"""Some runs of the fuzz of the scheduler with host memory; `tests/fuzz/kv_runs.py` plays thousands."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine


def test_random_programs_get_their_tokens_whatever_makes_plans_void(tmp_path: Path) -> None:
    """Calls are reset, taken back, aborted and forced out, and copies fail. No token is wrong, nothing is written
    twice, and nothing is left over. Everything happens in these runs."""
    from kv_fuzz import Run

    done: Counter[str] = Counter()
    for seed in range(40):
        done.update(Run(tmp_path, seed).play())
    assert done.keys() >= {"resets", "resets of host memory", "aborts", "taken back", "forced out", "policies replaced"}
    assert min(done[what] for what in ("swapped", "loaded", "fetched", "failed")) > 0


@pytest.mark.parametrize(
    "seed",
    [
        7753,  # a plan writes a slot that nobody needs any more
        8138,  # a call shares the blocks of one whose load fails, and is preempted before that is known
    ],
)
def test_runs_that_have_found_errors(tmp_path: Path, seed: int) -> None:
    """These seeds have found errors before."""
    from kv_fuzz import Run

    Run(tmp_path, seed).play()


@pytest.mark.soak
def test_two_thousand_more_runs_find_nothing(tmp_path: Path) -> None:
    """As above, with other seeds. A failure names the seed, which `tests/fuzz/kv_runs.py` repeats."""
    from kv_fuzz import Run

    for seed in range(40, 2040):
        try:
            Run(tmp_path, seed).play()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
