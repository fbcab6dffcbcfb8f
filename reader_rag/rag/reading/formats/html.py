"""HTML: the text of a page, divided at headings."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from html.parser import HTMLParser

from reader_rag.rag.reading.section import Section, divide_blocks
from reader_rag.rag.reading.text import decode

_HEAD_BYTES = 4096  # a page declares its encoding, and what it is, in its first bytes
_CHARSET = re.compile(
    rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([\w.:-]{1,40})|<\?xml[^>]{0,100}?encoding=[\"']([\w.:-]{1,40})", re.I
)
_XHTML = re.compile(rb"<\?xml|DTD XHTML|http://www\.w3\.org/1999/xhtml")
# Codecs of texts on the web; Python has others, such as unicode_escape.
_WEB_CODEC = re.compile(r"utf-8|ascii|iso8859|cp\d|koi8|mac|gb|big5|hz|euc|shift_jis|iso2022|johab|tis")
_DROPPED = frozenset({"script", "style", "template", "noscript", "svg", "math", "iframe", "object", "canvas"})
_INLINE = (
    "a abbr acronym b bdi bdo big cite code data del dfn em font i img ins kbd label mark meter nobr output progress q "
    "rp rt ruby s samp small span strike strong sub sup time tt u var wbr"
)
_PARAGRAPHS = "p h1 h2 h3 h4 h5 h6 ul ol dl table pre blockquote section article header footer title"
# Line breaks before and after an element; 1 for all others.
_BREAKS = dict.fromkeys(_INLINE.split(), 0) | dict.fromkeys(_PARAGRAPHS.split(), 2)
_CELLS = frozenset({"td", "th"})
_PREFORMATTED = frozenset({"pre", "textarea"})
_SPACES = re.compile(r"[ \t\n\r\f\v\xa0]+")
_BLANK_LINES = re.compile(r"\n{3,}")
_HEADINGS = {f"h{level}": level for level in range(1, 7)} | {"title": 0}


def read(data: bytes, suffix: str, encoding: str) -> Iterator[Section]:
    """The text of an HTML page, with the headings above each part as `section`.

    Args:
        data: Content of the file.
        suffix: Unused.
        encoding: Encoding of a page that declares none.
    """
    return divide_blocks(html_blocks(data, encoding))


def html_text(data: bytes, encoding: str = "utf-8") -> str:
    """The text of an HTML page: without tags, scripts, styles and comments; each block in lines of its own.

    Args:
        data: The page, in the encoding that it declares, or in `encoding`.
        encoding: Encoding of a page that declares none.

    Raises:
        UnusableFileError: The content is binary or in another encoding.
    """
    return "\n\n".join(block for block, _ in html_blocks(data, encoding))


def html_blocks(data: bytes, encoding: str = "utf-8") -> Iterator[tuple[str, int | None]]:
    """The headings of an HTML page, and the texts between them.

    Args:
        data: The page, in the encoding that it declares, or in `encoding`.
        encoding: Encoding of a page that declares none.

    Yields:
        (text, level) with the level of a heading, 0 for the page's title; None for other text.

    Raises:
        UnusableFileError: The content is binary or in another encoding.
    """
    head = data[:_HEAD_BYTES]
    parser = _TextParser(is_xml=_XHTML.search(head) is not None)
    parser.feed(decode(data, _declared_encoding(head) or encoding))
    parser.close()
    return parser.blocks()


def _declared_encoding(head: bytes) -> str:
    """The encoding that a page declares, as Python's name; "" where it declares none, or none of the web's."""
    declared = _CHARSET.search(head)
    if declared is not None:
        try:
            name = codecs.lookup((declared[1] or declared[2]).decode("ascii")).name
        except (LookupError, UnicodeDecodeError):
            return ""
        if _WEB_CODEC.match(name):
            return "cp1252" if name in ("ascii", "iso8859-1") else name  # as browsers do
    return ""


class _TextParser(HTMLParser):
    """Collects the text of a page while it is parsed; it makes no tree, so nesting has no cost.

    Args:
        is_xml: Whether `<script/>` is a whole element, as in XHTML; in HTML it begins one.
    """

    def __init__(self, is_xml: bool) -> None:
        super().__init__(convert_charrefs=True)
        self._is_xml = is_xml
        self._blocks: list[tuple[list[str], int | None]] = []  # parts of finished headings, and of what is between
        self._parts: list[str] = []  # of the heading, or of the text since the last one
        self._level: int | None = None  # of the heading that is open
        self._breaks = 0  # line ends before the next text
        self._dropped = ""  # the open element whose content is no text
        self._depth = 0  # of open elements of its name
        self._preformatted = 0  # open elements in which white space counts

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._dropped:
            self._depth += tag == self._dropped
        elif tag in _DROPPED:
            self._dropped, self._depth = tag, 1
        else:
            self._separate(tag)
            self._preformatted += tag in _PREFORMATTED
            if tag in _HEADINGS:
                self._end_block(_HEADINGS[tag])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _DROPPED and not self._is_xml and tag not in ("svg", "math"):
            self.handle_starttag(tag, attrs)
        elif not self._dropped:
            self._separate(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._dropped:
            self._depth -= tag == self._dropped
            if self._depth == 0 or tag in ("body", "html"):  # an element that is never closed ends with the page
                self._dropped = ""
        else:
            self._separate(tag)
            self._preformatted = max(0, self._preformatted - (tag in _PREFORMATTED))
            if tag in _HEADINGS:
                self._end_block(None)

    def handle_data(self, data: str) -> None:
        if self._dropped:
            return
        if not self._preformatted:
            data = _SPACES.sub(" ", data)
            if self._breaks or not self._parts or self._parts[-1].endswith((" ", "\n")):
                data = data.removeprefix(" ")
        if data:
            self._parts += ["\n" * self._breaks if self._parts else "", data]
            self._breaks = 0

    def blocks(self) -> Iterator[tuple[str, int | None]]:
        """Headings, and the texts between them, without spaces at the ends of lines, and with single blank lines."""
        self._end_block(None)
        for parts, level in self._blocks:
            lines = "\n".join(line.rstrip() for line in "".join(parts).split("\n"))
            text = _BLANK_LINES.sub("\n\n", lines).strip("\n")
            if text.strip():
                yield text, level

    def _end_block(self, next_level: int | None) -> None:
        self._blocks.append((self._parts, self._level))
        self._parts, self._level = [], next_level

    def _separate(self, tag: str) -> None:
        if tag in _CELLS:
            self.handle_data(" ")
        elif tag == "br":
            self._breaks += 1
        else:
            self._breaks = max(self._breaks, _BREAKS.get(tag, 1))
