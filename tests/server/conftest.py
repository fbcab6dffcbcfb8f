"""A service over tiny models, and clients of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from llama_index.core.llms.llm import LLM
from word_embedding import WordEmbedding

from reader_rag.engine.engine import Engine
from reader_rag.llm import ReaderLLM
from reader_rag.rag import FaissStore
from reader_rag.server.app import create_app
from reader_rag.server.documents.jobs import Jobs
from reader_rag.server.documents.library import Library
from reader_rag.server.keys import KeyFile, KeyRing
from reader_rag.server.running import open_service
from reader_rag.server.service import Service

BASE_URL = "http://127.0.0.1:8000"
"""Where tests' clients think that the service is: its Host is checked."""

MakeClient = Callable[..., TestClient]


@pytest.fixture
def embedding() -> WordEmbedding:
    """64 numbers per vector, 48 tokens per text."""
    return WordEmbedding(model_name="words", embedded=[])


@pytest.fixture
def service(tiny_engine: Engine, embedding: WordEmbedding, tmp_path: Path) -> Iterator[Service]:
    """A service over the tiny model and an empty store, without keys."""
    folder = tmp_path / "store"
    with FaissStore(folder, embed_model=embedding) as store:
        llm = ReaderLLM.from_engine(tiny_engine, max_tokens=32)
        made = open_service(llm, "tiny", store=store, embedding=embedding, folder=folder)
        yield made
        made.close()


@pytest.fixture
def make_client(service: Service) -> Iterator[MakeClient]:
    """Makes clients: `make_client(config=..., keys=..., key=..., llm=...)`; all arguments are optional.

    `config` has fields of `ServerConfig` by name; `key` is sent with every request; `llm` answers in place of the tiny
    model.
    """
    opened: list[TestClient] = []

    def make(
        config: dict[str, Any] | None = None,
        keys: KeyRing | None = None,
        key: str = "",
        llm: LLM | None = None,
    ) -> TestClient:
        settings = replace(service.config, **(config or {}))
        changed = replace(service, config=settings, keys=keys, llm=llm or service.llm)
        if config is not None and service.library is not None:
            library = Library(service.library.store, service.library.embedding, service.library.folder, changed.config)
            changed = replace(changed, library=library, jobs=Jobs(library, changed.config))
        client = TestClient(create_app(changed), base_url=BASE_URL, raise_server_exceptions=False)
        if key:
            client.headers["Authorization"] = f"Bearer {key}"
        client.__enter__()
        opened.append(client)
        return client

    yield make
    for client in opened:
        client.__exit__(None, None, None)


@pytest.fixture
def client(make_client: MakeClient) -> TestClient:
    """A client without a key, of a service without keys."""
    return make_client()


@pytest.fixture
def key_file(tmp_path: Path) -> KeyFile:
    """A file of keys, not made yet."""
    return KeyFile(tmp_path / "keys.json")
