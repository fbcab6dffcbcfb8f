"""The long-term datastore: texts on the disk that drafts are searched in. See docs/datastore.md."""

from reader_rag.datastore.settings import DatastoreSettings
from reader_rag.datastore.snapshot import Cursor, Source, View
from reader_rag.datastore.stats import Damage, NamespaceStats
from reader_rag.datastore.store import Datastore
from reader_rag.util.files import Files

__all__ = ["Cursor", "Damage", "Datastore", "DatastoreSettings", "Files", "NamespaceStats", "Source", "View"]
