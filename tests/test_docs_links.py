"""Links between the pages of the documentation, and paths that they name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import reader_rag

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

_CODE_BLOCK = re.compile(r"^```.*?^```", flags=re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", flags=re.MULTILINE)


def text_of(page: Path) -> str:
    """A page without its code blocks."""
    return _CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub names them."""
    headings = (re.sub(r"[`*]|\]\([^)]*\)", "", heading) for heading in _HEADING.findall(text_of(page)))
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_resolve(page: Path) -> None:
    broken = []
    for link in _LINK.findall(text_of(page)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors_of(target)):
            broken.append(link)
    assert broken == []


def test_modules_of_the_glossary_exist() -> None:
    modules = re.findall(r"\| `([\w/]+\.py)` \|$", (ROOT / "docs" / "glossary.md").read_text(), flags=re.MULTILINE)
    assert len(modules) > 50
    assert [module for module in modules if not (ROOT / "reader_rag" / module).is_file()] == []


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in _LINK.findall(text_of(ROOT / "README.md"))}
    pages = set((ROOT / "docs").glob("*.md"))
    assert {page.name for page in pages - linked} == set()


_PYTHON = re.compile(r"^```py(?:thon)?\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
_OWN_MODULES = ("reader_rag.connectors.", "reader_rag.testing.")
"""What is imported from its own module, because it needs an extra."""


def imports_of(page: Path) -> set[tuple[str, str]]:
    """(module, name) of every import from this package in the code of a page."""
    found = set()
    for block in _PYTHON.findall(page.read_text(encoding="utf-8")):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "reader_rag":
                found |= {(str(node.module), alias.name) for alias in node.names}
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if imports_of(page)], ids=lambda page: page.stem)
def test_names_in_code_are_public(page: Path) -> None:
    for module, name in sorted(imports_of(page)):
        if not module.startswith(_OWN_MODULES):
            assert module == "reader_rag", f"{page.name}: from {module} import {name}"
            assert name in reader_rag.__all__
            assert getattr(reader_rag, name) is not None


def test_the_citation_names_this_version() -> None:
    assert f"\nversion: {reader_rag.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
