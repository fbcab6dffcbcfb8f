"""The loop that finds which prompt positions a draft asks for, in numba."""

from __future__ import annotations

from typing import Any

from reader_rag.draft.kernels.arrays import CorpusArrays
from reader_rag.draft.kernels.compile import inlined, loop
from reader_rag.draft.kernels.context import EMPTY, find_slot
from reader_rag.draft.kernels.successors import find_entry
from reader_rag.draft.kernels.workspace import PARENT, POSITION, SOURCE, TOKEN

AHEAD = 4
"""Positions behind the source of a copied node that are asked for before a draft gets there."""
_LOOKED_AT = 64
"""Most occurrences of a token that are looked at, the latest first."""


@inlined
def _pending_position(corpus: Any, pending: Any, before: int, token: int) -> int:
    """The latest pending position of a token behind another one; behind any, if `before` is negative; -1: none."""
    slot = find_slot(corpus.table, token)
    at = corpus.table[1, slot] if corpus.table[0, slot] != EMPTY else -1
    looked = 0
    while at >= 0 and looked < _LOOKED_AT:
        if at < pending.shape[0]:
            if pending[at] and (before < 0 or (at > 0 and corpus.tokens[at - 1] == before)):
                return int(at)
            looked += 1
        at = corpus.previous[at]
    return -1


@inlined
def _added(out: Any, count: int, position: int) -> int:
    """Put a position behind the first `count`, unless it is among them; returns how many there are then."""
    for k in range(count):
        if out[k] == position:
            return count
    out[count] = position
    return count + 1


@inlined
def _is_source(tree: Any, verified: int, position: int) -> bool:
    """Whether one of the first `verified` nodes was copied from a position of the prompt."""
    node = 0
    while node < verified and (tree[SOURCE, node] != 0 or tree[POSITION, node] != position):
        node += 1
    return node < verified


@loop
def ask(sequence: Any, pending: Any, keys: Any, tree: Any, verified: int, out: Any) -> int:
    """Find prompt positions whose successors a draft lacks.

    First those with the tokens of a node that is not verified: the node's and the one before, if the table has no entry
    for both; the node's alone, if it has none for that either. Then those behind the sources of copied nodes, which the
    drafts of the next steps may reach. Nodes come in order of falling probability.

    Args:
        sequence: A tuple like `CorpusArrays`: prompt and output; at least one token.
        pending: bool [prompt], which positions may be asked for.
        keys: int64 [sets, ways], of the successor table.
        tree: int32 [TREE_FIELDS, nodes].
        verified: How many nodes, the first ones, are verified in this step, which teaches their successors.
        out: int32 [most], overwritten with the positions, the most useful first.

    Returns:
        How many positions there are.
    """
    corpus = CorpusArrays(*sequence)
    tokens, prompt = corpus.tokens, pending.shape[0]
    nodes, most = tree.shape[1], out.shape[0]
    root = int(tokens[corpus.size - 1])
    count = 0
    for node in range(verified, nodes):
        if count == most:
            return count
        token, parent = int(tree[TOKEN, node]), tree[PARENT, node]
        before = int(tree[TOKEN, parent]) if parent >= 0 else root
        if find_entry(keys, before, token) >= 0:
            continue
        at = tree[POSITION, node]
        # A node copied from the prompt stands behind the same token there.
        if tree[SOURCE, node] != 0 or at >= prompt or not pending[at]:
            at = _pending_position(corpus, pending, before, token)
        if at < 0 and find_entry(keys, -1, token) < 0:
            at = _pending_position(corpus, pending, -1, token)
        if at >= 0:
            count = _added(out, count, at)
    for node in range(nodes):
        if tree[SOURCE, node] != 0:
            continue
        first = tree[POSITION, node] + 1
        for at in range(first, min(first + AHEAD, prompt)):
            if count == most:
                return count
            if not pending[at] or _is_source(tree, verified, at):
                continue
            if find_entry(keys, int(tokens[at - 1]), int(tokens[at])) < 0:
                count = _added(out, count, at)
    return count
