"""Texts that cannot be encoded: a lone surrogate stands for a broken character, and no file or terminal takes it."""

from __future__ import annotations


def is_encodable(text: str) -> bool:
    """Whether a text has no lone surrogate. A file name that is not valid UTF-8 has some in Python.

    Args:
        text: The text.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encodable(text: str) -> str:
    """The text with a question mark for each lone surrogate; it has as many characters.

    Args:
        text: The text.
    """
    return text if is_encodable(text) else text.encode("utf-8", "replace").decode()
