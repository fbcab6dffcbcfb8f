"""The hook of the documentation site: where links lead, and which names the reference has."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import reader_rag

pytest.importorskip("mkdocs")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / ".ci" / "docs_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("uri", "link", "expected"),
    [
        ("readme.md", "docs/drafts.md#sources", "drafts.md#sources"),
        ("readme.md", "examples/rag_chat.py", "source/examples/rag_chat.py.md"),
        ("drafts.md", "../reader_rag/draft/tree.py", "source/reader_rag/draft/tree.py.md"),
        ("drafts.md", "../reader_rag/draft", "source/reader_rag/draft.md"),
        ("drafts.md", "exactness.md", "exactness.md"),
        ("drafts.md", "../README.md", "readme.md"),
        ("connectors/vllm.md", "../drafts.md", "../drafts.md"),
        ("connectors/vllm.md", "../../CHANGELOG.md", "../changelog.md"),
        ("drafts.md", "../no_such_file.py", "../no_such_file.py"),
        ("drafts.md", "https://arxiv.org/abs/2508.09072", "https://arxiv.org/abs/2508.09072"),
        ("drafts.md", "#heading", "#heading"),
    ],
)
def test_links_lead_to_pages_of_the_site(site: ModuleType, uri: str, link: str, expected: str) -> None:
    text = "Read [this]({}), not `[this](../README.md)`.\n\n```\n[this](../README.md)\n```\n"
    assert site._replaced(text.format(link), uri) == text.format(expected)


def test_the_reference_has_every_public_name_once(site: ModuleType) -> None:
    entries = [line for _, page in site._reference() for line in page.splitlines() if line.startswith(":::")]
    names = [entry.rpartition(".")[2] for entry in entries]
    assert sorted(names) == sorted({*reader_rag.__all__, *site.WITH_EXTRAS} - {"__version__"})


def test_a_folder_of_the_source_lists_its_modules_and_what_they_have(site: ModuleType) -> None:
    page = site._shown("reader_rag/sampling")
    assert "| [`accept.py`](sampling/accept.py.md) | " in page
    assert (ROOT / "reader_rag" / "sampling" / "accept.py").read_text().splitlines()[0].strip('"') in page


def test_every_page_is_in_the_navigation(site: ModuleType) -> None:
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    pages |= {*site.PAGES.values(), *(f"reference/{name}.md" for name in site.REFERENCE)}
    assert {page for page in pages if not re.search(rf"[ ]{re.escape(page)}$", listed, flags=re.MULTILINE)} == set()
