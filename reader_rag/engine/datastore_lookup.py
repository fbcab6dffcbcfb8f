"""What was said before: answers and other texts in a datastore, that drafts are searched in."""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reader_rag.config import DatastoreConfig
from reader_rag.datastore import Datastore
from reader_rag.draft.profile import fingerprint
from reader_rag.draft.tree_builder import DatastoreCandidates
from reader_rag.errors import DatastoreError

_log = logging.getLogger(__name__)

_BEFORE_ANSWER = 64
"""Prompt tokens kept with an answer: the question's end, by which it is found when the question comes again."""
_COMMIT_AFTER_S = 2.0
"""Answers that end within so much time are brought to the disk together."""
_LEAST_ANSWER = 8
"""Tokens below which an answer is not worth keeping."""


def answers_of(tenant: str) -> str:
    """The namespace of a tenant's answers."""
    return f"answers/{tenant}"


def passages_of(tenant: str) -> str:
    """The namespace of the passages in a tenant's document stores."""
    return f"passages/{tenant}"


def texts_of(tenant: str) -> str:
    """The namespace of the corpora that a tenant brought."""
    return f"texts/{tenant}"


def open_datastore(folder: Path | str, tokenizer: Any, vocabulary: int, *, read_only: bool) -> Datastore:
    """The datastore of a model.

    Args:
        folder: Where it lies.
        tokenizer: The model's.
        vocabulary: Number of token ids of the model.
        read_only: Whether nothing is written, so that other processes may.

    Raises:
        DatastoreError: It cannot be used: not there, of another tokenizer, damaged, or in another's hands.
    """
    return Datastore.open(
        Path(folder), vocabulary=vocabulary, tokenizer=fingerprint(tokenizer.get_vocab()), read_only=read_only
    )


def answer_document(prompt: Sequence[int], answer: Sequence[int]) -> tuple[str, NDArray[np.int32]]:
    """An answer as a document: its name, the same for the same text, and its tokens with the end of its prompt."""
    tokens = np.array([*prompt[-_BEFORE_ANSWER:], *answer], np.int32)
    return hashlib.sha256(tokens.tobytes()).hexdigest()[:24], tokens


class DatastoreLookup:
    """What an engine looks up in a datastore, and what it adds to it.

    A request searches what its tenant's own namespaces hold, and what is marked as shared. Its answer goes to its
    tenant's own. How fast an answer comes tells whether its words were known: so nothing else is searched.

    Args:
        datastore: Where; this closes it.
        config: What is kept, and how much is looked up.
    """

    def __init__(self, datastore: Datastore, config: DatastoreConfig) -> None:
        self.datastore = datastore
        self.config = config
        self._limited: set[str] = set()
        self._keeper = _Keeper(datastore)
        # When the engine is dropped, and when the process ends.
        self._end = weakref.finalize(self, self._keeper.close)

    def begin(self, tenant: str, prompt: Sequence[int]) -> RequestLookup | None:
        """What one request looks up.

        Args:
            tenant: On whose behalf.
            prompt: Its token ids.
        """
        try:
            recollection = RequestLookup(self.datastore, tenant, self.config)
            recollection.extend(prompt)
        except (DatastoreError, OSError):
            _log.exception(
                "the datastore %s cannot be searched: an answer is drafted without it", self.datastore.folder
            )
            return None
        return recollection

    def keep(self, tenant: str, prompt: Sequence[int], answer: Sequence[int], used: Counter[tuple[str, str]]) -> None:
        """Keep a finished answer, and note which documents it was copied from; on the disk within seconds.

        Args:
            tenant: Whose it is.
            prompt: Token ids of what was asked.
            answer: Token ids of the answer.
            used: Accepted tokens by namespace and document.
        """
        if not self.config.keeps_answers:
            return
        try:
            for namespace, document in used:
                self.datastore.mark_used([document], namespace=namespace)
            if len(answer) >= _LEAST_ANSWER:
                space = answers_of(tenant)
                if space not in self._limited:
                    self.datastore.limit(
                        space, max_tokens=self.config.max_answer_tokens, max_age_s=self.config.max_answer_age_s
                    )
                    self._limited.add(space)
                self.datastore.add(*answer_document(prompt, answer), namespace=space)
        except (DatastoreError, OSError, ValueError):
            _log.exception("an answer could not be kept in %s", self.datastore.folder)
            return
        self._keeper.commit_soon()

    def forget(self, tenant: str) -> None:
        """Remove a tenant's answers from the datastore, if this process may write to it."""
        if self.config.keeps_answers:
            self._limited.discard(answers_of(tenant))
            self.datastore.remove_namespace(answers_of(tenant))

    def flush(self) -> None:
        """Bring the answers kept so far to the disk."""
        self._keeper.flush()

    def close(self) -> None:
        """Bring what is left to the disk and close the datastore."""
        self._end()


