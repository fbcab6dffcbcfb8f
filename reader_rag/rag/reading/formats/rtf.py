"""RTF: one text."""

from __future__ import annotations

import re
from collections.abc import Iterator

from striprtf.striprtf import rtf_to_text

from reader_rag.rag.reading.section import Section
from reader_rag.rag.reading.text import UnusableFileError

_CODE_PAGE = re.compile(rb"\\ansicpg(\d{3,5})")
_BLANK_LINES = re.compile(r"\n{3,}")


def read(data: bytes, suffix: str, encoding: str) -> Iterator[Section]:
    """The text of an RTF file.

    Args:
        data: Content of the file.
        suffix: Unused.
        encoding: Unused: the file declares its own.

    Raises:
        UnusableFileError: The content is no RTF.
    """
    if not data.lstrip().startswith(b"{\\rtf"):
        raise UnusableFileError("not a readable .rtf file: it does not begin with {\\rtf")
    declared = _CODE_PAGE.search(data[:4096])
    code_page = f"cp{int(declared[1])}" if declared and int(declared[1]) != 65001 else "cp1252"
    text = rtf_to_text(data.decode("latin-1"), encoding=code_page, errors="replace")
    lines = "\n".join(line.rstrip() for line in text.replace("\r", "").split("\n"))
    yield Section(_BLANK_LINES.sub("\n\n", lines).strip("\n"))
