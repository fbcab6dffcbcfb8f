"""Loops that grow draft trees best first from copies and successors, in numba.

At a node, the occurrences that still agree with the path (its *members*) vote for their next token. The probability
that they leave goes to the target's own next tokens after the same two tokens, or else after the same last one, or else
to those that a *prior* lists (the *successors*). Each estimate is corrected by the factor of its calibration cell.

Where sources from outside propose children of a node too, equal tokens are one child, and the chances of all children
are estimated again, from what search and the proposal say of them (`join`). A proposed node has the copies that agree
with it and the successors below it, like any other.
"""

from __future__ import annotations

from typing import Any

from reader_rag.draft.kernels.arrays import Corpora, CorpusMatches, Estimator, Limits, Node, Proposed
from reader_rag.draft.kernels.cells import MOST_RATE, RATES, copy_cell, count, successor_cell
from reader_rag.draft.kernels.compile import inlined, loop
from reader_rag.draft.kernels.context import EMPTY, find_slot
from reader_rag.draft.kernels.proposals import FIRST_CHILD, join
from reader_rag.draft.kernels.successors import KEPT, ONE, PAIR, TOKENS, TOTAL, WEIGHTS, prepare, successors
from reader_rag.draft.kernels.workspace import (
    CANDIDATE_CELL,
    CANDIDATE_DEPTH,
    CANDIDATE_ESTIMATE,
    CANDIDATE_ORIGIN,
    CANDIDATE_PARENT,
    CANDIDATE_PROPOSED,
    CANDIDATE_START,
    CANDIDATE_STOP,
    CANDIDATE_TOKEN,
    CELL,
    CHANCE,
    COLUMNS,
    DEPTH,
    ESTIMATE,
    EXTERNAL,
    FOUND_BEST,
    FOUND_CELL,
    FOUND_PROPOSED,
    FOUND_SIZE,
    FOUND_SLOT,
    FOUND_START,
    FOUND_TOKEN,
    FOUND_VOTES,
    GROUP,
    KEYS,
    MATCH_LENGTH,
    MEMBER_LENGTH,
    MEMBER_POSITION,
    MEMBER_SOURCE,
    MOST,
    MOVED,
    NODE_ESTIMATE,
    ONLY_PROPOSED,
    ORDER,
    PADDING,
    PARENT,
    PATHS,
    POSITION,
    RANKED,
    SCRATCH,
    SOURCE,
    SUCCESSOR,
    TOKEN,
    Workspace,
)

# The first entries of the scoring array; the votes by match length follow.
UNKNOWN, TRUST, VOTES = 0, 1, 4  # trust in each kind of entry

ACCEPTANCE_DECAY = 0.95
"""Factor by which the hits and expected hits of earlier steps fade with each step."""
_FEW = 4
"""Up to so many children are searched one by one."""


@inlined
def _lookup(ints: Any) -> Any:
    """The hash table from a token to its column among the children found; see `find_slot`."""
    return ints[KEYS:SCRATCH, : ints.shape[1] - PADDING]


@inlined
def _column(ints: Any, token: int, found: int, hashed: bool) -> int:
    """The column of the child `token` among the first `found`, or -1."""
    if not hashed:
        for child in range(found):
            if ints[FOUND_TOKEN, child] == token:
                return child
        return -1
    lookup = _lookup(ints)
    slot = find_slot(lookup, token)
    return int(lookup[1, slot]) if lookup[0, slot] == token else -1


