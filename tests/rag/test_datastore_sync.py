"""Synchronising a datastore with the passages of a store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from birds import HERON, OWL, write_birds
from transformers import PreTrainedTokenizerFast
from word_embedding import WordEmbedding

from reader_rag.datastore import Datastore
from reader_rag.engine.datastore_lookup import open_datastore, passages_of
from reader_rag.rag import FaissStore
from reader_rag.rag.datastore_sync import SyncReport, sync_passages
from reader_rag.rag.ingest import ingest


@pytest.fixture
def drafts(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> Iterator[Datastore]:
    with open_datastore(tmp_path / "drafts", tiny_tokenizer, len(tiny_tokenizer), read_only=False) as store:
        yield store


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    return write_birds(tmp_path / "docs")


def synced(
    docs: Path, store_dir: Path, drafts: Datastore, tokenizer: PreTrainedTokenizerFast, tenant: str = ""
) -> SyncReport:
    """Ingest, and bring the passages into the datastore."""
    embedding = WordEmbedding(model_name="words")
    ingest(docs, store_dir, embed_model=embedding, tenant=tenant)
    with FaissStore.open(store_dir, embed_model=embedding, tenant=tenant) as store:
        return sync_passages(store, drafts, tokenizer)


def found(drafts: Datastore, tokenizer: PreTrainedTokenizerFast, text: str, tenant: str = "") -> int:
    return drafts.searcher([passages_of(tenant)]).count(tokenizer(text)["input_ids"][:12])


def test_additions_changes_and_removals_are_synchronised(
    docs: Path, tmp_path: Path, drafts: Datastore, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    assert synced(docs, tmp_path / "store", drafts, tiny_tokenizer) == SyncReport(2, 0, 2)
    assert synced(docs, tmp_path / "store", drafts, tiny_tokenizer) == SyncReport(0, 0, 2)
    (docs / "owl.txt").write_text("The owl sleeps at noon, high up in an old tree.")
    assert synced(docs, tmp_path / "store", drafts, tiny_tokenizer) == SyncReport(1, 1, 2)
    (docs / "heron.txt").unlink()
    assert synced(docs, tmp_path / "store", drafts, tiny_tokenizer) == SyncReport(0, 1, 1)
    assert [found(drafts, tiny_tokenizer, text) for text in (HERON, OWL, "The owl sleeps at noon, high")] == [0, 0, 1]
    encoded = b"".join(token.to_bytes(2, "little") for token in tiny_tokenizer(HERON)["input_ids"][:8])
    assert not any(encoded in path.read_bytes() for path in drafts.folder.rglob("*") if path.is_file())


def test_stores_and_tenants_are_separate(
    docs: Path, tmp_path: Path, drafts: Datastore, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    synced(docs, tmp_path / "first", drafts, tiny_tokenizer)
    synced(docs, tmp_path / "second", drafts, tiny_tokenizer)
    synced(docs, tmp_path / "first", drafts, tiny_tokenizer, tenant="a")
    assert found(drafts, tiny_tokenizer, HERON) == 2
    (docs / "heron.txt").unlink()
    synced(docs, tmp_path / "first", drafts, tiny_tokenizer)
    assert found(drafts, tiny_tokenizer, HERON) == 1
    assert found(drafts, tiny_tokenizer, HERON, "a") == 1
    assert found(drafts, tiny_tokenizer, HERON, "b") == 0
