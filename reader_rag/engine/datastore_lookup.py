"""Searches a datastore of earlier answers, passages and other texts for drafts, and adds answers to it."""

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
"""Prompt tokens stored before an answer: the end of the question, so that the same question finds its answer."""
_COMMIT_AFTER_S = 2.0
"""Seconds from the first uncommitted answer to the commit; answers that end in between share it."""
_LEAST_ANSWER = 8
"""Answers with fewer tokens are not stored."""


def answers_of(tenant: str) -> str:
    """The namespace of a tenant's answers.

    Args:
        tenant: The tenant's name.
    """
    return f"answers/{tenant}"


def passages_of(tenant: str) -> str:
    """The namespace of the passages in a tenant's document stores.

    Args:
        tenant: The tenant's name.
    """
    return f"passages/{tenant}"


def texts_of(tenant: str) -> str:
    """The namespace of the texts that a tenant added.

    Args:
        tenant: The tenant's name.
    """
    return f"texts/{tenant}"


def open_datastore(folder: Path | str, tokenizer: Any, vocabulary: int, *, read_only: bool) -> Datastore:
    """Open a datastore with a model's tokenizer.

    Args:
        folder: Folder of the datastore.
        tokenizer: The model's tokenizer; its vocabulary must be the one that the datastore was made with.
        vocabulary: Number of token ids of the model.
        read_only: Open without the writer's lock, so that another process can write.

    Raises:
        DatastoreError: The datastore does not exist, is damaged, has another tokenizer, or another process writes to
            it.
    """
    return Datastore.open(
        Path(folder), vocabulary=vocabulary, tokenizer=fingerprint(tokenizer.get_vocab()), read_only=read_only
    )


def answer_document(prompt: Sequence[int], answer: Sequence[int]) -> tuple[str, NDArray[np.int32]]:
    """Turn an answer into a document of the datastore.

    Args:
        prompt: Token ids of the prompt; the last ones are stored before the answer.
        answer: Token ids of the answer.

    Returns:
        The document's name, a hash of its tokens, and its tokens, int32 [n].
    """
    tokens = np.array([*prompt[-_BEFORE_ANSWER:], *answer], np.int32)
    return hashlib.sha256(tokens.tobytes()).hexdigest()[:24], tokens


