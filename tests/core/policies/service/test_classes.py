"""How programs of one class are ranked, by how many of them have ended."""

from __future__ import annotations

import random

import pytest

from weft.core.class_rows import Branch
from weft.core.policies.service.classes import ServiceClass
from weft.core.policies.service.distribution import AGES


def fitted(works: list[float]) -> ServiceClass:
    found = ServiceClass(name="agent")
    for work in works:
        found.end(work)
    found.fit(found.estimate(ServiceClass()), [float(age) for age in AGES], is_all=False)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_a_few_ends_do_not_make_programs_varied(seed: int) -> None:
    """Four programs between 700 and 1,400 tokens are alike; the smoothing and the tail alone do not tell them apart."""
    rng = random.Random(seed)
    assert fitted([rng.uniform(700, 1400) for _ in range(4)]).branch is Branch.ALIKE


def test_many_ends_show_that_programs_vary() -> None:
    """The same spread of three orders of magnitude is believed after a hundred ends, and not yet after three."""
    few, many = fitted([10.0, 1000.0, 100_000.0]), fitted([10.0, 1000.0, 100_000.0] * 33)
    assert many.branch is Branch.VARIED
    assert many.ranks == pytest.approx(AGES)
    assert not few.is_alike