class _Keeper:
    """Brings changes of a datastore to the disk, those of a few seconds together, on a thread of its own."""

    def __init__(self, datastore: Datastore) -> None:
        self._datastore = datastore
        self._changed = threading.Condition()
        self._pending = self._closing = False
        self._thread: threading.Thread | None = None

    def commit_soon(self) -> None:
        """Bring what has changed to the disk within a few seconds; returns at once."""
        with self._changed:
            self._pending = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="recall-keeper", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Bring what has changed to the disk now. What cannot be is logged, and the answer that it is of has come."""
        with self._changed:
            pending, self._pending = self._pending, False
        if not pending:
            return
        try:
            self._datastore.commit()
        except (DatastoreError, OSError):
            _log.exception("answers could not be brought to the disk in %s", self._datastore.folder)

    def close(self) -> None:
        """End the thread, bring what has changed to the disk and close the datastore."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.flush()
        self._datastore.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing)
                self._changed.wait_for(lambda: self._closing, timeout=_COMMIT_AFTER_S)
                if self._closing:
                    return
            self.flush()


class RequestLookup:
    """One request's lookups: in answers of the model, and in other texts. Not for several threads at once.

    Short matches say much in what the model wrote itself and little elsewhere, so each is asked for matches of its own
    least length.

    Args:
        datastore: Where.
        tenant: On whose behalf.
        config: How much is looked up.

    Attributes:
        used: Accepted tokens by namespace and document.
    """

    def __init__(self, datastore: Datastore, tenant: str, config: DatastoreConfig) -> None:
        most, reach = config.max_places, config.reach
        answers = datastore.searcher([answers_of(tenant)], shared=False)
        others = datastore.searcher([passages_of(tenant), texts_of(tenant)])
        self._cursors = (
            answers.cursor(max_matches=most, max_tokens=reach, min_match=config.least_match_of_answers),
            others.cursor(max_matches=most, max_tokens=reach, min_match=config.least_match),
        )
        self._tokens = np.empty(2 * most * (reach + 1), np.int32)
        self._places = np.empty((2, 2 * most), np.int32)
        self.used: Counter[tuple[str, str]] = Counter()

    def extend(self, tokens: Sequence[int]) -> None:
        """Follow tokens of the request."""
        for cursor in self._cursors:
            cursor.extend(tokens)

    def look_up(self) -> DatastoreCandidates:
        """What followed text like the end of the request's, for `TreeBuilder.build`."""
        found = size = 0
        for cursor in self._cursors:
            count = cursor.search()
            if count:
                tokens = cursor.continuations
                self._tokens[size : size + len(tokens)] = tokens
                self._places[:, found : found + count] = cursor.matches
                self._places[0, found : found + count] += size
                found, size = found + count, size + len(tokens)
        return DatastoreCandidates(self._tokens, size, self._places, found)

    def accepted(self, position: int) -> None:
        """A token of the last lookup was accepted; it stands at `position` of the arrays."""
        for cursor in self._cursors:
            if cursor.found:
                if position < len(cursor.continuations):
                    place = int(np.searchsorted(cursor.matches[0], position, side="right")) - 1
                    source = cursor.source_of(place)
                    self.used[source.namespace, source.document] += 1
                    return
                position -= len(cursor.continuations)
