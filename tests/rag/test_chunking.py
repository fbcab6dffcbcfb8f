"""Chunks fit the embedding model and know their character spans."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llama_index.core.schema import Document

from reader_rag.rag import LocalEmbedding, SizedEmbedding
from reader_rag.rag.chunking import Chunker
from reader_rag.rag.files import UnusableFileError


def test_chunks_end_at_sentences_and_overlap(embedding: SizedEmbedding) -> None:
    text = "Cats purr at home. Dogs bark a lot. Birds sing at dawn. "  # 5, 5 and 5 tokens
    nodes = Chunker(embedding, 16, 6).split([Document(text=text * 2, id_="doc", metadata={"file_name": "a.txt"})])
    assert [(node.start_char_idx, node.end_char_idx, node.text) for node in nodes] == [
        (0, 55, "Cats purr at home. Dogs bark a lot. Birds sing at dawn."),
        (36, 91, "Birds sing at dawn. Cats purr at home. Dogs bark a lot."),
        (75, 111, "Dogs bark a lot. Birds sing at dawn."),
    ]
    assert {(node.ref_doc_id, node.metadata["file_name"]) for node in nodes} == {("doc", "a.txt")}


def test_nothing_is_printed(embedding: SizedEmbedding, capsys: pytest.CaptureFixture[str]) -> None:
    Chunker(embedding, 16, 4).split([Document(text="word " * 100)])
    assert capsys.readouterr().out == ""


def test_a_character_longer_than_a_chunk_raises() -> None:
    dear: Any = SimpleNamespace(count_tokens=lambda text: 30 * len(text))
    with pytest.raises(UnusableFileError, match="cannot be split into chunks of 20 tokens"):
        Chunker(dear, 20, 4).split([Document(text="abc")])


@settings(max_examples=60, deadline=None)
@example("ab" * 60)
@example("again and again. " * 20)
@given(st.text(st.sampled_from("ab .,;\n\té漢🐍"), min_size=1, max_size=600))
def test_chunks_fit_the_embedding_and_cover_the_text(text: str) -> None:
    bytes_as_tokens: Any = SimpleNamespace(count_tokens=lambda text: len(text.encode()))  # the dearest there is
    nodes = Chunker(bytes_as_tokens, 20, 4).split([Document(text=text)])
    assert all(len(node.get_content().encode()) <= 20 for node in nodes)
    covered: set[int] = set()
    for node in nodes:
        start = node.start_char_idx or 0
        assert text[start : node.end_char_idx] == node.text
        covered.update(range(start, node.end_char_idx or 0))
    assert {i for i, c in enumerate(text) if not c.isspace()} <= covered


@pytest.mark.parametrize(
    "text",
    ["x9Q" * 20_000, "漢字仮名交じり文" * 500, "word " * 3_000, "import os;x=1;" * 800],
    ids=["no spaces", "japanese", "no sentences", "no line ends"],
)
def test_chunks_fit_the_real_model(minilm: LocalEmbedding, text: str) -> None:
    nodes = Chunker(minilm, 254, 32).split([Document(text=text)])
    assert max(minilm.count_tokens(node.get_content()) for node in nodes) <= 254
    assert max(len(node.get_content()) for node in nodes) <= 254 * 16
    assert len(nodes) > 1
