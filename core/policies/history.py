"""The history that an engine can begin with: how much work programs took, and their execution graphs.

A history is kept as JSON text::

    {"format": "weft-history", "version": 1, "models": {"my-model": [
        {"tenant": null, "name": "chat", "ended": 812, "finished": [1200, 310], "forgotten": []},
        {"name": null, "ended": 4000, "finished": [...], "forgotten": []}]},
     "graphs": {...}}

Work is kept by model, tenant and name, and execution graphs by name (`weft.core.prediction.saved_graphs`). The class
without a name is all programs together. `finished` has the work in tokens of the latest 100 programs that ended, and
`forgotten` that of programs of which no end was reported. Numbers of classes and of programs are bounded.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

from weft.core.errors import HistoryError
from weft.core.prediction import ExecutionGraphs
from weft.core.prediction.saved_graphs import decode_graphs, encode_graphs

FORMAT: Final = "weft-history"
VERSION: Final = 1
MOST_CLASSES: Final = 1024
KEPT: Final = 100  # the latest programs of a class; a scheduler's window is longer
_MOST_MODELS: Final = 8
_MOST_TOKENS: Final = 10**12  # of one program
_MOST_ENDED: Final = 10**12
_MOST_LETTERS: Final = 1024  # of a name


class ProgramEnd(NamedTuple):
    """A program that has ended, or of which nothing more is expected."""

    tenant: str | None
    name: str
    work_tokens: int
    is_known: bool  # True: it has ended. False: no end was reported, so its work is at least this much


@dataclass(eq=False, slots=True)
class ClassHistory:
    """The work of the programs of one class that are gone."""

    finished: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))  # work in tokens, the latest last
    forgotten: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))  # the same, if no end was reported
    ended: int = 0  # programs that have ended, also those that `finished` no longer holds

    def add(self, end: ProgramEnd) -> None:
        """A program is gone."""
        (self.finished if end.is_known else self.forgotten).append(end.work_tokens)
        self.ended += end.is_known


class ModelHistory:
    """The past of the programs that one model served, by class."""

    def __init__(self) -> None:
        self.all = ClassHistory()
        self._classes: OrderedDict[tuple[str | None, str], ClassHistory] = OrderedDict()  # the latest changed last

    def add(self, end: ProgramEnd) -> None:
        """A program is gone. If there are too many classes, the one that changed longest ago is dropped."""
        self.all.add(end)
        self[end.tenant, end.name].add(end)

    def __getitem__(self, key: tuple[str | None, str]) -> ClassHistory:
        past = self._classes.setdefault(key, ClassHistory())
        self._classes.move_to_end(key)
        if len(self._classes) > MOST_CLASSES:
            self._classes.popitem(last=False)
        return past

    def __iter__(self) -> Iterator[tuple[str | None, str]]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)

    def items(self) -> Iterable[tuple[tuple[str | None, str], ClassHistory]]:
        """Tenant and name of each class, and its past."""
        return self._classes.items()


class History:
    """The histories of several models, and the execution graphs of all. Empty at first."""

    def __init__(self) -> None:
        self.graphs = ExecutionGraphs()
        self._models: OrderedDict[str, ModelHistory] = OrderedDict()  # the latest changed last

    def __getitem__(self, model: str) -> ModelHistory:
        """The history of a model, a new one if there is none."""
        found = self._models.setdefault(model, ModelHistory())
        self._models.move_to_end(model)
        if len(self._models) > _MOST_MODELS:
            self._models.popitem(last=False)
        return found

    @property
    def models(self) -> list[str]:
        return list(self._models)

    def to_json(self, *, with_graphs: bool = True) -> str:
        """The history as text."""
        models = {
            model: [
                *(_row({"tenant": tenant, "name": name}, past) for (tenant, name), past in history.items()),
                _row({"name": None}, history.all),
            ]
            for model, history in self._models.items()
        }
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION, "models": models}
        if with_graphs:
            with self.graphs.unchanged() as templates:
                data["graphs"] = encode_graphs(templates)
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` wrote, without classes and programs beyond the bounds. Raises HistoryError if it is
        damaged, or from a newer version of Weft."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            raise HistoryError("it is not JSON") from None
        try:
            return cls._decode(data)
        except RecursionError:  # a value that a message would quote
            raise HistoryError("it is nested too deeply") from None

    @classmethod
    def _decode(cls, data: Any) -> Self:
        """Raises HistoryError: see `from_json`."""
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise HistoryError("it is not a history of Weft")
        if data.get("version") != VERSION:
            raise HistoryError(f"its version is {data.get('version')!r:.40}, and this Weft reads {VERSION}")
        models = data.get("models")
        if not isinstance(models, Mapping) or not all(isinstance(rows, list) for rows in models.values()):
            raise HistoryError("it has no lists of classes by model")
        history = cls()
        if "graphs" in data:
            try:
                with history.graphs.unchanged() as templates:
                    decode_graphs(data["graphs"], templates)
            except ValueError as error:
                raise HistoryError(str(error)) from None
        for model, rows in models.items():
            found = history[model]
            for row in rows:
                if not isinstance(row, Mapping):
                    raise HistoryError(f"a class is {row!r:.40}")
                tenant, name = row.get("tenant"), row.get("name")
                if not _is_text(tenant) or not _is_text(name):
                    raise HistoryError(f"a class has the name {name!r:.40}")
                _read(row, found.all if name is None else found[tenant, name])
        return history


def _row(key: dict[str, Any], past: ClassHistory) -> dict[str, Any]:
    return {**key, "ended": past.ended, "finished": list(past.finished), "forgotten": list(past.forgotten)}


def _read(row: Mapping[str, Any], past: ClassHistory) -> None:
    for kind in ("finished", "forgotten"):
        works = row.get(kind)
        if not isinstance(works, list) or not all(type(work) is int and 0 < work <= _MOST_TOKENS for work in works):
            raise HistoryError(f"the {kind} programs of {row.get('name')!r:.40} are not a list of tokens")
        getattr(past, kind).extend(works)
    ended = row.get("ended")
    if type(ended) is not int or not len(past.finished) <= ended <= _MOST_ENDED:
        raise HistoryError(f"{row.get('name')!r:.40} has {ended!r:.40} programs that ended")
    past.ended = ended


def _is_text(value: object) -> bool:
    if value is None:
        return True
    # A lone surrogate is no text that could be written again.
    return isinstance(value, str) and len(value) <= _MOST_LETTERS and value.isprintable()
