"""Fixtures of the tests of stores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from llama_index.core.schema import TextNode

from reader_rag.rag import FaissStore

MakeNode = Callable[..., TextNode]


@pytest.fixture
def folder(tmp_path: Path, make_node: MakeNode) -> Path:
    """A closed store with 40 nodes."""
    with FaissStore(tmp_path / "store") as store:
        store.add([make_node(f"n{i}", [1.0, float(i)], text="word " * 100) for i in range(40)])
    return tmp_path / "store"
