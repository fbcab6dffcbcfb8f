"""OpenDocument: texts divided at headings (.odt), sheets (.ods), slides (.odp)."""

from __future__ import annotations

import io
from collections.abc import Iterator

from odfdo import Document, Element

from reader_rag.rag.reading.formats.tables import table_section
from reader_rag.rag.reading.section import Section, divide_blocks, table_block

_PARAGRAPHS = frozenset({"text:p", "text:h"})
_DROPPED = frozenset({"text:tracked-changes", "text:sequence-decls", "office:forms", "table:shapes", "style:style"})
_MOST_REPEATED = 1000  # columns or rows; an empty rest of a sheet is written as one that is repeated


def read(data: bytes, suffix: str, encoding: str) -> Iterator[Section]:
    """The text of an OpenDocument file.

    Args:
        data: Content of the file.
        suffix: Suffix of its name: a text, a spreadsheet or a presentation.
        encoding: Unused.
    """
    body = Document(io.BytesIO(data)).body
    if suffix == ".ods":
        for sheet in body.get_elements("table:table"):
            yield table_section(_rows(sheet), {"sheet": str(sheet.get_attribute("table:name") or "")})
    elif suffix == ".odp":
        for number, page in enumerate(body.get_elements("draw:page"), start=1):
            yield Section("\n\n".join(block for block, _ in _blocks(page) if block.strip()), {"slide": str(number)})
    else:
        yield from divide_blocks(_blocks(body))


def _blocks(parent: Element) -> Iterator[tuple[str, int | None]]:
    """Paragraphs and tables below an element; with its level where one is a heading."""
    waiting = parent.children[::-1]
    while waiting:  # not by recursion: elements may be nested deeper than Python's stack
        element = waiting.pop()
        if element.tag == "text:h":
            yield element.inner_text, int(element.get_attribute("text:outline-level") or 1)
        elif element.tag == "text:p":
            yield element.inner_text, 0 if element.get_attribute("text:style-name") == "Title" else None
            waiting += [frame for frame in element.children if frame.tag.startswith("draw:")][::-1]
        elif element.tag == "table:table":
            yield table_block(cells for _, cells in _rows(element)), None
        elif element.tag not in _DROPPED:
            waiting += element.children[::-1]


def _rows(table: Element) -> Iterator[tuple[int, list[str]]]:
    number = 1
    for row in table.get_elements("descendant::table:table-row"):
        repeated = int(row.get_attribute("table:number-rows-repeated") or 1)
        cells: list[str] = []
        for cell in row.children:
            if cell.tag in ("table:table-cell", "table:covered-table-cell"):
                times = int(cell.get_attribute("table:number-columns-repeated") or 1)
                text = "\n".join(part.inner_text for part in cell.children if part.tag in _PARAGRAPHS)
                cells += [text] * min(times, _MOST_REPEATED)
        if any(cells):
            for place in range(min(repeated, _MOST_REPEATED)):
                yield number + place, cells
        number += repeated
