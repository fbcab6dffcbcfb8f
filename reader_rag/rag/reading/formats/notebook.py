"""Notebooks (.ipynb): a section for each text with the code below it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from reader_rag.rag.reading.section import Section
from reader_rag.rag.reading.text import UnusableFileError, decode


def read(data: bytes, suffix: str, encoding: str) -> Iterator[Section]:
    """The cells of a notebook with their printed outputs; numbers of the cells, from 1, are in `cells`.

    A section is a run of text cells and the code cells up to the next text.

    Args:
        data: Content of the file.
        suffix: Unused.
        encoding: Unused: notebooks are UTF-8.

    Raises:
        UnusableFileError: The content is no notebook.
    """
    notebook = json.loads(decode(data))
    cells = _cells(notebook)
    if cells is None:
        raise UnusableFileError("not a readable .ipynb file: it has no cells")
    blocks: list[str] = []
    first, was_text = 1, True
    for number, cell in enumerate(cells, start=1):
        is_text = cell.get("cell_type") != "code"
        if is_text and not was_text and blocks:
            yield _section(blocks, first, number - 1)
            blocks, first = [], number
        blocks += [block for block in (_joined(cell.get("source", cell.get("input", ""))), *_outputs(cell)) if block]
        was_text = is_text
    if blocks:
        yield _section(blocks, first, len(cells))


def _cells(notebook: Any) -> list[Any] | None:
    if not isinstance(notebook, dict):
        return None
    cells = notebook.get("cells")
    if cells is None and "worksheets" in notebook:  # format 3
        cells = [cell for sheet in notebook["worksheets"] for cell in sheet["cells"]]
    return cells if isinstance(cells, list) else None


def _section(blocks: list[str], first: int, last: int) -> Section:
    return Section("\n\n".join(blocks), {"cells": str(first) if first == last else f"{first}-{last}"})


def _outputs(cell: Mapping[str, Any]) -> Iterator[str]:
    for output in cell.get("outputs", ()):
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        yield _joined(text).strip("\n")


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)
