"""The file that keeps finished rounds, so that a session can be resumed after it was stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from weft.bench.records import Round
from weft.core.errors import BenchError

FILE: Final = "rounds.jsonl"
_SHOWN: Final = 60  # characters of a setting in an error


class Journal:
    """`rounds.jsonl`: one line with the settings, then one line for each finished round.

    Args:
        folder: the folder of the file; it is created if it is missing.
        settings: the settings under which the rounds are comparable, as JSON.

    Raises:
        BenchError: the file has other settings, is not a journal, or cannot be read or written.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.path = folder / FILE
        self.rounds: dict[tuple[str, int], Round] = {}  # by load and number
        try:
            folder.mkdir(parents=True, exist_ok=True)
            text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
            # A session that is killed may leave an incomplete last line.
            complete = text[: text.rfind("\n") + 1]
            if complete:
                self._read(complete.splitlines(), settings)
                if complete != text:
                    self.path.write_text(complete, encoding="utf-8")
            else:
                self.path.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")
        except OSError as error:
            raise BenchError(f"{self.path}: {error.strerror or error}. Choose another --out.") from None

    def _read(self, lines: list[str], settings: dict[str, Any]) -> None:
        try:
            found = json.loads(lines[0])["settings"]
            if found != settings:
                raise self._other_settings(found, settings)
            for line in lines[1:]:
                round_ = Round.from_json(json.loads(line))
                self.rounds[round_.load, round_.number] = round_
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, BenchError):
                raise
            raise BenchError(f"{self.path} is not a journal of `weft bench`; choose another --out.") from None

    def _other_settings(self, found: dict[str, Any], settings: dict[str, Any]) -> BenchError:
        keys = [key for key in settings | found if found.get(key) != settings.get(key)]
        differences = ", ".join(
            f"{key}: {_short(found.get(key))} there, {_short(settings.get(key))} now" for key in keys
        )
        return BenchError(
            f"{self.path.parent} holds rounds of other settings ({differences}). Choose another --out, give the same "
            f"settings to resume, or delete {self.path} to begin again."
        )

    def add(self, round_: Round) -> None:
        """Keep a finished round."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(round_.to_json()) + "\n")
        self.rounds[round_.load, round_.number] = round_


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
