"""The local embedding model: limits, vectors, threads and event loops."""

from __future__ import annotations

import asyncio
import pickle
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from reader_rag.errors import ModelError, ModelNotFoundError, ReaderError
from reader_rag.rag import LocalEmbedding


def test_the_default_model_reports_its_limits(minilm: LocalEmbedding) -> None:
    assert (minilm.max_tokens, minilm.max_text_tokens, minilm.dimension) == (256, 254, 384)
    assert minilm.count_tokens("hello world") == 2
    assert minilm.count_tokens("hello " * 1000) == 1000
    assert minilm.count_tokens("") == 0


def test_vectors_have_length_one_and_similar_texts_are_near(minilm: LocalEmbedding) -> None:
    cat, car = minilm.get_text_embedding_batch(["The cat sleeps on the sofa.", "The car needs new tyres."])
    question = np.array(minilm.get_query_embedding("Where is the kitten napping?"))
    assert len(cat) == 384
    assert np.linalg.norm(cat) == pytest.approx(1.0, abs=1e-5)
    assert question @ cat > question @ car + 0.2


def test_vectors_do_not_depend_on_the_number_of_threads(minilm: LocalEmbedding) -> None:
    texts = [f"sentence number {i} " * (i % 5 + 1) for i in range(16)]
    alone = [minilm.get_text_embedding(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        counts = pool.map(minilm.count_tokens, texts)
        together = list(pool.map(minilm.get_text_embedding, texts))
    np.testing.assert_allclose(together, alone, atol=1e-6)
    assert all(count > 0 for count in counts)


def test_async_calls_do_not_block_the_event_loop(minilm: LocalEmbedding, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def wait(self: LocalEmbedding, texts: list[str]) -> list[list[float]]:
        assert released.wait(10)
        return [[1.0] for _ in texts]

    monkeypatch.setattr(LocalEmbedding, "_get_text_embeddings", wait)

    async def use() -> list[list[float]]:
        embedding = asyncio.create_task(minilm.aget_text_embedding_batch(["a"]))
        await asyncio.sleep(0.01)
        released.set()  # only a loop that is not blocked by the task gets here
        return await embedding

    assert asyncio.run(use()) == [[1.0]]


def test_async_and_sync_agree(minilm: LocalEmbedding) -> None:
    assert asyncio.run(minilm.aget_query_embedding("a question")) == minilm.get_query_embedding("a question")
    assert asyncio.run(minilm.aget_text_embedding("a text")) == minilm.get_text_embedding("a text")


def test_a_missing_model_raises_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        LocalEmbedding(str(tmp_path / "nowhere"))


def test_a_folder_without_a_model_raises_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(ModelError, match=tmp_path.name):
        LocalEmbedding(str(tmp_path))


@pytest.fixture
def damaged_folder(minilm: LocalEmbedding, tmp_path: Path) -> Path:
    """A copy of the default embedding model, of which a test damages a file."""
    from reader_rag.model.registry import resolve_embed_model

    return Path(shutil.copytree(resolve_embed_model("minilm"), tmp_path / "model", symlinks=False))


@pytest.mark.parametrize("damage", ["empty", "half", "binary", "deep", "null", "pickle"])
def test_a_damaged_folder_is_one_line(damaged_folder: Path, damage: str) -> None:
    refused = []
    for path in sorted(path for path in damaged_folder.rglob("*") if path.is_file() and path.suffix != ".md"):
        whole = path.read_bytes()
        content = {
            "empty": b"",
            "half": whole[: len(whole) // 2],
            "binary": bytes(range(256)) * 4,
            "deep": b"[" * 100_000,
            "null": b"null",
            "pickle": pickle.dumps(ValueError("never unpickled")),
        }[damage]
        path.write_bytes(content)
        try:
            LocalEmbedding(str(damaged_folder), device="cpu")
        except ReaderError:
            refused.append(path.name)
        finally:
            path.write_bytes(whole)
    assert {"config.json", "tokenizer.json"} <= set(refused)


def test_texts_with_lone_surrogates_have_vectors(minilm: LocalEmbedding) -> None:
    assert minilm.get_query_embedding("a\ud800") == minilm.get_query_embedding("a?")
    assert minilm.get_text_embedding("a\ud800") == minilm.get_text_embedding("a?")
    assert minilm.count_tokens("a\ud800") == minilm.count_tokens("a?")
