"""The formats that parsers turn into text: modules with the same function.

A module has `read(data, suffix, encoding)`, a generator of `Section`s. It imports the packages of its formats, so it is
imported in the reading process only, for the first file of such a format. Every other file is text itself.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module

from reader_rag.rag.reading.section import Section

Read = Callable[[bytes, str, str], Iterator[Section]]


@dataclass(frozen=True)
class Format:
    """A format of files.

    Attributes:
        title: Name of the format, for messages.
        suffixes: Suffixes of its files, in lower case.
        module: Its module in this package.
        package: Package that it needs, of the extra "files"; "" for none.
        version: Part of the hash of its files: another one makes every store read them again. "" for those that
            are read as in the first version.
        is_archive: Whether its files are zip archives.
    """

    title: str
    suffixes: tuple[str, ...]
    module: str
    package: str = ""
    version: str = ""
    is_archive: bool = False

    @property
    def is_installed(self) -> bool:
        """Whether its package is on this machine."""
        return not self.package or importlib.util.find_spec(self.package) is not None

    def reader(self) -> Read:
        """The function that turns its files into sections."""
        read: Read = import_module(f"{__name__}.{self.module}").read
        return read


_TEXT = "text in sections 1"

FORMATS = (
    Format("PDF", (".pdf",), "pdf", "pypdf"),
    Format("Word", (".docx",), "word", "docx", "docx 1", is_archive=True),
    Format("PowerPoint", (".pptx", ".pptm"), "slides", "pptx", "pptx 1", is_archive=True),
    Format("Excel", (".xlsx", ".xlsm"), "tables", "openpyxl", "xlsx 1", is_archive=True),
    Format("Excel 97", (".xls",), "tables", "xlrd", "xls 1"),
    Format("OpenDocument", (".odt", ".ods", ".odp"), "opendocument", "odfdo", "odf 1", is_archive=True),
    Format("EPUB", (".epub",), "epub", "", "epub 1", is_archive=True),
    Format("RTF", (".rtf",), "rtf", "striprtf", "rtf 1"),
    Format("mail", (".eml", ".mbox"), "mail", "", "mail 1"),
    Format("Outlook", (".msg",), "mail", "oxmsg", "msg 1"),
    Format("HTML", (".html", ".htm", ".xhtml"), "html", "", "HTML in sections 1"),
    Format("Markdown", (".md", ".markdown"), "markup", "", _TEXT),
    Format("reStructuredText", (".rst",), "markup", "", _TEXT),
    Format("notebook", (".ipynb",), "notebook", "", "notebook 1"),
    Format("table", (".csv", ".tsv"), "tables", "", "table 1"),
    Format("JSON", (".json", ".jsonl", ".ndjson"), "data", "", "JSON 1"),
    Format("XML", (".xml",), "data", "", "XML 1"),
)

_BY_SUFFIX = {suffix: format_ for format_ in FORMATS for suffix in format_.suffixes}

# Formats that no package of the extra reads, and what to do instead.
_UNREAD = {
    ".doc": "save it as .docx",
    ".docm": "save it as .docx",
    ".hwp": "save it as .docx or PDF",
    ".key": "save it as .pptx or PDF",
    ".numbers": "save it as .xlsx",
    ".pages": "save it as .docx or PDF",
    ".ppt": "save it as .pptx",
    ".xlsb": "save it as .xlsx",
}


def format_of(suffix: str) -> Format | None:
    """The format of files with a suffix; None for those that are text themselves.

    Args:
        suffix: The suffix with its dot, in lower case.
    """
    return _BY_SUFFIX.get(suffix)


def unread_reason(suffix: str) -> str:
    """Why binary files with a suffix cannot be read, where their format is known; else "".

    Args:
        suffix: The suffix with its dot, in lower case.
    """
    instead = _UNREAD.get(suffix)
    return f"{suffix} files cannot be read: {instead}" if instead else ""
