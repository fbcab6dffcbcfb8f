"""PowerPoint (.pptx): a section for each slide."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import Any

import pptx

from reader_rag.rag.reading.section import Section, table_block


def read(data: bytes, suffix: str, encoding: str) -> Iterator[Section]:
    """The texts, tables and notes of each slide, with its number as `slide`.

    Args:
        data: Content of the file.
        suffix: Unused.
        encoding: Unused.
    """
    for number, slide in enumerate(pptx.Presentation(io.BytesIO(data)).slides, start=1):
        blocks = list(_blocks(slide.shapes))
        if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
            blocks.append(slide.notes_slide.notes_text_frame.text)
        text = "\n\n".join(block for block in blocks if block.strip())
        yield Section(text.replace("\v", "\n"), {"slide": str(number)})


def _blocks(shapes: Iterable[Any]) -> Iterator[str]:
    waiting = list(shapes)[::-1]
    while waiting:  # not by recursion: groups may be nested deeper than Python's stack
        shape = waiting.pop()
        if hasattr(shape, "shapes"):
            waiting += list(shape.shapes)[::-1]
        elif getattr(shape, "has_table", False):
            yield table_block([cell.text for cell in row.cells] for row in shape.table.rows)
        elif getattr(shape, "has_text_frame", False):
            yield shape.text_frame.text
