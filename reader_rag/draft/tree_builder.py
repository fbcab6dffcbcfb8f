"""Merges what all sources propose into one draft tree, best first, within a node limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reader_rag.draft.calibration import Calibration, Scoring
from reader_rag.draft.context_index import ContextIndex
from reader_rag.draft.kernels import tree as kernels
from reader_rag.draft.kernels.context import EMPTY
from reader_rag.draft.kernels.successors import KEPT
from reader_rag.draft.successor_table import SuccessorTable
from reader_rag.draft.tree import DraftTree

StoredArrays = tuple[NDArray[np.int32], int, NDArray[np.int32], int]
"""Tokens int32 [>= size], each text ended by a negative one; their size; places int32 [2, >= n], positions in them and
match lengths; n."""
NOTHING_STORED: StoredArrays = (np.zeros(1, np.int32), 0, np.zeros((2, 1), np.int32), 0)
"""No places in the datastore."""
_LUCK = 2.0
"""Hits that a stream is given in advance when its luck is judged."""


class TreeBuilder:
    """Builds draft trees; owns the scratch memory, so one builder serves one thread at a time.

    Best first: take the most probable candidate, add it as a node, add its children as candidates with
    `p(path) = p(parent path) * p(child)`. The sum of path probabilities is the expected accepted length, so taking
    nodes in this order is optimal for every tree size. Equal tokens under one parent are one node, whatever proposed
    them, and successors continue the branches of copies.

    Args:
        max_nodes: Most nodes of a tree.
        max_depth: Longest path, in tokens.
        min_probability: Least path probability of a node.
        max_occurrences: What the indexes were made with.
        max_stored: Most places in the datastore of one draft.
        successors: The target's own next tokens; None: drafts are copied only.
        calibration: Corrects the estimates; None: by the shipped counts, learning on.
        scoring: How candidates are estimated.
    """

    def __init__(
        self,
        *,
        max_nodes: int = 64,
        max_depth: int = 40,
        min_probability: float = 0.0001,
        max_occurrences: int = 256,
        max_stored: int = 0,
        successors: SuccessorTable | None = None,
        calibration: Calibration | None = None,
        scoring: Scoring | None = None,
    ) -> None:
        self.calibration = Calibration() if calibration is None else calibration
        self.successors = SuccessorTable(0) if successors is None else successors
        self._max_depth = max_depth
        self._floor = max(min_probability, 1e-12)  # a node of probability 0 would never be accepted
        self._max_nodes = max_nodes
        self._nodes = 0
        self._places = 2 * max_occurrences
        self._stored = max_stored
        self._fortune = np.zeros(2)
        places = self._places + max_stored
        width = 1 << max(2 * places, places + KEPT, max_nodes).bit_length()
        self._work = np.full((kernels.WORK_ROWS, width + kernels.PADDING), EMPTY, np.int32)
        self._mass = np.zeros((kernels.MASS_ROWS, width + kernels.PADDING))
        table = self.successors
        estimates = (scoring or Scoring()).array
        self._fixed: tuple[Any, ...] = (
            *(table.keys, table.entries, table.prior, estimates, self.calibration.counts),
            *(self._work, self._mass, max_nodes),
        )

    def build(
        self, index: ContextIndex, *, stored: StoredArrays = NOTHING_STORED, max_depth: int | None = None
    ) -> DraftTree:
        """Draft what may follow the index's sequence.

        Args:
            index: The request's texts and matches.
            stored: What the datastore holds behind places like the sequence's end.
            max_depth: Longest path of this tree, if shorter than the builder's (e.g. few tokens are left to emit).

        Returns:
            The tree; empty where no source continues the sequence.

        Raises:
            ValueError: The index follows more places than the builder has room for.
        """
        self._nodes = 0
        depth = self._max_depth if max_depth is None else min(max_depth, self._max_depth)
        if depth < 1 or not self._max_nodes or not len(index):
            return DraftTree.empty()
        if index.followed > self._places or stored[3] > self._stored:
            # The kernels check no bounds.
            raise ValueError(
                f"{index.followed} places in the index and {stored[3]} in the datastore are followed, and the builder "
                f"has room for {self._places} and {self._stored}"
            )
        arguments: Any = (*index.arrays, *stored, *self._fixed, depth, self._floor)
        self._nodes = nodes = kernels.build(*arguments)
        return DraftTree(self._work[: kernels.TREE_ROWS, :nodes].copy(), self._mass[kernels.PATHS, :nodes].copy())

    def skip(self) -> DraftTree:
        """No draft this time, so that nothing is learned from what comes."""
        self._nodes = 0
        return DraftTree.empty()

    def observe(self, tokens: Sequence[int]) -> None:
        """Learn how the nodes of the last tree fared: all those whose parent was accepted.

        Args:
            tokens: [n], what the target emitted where that tree was drafted.
        """
        if self.calibration.learns and self._nodes:
            came = np.array(tokens, np.int32)
            kernels.observe(self.calibration.counts, self._work, self._mass, self._nodes, came, self._fortune)

    @property
    def luck(self) -> float:
        """How the last few drafts fared beside what was expected of them: 1.0 as expected or better, down to 0.0.

        Frequencies learned over many texts say little of a text that is unlike them; this does within a few steps.
        """
        hits, expected = self._fortune
        return float(min((hits + _LUCK) / (expected + _LUCK), 1.0))
