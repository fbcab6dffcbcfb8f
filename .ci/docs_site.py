"""MkDocs hooks: pages that are not in docs/, and links that leave docs/.

`README.md`, `CHANGELOG.md` and `CONTRIBUTING.md` are pages. Every public name has an entry in the API
reference. A link to a file or folder of the source leads to a page that shows it, so that the site is whole offline.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "readme.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages of the site by files outside docs/."""
REFERENCE = {
    "rag": ("reader_rag.rag", "reader_rag.testing", "reader_rag.connectors"),
    "llm": ("reader_rag.llm",),
    "engine": ("reader_rag.engine", "reader_rag.draft", "reader_rag.datastore"),
    "settings": ("reader_rag.config", "reader_rag.errors"),
}
"""Packages whose public names are on a page of the reference."""
WITH_EXTRAS = {
    "MilvusStore": "reader_rag.connectors.milvus",
    "QdrantStore": "reader_rag.connectors.qdrant",
    "ReaderProposer": "reader_rag.connectors.vllm",
    "ServerLLM": "reader_rag.connectors.openai",
    "DocumentStoreContract": "reader_rag.testing.document_store",
    "VectorStoreContract": "reader_rag.testing.vector_store",
}
"""Public classes that are imported from their own modules, because they need an extra."""

_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
_CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", flags=re.MULTILINE | re.DOTALL)
_LANGUAGES = {".md": "markdown", ".py": "python", ".json": "json", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text(encoding="utf-8")))
    for name, content in _reference():
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    for target in sorted(_linked_sources(files)):
        files.append(File.generated(config, f"source/{target}.md", content=_shown(target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links that leave docs/ lead to pages of the site."""
    return _replaced(markdown, page.file.src_uri)


def _path_of(uri: str) -> str:
    """The path in the repository of a page's text."""
    outside = {target: path for path, target in PAGES.items()}
    return outside.get(uri, f"docs/{uri}")


def _replaced(markdown: str, uri: str) -> str:
    folder = posixpath.dirname(_path_of(uri))

    def replace(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        if uri.startswith(("source/", "reference/")):
            return match[0]
        if target in PAGES:
            new = PAGES[target]
        elif target.startswith("docs/"):
            new = target.removeprefix("docs/")
        elif (ROOT / target).exists():
            new = f"source/{target}.md"
        else:
            return match[0]  # MkDocs reports it
        return posixpath.relpath(new, posixpath.dirname(uri) or ".") + (match[2] or "")

    parts = _CODE.split(markdown)
    return "".join(part if n % 2 else _LINK.sub(replace, part) for n, part in enumerate(parts))


def _linked_sources(files: Files) -> Iterator[str]:
    """Files and folders outside docs/ that a page links to, and the files of such folders."""
    found = set()
    for file in files:
        if not file.src_uri.endswith(".md") or file.src_uri.startswith("reference/"):
            continue
        folder = posixpath.dirname(_path_of(file.src_uri))
        for link in _LINK.findall("".join(_CODE.split(file.content_string)[::2])):
            target = posixpath.normpath(posixpath.join(folder, link[0]))
            if not target.startswith((".", "docs/")) and target not in PAGES and (ROOT / target).exists():
                found.add(target)
    for target in list(found):
        if (ROOT / target).is_dir():
            found |= {path.relative_to(ROOT).as_posix() for path in _files(target)}
    yield from found


def _files(folder: str) -> list[Path]:
    """The modules of a folder, and its texts."""
    found = [path for kind in ("*.py", "*.md") for path in (ROOT / folder).rglob(kind)]
    return sorted(path for path in found if path.read_text(encoding="utf-8").strip())


def _first_line(path: Path) -> str:
    """What a file says that it is: the first line of its docstring, or its heading."""
    text = path.read_text(encoding="utf-8")
    first = (ast.get_docstring(ast.parse(text)) or "") if path.suffix == ".py" else text.lstrip("# ")
    return first.partition("\n")[0].replace("|", "&#124;")


def _shown(target: str) -> str:
    """A page that shows a file, or lists the files of a folder."""
    path = ROOT / target
    title = f"---\nsearch:\n  exclude: true\n---\n\n# `{target}`\n\n"
    if path.is_dir():
        rows = []
        for file in _files(target):
            name = file.relative_to(ROOT).as_posix()
            link = posixpath.relpath(f"source/{name}.md", posixpath.dirname(f"source/{target}.md"))
            rows.append(f"| [`{file.relative_to(path).as_posix()}`]({link}) | {_first_line(file)} |")
        return title + "| file | what it has |\n|---|---|\n" + "\n".join(rows) + "\n"
    text = path.read_text(encoding="utf-8")
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{title}{fence}{_LANGUAGES.get(path.suffix, 'text')}\n{text}\n{fence}\n"


def _reference() -> Iterator[tuple[str, str]]:
    """The pages of the API reference: name and content."""
    names = _public_names() | WITH_EXTRAS
    for page, packages in REFERENCE.items():
        mine = sorted(name for name, module in names.items() if module.startswith(packages))
        entries = "\n\n".join(f"::: {names.pop(name)}.{name}" for name in mine)
        yield page, f"# {_title(page)}\n\n{entries}\n"
    if names:
        raise PluginError(f"no page of the reference has {', '.join(sorted(names))}: see REFERENCE in {__file__}")


def _title(page: str) -> str:
    return {"rag": "Documents and retrieval", "llm": "LLM", "engine": "Engine", "settings": "Settings, errors"}[page]


def _public_names() -> dict[str, str]:
    """Public names of the package with their modules, read from its source: nothing is imported."""
    tree = ast.parse((ROOT / "reader_rag" / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_MODULES":
            found: dict[str, str] = ast.literal_eval(node.value)
            return found
    raise PluginError("reader_rag/__init__.py has no _MODULES")
