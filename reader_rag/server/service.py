"""`Service`: what the routes use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.llms.llm import LLM

from reader_rag.config import ServerConfig
from reader_rag.rag.stores.contract import DocumentStore
from reader_rag.server.keys import KeyRing

if TYPE_CHECKING:  # their routes use the service
    from reader_rag.engine.engine import Engine
    from reader_rag.server.conversations.store import Conversations
    from reader_rag.server.documents.jobs import Jobs
    from reader_rag.server.documents.library import Library

DOCS_SUFFIX = "+docs"
"""Appended to a model's name: answers come from the store."""


@dataclass(frozen=True)
class Service:
    """What the routes use; the same for all requests. Made by `open_service`.

    Attributes:
        llm: A `ReaderLLM`, or a `ServerLLM` where another server decodes.
        model: The model's name in the API.
        config: Addresses and limits.
        store: The document store, for the tenant ""; None: the service has no documents. Routes take
            `store.for_tenant(caller.tenant)`.
        embedding: The embedding model of the store; None without a store.
        keys: The API keys; None: every caller is let in, as `tenant`.
        tenant: The tenant of callers without a key.
        library: The documents; None without a store.
        jobs: Ingestions in the background; None without a store.
        conversations: The conversations; None without a store.
    """

    llm: LLM
    model: str
    config: ServerConfig = field(default_factory=ServerConfig)
    store: DocumentStore | None = None
    embedding: BaseEmbedding | None = None
    keys: KeyRing | None = None
    tenant: str = ""
    library: Library | None = None
    jobs: Jobs | None = None
    conversations: Conversations | None = None

    def close(self, grace_s: float = 0.0) -> None:
        """End ingestions, and release the files. LLM and store stay open.

        Args:
            grace_s: Seconds that running ingestions have to finish.
        """
        if self.jobs is not None:
            self.jobs.close(grace_s)
        if self.library is not None:
            self.library.close()
        if self.conversations is not None:
            self.conversations.close()

    @property
    def engine(self) -> Engine | None:
        """The engine; None where another server decodes."""
        engine: Any = getattr(self.llm, "engine", None)
        return engine  # type: ignore[no-any-return]

    @property
    def docs_model(self) -> str | None:
        """Name of the model that answers from the store; None without a store."""
        return f"{self.model}{DOCS_SUFFIX}" if self.store is not None else None

    @property
    def models(self) -> list[str]:
        """Names of the models in the API."""
        return [self.model] if self.docs_model is None else [self.model, self.docs_model]
