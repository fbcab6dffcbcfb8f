"""PDF: a section for each page."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pypdf
from pypdf.errors import DependencyError, FileNotDecryptedError

from reader_rag.rag.reading.section import Section
from reader_rag.rag.reading.text import UnusableFileError

logging.getLogger("pypdf").setLevel(logging.CRITICAL)


def read(data: bytes, suffix: str, encoding: str) -> Iterator[Section]:
    """The pages of a PDF file, with its own labels ("iv", "12") as `page_label`.

    Where the label of a page is not its number, counted from 1, that is `page_number`: PDF viewers go by it.

    Args:
        data: Content of the file.
        suffix: Unused.
        encoding: Unused.

    Raises:
        UnusableFileError: The file needs a password, or has pages but no text.
    """
    try:
        pdf = pypdf.PdfReader(io.BytesIO(data))
        labels = pdf.page_labels
        has_text = False
        for number, (page, label) in enumerate(zip(pdf.pages, labels, strict=True), start=1):
            text = page.extract_text()
            has_text = has_text or bool(text.strip())
            numbered = {} if str(label) == str(number) else {"page_number": str(number)}
            yield Section(text, {"page_label": str(label), **numbered})
    except (FileNotDecryptedError, DependencyError) as error:
        raise UnusableFileError("encrypted: save it without its password") from error
    if labels and not has_text:
        raise UnusableFileError(f"its {len(labels)} pages hold no text (scanned?); run text recognition on it")
