"""A service with documents on a real socket, and real clients of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import openai
import pytest
import uvicorn
from served import Serve, Served, fill
from waiting import join, wait_until
from word_embedding import WordEmbedding

from reader_rag.server.app import create_app
from reader_rag.server.service import Service


@pytest.fixture
def serve(service: Service, embedding: WordEmbedding) -> Iterator[Serve]:
    """Starts services: `serve(llm=..., texts=..., config={...})`; all arguments are optional."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(texts: dict[str, str] | None = None, config: dict[str, Any] | None = None, **changed: Any) -> Served:
        assert service.store is not None
        if texts:
            fill(service.store, embedding, texts)
        made = replace(service, config=replace(service.config, **(config or {})), **changed)
        server = uvicorn.Server(uvicorn.Config(create_app(made), host="127.0.0.1", port=0, log_level="warning"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        running.append((server, thread))
        wait_until(lambda: server.started, "the start of the server")
        port = server.servers[0].sockets[0].getsockname()[1]
        return Served(f"http://127.0.0.1:{port}", made)

    yield start
    for server, thread in running:
        server.should_exit = True
        join(thread)


@pytest.fixture
def client(serve: Serve) -> Iterator[openai.OpenAI]:
    """OpenAI's client of a service over the tiny model and an empty store."""
    with closing(serve().client()) as made:
        yield made
