"""Python blocks of README and docs that are tagged `types-only`, checked by one run of mypy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import ROOT, Block, all_blocks, free_names

GIVEN = {
    "llm": "ReaderLLM",
    "store": "FaissStore",
    "embed_model": "LocalEmbedding",
    "engine": "Engine",
    "prompt": "Prompt",
    "prompts": "list[Prompt]",
    "change_weights": "Callable[[], None]",
    "index": "VectorStoreIndex",
    "MyStore": "Any",
}
"""Types of what blocks take as given."""
IMPORTS = """
from collections.abc import Callable
from typing import Any
from llama_index.core import VectorStoreIndex
from reader_rag import Engine, FaissStore, LocalEmbedding, ReaderLLM
from reader_rag.engine.outputs import Prompt
"""
BLOCKS = [block for block in all_blocks() if block.language == "python" and block.tag == "types-only"]


def program(block: Block) -> str:
    """A block as a module: names that it takes as given are declared, and its own functions may be untyped."""
    given = "".join(f"{name}: {GIVEN[name]}\n" for name in sorted(free_names(block.text)) if name in GIVEN)
    settings = "disallow-untyped-defs=False, disallow-untyped-calls=False, check-untyped-defs=True"
    return f"# mypy: {settings}\n{IMPORTS if given else ''}{given}{block.text}"


@pytest.mark.slow  # a minute where mypy's cache has nothing of torch and LlamaIndex
@pytest.mark.timeout(600)
def test_types_fit(tmp_path: Path) -> None:
    package = tmp_path / "reader_rag"  # laid out as installed
    shutil.copytree(ROOT / "reader_rag", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "connectors", package / "connectors", ignore=shutil.ignore_patterns("__pycache__"))
    files = []
    for block in BLOCKS:
        name = f"{block.page.removesuffix('.md')}_{block.line}".replace("/", "_").replace("-", "_").replace(".", "_")
        (tmp_path / f"{name}.py").write_text(program(block), encoding="utf-8")
        files.append(f"{name}.py")
    (tmp_path / "wrong_block.py").write_text(
        'from reader_rag import SamplingParams\nSamplingParams(max_tokens="many")\n'
    )
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(ROOT / ".mypy_cache"), "--follow-imports=silent", *files, "wrong_block.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=580, check=False)
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("wrong_block.py:2: error: Argument")], done.stdout + done.stderr
    assert [line for line in lines if not line.startswith(("wrong_block.py", "Found 1 error"))] == []
