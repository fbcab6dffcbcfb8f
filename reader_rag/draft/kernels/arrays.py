"""NamedTuples of the arrays that belong together: the arguments of the kernels.

Where a call takes microseconds, Python hands them over as plain tuples in the same order: ten arrays cross into a
compiled loop in 0.8 us so, and in 1.9 us as NamedTuples.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class CorpusArrays(NamedTuple):
    """An indexed corpus; see `kernels.context`.

    Attributes:
        tokens: int32 [capacity], negative: the end of a text.
        previous: int32 [capacity], by position the previous position of the same token, -1: none.
        table: int32 [2, slots], a hash table from a token to its latest position.
        size: Tokens of the corpus.
    """

    tokens: Any
    previous: Any
    table: Any
    size: Any


class CorpusMatches(NamedTuple):
    """A corpus and the positions in it behind which the sequence may go on as the corpus does.

    Attributes:
        tokens: int32 [>= size]; negative tokens end a text.
        size: Tokens of the corpus.
        matches: int32 [2, >= found], positions of the next token, and match lengths.
        found: How many there are.
    """

    tokens: Any
    size: Any
    matches: Any
    found: Any


class Corpora(NamedTuple):
    """What a draft may be copied from: the sequence, passages, and the datastore's candidates.

    Attributes:
        tokens: Three of int32 [>= size].
        sizes: Tokens of each; at least one in the sequence.
        prompt: How many of the sequence's are the prompt's.
    """

    tokens: Any
    sizes: Any
    prompt: Any


class Estimator(NamedTuple):
    """What probabilities are estimated by.

    Attributes:
        keys: int64 [sets, ways], of the successor table; no sets: there is no table.
        entries: int32 [sets * ways, ENTRY_COLUMNS].
        prior: int32 [tokens, BEST], by token id its next tokens; see `successors`.
        scoring: float64 [VOTES + lengths], see `Scoring`.
        counts: float64 [3, CELLS]; the RATES correct the estimate of a candidate by its cell.
    """

    keys: Any
    entries: Any
    prior: Any
    scoring: Any
    counts: Any


class Node(NamedTuple):
    """A node whose children are wanted.

    Attributes:
        depth: 0: the root.
        start: First index of its members in `ints[ORDER]`.
        stop: One past the last index of its members in `ints[ORDER]`.
        before: The token before `token`; negative: none.
        token: The node's token.
    """

    depth: Any
    start: Any
    stop: Any
    before: Any
    token: Any


class Limits(NamedTuple):
    """Bounds of a tree.

    Attributes:
        max_nodes: Most nodes, at least 1.
        max_depth: Longest path, in tokens.
        floor: Least path probability of a node.
    """

    max_nodes: Any
    max_depth: Any
    floor: Any


class Proposed(NamedTuple):
    """What sources from outside propose behind the sequence; column 0 is the root, column n + 1 their node n.

    Attributes:
        links: int32 [3, size + 1], by column its token (0 for the root), its first child and its next sibling; 0: none.
        chances: float64 [size + 1], probabilities, given the parent, corrected by `kernels.proposals.correct`.
        counts: float64 [3, JOINT_CELLS], which correct what search and proposal say together.
        size: Nodes; 0: nothing is proposed.
    """

    links: Any
    chances: Any
    counts: Any
    size: Any


class RowArrays(NamedTuple):
    """The drafting states of the requests in the rows of a batch (`kernels.rows`).

    Attributes:
        states: int64 [states, COLUMNS].
        matches: int32 [states, 2, 2, limit], in the request's tokens and in outputs of ended requests: positions and
            match lengths.
        chains: int32 [states, longest], the chain drafted last.
        chances: float64 [states, longest], the probability of each of its tokens, given those before.
        recent: float64 [states, 2], hits and expected hits of the last steps, fading.
    """

    states: Any
    matches: Any
    chains: Any
    chances: Any
    recent: Any


class RowCandidates(NamedTuple):
    """What the datastore holds behind the matches of each row's end.

    Attributes:
        tokens: int32 [n, tokens], each text ended by a negative token.
        matches: int32 [n, 2, most], positions in `tokens`, and match lengths.
        counts: int64 [n], matches of each row.
    """

    tokens: Any
    matches: Any
    counts: Any


class Chain(NamedTuple):
    """A chain as it is drafted; overwritten.

    Attributes:
        tokens: int32 [longest].
        chances: float64 [longest], the probability of each token, given those before.
        paths: float64 [longest], the probability of the chain up to each token.
    """

    tokens: Any
    chances: Any
    paths: Any
