"""Texts and errors of other libraries in one line, for messages."""

from __future__ import annotations


def one_line(text: str) -> str:
    """Text with every run of white space, line ends included, as one space."""
    return " ".join(text.split())


def first_line(error: BaseException | str) -> str:
    """The first line of an error's message that is not blank.

    Args:
        error: An error, or the text of one.

    Returns:
        The line without white space around it and without the full stop or colon at its end, to be part of a longer
        sentence; the name of the error's class where its message is blank, "" for a blank text.
    """
    for line in str(error).splitlines():
        if line.strip():
            return line.strip().rstrip(".:")
    return "" if isinstance(error, str) else type(error).__name__
