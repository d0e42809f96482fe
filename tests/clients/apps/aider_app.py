"""Aider: three turns of one chat, without git."""

from __future__ import annotations

from pathlib import Path

from aider.coders import Coder
from aider.io import InputOutput
from aider.models import Model

Path("notes.txt").write_text("The keeper counts the ships.\n")
coder = Coder.create(
    main_model=Model("openai/scripted"),
    edit_format="diff",
    io=InputOutput(yes=True, pretty=False, fancy_input=False),
    fnames=["notes.txt"],
    use_git=False,
    map_tokens=0,
)
for turn in ("What is in the notes?", "And who counts them?", "Thank you."):
    coder.run(turn)
