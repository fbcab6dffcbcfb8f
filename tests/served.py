"""Services with documents on real sockets, for tests with real clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import openai
from llama_index.core import Document
from llama_index.core.node_parser import SentenceSplitter
from word_embedding import WordEmbedding

from reader_rag.rag.stores.contract import DocumentRecord, DocumentStore
from reader_rag.server.service import Service

TEXTS = {
    "/docs/heron.txt": "The heron stands still in shallow water. It spears fish with a sharp bill 🐟 and eats them.",
    "/docs/owl.txt": "An owl hunts at night; it finds mice by their sound alone. Zürich's owls sleep in old towers.",
}
"""Documents by path."""


def fill(store: DocumentStore, embedding: WordEmbedding, texts: dict[str, str]) -> None:
    """Store documents in nodes of one or two sentences."""
    splitter = SentenceSplitter(chunk_size=16, chunk_overlap=0, tokenizer=str.split)
    hidden = ["file_path", "file_name"]
    documents = [
        Document(
            id_=path,
            text=text,
            metadata={"file_path": path, "file_name": path.rpartition("/")[2]},
            excluded_llm_metadata_keys=hidden,
            excluded_embed_metadata_keys=hidden,
        )
        for path, text in texts.items()
    ]
    nodes = splitter(documents)
    for node in nodes:
        node.embedding = embedding.get_text_embedding(node.get_content())
    store.replace_documents(nodes, [DocumentRecord(path=path, root="/docs", hash="0") for path in texts])


@dataclass(frozen=True)
class Served:
    """A service that listens.

    Attributes:
        url: Its address.
        service: What it serves.
    """

    url: str
    service: Service

    def client(self, **settings: Any) -> openai.OpenAI:
        """OpenAI's client."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, "timeout": 60} | settings
        )

    def async_client(self, **settings: Any) -> openai.AsyncOpenAI:
        """OpenAI's client for event loops."""
        given = {"api_key": "none", "max_retries": 0, "timeout": 60} | settings
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **given)


Serve = Callable[..., Served]
