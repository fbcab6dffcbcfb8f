"""The long-term datastore: texts on the disk that drafts are searched in. See docs/datastore.md."""

from reader_rag.draft.datastore.files import Files
from reader_rag.draft.datastore.report import Damage, NamespaceStats
from reader_rag.draft.datastore.settings import DatastoreSettings
from reader_rag.draft.datastore.store import Datastore
from reader_rag.draft.datastore.view import Cursor, Source, View

__all__ = ["Cursor", "Damage", "Datastore", "DatastoreSettings", "Files", "NamespaceStats", "Source", "View"]
