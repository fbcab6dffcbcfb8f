"""PromptSuccessors: the target's likely next tokens at prompt positions, computed once a draft asks for them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reader_rag.draft.context_index import ContextIndex
from reader_rag.draft.kernels import prompt as kernels
from reader_rag.draft.successor_table import SuccessorTable
from reader_rag.draft.tree import DraftTree

ASKED = 16
"""Most positions of a prompt that a step computes for a sequence."""


class PromptSuccessors:
    """Finds prompt positions whose successors a draft lacked, and adds their successors to the table.

    The output head is not computed at all positions of a prompt: what follows most of them is never looked up. A
    position that is asked for in one step is in the table from the next step on.

    Args:
        index: Prompt and output of the request.
        table: The successor table that drafts read.

    Example:
        >>> index, table = ContextIndex([5, 6, 7, 5]), SuccessorTable()
        >>> prompt = PromptSuccessors(index, table)
        >>> prompt.add(np.array([True, True, True, False]))
        >>> draft = TreeBuilder(successors=table).build(index)   # copies 6 and 7, and knows of nothing else
        >>> prompt.ask(draft).tolist()
        [1, 2]
        >>> prompt.learn(np.array([1]), [[8, 9, 1, 2, 3, 4, 10, 11]])
        >>> table.after(5, 6)[:2]
        [8, 9]
    """

    def __init__(self, index: ContextIndex, table: SuccessorTable) -> None:
        self._index = index
        self._table = table
        self._pending = np.zeros(len(index), np.bool_)
        self._asked = np.zeros(ASKED, np.int32)

    def add(self, positions: NDArray[np.bool_]) -> None:
        """Let positions be asked for.

        Args:
            positions: bool [n], for each of the prompt's first n whether its next tokens can be computed.
        """
        self._pending[: len(positions)] |= positions

    def ask(self, tree: DraftTree, verified: int = 0) -> NDArray[np.int32]:
        """Find the positions that the drafts behind this one lack; they stay pending until they are learned.

        Args:
            tree: The draft of the coming step.
            verified: How many of its first nodes the step verifies: their successors are learned by that.

        Returns:
            int32 [at most `ASKED`], positions of the prompt, the most useful first.
        """
        count = kernels.ask(
            self._index.corpus,
            self._pending,
            self._table.keys,
            np.ascontiguousarray(tree.fields),
            verified,
            self._asked,
        )
        return self._asked[:count].copy()

    def learn(self, positions: NDArray[np.int32], best: NDArray[np.int32]) -> None:
        """Add the successors of some positions to the table; these positions are not asked for again.

        Args:
            positions: int32 [n].
            best: int32 [n, 8], the target's best next tokens there, the best first.
        """
        self._pending[positions] = False
        tokens = self._index.sequence
        before = np.where(positions > 0, tokens[positions - 1], -1)
        self._table.learn(before, tokens[positions], best)
