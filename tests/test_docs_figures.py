"""Figures of README and docs: those of `bench report` are of the committed report, all others name their command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from reader_rag.bench.figures.pages import section_markdown, stale_blocks
from reader_rag.bench.figures.run import read_report

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "docs" / "benchmarks" / "report"
ALL = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in ALL if "\n<!-- figures: " in page.read_text(encoding="utf-8")]
"""Pages with blocks of figures."""
AGAIN = (
    "write them again: reader-rag bench report --out docs/benchmarks/report --render --update README.md --update docs"
)
_BLOCK = re.compile(r"<!-- figures: [\w-]+ -->\n(.*?)<!-- end of figures -->", re.DOTALL)
_TABLE = re.compile(r"(?:^\|.*\n?)+", re.MULTILINE)
_NUMBER = re.compile(r"\**[\d.,]+\**(?: ?(?:[kMG]i?B|ms|us|s|%|times|of|to|and|[/,()x]|\d[\d.,]*)\**)*")
_MEASURED = re.compile(
    r"^Measured with reader-rag \d+\.\d+\.\d+ at commit [0-9a-f]{7,}, \d{4}-\d\d-\d\d, \w", re.MULTILINE
)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_have_the_figures_of_the_report(page: Path) -> None:
    _, stale = stale_blocks(page.read_text(encoding="utf-8"), read_report(REPORT), name(page))
    assert stale == [], AGAIN


def test_pages_that_quote_figures_have_blocks_of_them() -> None:
    quoting = {"README.md", *(f"docs/{page}.md" for page in ("benchmarks/README", "comparison", "drafts", "int8"))}
    assert quoting <= set(map(name, PAGES))


def test_no_block_is_empty() -> None:
    empty = [name(page) for page in PAGES for block in _BLOCK.findall(page.read_text("utf-8")) if "\n|" not in block]
    assert empty == []


def test_the_page_of_the_report_has_its_sections() -> None:
    report = read_report(REPORT)
    page = (REPORT / "README.md").read_text(encoding="utf-8")
    for section in report["sections"]:
        assert section_markdown(report, section, heading=True).rstrip() in page, AGAIN


def tables_of_figures(text: str) -> Iterator[str]:
    """The tables outside blocks at least half of whose cells are numbers.

    Args:
        text: A page, or a part of one.
    """
    for table in _TABLE.findall(_BLOCK.sub("", text)):
        rows = [line.strip("|").split("|")[1:] for line in table.strip().splitlines()[2:]]
        cells = [cell.strip() for row in rows for cell in row if cell.strip() not in ("", "-")]
        if 2 * sum(_NUMBER.fullmatch(cell) is not None for cell in cells) >= max(len(cells), 1):
            yield table


def unexplained(text: str) -> list[str]:
    """The tables of figures in whose section no command, or no version with day and processor, stands.

    Args:
        text: A page.
    """
    found = []
    for section in re.split(r"^#+ ", text, flags=re.MULTILINE):
        explained = _MEASURED.search(section) and re.search(r"^(?:reader-rag|make) ", section, re.MULTILINE)
        found += [] if explained else list(tables_of_figures(section))
    return found


@pytest.mark.parametrize("page", [page for page in ALL if REPORT not in page.parents], ids=name)
def test_a_table_of_figures_outside_a_block_names_its_command_and_machine(page: Path) -> None:
    found = unexplained(page.read_text(encoding="utf-8"))
    assert found == [], "make it a block of `bench report`, or put the command and `Measured with ...` beside it"


TABLE = "| type | tokens/s | ratio |\n|---|---|---|\n| plain | 53.25 | 1.73 (1.32 to 3.90) |\n"
COMMAND = "```bash\nreader-rag bench generate\n```\n"
MEASURED = "Measured with reader-rag 0.2.0 at commit 9d47a197fd, 2026-11-23, AMD EPYC.\n"


@pytest.mark.parametrize(
    ("page", "found"),
    [
        (f"# A\n\n{TABLE}", [TABLE]),
        (f"# A\n\n{TABLE}\n{COMMAND}", [TABLE]),
        (f"# A\n\n{TABLE}\n# B\n\n{COMMAND}\n{MEASURED}", [TABLE]),
        (f"# A\n\n{TABLE}\n{COMMAND}\n{MEASURED}", []),
        (f"# A\n\n<!-- figures: speed -->\n{TABLE}<!-- end of figures -->\n", []),
        ("| setting | default |\n|---|---|\n| `a` | 8 of each kind |\n| `b` | none |\n", []),
    ],
)
def test_tables_without_command_or_machine_are_found(page: str, found: list[str]) -> None:
    assert unexplained(page) == found
