"""The workspace of a draft: the rows of its arrays. Its first rows are those of a draft tree."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from reader_rag.draft.kernels.context import EMPTY
from reader_rag.draft.kernels.successors import KEPT

# Rows of the int32 workspace. First the tree, a column a node,
TOKEN, PARENT, DEPTH, SOURCE, POSITION, MATCH_LENGTH, CELL = range(7)
TREE_FIELDS = 6
# then those whose columns are members,
MEMBER_SOURCE, MEMBER_POSITION, MEMBER_LENGTH, ORDER, GROUP, MOVED = range(7, 13)
# those whose columns are the children found at one node,
FOUND_TOKEN, FOUND_SIZE, FOUND_BEST, FOUND_CELL, FOUND_START, FOUND_SLOT = range(13, 19)
# those whose columns are candidates,
CANDIDATE_TOKEN, CANDIDATE_PARENT, CANDIDATE_START, CANDIDATE_STOP, CANDIDATE_DEPTH, CANDIDATE_ORIGIN = range(19, 25)
CANDIDATE_CELL, RANKED = range(25, 27)
# a hash table from a token to its column among the children found, and an entry made of the prior;
KEYS, COLUMNS, SCRATCH = range(27, 30)
# and the columns of `Proposed` that are the children found, and the candidates, -1: none.
FOUND_PROPOSED, CANDIDATE_PROPOSED = range(30, 32)
_INT_ROWS = 32
PADDING = 16
"""Columns behind those that are used, so that a column's rows do not all fall into the same set of the CPU's cache."""
# Rows of the float64 workspace: path probabilities of the candidates in their order, which become those of the nodes,
# and the nodes' estimates; then of the children found; and the candidates' estimates.
PATHS, NODE_ESTIMATE, FOUND_VOTES, ESTIMATE, CHANCE, CANDIDATE_ESTIMATE = range(6)
_FLOAT_ROWS = 6

SUCCESSOR = 3
"""The source of nodes that only the successors proposed."""
EXTERNAL = 4
"""The source of nodes that only a source from outside proposed."""
ONLY_PROPOSED = 0
"""Origin of a candidate that only a source from outside proposed; that of the successors' is the tokens they know."""


class Workspace(NamedTuple):
    """Memory that a draft is made in; made by `new_workspace`, for one thread at a time.

    Attributes:
        ints: int32 [_INT_ROWS, width + PADDING]; width a power of two. The hash table in it is empty (`EMPTY`)
            between drafts.
        floats: float64 [_FLOAT_ROWS, width + PADDING].
    """

    ints: Any
    floats: Any


def new_workspace(matches: int, max_nodes: int = 0, max_proposed: int = 0) -> Workspace:
    """A workspace for drafts up to a size.

    Args:
        matches: Most matches, of all sources together.
        max_nodes: Most nodes of a tree.
        max_proposed: Most nodes that a source from outside proposes.
    """
    width = 1 << max(2 * matches, matches + KEPT + max_proposed, max_nodes).bit_length()
    return Workspace(np.full((_INT_ROWS, width + PADDING), EMPTY, np.int32), np.zeros((_FLOAT_ROWS, width + PADDING)))


MOST = 0.995
"""Highest probability of a child."""
