"""Word (.docx): paragraphs, tables and footnotes, divided at headings."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

import docx
from docx.document import Document
from docx.oxml.ns import qn
from docx.oxml.parser import parse_xml
from docx.table import Table
from docx.text.paragraph import Paragraph

from reader_rag.rag.reading.section import Section, divide_blocks, table_block

_HEADING = re.compile(r"heading (\d)", re.I)
_FOOTNOTES = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/footnotes"


def read(data: bytes, suffix: str, encoding: str) -> Iterator[Section]:
    """The text of a Word file.

    Args:
        data: Content of the file.
        suffix: Unused.
        encoding: Unused.
    """
    return divide_blocks(_blocks(docx.Document(io.BytesIO(data))))


def _blocks(document: Document) -> Iterator[tuple[str, int | None]]:
    """Paragraphs, tables and footnotes; with its level where one is a heading."""
    for block in document.iter_inner_content():
        yield (table_block(_rows(block)), None) if isinstance(block, Table) else (block.text, _level(block))
    for note in _footnotes(document):
        yield note, None


def _level(paragraph: Paragraph) -> int | None:
    """Level of a heading; None for other paragraphs. Styles have English names in files of every language."""
    name = (paragraph.style.name if paragraph.style is not None else None) or ""
    found = _HEADING.match(name)
    return int(found[1]) if found else 0 if name.lower() == "title" else None


def _rows(table: Table) -> Iterator[list[str]]:
    for row in table.rows:
        cells, last = [], None
        for cell in row.cells:
            if cell._tc is not last:  # a merged cell is listed once for each column
                cells.append(cell.text)
            last = cell._tc
        yield cells


def _footnotes(document: Document) -> Iterator[str]:
    for relation in document.part.rels.values():
        if relation.reltype == _FOOTNOTES and not relation.is_external:
            for note in parse_xml(relation.target_part.blob).iter(qn("w:footnote")):
                yield "".join(piece.text or "" for piece in note.iter(qn("w:t"))).strip()
