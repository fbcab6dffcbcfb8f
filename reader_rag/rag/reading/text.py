"""Decodes text, and extracts the text of HTML."""

from __future__ import annotations

import codecs
import re
from html.parser import HTMLParser

_BYTE_ORDER_MARKS = (
    # UTF-32 first: its little-endian mark begins with the one of UTF-16.
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x06\x0e-\x1a\x1c-\x1f\x7f]")
_MOST_CONTROL_CHARACTERS = 0.01  # share of all characters; text has none or a single one

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


class UnusableFileError(Exception):
    """A file that cannot be ingested; the message is the reason, shown to the user."""


def decode(data: bytes, encoding: str = "utf-8") -> str:
    """Decode text: UTF-8, or UTF-16 and UTF-32 with a byte order mark.

    Args:
        data: The encoded text.
        encoding: Encoding of text without a byte order mark.

    Returns:
        The text with newlines as line ends and without a byte order mark, as `Path.read_text` returns it.

    Raises:
        UnusableFileError: The content is binary or in another encoding.
    """
    encoding = next((name for mark, name in _BYTE_ORDER_MARKS if data.startswith(mark)), encoding)
    if not encoding.startswith(("utf-16", "utf-32")) and b"\0" in data:
        raise UnusableFileError("binary")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise UnusableFileError(f"not {encoding} text (byte {error.start}); convert it to UTF-8") from error
    if len(_CONTROL_CHARACTERS.findall(text)) > _MOST_CONTROL_CHARACTERS * len(text):
        raise UnusableFileError("binary")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def html_text(data: bytes) -> str:
    """The text of an HTML page: without tags, scripts, styles and comments; each block in lines of its own.

    Args:
        data: The page, in the encoding that it declares, or in UTF-8.

    Raises:
        UnusableFileError: The content is binary or in another encoding.
    """
    head = data[:_HEAD_BYTES]
    parser = _TextParser(is_xml=_XHTML.search(head) is not None)
    parser.feed(decode(data, _declared_encoding(head)))
    parser.close()
    return parser.text()


def _declared_encoding(head: bytes) -> str:
    """The encoding that a page declares, as Python's name; UTF-8 where it declares none, or none of the web's."""
    declared = _CHARSET.search(head)
    if declared is not None:
        try:
            name = codecs.lookup((declared[1] or declared[2]).decode("ascii")).name
        except (LookupError, UnicodeDecodeError):
            return "utf-8"
        if _WEB_CODEC.match(name):
            return "cp1252" if name in ("ascii", "iso8859-1") else name  # as browsers do
    return "utf-8"


class _TextParser(HTMLParser):
    """Collects the text of a page while it is parsed; it makes no tree, so nesting has no cost.

    Args:
        is_xml: Whether `<script/>` is a whole element, as in XHTML; in HTML it begins one.
    """

    def __init__(self, is_xml: bool) -> None:
        super().__init__(convert_charrefs=True)
        self._is_xml = is_xml
        self._parts: list[str] = []
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

    def text(self) -> str:
        """The text of what was fed, without spaces at the ends of lines, and with single blank lines."""
        lines = (line.rstrip() for line in "".join(self._parts).split("\n"))
        return _BLANK_LINES.sub("\n\n", "\n".join(lines)).strip("\n")

    def _separate(self, tag: str) -> None:
        if tag in _CELLS:
            self.handle_data(" ")
        elif tag == "br":
            self._breaks += 1
        else:
            self._breaks = max(self._breaks, _BREAKS.get(tag, 1))
