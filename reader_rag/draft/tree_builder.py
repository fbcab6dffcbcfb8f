"""TreeBuilder: grows one draft tree of all sources, best first, within a node limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reader_rag.draft.calibration import Calibration, Scoring, acceptance_ratio
from reader_rag.draft.context_index import ContextIndex
from reader_rag.draft.kernels import tree as kernels
from reader_rag.draft.kernels.arrays import Proposed
from reader_rag.draft.kernels.cells import JOINT_CELLS
from reader_rag.draft.kernels.proposals import LINK_ROWS
from reader_rag.draft.kernels.workspace import PATHS, TREE_FIELDS, new_workspace
from reader_rag.draft.successor_table import SuccessorTable
from reader_rag.draft.tree import DraftTree


class DatastoreCandidates(NamedTuple):
    """What the datastore holds behind positions like the sequence's end.

    Attributes:
        tokens: int32 [>= size], the continuations, each ended by a negative token.
        size: Tokens of all continuations.
        matches: int32 [2, >= found], where each continuation begins in `tokens`, and its match length.
        found: How many continuations there are.
    """

    tokens: NDArray[np.int32]
    size: int
    matches: NDArray[np.int32]
    found: int


NO_CANDIDATES = DatastoreCandidates(np.zeros(1, np.int32), 0, np.zeros((2, 1), np.int32), 0)
"""No continuations in the datastore."""
NOT_PROPOSED = Proposed(np.zeros((LINK_ROWS, 1), np.int32), np.zeros(1), np.ones((3, JOINT_CELLS)), 0)
"""Nothing is proposed from outside."""


class TreeBuilder:
    """Builds draft trees. Owns their workspace, so one builder serves one thread at a time.

    Best first: take the most probable candidate, add it as a node, add its children as candidates with
    `p(path) = p(parent path) * p(child)`. The sum of path probabilities is the expected accepted length, so taking
    nodes in this order is optimal for every tree size. Equal tokens under one parent are one node, whatever proposed
    them, and successors continue the branches of copies.

    Args:
        max_nodes: Most nodes of a tree.
        max_depth: Longest path, in tokens.
        min_probability: Least path probability of a node.
        max_occurrences: Most matches that the context index follows in the sequence, and in the passages.
        max_candidates: Most continuations from the datastore in one draft.
        max_proposed: Most nodes that sources from outside propose for one draft.
        successors: The target's own next tokens; None: drafts are copied only.
        calibration: Corrects the estimates; None: starts from the shipped counts and goes on counting.
        scoring: How probabilities are estimated; None: the default.
    """

    def __init__(
        self,
        *,
        max_nodes: int = 64,
        max_depth: int = 40,
        min_probability: float = 0.0001,
        max_occurrences: int = 256,
        max_candidates: int = 0,
        max_proposed: int = 0,
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
        self._max_matches = 2 * max_occurrences
        self._max_candidates = max_candidates
        self._max_proposed = max_proposed
        self._recent = np.zeros(2)
        self._counts = self.calibration.counts
        self._workspace = tuple(new_workspace(self._max_matches + max_candidates, max_nodes, max_proposed))
        self._scoring = scoring or Scoring()
        table = self.successors
        self._estimator = (
            *(table.keys, table.entries, table.prior),
            *(self._scoring.array, self.calibration.counts),
        )

    def joint(self, max_proposed: int) -> TreeBuilder:
        """A builder that joins what sources from outside propose, with the same settings, table and calibration.

        Args:
            max_proposed: Most nodes that they propose for one draft.
        """
        return TreeBuilder(
            max_nodes=self._max_nodes,
            max_depth=self._max_depth,
            min_probability=self._floor,
            max_occurrences=self._max_matches // 2,
            max_candidates=self._max_candidates,
            max_proposed=max_proposed,
            successors=self.successors,
            calibration=self.calibration,
            scoring=self._scoring,
        )

    def build(
        self,
        index: ContextIndex,
        *,
        candidates: DatastoreCandidates = NO_CANDIDATES,
        proposed: Proposed = NOT_PROPOSED,
        max_depth: int | None = None,
    ) -> DraftTree:
        """Draft what may follow the index's sequence.

        Args:
            index: The request's tokens, passages and matches.
            candidates: What the datastore holds behind positions like the sequence's end.
            proposed: What sources from outside propose; `observe` then counts joint estimates, and not those of search.
            max_depth: Longest path of this tree, if shorter than the builder's (e.g. few tokens are left to emit).

        Returns:
            The tree; empty where no source continues the sequence.

        Raises:
            ValueError: There are more matches or proposed nodes than the builder has room for.
        """
        self._nodes = 0
        depth = self._max_depth if max_depth is None else min(max_depth, self._max_depth)
        if depth < 1 or not self._max_nodes or not len(index):
            return DraftTree.empty()
        if index.match_count > self._max_matches or candidates.found > self._max_candidates:
            # The kernels check no bounds.
            raise ValueError(
                f"{index.match_count} matches in the index and {candidates.found} in the datastore, and the builder "
                f"has room for {self._max_matches} and {self._max_candidates}: raise its limits"
            )
        if proposed.size > self._max_proposed:
            raise ValueError(f"{proposed.size} proposed nodes, and the builder has room for {self._max_proposed}")
        sequence, passages, prompt = index.arrays
        limits = (self._max_nodes, depth, self._floor)
        self._nodes = nodes = kernels.build(
            sequence, passages, tuple(candidates), prompt, self._estimator, tuple(proposed), self._workspace, limits
        )
        self._counts = proposed.counts if proposed.size else self.calibration.counts
        ints, floats = self._workspace
        return DraftTree(ints[:TREE_FIELDS, :nodes].copy(), floats[PATHS, :nodes].copy())

    def skip(self) -> DraftTree:
        """Draft nothing in this step, so that `observe` learns nothing from it."""
        self._nodes = 0
        return DraftTree.empty()

    def observe(self, tokens: Sequence[int]) -> None:
        """Count which nodes of the last tree were accepted, of all those whose parent was.

        Args:
            tokens: [n], what the target emitted in the step that verified the tree.
        """
        if self.calibration.learns and self._nodes:
            emitted = np.array(tokens, np.int32)
            kernels.observe(self._counts, self._workspace, self._nodes, emitted, self._recent)

    @property
    def acceptance_ratio(self) -> float:
        """Accepted over expected tokens of the last drafts: 1.0 as estimated or better, down to 0.0.

        The calibration follows many texts, and this ratio one text within a few steps.
        """
        return float(acceptance_ratio(self._recent))
