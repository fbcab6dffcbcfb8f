"""Errors and texts in one line."""

from __future__ import annotations

import pytest

from reader_rag.util.one_line import first_line, one_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("no such file"), "no such file"),
        (ValueError("\n  no such file:  \nTraceback follows"), "no such file"),
        (ValueError("it failed. Try again.\nor not"), "it failed. Try again"),
        (ValueError(), "ValueError"),
        (ValueError(" \n "), "ValueError"),
        ("refused\nby the server", "refused"),
        ("", ""),
    ],
)
def test_the_first_line_of_an_error_is_its_first_that_is_not_blank(error: Exception | str, line: str) -> None:
    assert first_line(error) == line


def test_one_line_has_single_spaces() -> None:
    assert one_line(" the\tdisk\n\n is  full ") == "the disk is full"
