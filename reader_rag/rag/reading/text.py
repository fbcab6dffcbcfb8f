"""Decodes text."""

from __future__ import annotations

import codecs
import re

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