@inlined
def _group(corpora: Any, node: Any, scoring: Any, ints: Any, floats: Any) -> Any:
    """Group a node's members by their next token.

    `ints[GROUP, start:stop]` becomes each one's group, -1 where its text ends, and `floats[FOUND_VOTES, :groups]` their
    votes.

    Returns:
        (groups, all votes).
    """
    groups = 0
    votes = 0.0
    longest = scoring.shape[0] - 1 - VOTES
    hashed = node.stop - node.start > _FEW
    for i in range(node.start, node.stop):
        member = ints[ORDER, i]
        source = ints[MEMBER_SOURCE, member]
        at = ints[MEMBER_POSITION, member] + node.depth
        token = int(corpora.tokens[source][at]) if at < corpora.sizes[source] else -1
        if token < 0:
            ints[GROUP, i] = -1
            continue
        group = _column(ints, token, groups, hashed)
        if group < 0:
            group = groups
            groups += 1
            ints[FOUND_TOKEN, group] = token
            ints[FOUND_SIZE, group] = 0
            ints[FOUND_BEST, group] = member
            floats[FOUND_VOTES, group] = 0.0
            if hashed:
                slot = find_slot(_lookup(ints), token)
                ints[KEYS, slot] = token
                ints[COLUMNS, slot] = group
                ints[FOUND_SLOT, group] = slot
        weight = scoring[VOTES + min(ints[MEMBER_LENGTH, member] + node.depth, longest)]
        votes += weight
        floats[FOUND_VOTES, group] += weight
        ints[FOUND_SIZE, group] += 1
        if ints[MEMBER_LENGTH, member] > ints[MEMBER_LENGTH, ints[FOUND_BEST, group]]:
            ints[FOUND_BEST, group] = member
        ints[GROUP, i] = group
    return groups, votes


@inlined
def _forget(ints: Any, groups: int) -> None:
    """Empty the hash table; after all probing, since one slot emptied earlier would cut another token's probe chain."""
    for group in range(groups):
        ints[KEYS, ints[FOUND_SLOT, group]] = EMPTY


@loop
def find_children(corpora: Any, node: Any, estimator: Any, least: float, workspace: Any) -> Any:
    """Find the children of a node: their tokens, cells, estimates and corrected probabilities, given the node.

    They become columns of the workspace: `FOUND_TOKEN`, `FOUND_BEST`, `FOUND_CELL`, `ESTIMATE` and `CHANCE`. Behind the
    groups of the members come the successors that no member proposes.

    Args:
        corpora: `Corpora`.
        node: `Node`.
        estimator: `Estimator`.
        least: Successors less probable than this may be left out.
        workspace: `Workspace`; updated.

    Returns:
        (groups, children found).
    """
    ints, floats, counts = workspace.ints, workspace.floats, estimator.counts
    groups, votes = _group(corpora, node, estimator.scoring, ints, floats)
    hashed = node.stop - node.start > _FEW
    entry, kind = successors(estimator.keys, estimator.entries, estimator.prior, ints[SCRATCH], node.before, node.token)
    known = entry[TOTAL] > 0
    for child in range(groups):
        floats[ESTIMATE, child] = floats[FOUND_VOTES, child] / (votes + 1.0)
        ints[FOUND_CELL, child] = 1 if known else 0
    found = groups
    if known:
        trust = estimator.scoring[TRUST + kind]
        share = trust / ((votes + 1.0) * (estimator.scoring[UNKNOWN] * ONE + trust * entry[TOTAL]))
        for k in range(KEPT):
            following = entry[TOKENS + k]
            if following < 0:
                break
            estimate = entry[WEIGHTS + k] * share
            child = _column(ints, following, groups, hashed) if groups else -1
            if child >= 0:
                floats[ESTIMATE, child] += estimate
                ints[FOUND_CELL, child] = 2
                continue
            if estimate * MOST_RATE < least:
                if not groups:
                    break
                continue
            ints[FOUND_TOKEN, found] = following
            ints[FOUND_BEST, found] = 2 if kind == PAIR else 1
            floats[ESTIMATE, found] = estimate
            cell = successor_cell(kind, estimate)
            ints[FOUND_CELL, found] = cell
            floats[CHANCE, found] = min(estimate * counts[RATES, cell], MOST)
            found += 1
    if hashed:
        _forget(ints, groups)
    for child in range(groups):
        best = ints[FOUND_BEST, child]
        estimate = floats[ESTIMATE, child]
        source = ints[MEMBER_SOURCE, best]
        origin = source + 1 if source else (1 if ints[MEMBER_POSITION, best] + node.depth >= corpora.prompt else 0)
        cell = copy_cell(
            origin,
            ints[MEMBER_LENGTH, best] + node.depth,
            estimate,
            ints[FOUND_CELL, child],
            ints[FOUND_SIZE, child] > 1,
        )
        ints[FOUND_CELL, child] = cell
        floats[CHANCE, child] = min(estimate * counts[RATES, cell], MOST)
    return groups, found


