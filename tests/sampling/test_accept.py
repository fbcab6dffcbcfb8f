"""The path of a draft tree that the target accepts."""

from __future__ import annotations

import numpy as np
import pytest

from reader_rag.draft import DraftTree
from reader_rag.sampling.accept import accept_path


@pytest.fixture
def tree() -> DraftTree:
    """
    root -+- 5 (node 0) -+- 6 (node 2) --- 5 (node 4)
          |              +- 7 (node 3)
          +- 8 (node 1)
    """
    zeros = np.zeros(5, np.int32)
    return DraftTree.of(
        tokens=np.array([5, 8, 6, 7, 5], np.int32),
        parents=np.array([-1, -1, 0, 0, 2], np.int32),
        depths=np.array([1, 1, 2, 2, 3], np.int32),
        probabilities=np.array([0.5, 0.4, 0.3, 0.2, 0.1]),
        sources=zeros,
        positions=zeros,
        match_lengths=zeros,
    )


class Target:
    """Emits a fixed token after each node, and remembers the nodes it was asked about."""

    def __init__(self, tokens: dict[int, int]) -> None:
        self._tokens = tokens
        self.asked: list[int] = []

    def __call__(self, node: int) -> int:
        self.asked.append(node)
        return self._tokens[node]


@pytest.mark.parametrize(
    ("target", "accepted", "emitted"),
    [
        ({-1: 9}, [], [9]),
        ({-1: 6}, [], [6]),
        ({-1: 8, 1: 5}, [1], [8, 5]),
        ({-1: 5, 0: 8}, [0], [5, 8]),
        ({-1: 5, 0: 7, 3: 7}, [0, 3], [5, 7, 7]),
        ({-1: 5, 0: 6, 2: 5, 4: 5}, [0, 2, 4], [5, 6, 5, 5]),
    ],
)
def test_it_goes_on_while_a_child_carries_the_targets_token(
    tree: DraftTree, target: dict[int, int], accepted: list[int], emitted: list[int]
) -> None:
    assert accept_path(tree, Target(target)) == (accepted, emitted)


def test_the_target_is_asked_once_about_each_visited_node_and_no_other(tree: DraftTree) -> None:
    target = Target({-1: 5, 0: 6, 2: 9})
    accept_path(tree, target)
    assert target.asked == [-1, 0, 2]


def test_without_a_draft_the_targets_token_alone_is_emitted() -> None:
    assert accept_path(DraftTree.empty(), Target({-1: 3})) == ([], [3])


@pytest.mark.parametrize(("ends", "asked"), [((), [-1, 0, 2]), ((6,), [-1, 0]), ((5,), [-1]), ((9,), [-1, 0, 2])])
def test_nothing_is_asked_behind_an_end(tree: DraftTree, ends: tuple[int, ...], asked: list[int]) -> None:
    target = Target({-1: 5, 0: 6, 2: 9})
    reported: list[int] = []

    def ended(token: int) -> bool:
        reported.append(token)
        return token in ends

    accepted, emitted = accept_path(tree, target, ended)
    assert target.asked == asked
    assert emitted == [5, 6, 9][: len(asked)]
    assert accepted == [0, 2][: len(asked)]
    assert reported == emitted
