"""The datastore: documents as tokens on disk, in which drafts are searched. See docs/datastore.md."""

from reader_rag.datastore.compactor import CompactionConfig
from reader_rag.datastore.searcher import Cursor, Searcher, Source
from reader_rag.datastore.stats import Damage, NamespaceStats
from reader_rag.datastore.store import Datastore
from reader_rag.util.files import Files

__all__ = ["CompactionConfig", "Cursor", "Damage", "Datastore", "Files", "NamespaceStats", "Searcher", "Source"]
