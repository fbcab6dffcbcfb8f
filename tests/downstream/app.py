"""A program that uses the installed package, as a type checker sees it: `make release-check` checks it strictly."""

from __future__ import annotations

from pathlib import Path

from reader_rag import (
    FaissStore,
    LocalEmbedding,
    ReaderError,
    ReaderLLM,
    SamplingParams,
    configure_threads,
    ingest,
    make_query_engine,
)


def answer(folder: Path, store_folder: Path, question: str) -> str:
    """Ingest a folder and answer a question about it."""
    configure_threads()
    embed_model = LocalEmbedding("minilm")
    llm = ReaderLLM("smollm2-135m", max_tokens=SamplingParams(max_tokens=64).max_tokens)
    ingest([folder], store_folder, embed_model=embed_model)
    store = FaissStore.open(store_folder, embed_model=embed_model)
    try:
        return str(make_query_engine(store, llm, embed_model).query(question))
    except ReaderError as error:
        return f"no answer: {error}"
