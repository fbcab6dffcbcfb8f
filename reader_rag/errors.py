"""Exceptions and warnings. Every message says in one line what is wrong and what to do next.

Catch `ReaderError` to handle every error that this package raises on purpose; any other exception is a bug or comes
from a library.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

# Control characters, those that change the direction of text, and lone surrogates, which no terminal takes.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class ReaderError(Exception):
    """Base of every error that reader_rag raises on purpose.

    As text it is one line that can be printed, whatever the names and messages in it hold.
    """

    def __str__(self) -> str:
        return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", " ".join(super().__str__().split()))


class ReaderWarning(UserWarning):
    """A request or setting works differently or slower than requested, e.g. a model that is decoded without drafts."""


class ConfigError(ReaderError, ValueError):
    """A setting is out of its range, or two settings contradict each other."""


class MissingDependencyError(ReaderError, ImportError):
    """An optional package is not installed; the message names the command that installs it."""


class ModelError(ReaderError):
    """A model cannot be used."""


class ModelNotFoundError(ModelError):
    """The model is neither an alias, nor a local folder, nor reachable on a hub."""


class UnsupportedModelError(ModelError):
    """The model cannot be decoded here, or not with the requested exactness."""


class PromptError(ReaderError, ValueError):
    """A prompt that cannot be answered: empty, or longer than the model's context."""


class ContextLengthError(PromptError):
    """A prompt that is longer than the model's context."""


class ForkError(ReaderError):
    """This process was forked after a model was loaded; models must be loaded in each worker process."""


class NestedCallError(ReaderError):
    """A logits processor or stopping criterion called the engine that runs it."""


class CallbackError(ReaderError, RuntimeError):
    """A logits processor, stopping criterion, sampler or draft source of the caller's raised what would end an
    iteration or a task, or returned what it may not."""


class ScoresError(ReaderError):
    """No token can be chosen: all scores are NaN or minus infinity."""


class EngineClosedError(ReaderError):
    """The engine was closed; make another one."""


class BusyError(ReaderError):
    """The queue is full, a request waited too long, or the engine is being closed; try again later."""


class ServerError(ReaderError):
    """An LLM server cannot be reached, or fails a request."""


class BatchError(ReaderError):
    """Some answers of a batch failed.

    Attributes:
        results: For each prompt, its answer or the error that ended it.
    """

    def __init__(self, message: str, results: Sequence[Any]) -> None:
        super().__init__(message)
        self.results = tuple(results)


class GrammarError(ReaderError):
    """The grammar of an answer cannot be followed any further."""


class ToolCallError(ReaderError, ValueError):
    """An answer has no tool call, or one whose arguments the tool's schema refuses."""


class IncompleteAnswerError(ReaderError):
    """An answer ended before it was a whole object of the requested class."""


class StoreError(ReaderError):
    """A document store cannot be read or written."""


class StoreNotFoundError(StoreError):
    """There is no document store in that folder or at that URL."""

    @classmethod
    def at(cls, location: object) -> StoreNotFoundError:
        """The error for a location.

        Args:
            location: A folder or a URL.
        """
        return cls(f"there is no store at {location}; ingest documents into it first")


class StoreCorruptError(StoreError):
    """A store's file is damaged, truncated, or of another program."""


class StoreMismatchError(StoreError):
    """The store was made by another version or for another embedding model."""


class StoreBusyError(StoreError):
    """Another process is writing to the store."""


class StoreConnectionError(StoreError):
    """The database of the store does not answer, or refuses access."""


class StoreWriteError(StoreError):
    """A change could not be written (disk full, read-only folder); what was stored before is intact."""


class DatastoreError(ReaderError):
    """A datastore that drafts are copied from cannot be read or written."""


class DatastoreNotFoundError(DatastoreError):
    """There is no datastore in the folder."""


class DatastoreMismatchError(DatastoreError):
    """The datastore was made by another version, or with another tokenizer or vocabulary."""


class DatastoreCorruptError(DatastoreError):
    """A datastore's file is damaged, truncated, or of another program."""


class DatastoreBusyError(DatastoreError):
    """Another process writes to the datastore."""


class DatastoreWriteError(DatastoreError):
    """A change could not be written (disk full, read-only folder); what was committed before is intact."""


class IngestError(ReaderError):
    """There is nothing to ingest, or an input cannot be read.

    Args:
        message: What is wrong and what to do next.
        skipped: What could not be ingested, with reasons (`SkippedFile`).
    """

    def __init__(self, message: str, skipped: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.skipped = tuple(skipped)


class ServeError(ReaderError):
    """The HTTP service cannot start: a port is taken, a file of keys cannot be used."""