@inlined
def list_members(matches: Any, counts: Any, ints: Any) -> int:
    """List the matches of three corpora as the root's members.

    Args:
        matches: Three of int32 [2, >= count], positions and match lengths.
        counts: Matches of each.
        ints: Of `Workspace`; updated.

    Returns:
        How many members there are.
    """
    members = 0
    for source in range(3):
        for k in range(counts[source]):
            ints[MEMBER_SOURCE, members] = source
            ints[MEMBER_POSITION, members] = matches[source][0, k]
            ints[MEMBER_LENGTH, members] = matches[source][1, k]
            ints[ORDER, members] = members
            members += 1
    return members


@loop
def observe(counts: Any, workspace: Any, nodes: int, tokens: Any, recent: Any) -> None:
    """Count, for every child of an accepted node of the last tree, what was expected of it and whether it was emitted.

    Args:
        counts: float64 [3, CELLS]; or [3, JOINT_CELLS] where something was proposed from outside; updated.
        workspace: `Workspace`, as `build` left it.
        nodes: Nodes of the tree.
        tokens: int32 [n], the emitted tokens.
        recent: float64 [2], hits and expected hits (corrected) of the last steps, fading; updated.
    """
    ints, floats = Workspace(*workspace)
    paths = floats[PATHS]
    parent = -1
    recent *= ACCEPTANCE_DECAY
    for token in tokens:
        accepted = -1
        for node in range(parent + 1, nodes):
            if ints[PARENT, node] != parent:
                continue
            recent[1] += paths[node] / (paths[parent] if parent >= 0 else 1.0)
            hit = ints[TOKEN, node] == token
            if hit:
                recent[0] += 1.0
                accepted = node
            if ints[CELL, node] >= 0:
                count(counts, ints[CELL, node], floats[NODE_ESTIMATE, node], hit)
        if accepted < 0:
            return
        parent = accepted


