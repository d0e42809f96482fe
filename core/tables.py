"""Tables for people: in colour in a terminal, as plain text, and as HTML in a notebook."""

from __future__ import annotations

import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, Final, NamedTuple

_TITLE_STYLE, _RULE_STYLE, _HEADING_STYLE = "italic", "dim", "bold"  # as rich spells styles
_WIDE: Final = ("W", "F")  # characters that take two columns of a terminal


class Cell(NamedTuple):
    """A cell with a style of its own."""

    text: str
    style: str  # as rich spells it, such as "bold red"


class Table(NamedTuple):
    """A table. Texts may contain anything, because names come from users and their clients."""

    title: str
    headings: Sequence[str]  # may have several lines; all empty: no headings
    rows: Sequence[Sequence[str | Cell]]
    numbers: frozenset[int] = frozenset()  # the columns that are aligned to the right
    widest: int = 24  # columns of a terminal that a text gets; a longer one is cut off
    below: Table | None = None  # another table, shown below this one

    def __str__(self) -> str:
        return "\n".join("".join(text for text, _style in line).rstrip() for line in self._lines())

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Yield the lines for rich, which is not imported here."""
        for line in self._lines():
            text = console.render_str("", markup=False, emoji=False, highlight=False)
            text.no_wrap, text.overflow = True, "ellipsis"
            for part, style in line:
                text.append(part, style)
            yield text

    def _repr_html_(self) -> str:
        headings = (heading.replace("\n", " ") for heading in self.headings)
        lines = [f"<table><caption style='text-align: left'>{_html(self.title)}</caption>"]
        if any(self.headings):
            cells = "".join(self._html_cell("th", number, heading) for number, heading in enumerate(headings))
            lines.append(f"<thead><tr>{cells}</tr></thead>")
        lines.append("<tbody>")
        for row in self.rows:
            cells = "".join(self._html_cell("td", number, cell.text) for number, cell in enumerate(map(_cell, row)))
            lines.append(f"<tr>{cells}</tr>")
        below = [self.below._repr_html_()] if self.below is not None else []
        return "\n".join([*lines, "</tbody></table>", *below])

    def _html_cell(self, tag: str, column: int, text: str) -> str:
        side = "right" if column in self.numbers else "left"
        return f"<{tag} style='text-align: {side}'>{_html(text)}</{tag}>"

    def _lines(self) -> Iterator[list[Cell]]:
        """Yield the lines of the table, each as parts with their styles."""
        rows = [[Cell(self._fitting(number, cell.text), cell.style) for number, cell in enumerate(map(_cell, row))]
                for row in self.rows]  # fmt: skip
        headings = [heading.split("\n") for heading in self.headings]
        widths = [
            max([*map(len, heading), *(_width(row[number].text) for row in rows)])
            for number, heading in enumerate(headings)
        ]
        if self.title:
            yield [Cell(one_line(self.title), _TITLE_STYLE)]
        if any(self.headings):
            height = max(map(len, headings))
            for line in range(height):
                texts = [heading[line + len(heading) - height] if line + len(heading) >= height else ""
                         for heading in headings]  # fmt: skip
                yield self._line(widths, [Cell(text, _HEADING_STYLE) for text in texts])
            yield [Cell("─" * (sum(widths) + len(widths) - 1), _RULE_STYLE)]
        for row in rows:
            yield self._line(widths, row)
        if self.below is not None:
            yield []
            yield from self.below._lines()  # noqa: SLF001  of the same class

    def _line(self, widths: list[int], cells: list[Cell]) -> list[Cell]:
        line = []
        for number, (width, (text, style)) in enumerate(zip(widths, cells, strict=True)):
            fill = " " * (width - _width(text))
            space = " " if number else ""
            line.append(Cell(space + (fill + text if number in self.numbers else text + fill), style))
        return line

    def _fitting(self, column: int, text: str) -> str:
        """The text, cut off if it is too wide for its column. Numbers are never cut off."""
        text = one_line(text)
        if column in self.numbers or (len(text) <= self.widest and _width(text) <= self.widest):
            return text
        text = text[: self.widest]  # a name may have a million characters
        while _width(text) >= self.widest:
            text = text[:-1]
        return f"{text}…"


class ShownAsTable(ABC):
    """An object that a terminal and a notebook show as a table."""

    __slots__ = ()

    @abstractmethod
    def to_table(self) -> Table:
        """Return what is shown of the object now."""

    def __str__(self) -> str:
        return str(self.to_table())

    def __rich__(self) -> Table:
        return self.to_table()

    def _repr_html_(self) -> str:
        return self.to_table()._repr_html_()


def seconds(value: float) -> str:
    """Write a duration in seconds with two decimals, or one from ten seconds on."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def one_line(text: str) -> str:
    """Replace each character that a terminal or a picture does not print, such as a line break, by a space."""
    return "".join(character if character.isprintable() else " " for character in text)


def _cell(cell: str | Cell) -> Cell:
    return cell if isinstance(cell, Cell) else Cell(cell, "")


def _width(text: str) -> int:
    """The columns of a terminal that a text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(each) else 1 + (unicodedata.east_asian_width(each) in _WIDE) for each in text)


def _html(text: str) -> str:
    return escape(one_line(text))
