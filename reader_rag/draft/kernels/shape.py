"""Loops over the shape of a draft tree, in numba: ancestor masks and paths."""

from __future__ import annotations

from typing import Any

import numpy as np

from reader_rag.draft.kernels.compile import allocating


@allocating
def ancestor_mask(parents: Any) -> Any:
    """Which nodes each node sees: itself, its ancestors and the root.

    Args:
        parents: int32 [nodes], -1: the root; parents come before children.

    Returns:
        bool [nodes + 1, nodes + 1], row and column 0 the root.
    """
    n = parents.shape[0] + 1
    mask = np.zeros((n, n), dtype=np.bool_)
    mask[0, 0] = True
    for i in range(1, n):
        parent = parents[i - 1] + 1
        mask[i, : parent + 1] = mask[parent, : parent + 1]
        mask[i, i] = True
    return mask


@allocating
def paths(parents: Any, depths: Any) -> Any:
    """The rows from the root to each node.

    Args:
        parents: int32 [nodes], -1: the root; parents come before children.
        depths: int32 [nodes].

    Returns:
        int32 [nodes + 1, deepest + 1]; row 0 is the root; zeros behind a path's end.
    """
    deepest = 0
    for depth in depths:
        deepest = max(deepest, depth)
    rows = np.zeros((parents.shape[0] + 1, deepest + 1), np.int32)
    for i in range(1, rows.shape[0]):
        depth = depths[i - 1]
        rows[i, :depth] = rows[parents[i - 1] + 1, :depth]
        rows[i, depth] = i
    return rows
