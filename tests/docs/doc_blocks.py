"""The code blocks of README and docs, with the tag that says how each is checked.

The tag is an HTML comment in the line before the fence, which neither GitHub nor the site shows:

    <!-- run -->             Python: executed. Shell: `reader-rag` is executed where it ends by itself, else parsed.
    <!-- types-only -->      Python: checked by mypy. Shell: command lines are parsed by the real parser. JSON: parsed.
    <!-- shown: reason -->   only shown; at most a tenth of all blocks.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / ".github").rglob("*.md"), *(ROOT / "docs").rglob("*.md")])
LANGUAGES = ("python", "bash", "json", "text")
"""`text` is for what no tool can check: diagrams, layouts, output."""

_FENCE = re.compile(r"^( *)(`{3,})([^`\n]*)\n(.*?)^\1\2 *$", flags=re.MULTILINE | re.DOTALL)
_TAG = re.compile(r"<!-- (run|types-only|shown: \S[^>]*) -->")
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """A fenced code block.

    Attributes:
        page: Path of the page below the repository.
        line: Line of the fence, from 1.
        language: Of the fence.
        tag: `run`, `types-only`, `shown`, or "" where there is none.
        reason: Of `shown`.
        title: Name of the file that the block is, or "".
        text: The code.
    """

    page: str
    line: int
    language: str
    tag: str
    reason: str
    title: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(text: str, page: str) -> Iterator[Block]:
    """The code blocks of a page.

    Args:
        text: The page.
        page: Its path below the repository.
    """
    for fence in _FENCE.finditer(text):
        before = text[: fence.start()].splitlines()
        tag = _TAG.fullmatch(before[-1].strip()) if before else None
        kind, _, reason = tag[1].partition(": ") if tag else ("", "", "")
        language, _, more = fence[3].strip().partition(" ")
        title = _TITLE.search(more)
        yield Block(page, len(before) + 1, language, kind, reason, title[1] if title else "", fence[4])


@cache
def all_blocks() -> tuple[Block, ...]:
    """The blocks of all pages, in the order of the pages."""
    found: list[Block] = []
    for page in PAGES:
        found += blocks_of(page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix())
    return tuple(found)


def pages_with(language: str, *tags: str) -> list[str]:
    """Pages that have a block of this language with one of these tags."""
    return list(dict.fromkeys(b.page for b in all_blocks() if b.language == language and b.tag in tags))


def free_names(code: str) -> set[str]:
    """Names that Python code uses and nothing in it binds.

    Args:
        code: A program.
    """
    tree = ast.parse(code)
    used, bound = set(), set(dir(builtins)) | {"__name__", "__file__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return used - bound
