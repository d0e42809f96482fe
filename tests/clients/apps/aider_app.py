"""Aider: three turns of one chat, without git, and a chat that goes on later."""

from __future__ import annotations

import sys
from pathlib import Path

from aider.coders import Coder
from aider.io import InputOutput
from aider.models import Model

Path("notes.txt").write_text("The keeper counts the ships.\n")


def chat(*turns: str, goes_on: bool = False, edit_format: str = "diff") -> None:
    coder = Coder.create(
        main_model=Model("openai/scripted", editor_model="openai/scripted"),
        edit_format=edit_format,
        io=InputOutput(yes=True, pretty=False, fancy_input=False, chat_history_file="history.md"),
        fnames=["notes.txt"],
        use_git=False,
        map_tokens=0,
        restore_chat_history=goes_on,
    )
    for turn in turns:
        coder.run(turn)


if sys.argv[1] == "resume":
    chat("What is in the notes?", "And who counts them?")
    chat("Thank you.", goes_on=True)
elif sys.argv[1] == "architect":  # another agent edits what the first one has said
    chat("Let the keeper count the gulls, too.", edit_format="architect")
elif sys.argv[1] == "abort":  # of more turns, the next one would follow
    chat("Talk.")
else:
    chat(" ".join(["What is in the notes?", *sys.argv[2:]]), "And who counts them?", "Thank you.")
