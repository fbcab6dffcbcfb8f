"""Documents -> store -> retriever -> answer with citations, built of ordinary LlamaIndex components.

Names are imported at first use, so `import reader_rag.rag` loads nothing heavy. The function `ingest` is not among
them, because `reader_rag.rag.ingest` is its module: import it from there or from `reader_rag`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reader_rag.llm.citations import Citation as Citation
    from reader_rag.llm.citations import cite as cite
    from reader_rag.llm.citations import context_of as context_of
    from reader_rag.rag.embedding import LocalEmbedding as LocalEmbedding
    from reader_rag.rag.embedding import SizedEmbedding as SizedEmbedding
    from reader_rag.rag.engines import make_chat_engine as make_chat_engine
    from reader_rag.rag.engines import make_query_engine as make_query_engine
    from reader_rag.rag.engines import make_retriever as make_retriever
    from reader_rag.rag.ingest import IngestReport as IngestReport
    from reader_rag.rag.ingest import SkippedFile as SkippedFile
    from reader_rag.rag.prompts import NOTHING_FOUND as NOTHING_FOUND
    from reader_rag.rag.stores.contract import DocumentStore as DocumentStore
    from reader_rag.rag.stores.faiss_store import FaissStore as FaissStore
    from reader_rag.rag.stores.location import open_store as open_store

_MODULES = {
    "NOTHING_FOUND": "rag.prompts",
    "Citation": "llm.citations",
    "DocumentStore": "rag.stores.contract",
    "FaissStore": "rag.stores.faiss_store",
    "IngestReport": "rag.ingest",
    "LocalEmbedding": "rag.embedding",
    "SizedEmbedding": "rag.embedding",
    "SkippedFile": "rag.ingest",
    "cite": "llm.citations",
    "context_of": "llm.citations",
    "make_chat_engine": "rag.engines",
    "make_query_engine": "rag.engines",
    "make_retriever": "rag.engines",
    "open_store": "rag.stores.location",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"reader_rag.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
