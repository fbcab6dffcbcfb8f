"""reader_rag: retrieval-augmented generation with lossless speculative decoding, drafted from the retrieved text.

`import reader_rag` loads nothing heavy; each public name below loads its module when it is first used.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from reader_rag.config import BatchConfig as BatchConfig
    from reader_rag.config import DatastoreConfig as DatastoreConfig
    from reader_rag.config import DraftConfig as DraftConfig
    from reader_rag.config import EngineConfig as EngineConfig
    from reader_rag.config import Grammar as Grammar
    from reader_rag.config import ReadLimits as ReadLimits
    from reader_rag.config import SamplingParams as SamplingParams
    from reader_rag.config.threads import configure_threads as configure_threads
    from reader_rag.datastore import Datastore as Datastore
    from reader_rag.draft.source import Proposal as Proposal
    from reader_rag.engine.engine import Engine as Engine
    from reader_rag.engine.metrics import PrometheusMetrics as PrometheusMetrics
    from reader_rag.errors import ReaderError as ReaderError
    from reader_rag.llm import ReaderLLM as ReaderLLM
    from reader_rag.llm.citations import Citation as Citation
    from reader_rag.llm.citations import cite as cite
    from reader_rag.llm.programs.output_parser import GrammarOutputParser as GrammarOutputParser
    from reader_rag.llm.programs.program import GrammarProgram as GrammarProgram
    from reader_rag.llm.programs.selector import GrammarSelector as GrammarSelector
    from reader_rag.rag.embedding import LocalEmbedding as LocalEmbedding
    from reader_rag.rag.engines import make_chat_engine as make_chat_engine
    from reader_rag.rag.engines import make_query_engine as make_query_engine
    from reader_rag.rag.engines import make_retriever as make_retriever
    from reader_rag.rag.ingest import ingest as ingest
    from reader_rag.rag.stores.contract import DocumentStore as DocumentStore
    from reader_rag.rag.stores.faiss_store import FaissStore as FaissStore
    from reader_rag.rag.stores.location import open_store as open_store

__version__ = "0.2.0"

_MODULES = {
    "BatchConfig": "reader_rag.config",
    "Citation": "reader_rag.llm.citations",
    "Datastore": "reader_rag.datastore",
    "DatastoreConfig": "reader_rag.config",
    "DocumentStore": "reader_rag.rag.stores.contract",
    "DraftConfig": "reader_rag.config",
    "Engine": "reader_rag.engine.engine",
    "EngineConfig": "reader_rag.config",
    "FaissStore": "reader_rag.rag.stores.faiss_store",
    "Grammar": "reader_rag.config",
    "GrammarOutputParser": "reader_rag.llm.programs.output_parser",
    "GrammarProgram": "reader_rag.llm.programs.program",
    "GrammarSelector": "reader_rag.llm.programs.selector",
    "LocalEmbedding": "reader_rag.rag.embedding",
    "PrometheusMetrics": "reader_rag.engine.metrics",
    "Proposal": "reader_rag.draft.source",
    "ReadLimits": "reader_rag.config",
    "ReaderError": "reader_rag.errors",
    "ReaderLLM": "reader_rag.llm",
    "SamplingParams": "reader_rag.config",
    "cite": "reader_rag.llm.citations",
    "configure_threads": "reader_rag.config.threads",
    "ingest": "reader_rag.rag.ingest",
    "make_chat_engine": "reader_rag.rag.engines",
    "make_query_engine": "reader_rag.rag.engines",
    "make_retriever": "reader_rag.rag.engines",
    "open_store": "reader_rag.rag.stores.location",
}

__all__ = sorted([*_MODULES, "__version__"])


class _OldNames:
    """Finds modules by their names in 0.1. It is the last finder: imports by new names never ask it."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The spec of a module of this package that moved; None for every other name."""
        if not fullname.startswith(f"{__name__}."):
            return None
        from reader_rag.util.moved import find_spec

        return find_spec(fullname)


sys.meta_path.append(_OldNames)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        from reader_rag.util.moved import new_name

        name = new_name(__name__, _MODULES, name)
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
