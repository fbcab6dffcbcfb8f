"""reader_rag: retrieval-augmented generation with lossless speculative decoding, drafted from the retrieved text.

`import reader_rag` loads nothing heavy; each public name below loads its module when it is first used.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from reader_rag.util import moved

# Every thread that computes has a team of OpenMP threads of its own: an engine's, and one that embeds a question, say.
# As soon as there are more of them than cores, GNU OpenMP lets them sleep between any two loops, and waking them takes
# longer than the loops of a small model. This lets them wait a little longer; it has to be said before PyTorch is
# loaded. The other two are the ordinary values, which "active" would else replace by "for ever".
if sys.platform == "linux" and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
    os.environ |= {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "300000", "KMP_BLOCKTIME": "200"}

moved.install()

if TYPE_CHECKING:
    from reader_rag.config import DatastoreConfig, DraftConfig, SamplingParams
    from reader_rag.config.grammar import Grammar
    from reader_rag.engine.engine import Engine
    from reader_rag.errors import ReaderError
    from reader_rag.llm import ReaderLLM
    from reader_rag.rag.embedding import LocalEmbedding
    from reader_rag.rag.engines import make_chat_engine, make_query_engine
    from reader_rag.rag.ingest import ingest
    from reader_rag.rag.stores.faiss_store import FaissStore

__version__ = "0.1.0"

__all__ = [
    "DraftConfig",
    "Engine",
    "FaissStore",
    "SamplingParams",
    "Grammar",
    "LocalEmbedding",
    "ReaderError",
    "ReaderLLM",
    "DatastoreConfig",
    "__version__",
    "ingest",
    "make_chat_engine",
    "make_query_engine",
]

_MODULES = {
    "DraftConfig": "reader_rag.config",
    "Engine": "reader_rag.engine.engine",
    "FaissStore": "reader_rag.rag.stores.faiss_store",
    "SamplingParams": "reader_rag.config",
    "Grammar": "reader_rag.config.grammar",
    "LocalEmbedding": "reader_rag.rag.embedding",
    "ReaderError": "reader_rag.errors",
    "ReaderLLM": "reader_rag.llm",
    "DatastoreConfig": "reader_rag.config",
    "ingest": "reader_rag.rag.ingest",
    "make_chat_engine": "reader_rag.rag.engines",
    "make_query_engine": "reader_rag.rag.engines",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        name = moved.new_name(__name__, _MODULES, name)
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
