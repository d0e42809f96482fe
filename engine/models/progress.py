"""Progress of preparing the embedded model."""

from __future__ import annotations

from typing import Literal, Protocol

Stage = Literal["wait", "download", "extract", "convert", "save"]
"""A stage of preparing the model. In `wait`, another process is preparing the same model."""


class ProgressCallback(Protocol):
    """Is called with the progress several times a second, on the thread that called `embedded_model`."""

    def __call__(self, stage: Stage, fraction: float | None, /) -> None:
        """`fraction` of the stage is done, 0 to 1; None if that is not known."""


def ignore_progress(stage: Stage, fraction: float | None, /) -> None:
    """The callback for callers that give none."""
