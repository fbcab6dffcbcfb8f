"""Tables of README and docs that `bench report` writes: each figure is one of the committed report."""

from __future__ import annotations

from pathlib import Path

import pytest

from reader_rag.bench.figures.pages import section_markdown, stale_blocks
from reader_rag.bench.figures.run import read_report

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "docs" / "benchmarks" / "report"
PAGES = ("README.md", "docs/benchmarks/README.md", "docs/comparison.md")
"""Pages with blocks of figures."""
AGAIN = "write them again: reader-rag bench report --out docs/benchmarks/report --render " + " ".join(
    f"--update {page}" for page in PAGES
)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_have_the_figures_of_the_report(page: str) -> None:
    _, stale = stale_blocks((ROOT / page).read_text(encoding="utf-8"), read_report(REPORT), page)
    assert stale == [], AGAIN


def test_tokens_per_step_stand_in_a_block_of_the_comparison() -> None:
    compared, _ = stale_blocks((ROOT / "docs/comparison.md").read_text(encoding="utf-8"), read_report(REPORT), "")
    assert "tokens-per-step" in compared


def test_the_page_of_the_report_has_its_sections() -> None:
    report = read_report(REPORT)
    page = (REPORT / "README.md").read_text(encoding="utf-8")
    for name in report["sections"]:
        assert section_markdown(report, name, heading=True).rstrip() in page, AGAIN


def test_no_other_page_has_a_block_that_is_not_compared() -> None:
    marked = [
        path.relative_to(ROOT).as_posix()
        for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
        if "\n<!-- figures: " in path.read_text(encoding="utf-8")
    ]
    assert sorted(marked) == sorted(PAGES)