@loop
def build(
    sequence: Any,
    passages: Any,
    datastore: Any,
    prompt: int,
    estimator: Any,
    proposed: Any,
    workspace: Any,
    limits: Any,
) -> int:
    """Grow a draft tree best first from the matches of three corpora, from successors, and from a proposal.

    Args:
        sequence: Prompt and output so far, as a tuple like `CorpusMatches`; at least one token.
        passages: Other texts, separated by negative tokens, as a tuple like `CorpusMatches`.
        datastore: What the datastore holds behind its matches, each text ended by a negative token, as a tuple like
            `CorpusMatches`.
        prompt: How many of the sequence's tokens are the prompt's.
        estimator: A tuple like `Estimator`.
        proposed: What sources from outside propose, as a tuple like `Proposed`.
        workspace: A tuple like `Workspace`, of room for all matches and nodes; updated. The tree becomes its columns
            `ints[:TREE_FIELDS, :nodes]`, in order of falling probability, and `floats[PATHS, :nodes]` the path
            probabilities.
        limits: A tuple like `Limits`.

    Returns:
        The number of nodes.
    """
    own, others, stored = CorpusMatches(*sequence), CorpusMatches(*passages), CorpusMatches(*datastore)
    corpora = Corpora((own.tokens, others.tokens, stored.tokens), (own.size, others.size, stored.size), prompt)
    known, outside, memory = Estimator(*estimator), Proposed(*proposed), Workspace(*workspace)
    max_nodes, max_depth, floor = Limits(*limits)
    ints, floats = memory.ints, memory.floats
    # The best `max_nodes` candidates so far, in order; those before `nodes` are in the tree. Any other can never be.
    paths, ranked = floats[PATHS], ints[RANKED]
    ordered = nodes = depth = start = 0
    prepare(ints[SCRATCH])
    stop = list_members((own.matches, others.matches, stored.matches), (own.found, others.found, stored.found), ints)
    joins = outside.size > 0
    at_proposed = 0 if joins else -1  # the node's column of `outside`
    root = int(own.tokens[own.size - 1])
    token, before, above = root, int(own.tokens[own.size - 2]) if own.size > 1 else -1, 1.0
    while True:
        # No candidate below the least of `max_nodes` others is ever taken, and no child is above its parent.
        bar = floor if ordered < max_nodes else max(floor, paths[max_nodes - 1])
        if depth < max_depth and above * MOST >= bar:
            groups, found = find_children(corpora, Node(depth, start, stop, before, token), known, bar / above, memory)
            joined = at_proposed >= 0 and outside.links[FIRST_CHILD, at_proposed] > 0
            if joined:
                found = join(outside, at_proposed, found, memory)
            # Groups become neighbouring slices of the node's own, so that candidates never share a member.
            first = start
            for group in range(groups):
                ints[FOUND_START, group] = first
                first += ints[FOUND_SIZE, group]
            for child in range(found):
                path = above * floats[CHANCE, child]
                if path < floor:
                    continue
                if ordered < max_nodes:
                    c = ordered
                    ordered += 1
                elif path > paths[max_nodes - 1]:
                    c = ranked[max_nodes - 1]
                else:
                    continue
                at = ordered - 1
                while at > nodes and paths[at - 1] < path:
                    paths[at] = paths[at - 1]
                    ranked[at] = ranked[at - 1]
                    at -= 1
                paths[at] = path
                ranked[at] = c
                ints[CANDIDATE_TOKEN, c] = ints[FOUND_TOKEN, child]
                ints[CANDIDATE_PARENT, c] = nodes - 1
                ints[CANDIDATE_DEPTH, c] = depth + 1
                ints[CANDIDATE_ORIGIN, c] = ints[FOUND_BEST, child]
                ints[CANDIDATE_CELL, c] = ints[FOUND_CELL, child]
                floats[CANDIDATE_ESTIMATE, c] = floats[ESTIMATE, child]
                if joins:
                    # Counts of joint estimates: what search alone says is counted of the tree of search alone.
                    ints[CANDIDATE_PROPOSED, c] = ints[FOUND_PROPOSED, child] if joined else -1
                    if not joined:
                        ints[CANDIDATE_CELL, c] = -1
                ints[CANDIDATE_START, c] = ints[CANDIDATE_STOP, c] = 0
                if child < groups:
                    ints[CANDIDATE_START, c] = ints[FOUND_START, child]
                    ints[CANDIDATE_STOP, c] = ints[FOUND_START, child] + ints[FOUND_SIZE, child]
            if groups and stop > start + 1:
                for i in range(start, stop):
                    group = ints[GROUP, i]
                    if group >= 0:
                        ints[MOVED, ints[FOUND_START, group]] = ints[ORDER, i]
                        ints[FOUND_START, group] += 1
                for i in range(start, first):
                    ints[ORDER, i] = ints[MOVED, i]
        if nodes == ordered:
            return nodes
        c = ranked[nodes]
        above = paths[nodes]
        token, depth = int(ints[CANDIDATE_TOKEN, c]), int(ints[CANDIDATE_DEPTH, c])
        start, stop = int(ints[CANDIDATE_START, c]), int(ints[CANDIDATE_STOP, c])
        parent, origin = ints[CANDIDATE_PARENT, c], ints[CANDIDATE_ORIGIN, c]
        if joins:
            at_proposed = int(ints[CANDIDATE_PROPOSED, c])
        before = int(ints[TOKEN, parent]) if parent >= 0 else root
        ints[TOKEN, nodes] = token
        ints[PARENT, nodes] = parent
        ints[DEPTH, nodes] = depth
        ints[CELL, nodes] = ints[CANDIDATE_CELL, c]
        floats[NODE_ESTIMATE, nodes] = floats[CANDIDATE_ESTIMATE, c]
        if stop > start:
            ints[SOURCE, nodes] = ints[MEMBER_SOURCE, origin]
            ints[POSITION, nodes] = ints[MEMBER_POSITION, origin] + depth - 1
            ints[MATCH_LENGTH, nodes] = ints[MEMBER_LENGTH, origin] + depth - 1
        else:
            ints[SOURCE, nodes] = EXTERNAL if origin == ONLY_PROPOSED else SUCCESSOR
            ints[POSITION, nodes] = -1
            ints[MATCH_LENGTH, nodes] = origin
        nodes += 1
