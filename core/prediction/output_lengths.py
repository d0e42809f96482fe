"""Predicts how many tokens a call generates, by program name, label and the number of calls before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from weft.core.prediction.samples import Samples, SamplesByName
from weft.core.prediction.times import MOST_LETTERS

_PRIOR_TOKENS: Final = 64.0
_TRUST: Final = 4.0  # samples that the estimate of the coarser class is worth


class OutputLengths:
    """Output lengths of calls that have ended.

    The estimate of a class with few calls is weighed against that of the next coarser class. From fine to coarse, a
    class is a name, label and number of earlier calls; a name and label; a name; or all calls. Numbers of calls between
    two powers of two are one class.
    """

    def __init__(self) -> None:
        self._all = Samples(median=_PRIOR_TOKENS)
        self._classes = SamplesByName(self._all)

    def observe(self, name: str, label: str | None, calls_before: int, output_tokens: int) -> None:
        """A call has ended.

        Args:
            calls_before: Calls of the program that ended before.
        """
        self._all.observe(output_tokens)
        for key in _keys(name, label, calls_before):
            self._classes.observe(key, output_tokens)

    def mean_tokens(self, name: str, label: str | None, calls_before: int) -> float:
        """The expected output of a call in tokens. Each class counts by its number of samples."""
        mean = self._all.mean
        for key in _keys(name, label, calls_before):
            samples = self._classes.get(key)
            if samples is not None:
                weight = len(samples) / (len(samples) + _TRUST)
                mean += weight * (samples.mean - mean)
        return mean


def _keys(name: str, label: str | None, calls_before: int) -> Iterator[tuple[object, ...]]:
    """The classes of a call, the coarsest first."""
    name = name[:MOST_LETTERS]
    yield (name,)
    label = (label or "")[:MOST_LETTERS]
    yield name, label
    yield name, label, max(0, calls_before).bit_length()
