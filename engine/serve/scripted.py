"""`weft serve --scripted`: the server over an engine that answers from a script."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from weft.engine.models.scripted import make_scripted_model

SCRIPTED_NAME: Final = "scripted"


def scripted_arguments(folder: Path) -> list[str]:
    """The command line of `vllm serve` for the model without weights, which is written to `folder`.

    Further arguments may follow, such as `--served-model-name`.
    """
    return [
        str(make_scripted_model(folder)),
        *("--served-model-name", SCRIPTED_NAME),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "deepseek_r1"),
    ]
