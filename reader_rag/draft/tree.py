"""The draft tree: candidate continuations of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reader_rag.draft.kernels import shape
from reader_rag.draft.kernels import workspace as kernels

Int32 = NDArray[np.int32]

SOURCES = ("context", "passage", "datastore", "successor", "external", "prediction")
"""Source names by the code that `DraftTree.sources` holds. No node has the code of "prediction": a predicted answer is
indexed as the last passage, and an engine knows its positions."""
DATASTORE = 2
"""The code of nodes that were copied from the datastore."""
SUCCESSOR = kernels.SUCCESSOR
"""The code of nodes that only the successor table proposed: they have no position."""
EXTERNAL = kernels.EXTERNAL
"""The code of nodes that a source from outside proposed: they have no position."""


class DraftTree:
    """Candidate continuations as a tree; a node is one token, the root (not drafted) the last accepted token.

    Immutable. Nodes are in order of falling path probability, so every prefix of the arrays is the best tree of its
    size.

    Args:
        fields: int32 [TREE_FIELDS, nodes], in the order of `kernels.workspace`; `of` makes a tree of separate arrays.
        probabilities: float64 [nodes], estimated probability that the whole path down to the node is accepted.
    """

    def __init__(self, fields: Int32, probabilities: NDArray[np.float64]) -> None:
        self.fields = fields
        self.probabilities = probabilities

    @classmethod
    def of(
        cls,
        tokens: ArrayLike,
        parents: ArrayLike,
        depths: ArrayLike,
        probabilities: ArrayLike,
        sources: ArrayLike = 0,
        positions: ArrayLike = 0,
        match_lengths: ArrayLike = 0,
    ) -> DraftTree:
        """A tree of separate arrays, each [nodes], or one number for all nodes.

        Args:
            tokens: int token ids.
            parents: int, index of the parent, which comes before; -1: the root.
            depths: int, 1 for the root's children.
            probabilities: float in (0, 1], of the whole path down to the node, falling from node to node.
            sources: int, index into `SOURCES`.
            positions: int, position of the token in its source; -1: it was not copied.
            match_lengths: int, tokens before it that agree with the path and the sequence.
        """
        probability = np.atleast_1d(np.asarray(probabilities, np.float64))
        fields = np.empty((kernels.TREE_FIELDS, len(probability)), np.int32)
        for field, values in enumerate((tokens, parents, depths, sources, positions, match_lengths)):
            fields[field] = values
        return cls(fields, probability)

    @classmethod
    def empty(cls) -> DraftTree:
        """A tree of the root alone."""
        return cls(np.zeros((kernels.TREE_FIELDS, 0), np.int32), np.zeros(0))

    @classmethod
    def from_chain(cls, tokens: Sequence[int], probability: float = 0.5) -> DraftTree:
        """A tree without branches.

        Args:
            tokens: The tokens of the path.
            probability: Of each token, given those before.
        """
        depths = np.arange(1, len(tokens) + 1)
        return cls.of(tokens, depths - 2, depths, probability**depths)

    @property
    def tokens(self) -> Int32:
        """int32 [nodes]."""
        row: Int32 = self.fields[kernels.TOKEN]
        return row

    @property
    def parents(self) -> Int32:
        """int32 [nodes], the parent's index, -1: the root. A parent comes before its children."""
        row: Int32 = self.fields[kernels.PARENT]
        return row

    @property
    def depths(self) -> Int32:
        """int32 [nodes], 1 for the root's children."""
        row: Int32 = self.fields[kernels.DEPTH]
        return row

    @property
    def sources(self) -> Int32:
        """int32 [nodes], index into `SOURCES` of the corpus that the node was copied from."""
        row: Int32 = self.fields[kernels.SOURCE]
        return row

    @property
    def positions(self) -> Int32:
        """int32 [nodes], position of the node's token in that corpus, by the longest match; -1: it was not copied."""
        row: Int32 = self.fields[kernels.POSITION]
        return row

    @property
    def match_lengths(self) -> Int32:
        """int32 [nodes], how many tokens before it agree with the path and the sequence."""
        row: Int32 = self.fields[kernels.MATCH_LENGTH]
        return row

    def __len__(self) -> int:
        return len(self.probabilities)

    @cached_property
    def ancestor_mask(self) -> NDArray[np.bool_]:
        """bool [nodes + 1, nodes + 1]: which nodes each node sees; row and column 0 are the root."""
        mask: NDArray[np.bool_] = shape.ancestor_mask(self.parents)
        return mask

    @cached_property
    def paths(self) -> Int32:
        """int32 [nodes + 1, deepest + 1]: row i + 1 has the path from the root to node i, as nodes + 1; 0 is the root.

        A path has as many entries as the node's depth plus one; entries behind it are undefined.
        """
        paths: Int32 = shape.paths(self.parents, self.depths)
        return paths

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        return {
            (parent, token): node
            for node, (parent, token) in enumerate(zip(self.parents.tolist(), self.tokens.tolist(), strict=True))
        }

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` (-1: the root) that carries `token`, or None."""
        return self._children.get((node, token))

    @property
    def expected_accepted(self) -> float:
        """Expected accepted length: the sum of the path probabilities."""
        return float(self.probabilities.sum())

    def chain(self) -> DraftTree:
        """The most probable path alone, as a tree without branches.

        Each node's first child is its most probable one, since nodes come in falling probability.
        """
        kept: list[int] = []
        at = -1
        for node, parent in enumerate(self.parents.tolist()):
            if parent == at:
                kept.append(node)
                at = node
        fields = self.fields[:, kept]
        fields[kernels.PARENT] = np.arange(-1, len(kept) - 1)
        return DraftTree(fields, self.probabilities[kept])

    def head(self, nodes: int) -> DraftTree:
        """The best tree of at most `nodes` nodes."""
        if nodes >= len(self):
            return self
        return DraftTree(self.fields[:, :nodes], self.probabilities[:nodes])

    def check(self) -> None:
        """Check the invariants.

        Raises:
            ValueError: One of them does not hold; the message names the node.
        """
        seen: set[tuple[int, int]] = set()
        for node in range(len(self)):
            parent, token = int(self.parents[node]), int(self.tokens[node])
            if not -1 <= parent < node:
                raise ValueError(f"draft tree, node {node}: parent {parent} does not come before it")
            above = float(self.probabilities[parent]) if parent >= 0 else 1.0
            depth = int(self.depths[parent]) + 1 if parent >= 0 else 1
            problem = (
                f"depth {self.depths[node]} instead of {depth}"
                if int(self.depths[node]) != depth
                else f"probability {self.probabilities[node]} outside (0, {above}]"
                if not 0.0 < float(self.probabilities[node]) <= above
                else "more probable than the node before it"
                if node and self.probabilities[node] > self.probabilities[node - 1]
                else f"second child of {parent} with token {token}"
                if (parent, token) in seen
                else ""
            )
            if problem:
                raise ValueError(f"draft tree, node {node}: {problem}")
            seen.add((parent, token))

    def lines(self, show: Callable[[int], str] = str, accepted: Container[int] = ()) -> Iterator[str]:
        """The tree as text, a line a node, children indented under their parent.

        Args:
            show: Turns a token id into text.
            accepted: Nodes to mark.
        """
        order: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents.tolist()):
            order[parent + 1].append(node)
        stack = list(reversed(order[0]))
        while stack:
            node = stack.pop()
            indent, token = "  " * (int(self.depths[node]) - 1), show(int(self.tokens[node]))
            source = SOURCES[self.sources[node]]
            if self.positions[node] >= 0:
                source += f"@{self.positions[node]}"
            yield (
                f"{'+' if node in accepted else ' '} {indent}{token!r} p={self.probabilities[node]:.3f}"
                f" {source} match={self.match_lengths[node]}"
            )
            stack.extend(reversed(order[node + 1]))
