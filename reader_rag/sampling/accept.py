"""Accept the longest path of a draft tree that agrees with the target."""

from __future__ import annotations

from collections.abc import Callable

from reader_rag.draft.tree import DraftTree


def accept_path(
    tree: DraftTree, target: Callable[[int], int], ends: Callable[[int], bool] = lambda token: False
) -> tuple[list[int], list[int]]:
    """Follow the tree from its root for as long as it carries the target's own token.

    Args:
        tree: The verified draft.
        target: The token that the target emits after a node (-1: the root). Called once per visited node, from the
            root down, so a sampled token is drawn once and kept.
        ends: Called with each emitted token, in order, before the next one is chosen; True if the answer ends with it.

    Returns:
        The accepted nodes, and the emitted tokens: theirs and the target's own after the last of them. With m nodes
        accepted, m + 1 tokens are emitted, or m if the answer ends with the last of them.
    """
    accepted: list[int] = []
    emitted: list[int] = []
    node = -1
    while True:
        token = target(node)
        emitted.append(token)
        ended = ends(token)
        child = tree.child(node, token)
        if child is not None:
            accepted.append(child)
        if ended or child is None:
            return accepted, emitted
        node = child
