"""Accept the longest path of a draft tree that agrees with the target."""

from __future__ import annotations

from collections.abc import Callable, Container

from reader_rag.draft.tree import DraftTree


def walk(tree: DraftTree, target: Callable[[int], int], ends: Container[int] = ()) -> tuple[list[int], list[int]]:
    """Follow the tree from its root for as long as it carries the target's own token.

    Args:
        tree: The verified draft.
        target: The token that the target emits after a node (-1: the root). Called once per visited node, from the
            root down, so a sampled token is drawn once and kept.
        ends: Tokens behind which nothing is asked.

    Returns:
        The accepted nodes, and the emitted tokens: theirs and the target's own after the last of them. With m nodes
        accepted, m + 1 tokens are emitted, or m if the last of them is one of `ends`.
    """
    accepted: list[int] = []
    emitted: list[int] = []
    node = -1
    while True:
        token = target(node)
        emitted.append(token)
        child = tree.child(node, token)
        if child is None:
            return accepted, emitted
        accepted.append(child)
        if token in ends:
            return accepted, emitted
        node = child
