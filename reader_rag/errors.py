"""One exception family. Every message says in one line what is wrong and what to do next.

Catch `ReaderError` to handle everything this package raises on purpose; anything else that escapes is a bug
(or comes from a library) and keeps its own traceback. What works, but otherwise than was asked, is a `ReaderWarning`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ReaderError(Exception):
    """Base of every error that reader_rag raises on purpose."""


class ReaderWarning(UserWarning):
    """Something works otherwise than was asked, or slower: a model without drafts, a setting that was changed."""


class ConfigError(ReaderError, ValueError):
    """A setting is out of its range, or two settings contradict each other."""


class MissingDependencyError(ReaderError, ImportError):
    """An optional package is not installed; the message names the command that installs it."""


class ModelError(ReaderError):
    """A model cannot be used."""


class ModelNotFoundError(ModelError):
    """The model is neither an alias, nor a local folder, nor reachable on a hub."""


class UnsupportedModelError(ModelError):
    """The model cannot be decoded here, or not as exactly as was asked."""


class PromptError(ReaderError, ValueError):
    """A prompt that cannot be answered: empty, or longer than the model's context."""


class ForkError(ReaderError):
    """This process was forked after a model was loaded; models must be loaded in each worker process."""


class NestedCallError(ReaderError):
    """A logits processor or stopping criterion called the engine that runs it."""


class BusyError(ReaderError):
    """The engine has as much to do as it may; ask again later."""


class ServerError(ReaderError):
    """A server that answers in the LLM's place cannot be reached, or does not do what it is asked."""


class BatchError(ReaderError):
    """Some answers of a batch failed.

    Attributes:
        results: For each prompt its answer, or the error that ended it.
    """

    def __init__(self, message: str, results: Sequence[Any]) -> None:
        super().__init__(message)
        self.results = tuple(results)


class GrammarError(ReaderError):
    """An answer cannot be held to its grammar any further."""


class IncompleteAnswerError(ReaderError):
    """An answer was cut off before it was a whole object of the class that was asked for."""


class StoreError(ReaderError):
    """A document store cannot be read or written."""


class StoreNotFoundError(StoreError):
    """There is no document store at that place."""


class StoreCorruptError(StoreError):
    """A store's file is damaged, truncated, or not a store of ours."""


class StoreMismatchError(StoreError):
    """The store was made by another version or for another embedding model."""


class StoreBusyError(StoreError):
    """Another process is writing to the store."""


class StoreConnectionError(StoreError):
    """The database that holds the store does not answer, or refuses us."""


class StoreWriteError(StoreError):
    """A change could not be written (disk full, read-only folder); what was stored before is intact."""


class DatastoreError(ReaderError):
    """A long-term datastore of drafts cannot be read or written."""


class DatastoreNotFoundError(DatastoreError):
    """There is no datastore in the folder."""


class DatastoreMismatchError(DatastoreError):
    """The datastore was made by another version, or with another tokenizer or vocabulary."""


class DatastoreCorruptError(DatastoreError):
    """A datastore's file is damaged, truncated, or not one of ours."""


class DatastoreBusyError(DatastoreError):
    """Another process writes to the datastore."""


class DatastoreWriteError(DatastoreError):
    """A change could not be written (disk full, read-only folder); what was committed before is intact."""


class IngestError(ReaderError):
    """There is nothing to ingest, or an input cannot be read."""
