"""The text of a document as its nodes have it, and the addresses of spans in it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from llama_index.core.schema import BaseNode, TextNode

_PAGE_BREAK = "\n\n"
_LONGEST_GAP = 1 << 16
_PARTS = ("page_label", "slide", "sheet", "chapter", "cells", "message")
"""Metadata that names a part of a document whose nodes count characters from the part's start."""


@lru_cache(maxsize=1 << 14)
def document_id(ref_doc_id: str) -> str:
    """The id of a document in the API: a hash of the path that the store knows it by, so that no path is shown.

    Args:
        ref_doc_id: The store's id of the document, which its nodes have as `ref_doc_id`.
    """
    return hashlib.sha256(ref_doc_id.encode("utf-8", "surrogatepass")).hexdigest()[:24]


@dataclass(frozen=True)
class Page:
    """A page of a document's text.

    Attributes:
        number: Number of the page, from 1; in a PDF the physical one.
        label: The label that the document gives it, such as "iv"; "" where there are no pages.
        start: Start in the document's text, in characters.
        end: End in the document's text; exclusive.
    """

    number: int
    label: str
    start: int
    end: int


@dataclass(frozen=True)
class DocumentText:
    """The text of a document.

    Attributes:
        text: Its text. White space between two nodes that overlap nowhere is not stored: there are as many characters
            as the document has, but line ends may be spaces.
        version: Hash of the text.
        pages: Its pages; one where the format has none.
        name: File name of the document; "" where its nodes have none.
        offsets: Start of each node's text in `text`, by node id.
    """

    text: str
    version: str
    pages: tuple[Page, ...]
    name: str
    offsets: dict[str, int] = field(repr=False)

    def span(self, node_id: str, start: int, end: int) -> tuple[int, int] | None:
        """A span of a node as a span of the document; None if the document has no such node.

        Args:
            node_id: Id of the node.
            start: Start in the node's text, in characters.
            end: End in the node's text.
        """
        offset = self.offsets.get(node_id)
        return None if offset is None else (offset + start, offset + end)


def document_text(nodes: Sequence[BaseNode]) -> DocumentText:
    """The text of a document.

    Args:
        nodes: All nodes of the document, in the order in which the store has them.
    """
    text = _Text()
    for node in nodes:
        if isinstance(node, TextNode):
            text.append(node)
    return text.finish()


def citation_url(base_url: str, document: str, version: str, start: int, end: int) -> str:
    """The address at which the page shows a span of a document.

    Args:
        base_url: The service's own address.
        document: The document's id.
        version: The version of its text that the characters count in.
        start: Start of the span in the document's text, in characters.
        end: End of the span.
    """
    return f"{base_url.rstrip('/')}/#/documents/{document}?v={version}&start={start}&end={end}"


class _Text:
    """Puts the texts of nodes together."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0
        self._offsets: dict[str, int] = {}
        self._pages: list[Page] = []
        self._name = ""
        self._page_start = 0
        self._page: TextNode | None = None  # its first node
        self._last: tuple[TextNode, int, int] | None = None  # of the page, with its start and end there

    def append(self, node: TextNode) -> None:
        self._name = self._name or str(node.metadata.get("file_name") or "")
        start = node.start_char_idx if node.start_char_idx is not None and node.start_char_idx >= 0 else None
        if self._page is None or self._begins_page(node, start):
            self._begin_page(node)
        if start is None or self._last is None:
            self._add(_PAGE_BREAK if self._last is not None else "")
            overlap = 0
        else:
            _, _, end = self._last
            overlap = max(0, end - start)
            gap = min(start - end, _LONGEST_GAP)
            self._add(" " if gap == 1 else "\n" * gap)  # one space or line end, or an empty line
        self._offsets[node.node_id] = self._length - overlap
        self._add(node.text[overlap:])
        first = start or 0
        self._last = (node, first, first + len(node.text))

    def finish(self) -> DocumentText:
        self._end_page()
        text = "".join(self._parts)
        version = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return DocumentText(text, version, tuple(self._pages), self._name, self._offsets)

    def _begins_page(self, node: TextNode, start: int | None) -> bool:
        assert self._page is not None
        if _label(node) != _label(self._page) or _number(node) != _number(self._page):
            return True
        if start is None or self._last is None:
            return False
        last, last_start, last_end = self._last
        # A text of its own begins at 0 again, and does not repeat the end of the one before.
        return start < last_start or (start < last_end and not last.text.endswith(node.text[: last_end - start]))

    def _begin_page(self, node: TextNode) -> None:
        if self._page is not None:
            self._end_page()
            self._add(_PAGE_BREAK)
        self._page, self._last, self._page_start = node, None, self._length

    def _end_page(self) -> None:
        if self._page is not None:
            number = _number(self._page) or len(self._pages) + 1
            self._pages.append(Page(number, _label(self._page), self._page_start, self._length))

    def _add(self, text: str) -> None:
        self._parts.append(text)
        self._length += len(text)


def _label(node: TextNode) -> str:
    return next((str(node.metadata[name]) for name in _PARTS if node.metadata.get(name)), "")


def _number(node: TextNode) -> int | None:
    """The page's number, where the format has pages; in stores without numbers, a label that is a number."""
    number = str(node.metadata.get("page_number") or node.metadata.get("page_label") or "")
    return int(number) if number.isascii() and number.isdecimal() and 0 < len(number) < 8 else None
