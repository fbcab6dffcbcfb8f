"""A draft tree's shape: who sees whom, its best path, its best part, and what makes it wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reader_rag.draft import DraftTree
from reader_rag.draft.tree import SUCCESSOR


def make_tree(tokens: list[int], parents: list[int], probabilities: list[float]) -> DraftTree:
    """A tree of the context's text; node k was copied from position 10 + k with a match of k + 1 tokens."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    n = len(tokens)
    return DraftTree.of(
        tokens=np.array(tokens, np.int32),
        parents=np.array(parents, np.int32),
        depths=np.array(depths, np.int32),
        probabilities=np.array(probabilities),
        sources=np.zeros(n, np.int32),
        positions=np.arange(10, 10 + n, dtype=np.int32),
        match_lengths=np.arange(1, n + 1, dtype=np.int32),
    )


@pytest.fixture
def tree() -> DraftTree:
    """
    root -+- 5 (node 0) -+- 6 (node 2) --- 5 (node 4)
          |              +- 7 (node 3)
          +- 8 (node 1)
    """
    return make_tree([5, 8, 6, 7, 5], [-1, -1, 0, 0, 2], [0.5, 0.375, 0.25, 0.125, 0.0625])


def test_a_node_sees_itself_its_ancestors_and_the_root(tree: DraftTree) -> None:
    assert tree.ancestor_mask.astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 1, 0, 1],
    ]


def test_a_child_is_found_by_its_token(tree: DraftTree) -> None:
    assert tree.child(-1, 5) == 0
    assert tree.child(-1, 8) == 1
    assert tree.child(0, 7) == 3
    assert tree.child(2, 5) == 4
    assert tree.child(-1, 6) is None
    assert tree.child(4, 5) is None


def test_the_expected_accepted_length_is_the_sum_of_the_path_probabilities(tree: DraftTree) -> None:
    assert tree.expected_accepted == 0.5 + 0.375 + 0.25 + 0.125 + 0.0625


def test_the_chain_is_the_most_probable_path_alone(tree: DraftTree) -> None:
    chain = tree.chain()
    chain.check()
    assert chain.tokens.tolist() == [5, 6, 5]
    assert chain.parents.tolist() == [-1, 0, 1]
    assert chain.depths.tolist() == [1, 2, 3]
    assert chain.probabilities.tolist() == [0.5, 0.25, 0.0625]
    assert chain.positions.tolist() == [10, 12, 14]
    assert chain.match_lengths.tolist() == [1, 3, 5]


def test_the_head_is_the_best_tree_of_that_size(tree: DraftTree) -> None:
    head = tree.head(3)
    head.check()
    assert head.tokens.tolist() == [5, 8, 6]
    assert head.parents.tolist() == [-1, -1, 0]
    assert head.probabilities.tolist() == [0.5, 0.375, 0.25]
    assert head.child(0, 7) is None
    assert tree.head(5) is tree
    assert tree.head(99) is tree
    assert len(tree.head(0)) == 0


def test_the_empty_tree_is_the_root_alone() -> None:
    empty = DraftTree.empty()
    empty.check()
    assert len(empty) == len(empty.chain()) == 0
    assert empty.ancestor_mask.tolist() == [[True]]
    assert empty.child(-1, 5) is None
    assert empty.expected_accepted == 0.0
    assert list(empty.lines()) == []


def changed(tree: DraftTree, **arrays: Any) -> DraftTree:
    names = ("tokens", "parents", "depths", "probabilities", "sources", "positions", "match_lengths")
    return DraftTree.of(*(arrays.get(name, getattr(tree, name)) for name in names))


def test_lines_show_children_indented_under_their_parent_and_mark_accepted_nodes(tree: DraftTree) -> None:
    mixed = changed(
        tree,
        sources=np.array([0, 1, 0, SUCCESSOR, 0], np.int32),
        positions=np.array([10, 11, 12, -1, 14], np.int32),
    )
    lines = [
        "'f' p=0.500 context@10 match=1",
        "  'g' p=0.250 context@12 match=3",
        "    'f' p=0.062 context@14 match=5",
        "  'h' p=0.125 successor match=4",
        "'i' p=0.375 passage@11 match=2",
    ]
    assert list(mixed.lines(lambda token: "abcdefghi"[token])) == [f"  {line}" for line in lines]
    marked = list(mixed.lines(lambda token: "abcdefghi"[token], {0, 3}))
    assert marked == [f"{mark} {line}" for mark, line in zip("+  + ", lines, strict=True)]


def test_a_sound_tree_passes_the_check(tree: DraftTree) -> None:
    tree.check()


@pytest.mark.parametrize(
    ("column", "node", "value", "message"),
    [
        ("parents", 1, 1, "node 1: parent 1 does not come before it"),
        ("parents", 0, 3, "node 0: parent 3 does not come before it"),
        ("parents", 2, 99, "node 2: parent 99 does not come before it"),
        ("parents", 2, -2, "node 2: parent -2 does not come before it"),
        ("depths", 3, 3, "node 3: depth 3 instead of 2"),
        ("depths", 0, 0, "node 0: depth 0 instead of 1"),
        ("probabilities", 0, 1.5, r"node 0: probability 1.5 outside \(0, 1.0\]"),
        ("probabilities", 4, 0.0, r"node 4: probability 0.0 outside \(0, 0.25\]"),
        ("probabilities", 2, 0.625, r"node 2: probability 0.625 outside \(0, 0.5\]"),
        ("probabilities", 2, float("nan"), "node 2: probability nan outside"),
        ("probabilities", 2, 0.4375, "node 2: more probable than the node before it"),
        ("tokens", 1, 5, "node 1: second child of -1 with token 5"),
        ("tokens", 3, 6, "node 3: second child of 0 with token 6"),
    ],
)
def test_each_broken_invariant_is_named(tree: DraftTree, column: str, node: int, value: float, message: str) -> None:
    broken = getattr(tree, column).copy()
    broken[node] = value
    with pytest.raises(ValueError, match=message):
        changed(tree, **{column: broken}).check()
