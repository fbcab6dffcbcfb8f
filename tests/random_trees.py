"""Random tokens and trees for tests of a forward pass."""

from __future__ import annotations

import numpy as np

from reader_rag.draft.tree import DraftTree


def random_tokens(seed: int, count: int, vocabulary: int) -> list[int]:
    """Token ids from 3 up."""
    return [int(token) for token in np.random.default_rng(seed).integers(3, vocabulary, count)]


def random_tree(seed: int, nodes: int, vocabulary: int) -> DraftTree:
    """A tree that branches often, its branches interleaved in memory."""
    random = np.random.default_rng(seed)
    parents = np.array([random.integers(-1, node) if node else -1 for node in range(nodes)], np.int32)
    depths = np.zeros(nodes, np.int32)
    for node, parent in enumerate(parents):
        depths[node] = 1 if parent < 0 else depths[parent] + 1
    tokens = random.integers(3, vocabulary, nodes).astype(np.int32)
    return DraftTree.of(tokens, parents, depths, np.full(nodes, 0.5))
