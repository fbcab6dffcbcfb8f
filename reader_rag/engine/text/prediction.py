"""Predicted answers: a text of the caller's that the answer may repeat, and which of its tokens were accepted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reader_rag.draft.context_index import ContextIndex

_LEAD = 16
"""Tokens of the prompt's end that are put before a prediction, so that its first token follows a long match."""


class Prediction:
    """A predicted answer in the draft index of one request.

    It is the last text that is added to the index, and is never a source of a copied span.

    Args:
        index: The request's draft index, which holds the prompt; the prediction is added to it.
        token_ids: Tokens of the prediction; what exceeds `DraftConfig.max_passage_tokens` is not drafted.

    Attributes:
        tokens: Tokens of the prediction, drafted or not.
        start: Where its text begins among the index's passages.
    """

    def __init__(self, index: ContextIndex, token_ids: Sequence[int]) -> None:
        self.tokens = len(token_ids)
        self._index = index
        lead = index.sequence[-_LEAD:]
        start = index.add_passage("", np.concatenate([lead, np.asarray(token_ids, np.int32)]))
        self.start = len(index.passages) if start is None else start
        self._first = self.start + len(lead)
        self._accepted = np.zeros(max(len(index.passages) - self._first, 0), np.bool_)
        self._next = self._first

    @property
    def accepted(self) -> int:
        """Tokens of the prediction that were accepted as draft nodes; one that was accepted twice counts once."""
        return int(self._accepted.sum())

    @property
    def rejected(self) -> int:
        """The other tokens of the prediction."""
        return self.tokens - self.accepted

    def holds(self, source: int, position: int) -> bool:
        """Whether a draft node was copied from the prediction.

        Args:
            source: The node's value of `DraftTree.sources`.
            position: The node's value of `DraftTree.positions`.
        """
        return source == 1 and position >= self.start

    def accept(self, token: int, depth: int) -> None:
        """Note an accepted draft node; its token counts if the prediction is among the node's origins.

        Args:
            token: The node's token, which the index does not follow yet.
            depth: The node's depth in the draft tree: an occurrence that proposed it matches as many tokens before it.
        """
        positions, lengths = self._index.passage_matches
        passages = self._index.passages
        inside = (positions >= self._first) & (lengths >= depth)
        found = [
            (int(length), not self._accepted[position - self._first], position == self._next, int(position))
            for position, length in zip(positions[inside].tolist(), lengths[inside].tolist(), strict=True)
            if passages[position] == token
        ]
        if found:
            position = max(found)[-1]
            self._accepted[position - self._first] = True
            self._next = position + 1