class DatastoreLookup:
    """The datastore of an engine: requests search it for drafts, and finished answers are added to it.

    A request searches its tenant's namespaces and the shared ones; its answer is stored in its tenant's namespace. No
    other namespace is searched, because the speed of an answer would show whether its words are in one.

    Args:
        datastore: The open datastore; `close` closes it.
        config: Limits of the search, and whether and how long answers are kept.

    Attributes:
        datastore: As given.
        config: As given.
    """

    def __init__(self, datastore: Datastore, config: DatastoreConfig) -> None:
        self.datastore = datastore
        self.config = config
        self._limited: set[str] = set()
        self._committer = _Committer(datastore)
        # When the engine is dropped, and when the process ends.
        self._end = weakref.finalize(self, self._committer.close)

    def begin(self, tenant: str, prompt: Sequence[int]) -> RequestLookup | None:
        """Start the lookups of one request.

        Args:
            tenant: The request's tenant.
            prompt: Token ids of the prompt.

        Returns:
            The request's lookup; None if the datastore cannot be read, which is logged.
        """
        try:
            lookup = RequestLookup(self.datastore, tenant, self.config)
            lookup.extend(prompt)
        except (DatastoreError, OSError):
            _log.exception(
                "the datastore %s cannot be searched: a request is drafted without it", self.datastore.folder
            )
            return None
        return lookup

    def keep(self, tenant: str, prompt: Sequence[int], answer: Sequence[int], used: Counter[tuple[str, str]]) -> None:
        """Add a finished answer, and mark the documents that it was copied from as used; committed within seconds.

        Args:
            tenant: The tenant whose answer it is.
            prompt: Token ids of the prompt.
            answer: Token ids of the answer.
            used: Number of accepted tokens by (namespace, document).
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
            _log.exception("an answer could not be added to the datastore %s", self.datastore.folder)
            return
        self._committer.commit_soon()

    def forget(self, tenant: str) -> None:
        """Remove a tenant's answers from the datastore; no effect unless the engine keeps answers.

        Args:
            tenant: The tenant's name.
        """
        if self.config.keeps_answers:
            self._limited.discard(answers_of(tenant))
            self.datastore.remove_namespace(answers_of(tenant))

    def flush(self) -> None:
        """Commit the answers added so far."""
        self._committer.flush()

    def close(self) -> None:
        """Commit what is uncommitted and close the datastore."""
        self._end()


class _Committer:
    """Commits changes of a datastore on a thread of its own, those of a few seconds together.

    Args:
        datastore: The open datastore; `close` closes it.
    """

    def __init__(self, datastore: Datastore) -> None:
        self._datastore = datastore
        self._changed = threading.Condition()
        self._pending = self._closing = False
        self._thread: threading.Thread | None = None

    def commit_soon(self) -> None:
        """Have changes committed within a few seconds; returns at once."""
        with self._changed:
            self._pending = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="reader-rag-datastore-commits", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Commit changes now. A failure is logged, not raised: the answers have already been returned."""
        with self._changed:
            pending, self._pending = self._pending, False
        if not pending:
            return
        try:
            self._datastore.commit()
        except (DatastoreError, OSError):
            _log.exception("answers could not be committed to the datastore %s", self._datastore.folder)

    def close(self) -> None:
        """End the thread, commit changes and close the datastore."""
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
    """The lookups of one request, with one cursor over the model's answers and one over other texts. Not thread safe.

    A short match predicts well in the model's own answers and badly in other texts, so each cursor has its own shortest
    match (`least_match_of_answers`, `least_match`).

    Args:
        datastore: The datastore to search.
        tenant: The request's tenant.
        config: Limits of the search.

    Attributes:
        used: Number of accepted tokens by (namespace, document).
    """

    def __init__(self, datastore: Datastore, tenant: str, config: DatastoreConfig) -> None:
        max_matches, max_tokens = config.max_places, config.reach
        answers = datastore.searcher([answers_of(tenant)], shared=False)
        others = datastore.searcher([passages_of(tenant), texts_of(tenant)])
        self._cursors = (
            answers.cursor(max_matches=max_matches, max_tokens=max_tokens, min_match=config.least_match_of_answers),
            others.cursor(max_matches=max_matches, max_tokens=max_tokens, min_match=config.least_match),
        )
        self._tokens = np.empty(2 * max_matches * (max_tokens + 1), np.int32)
        self._matches = np.empty((2, 2 * max_matches), np.int32)
        self.used: Counter[tuple[str, str]] = Counter()

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the request's text.

        Args:
            tokens: Token ids.
        """
        for cursor in self._cursors:
            cursor.extend(tokens)

    def look_up(self) -> DatastoreCandidates:
        """Search for the end of the request's text.

        Returns:
            The tokens that follow each match, for `TreeBuilder.build`; valid until the next call.
        """
        found = size = 0
        for cursor in self._cursors:
            count = cursor.search()
            if count:
                tokens = cursor.continuations
                self._tokens[size : size + len(tokens)] = tokens
                self._matches[:, found : found + count] = cursor.matches
                self._matches[0, found : found + count] += size
                found, size = found + count, size + len(tokens)
        return DatastoreCandidates(self._tokens, size, self._matches, found)

    def accepted(self, position: int) -> None:
        """Count an accepted token for the document that it was copied from.

        Args:
            position: Index of the token in the tokens that the last `look_up` returned.
        """
        for cursor in self._cursors:
            if cursor.found:
                if position < len(cursor.continuations):
                    match = int(np.searchsorted(cursor.matches[0], position, side="right")) - 1
                    source = cursor.source_of(match)
                    self.used[source.namespace, source.document] += 1
                    return
                position -= len(cursor.continuations)
