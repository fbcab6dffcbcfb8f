"""Markdown and reStructuredText: the file's own text, divided at headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate, pairwise

from markdown_it import MarkdownIt

from reader_rag.rag.reading.section import Heading, Section, divide
from reader_rag.rag.reading.text import decode

_FRONT_MATTER = re.compile(r"---[ \t]*\n(?:.*\n)*?(?:---|\.\.\.)[ \t]*(?:\n|$)")
_ADORNMENT = re.compile(r"([!-/:-@\[-`{-~])\1*[ \t]*")
_LINKED = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_MARKS = re.compile(r"[*`]+")


def read(data: bytes, suffix: str, encoding: str) -> Iterator[Section]:
    """The text, with the titles of the headings above each part as `section`.

    Args:
        data: Content of the file.
        suffix: Suffix of its name: Markdown or reStructuredText.
        encoding: Encoding of text without a byte order mark.
    """
    text = decode(data, encoding)
    return divide(text, _rst_headings(text) if suffix == ".rst" else _markdown_headings(text))


def _markdown_headings(text: str) -> Iterator[Heading]:
    front = _FRONT_MATTER.match(text)
    skipped = front.end() if front else 0
    starts = [skipped + start for start in _line_starts(text[skipped:])]
    tokens = MarkdownIt("commonmark").parse(text[skipped:])
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open" and opening.map is not None and opening.level == 0:
            first, end = opening.map
            title = _MARKS.sub("", _LINKED.sub(r"\1", inline.content))
            yield Heading(starts[first], starts[min(end, len(starts) - 1)], int(opening.tag[1]), title)


def _rst_headings(text: str) -> Iterator[Heading]:
    """Headings: a line with a line of punctuation under it, at least as long, and perhaps another above it."""
    lines, starts = text.split("\n"), _line_starts(text)
    styles: list[tuple[str, bool]] = []  # of the levels, outermost first
    number = 0
    while number < len(lines) - 1:
        over = _is_adornment(lines, number) and number + 2 < len(lines)
        title = number + over
        under = title + 1
        is_heading = _is_title(lines[title], over) and _is_adornment(lines, under, lines[title])
        if is_heading and (not over or lines[number].rstrip() == lines[under].rstrip()):
            style = (lines[under][0], over)
            if style not in styles:
                styles.append(style)
            yield Heading(starts[number], starts[under + 1], styles.index(style) + 1, lines[title].strip())
            number = under
        number += 1


def _is_adornment(lines: list[str], number: int, title: str = "") -> bool:
    line = lines[number].rstrip() if number < len(lines) else ""
    return len(line) >= max(2, len(title.strip())) and _ADORNMENT.fullmatch(line) is not None


def _is_title(line: str, over: bool) -> bool:
    """Whether a line may be a title; only one with a line above it may be indented."""
    return bool(line.strip()) and not _is_adornment([line], 0) and (over or not line[0].isspace())


def _line_starts(text: str) -> list[int]:
    """The first character of each line, and the text's length."""
    ends = list(accumulate(len(line) + 1 for line in text.split("\n")))
    return [0, *ends[:-1], len(text)]
