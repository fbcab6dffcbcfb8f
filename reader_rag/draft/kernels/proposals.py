"""Loops over what sources from outside propose, in numba: correcting it, counting it, joining it with search.

What a source says of its tokens is corrected by what it said before: a cell counts, by depth and probability, how many
of its tokens were expected to be emitted and how many were.
"""

from __future__ import annotations

from typing import Any

from reader_rag.draft.kernels.cells import (
    BOTH,
    ESTIMATE_BUCKETS,
    EXPECTED,
    HITS,
    PROPOSED,
    RATES,
    SEARCHED,
    estimate_bucket,
    joint_cell,
)
from reader_rag.draft.kernels.compile import inlined, loop
from reader_rag.draft.kernels.workspace import (
    CHANCE,
    ESTIMATE,
    FOUND_BEST,
    FOUND_CELL,
    FOUND_PROPOSED,
    FOUND_TOKEN,
    MOST,
    ONLY_PROPOSED,
)

# Rows of `Proposed.links`.
PROPOSED_TOKEN, FIRST_CHILD, NEXT_SIBLING = range(3)
LINK_ROWS = 3

DEPTHS = 9
"""Depth 0 counts all depths, the last one all from there on."""
CELL_SHAPE = (2, DEPTHS, ESTIMATE_BUCKETS)
"""Shape of the counts of a source."""
_PRIOR = 2.0
"""Weight of what is known of all depths in that of one, and of a factor of 1 in that, in expected hits."""


@inlined
def _rate(counts: Any, depth: int, bucket: int) -> float:
    """The factor that corrects a probability of that bucket at that depth."""
    rate = (counts[HITS, 0, bucket] + _PRIOR) / (counts[EXPECTED, 0, bucket] + _PRIOR)
    at = min(depth, DEPTHS - 1)
    return float((counts[HITS, at, bucket] + _PRIOR * rate) / (counts[EXPECTED, at, bucket] + _PRIOR))


@loop
def correct(depths: Any, chances: Any, counts: Any, corrected: Any) -> None:
    """Correct the probabilities of proposed nodes.

    Args:
        depths: int32 [nodes], 1 for the root's children.
        chances: float64 [nodes], given the parent, as the source says.
        counts: float64 [2, DEPTHS, ESTIMATE_BUCKETS], hits and expected hits.
        corrected: float64 [nodes], overwritten.
    """
    for node in range(depths.shape[0]):
        rate = _rate(counts, depths[node], estimate_bucket(chances[node]))
        corrected[node] = min(chances[node] * rate, 1.0)


@loop
def link(tokens: Any, parents: Any, links: Any) -> None:
    """Write a proposal in the form that `kernels.tree.build` takes.

    Args:
        tokens: int32 [nodes].
        parents: int32 [nodes], -1: the root; parents come before children.
        links: int32 [LINK_ROWS, nodes + 1], overwritten; see `Proposed`.
    """
    links[:, 0] = 0
    for node in range(tokens.shape[0]):
        above = parents[node] + 1
        links[PROPOSED_TOKEN, node + 1] = tokens[node]
        links[FIRST_CHILD, node + 1] = 0
        links[NEXT_SIBLING, node + 1] = links[FIRST_CHILD, above]
        links[FIRST_CHILD, above] = node + 1


@loop
def observe(tokens: Any, parents: Any, chances: Any, emitted: Any, counts: Any) -> int:
    """Count every proposed child of an emitted node, verified or not.

    Args:
        tokens: int32 [nodes].
        parents: int32 [nodes], -1: the root; parents come before children.
        chances: float64 [nodes], given the parent, as the source says.
        emitted: int32 [n], what the target emitted.
        counts: float64 [2, DEPTHS, ESTIMATE_BUCKETS]; updated.

    Returns:
        How many tokens of the proposal were emitted.
    """
    parent = -1
    for depth in range(emitted.shape[0]):
        following = -1
        for node in range(parent + 1, tokens.shape[0]):
            if parents[node] != parent:
                continue
            bucket = estimate_bucket(chances[node])
            at = min(depth + 1, DEPTHS - 1)
            counts[EXPECTED, at, bucket] += chances[node]
            counts[EXPECTED, 0, bucket] += chances[node]
            if tokens[node] == emitted[depth]:
                counts[HITS, at, bucket] += 1.0
                counts[HITS, 0, bucket] += 1.0
                following = node
        if following < 0:
            return depth
        parent = following
    return int(emitted.shape[0])


@loop
def walk(tokens: Any, parents: Any, emitted: Any) -> int:
    """How many of the emitted tokens are a path of a tree.

    Args:
        tokens: int32 [nodes].
        parents: int32 [nodes], -1: the root; parents come before children.
        emitted: int32 [n].
    """
    parent = -1
    for depth in range(emitted.shape[0]):
        node = parent + 1
        while node < tokens.shape[0] and (parents[node] != parent or tokens[node] != emitted[depth]):
            node += 1
        if node == tokens.shape[0]:
            return depth
        parent = node
    return int(emitted.shape[0])


@loop
def join(proposed: Any, at: int, found: int, workspace: Any) -> int:
    """Join the children that search found at a node with those that sources from outside propose there.

    Equal tokens become one child. What both have is as likely as that one of them is right; what one of them lacks
    loses half of the probability that the other gives to all it has. Counts then correct both rules.

    Args:
        proposed: `Proposed`.
        at: The node's column in it.
        found: Children that search found; columns of the workspace.
        workspace: `Workspace`; the children's `FOUND_CELL`, `ESTIMATE` and `CHANCE` become those of the joint
            estimate, and `FOUND_PROPOSED` is written. Behind the children stand those that search lacks.

    Returns:
        How many children there are now.
    """
    ints, floats = workspace.ints, workspace.floats
    links, chances, rates = proposed.links, proposed.chances, proposed.counts[RATES]
    searched = drafted = 0.0
    for k in range(found):
        searched += floats[CHANCE, k]
        ints[FOUND_PROPOSED, k] = -1
    last = found
    child = links[FIRST_CHILD, at]
    while child > 0:
        drafted += chances[child]
        token = links[PROPOSED_TOKEN, child]
        k = 0
        while k < found and ints[FOUND_TOKEN, k] != token:
            k += 1
        if k == found:
            k = last
            last += 1
            ints[FOUND_TOKEN, k] = token
            ints[FOUND_BEST, k] = ONLY_PROPOSED
        ints[FOUND_PROPOSED, k] = child
        child = links[NEXT_SIBLING, child]
    searched, scale = min(searched, 1.0), 1.0 / max(drafted, 1.0)
    drafted = min(drafted, 1.0)
    for k in range(last):
        child = ints[FOUND_PROPOSED, k]
        if child < 0:
            chance = floats[CHANCE, k]
            estimate, cell = chance * (1.0 - 0.5 * drafted), joint_cell(SEARCHED, chance, drafted)
        elif k < found:
            chance, other = floats[CHANCE, k], chances[child] * scale
            estimate, cell = chance + other - chance * other, joint_cell(BOTH, chance, other)
        else:
            chance = chances[child] * scale
            estimate, cell = chance * (1.0 - 0.5 * searched), joint_cell(PROPOSED, chance, searched)
        floats[ESTIMATE, k] = estimate
        ints[FOUND_CELL, k] = cell
        floats[CHANCE, k] = min(estimate * rates[cell], MOST)
    return last
