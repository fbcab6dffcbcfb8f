"""`Section`: a part of a file's text, with what says where it is in the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from reader_rag.util.one_line import one_line

_MOST_TITLE = 120  # characters


@dataclass(frozen=True)
class Section:
    """A part of a file's text.

    Attributes:
        text: The text.
        metadata: Where it is in the file, e.g. `{"page_label": "3"}` or `{"section": "Birds > Herons"}`.
        start: Characters of the file's text before it, where the sections are one text that headings divide; 0 for
            pages, slides, sheets, chapters and messages, which are texts of their own.
        line_key: Name in the metadata for the labels of lines, e.g. "rows"; "" for none.
        line_labels: Label of each line of `text`, e.g. the number of the table's row; empty for none.
    """

    text: str
    metadata: dict[str, str] = field(default_factory=dict)
    start: int = 0
    line_key: str = ""
    line_labels: tuple[str, ...] = ()


class Heading(NamedTuple):
    """A heading within a text.

    Attributes:
        start: Its first character.
        end: The character behind it.
        level: 1 for the topmost; 0 divides the text and is no part of the names of sections.
        title: Its text.
    """

    start: int
    end: int
    level: int
    title: str


def divide(text: str, headings: Iterable[Heading]) -> Iterator[Section]:
    """Divide a text at its headings. A heading with nothing but white space before the next one stays with that.

    Args:
        text: The text.
        headings: Its headings, in order.

    Yields:
        The parts, which together are the text; each has as `section` the titles of the headings above it, outermost
        first, joined by " > ". What is before the first heading has none.
    """
    path: list[tuple[int, str]] = []
    start, metadata, last_end = 0, dict[str, str](), 0
    for heading in headings:
        if text[last_end : heading.start].strip():
            yield Section(text[start : heading.start], metadata, start)
            start = heading.start
        last_end = heading.end
        path = [(level, title) for level, title in path if level < heading.level]
        title = one_line(heading.title)[:_MOST_TITLE]
        if heading.level and title:
            path.append((heading.level, title))
        metadata = {"section": " > ".join(title for _, title in path)} if path else {}
    if text[start:].strip():
        yield Section(text[start:], metadata, start)


def divide_blocks(blocks: Iterable[tuple[str, int | None]]) -> Iterator[Section]:
    """Join blocks to one text, with blank lines between them, and divide it at its headings; see `divide`.

    Args:
        blocks: The text of each paragraph, list, table or heading, and the level of a heading (1 for the topmost; 0
            divides the text only), None for others. Blocks without text are left out.
    """
    parts: list[str] = []
    headings: list[Heading] = []
    length = 0
    for block, level in blocks:
        if block.strip():
            start = length + 2 * bool(parts)
            length = start + len(block)
            parts.append(block)
            if level is not None:
                headings.append(Heading(start, length, level, block))
    return divide("\n\n".join(parts), headings)


class LabelledLines:
    """A text whose lines have labels, such as the rows of a table.

    Args:
        key: Name of the labels in the metadata.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._lines: list[str] = []
        self._labels: list[str] = []

    def add(self, label: str, text: str) -> None:
        """Add lines.

        Args:
            label: Their label.
            text: One line or several.
        """
        lines = text.split("\n")
        self._lines += lines
        self._labels += [label] * len(lines)

    def section(self, metadata: dict[str, str] | None = None) -> Section:
        """The lines as one section.

        Args:
            metadata: Where it is in the file.
        """
        return Section("\n".join(self._lines), metadata or {}, 0, self._key, tuple(self._labels))


def table_text(rows: Iterable[tuple[int, Sequence[str]]]) -> list[tuple[int, str]]:
    """The rows of a table as lines that can be understood one by one: `Bird: Heron; Food: fish`.

    The first row names the columns where it has at least two cells and all of them are different texts, not numbers.
    Otherwise a line is the row's cells: `Heron | fish`.

    Args:
        rows: Number and cells of each row.

    Returns:
        (number, line) of each row that is not blank.
    """
    full = [(number, [one_line(cell) for cell in cells]) for number, cells in rows]
    full = [(number, cells) for number, cells in full if any(cells)]
    names = full[0][1] if len(full) > 1 else []
    while names and not names[-1]:
        names = names[:-1]
    if len(names) < 2 or len(set(names)) < len(names) or not all(_is_name(name) for name in names):
        names = []
    lines = []
    for place, (number, cells) in enumerate(full):
        if names and place:
            named = [f"{names[i]}: {cell}" if i < len(names) else cell for i, cell in enumerate(cells) if cell]
            lines.append((number, "; ".join(named)))
        else:
            lines.append((number, " | ".join(cell for cell in cells if cell)))
    return lines


def table_block(rows: Iterable[Sequence[str]]) -> str:
    """A table within a text, as a block of lines; see `table_text`.

    Args:
        rows: Cells of each row.
    """
    return "\n".join(line for _, line in table_text(enumerate(rows)))


def _is_name(cell: str) -> bool:
    return bool(cell) and not cell.replace(".", "").replace(",", "").replace("-", "").strip("%€$£ ").isdigit()
