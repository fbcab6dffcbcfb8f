"""Where a passage is from, in words."""

from __future__ import annotations

from typing import Any

import pytest

from reader_rag.util.source_title import source_title


@pytest.mark.parametrize(
    ("metadata", "title"),
    [
        ({"file_path": "/docs/a.txt"}, "a.txt"),
        ({"file_path": "C:\\docs\\a.txt"}, "a.txt"),
        ({"file_path": "/docs/0x1f.bin", "file_name": "Report.pdf", "page_label": "iv"}, "Report.pdf, page iv"),
        ({"file_name": "a.pptx", "slide": "3", "owner": "Ann"}, "a.pptx, slide 3"),
        ({"file_name": "a.xlsx", "rows": "2-9", "sheet": "Europe"}, "a.xlsx, sheet Europe, rows 2-9"),
        ({"file_name": "a.md", "section": "Birds > Herons"}, "a.md, section Birds > Herons"),
        ({"author": "Ann", "year": 2019, "note": None, "empty": ""}, "author: Ann, year: 2019"),
        ({"text": "one\n two"}, "text: one two"),
        ({}, ""),
    ],
)
def test_a_source_is_its_file_and_place_or_its_metadata(metadata: dict[str, Any], title: str) -> None:
    assert source_title(metadata) == title


def test_long_titles_are_cut() -> None:
    assert source_title({"note": "word " * 100}) == "note: " + "word " * 38 + "w..."
