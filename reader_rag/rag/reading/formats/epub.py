"""EPUB: a section for each chapter."""

from __future__ import annotations

import io
import posixpath
import zipfile
from collections.abc import Iterator
from urllib.parse import unquote
from xml.etree import ElementTree

from reader_rag.rag.reading.formats.html import html_blocks
from reader_rag.rag.reading.section import Section
from reader_rag.rag.reading.text import UnusableFileError
from reader_rag.util.one_line import one_line

_PAGES = frozenset({"application/xhtml+xml", "text/html", "application/x-dtbook+xml"})


def read(data: bytes, suffix: str, encoding: str) -> Iterator[Section]:
    """The documents of a book in reading order, with the first heading, or the title, as `chapter`.

    Args:
        data: Content of the file.
        suffix: Unused.
        encoding: Encoding of chapters that declare none.

    Raises:
        UnusableFileError: The archive holds no book.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = set(archive.namelist())
        for number, name in enumerate(_reading_order(archive), start=1):
            if name not in names:
                continue
            blocks = list(html_blocks(archive.read(name), encoding))
            text = "\n\n".join(block for block, _ in blocks)
            titles = [block for block, level in blocks if level is not None]
            heading = next((block for block, level in blocks if level), titles[0] if titles else "")
            yield Section(text, {"chapter": one_line(heading)[:120] or str(number)})


def _reading_order(archive: zipfile.ZipFile) -> list[str]:
    try:
        container = ElementTree.fromstring(archive.read("META-INF/container.xml"))
        root = next(element for element in container.iter() if element.tag.endswith("}rootfile"))
        package_name = root.attrib["full-path"]
        package = ElementTree.fromstring(archive.read(package_name))
    except (KeyError, StopIteration, ElementTree.ParseError) as error:
        raise UnusableFileError("not a readable .epub file: it names no book") from error
    items = {
        element.get("id"): unquote(element.get("href", ""))
        for element in package.iter()
        if element.tag.endswith("}item") and element.get("media-type") in _PAGES
    }
    order = [element.get("idref") for element in package.iter() if element.tag.endswith("}itemref")]
    folder = posixpath.dirname(package_name)
    return [posixpath.normpath(posixpath.join(folder, items[id_])) for id_ in order if id_ in items]
