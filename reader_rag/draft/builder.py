"""Merges what all sources propose into one draft tree, best first, within a node limit."""

from __future__ import annotations

import numpy as np

from reader_rag.draft import kernels
from reader_rag.draft.context import ContextIndex
from reader_rag.draft.scoring import CopyWeights
from reader_rag.draft.tree import DraftTree


class TreeBuilder:
    """Builds draft trees; owns the scratch memory, so one builder serves one thread at a time.

    Best first: take the most probable candidate, add it as a node, add its children as candidates with
    `p(path) = p(parent path) * p(child)`. The sum of path probabilities is the expected accepted length, so taking
    nodes in this order is optimal for every tree size. Equal tokens under one parent are one node.

    Args:
        max_nodes: Most nodes of a tree.
        max_depth: Longest path, in tokens.
        min_probability: Least path probability of a node.
        max_occurrences: What the indexes were made with.
        weights: Votes of the occurrences.
    """

    def __init__(
        self,
        *,
        max_nodes: int = 64,
        max_depth: int = 40,
        min_probability: float = 0.02,
        max_occurrences: int = 256,
        weights: CopyWeights | None = None,
    ) -> None:
        self._weights = weights or CopyWeights()
        self._table = self._weights.table
        self._max_depth = max_depth
        self._floor = max(min_probability, 1e-12)  # a node of probability 0 would never be accepted
        members = 2 * max_occurrences
        self._work = np.zeros((kernels.WORKSPACE_ROWS, members), np.int32)
        self._mass = np.zeros((2, members))
        self._lookup = np.full((2, 1 << (2 * members - 1).bit_length()), kernels.EMPTY, np.int32)
        self._out = np.zeros((kernels.OUTPUT_ROWS, max_nodes), np.int32)
        self._probabilities = np.zeros(max_nodes)

    def build(self, index: ContextIndex, *, max_depth: int | None = None) -> DraftTree:
        """Draft what may follow the index's sequence.

        Args:
            index: The request's texts and matches.
            max_depth: Longest path of this tree, if shorter than the builder's (e.g. few tokens are left to emit).

        Returns:
            The tree; empty where nothing in the index continues the sequence.

        Raises:
            ValueError: The index follows more places than the builder has room for.
        """
        places = index.sequence_matches.shape[1] + index.passage_matches.shape[1]
        if places > self._work.shape[1]:
            # The kernels check no bounds.
            raise ValueError(f"the index follows {places} places and the builder has room for {self._work.shape[1]}")
        depth = self._max_depth if max_depth is None else min(max_depth, self._max_depth)
        if depth < 1 or not self._out.shape[1]:
            return DraftTree.empty()
        nodes = kernels.build(
            index.sequence,
            index.passages,
            index.sequence_matches,
            index.passage_matches,
            self._table,
            self._weights.escape,
            depth,
            self._floor,
            self._work,
            self._mass,
            self._lookup,
            self._out,
            self._probabilities,
        )
        out = self._out[:, :nodes].copy()
        return DraftTree(
            tokens=out[kernels.TOKEN],
            parents=out[kernels.PARENT],
            depths=out[kernels.DEPTH],
            probabilities=self._probabilities[:nodes].copy(),
            sources=out[kernels.SOURCE],
            positions=out[kernels.POSITION],
            match_lengths=out[kernels.MATCH_LENGTH],
        )
