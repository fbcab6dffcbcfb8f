"""Sources from outside: their proposals are checked, turned into draft trees, and merged with others."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from reader_rag.draft.kernels.workspace import DEPTH, PARENT, TOKEN
from reader_rag.draft.source import Budget, DraftSource, Proposal, RequestState, SourceGroup, Verified
from reader_rag.draft.tree import EXTERNAL, DraftTree
from reader_rag.errors import ReaderWarning
from reader_rag.util.one_line import first_line

_Result = TypeVar("_Result")


def check_proposal(proposal: Proposal | DraftTree, budget: Budget, vocabulary: int) -> DraftTree:
    """Check what a source proposed and turn it into a draft tree.

    Equal tokens under one parent become one node. Nodes deeper than the budget are dropped.

    Args:
        proposal: What the source returned; of a tree, origins are ignored.
        budget: What it was allowed.
        vocabulary: Number of token ids of the model.

    Raises:
        TypeError: It is no proposal.
        ValueError: Its arrays do not fit together, it has more nodes than the budget, a token id outside the
            vocabulary, a parent that does not come before its child, or a log-probability that is not finite or above
            0. The message names the node.
    """
    if isinstance(proposal, DraftTree):
        proposal = Proposal(proposal.tokens, proposal.parents, np.log(given_parent(proposal)))
    if not isinstance(proposal, Proposal):
        raise TypeError(f"propose must return a Proposal, not {type(proposal).__name__}")
    tokens, parents = _integers("tokens", proposal.tokens), _integers("parents", proposal.parents)
    logprobs = np.asarray(proposal.logprobs, np.float64)
    if not len(tokens) == len(parents) == logprobs.size or logprobs.ndim != 1:
        raise ValueError(
            f"a proposal has {len(tokens)} tokens, {len(parents)} parents and logprobs of shape {logprobs.shape}"
        )
    if len(tokens) > budget.max_nodes:
        raise ValueError(f"a proposal has {len(tokens)} nodes, and the budget is {budget.max_nodes}")
    nodes = np.arange(len(tokens))
    for wrong, values, reason in (
        ((tokens < 0) | (tokens >= vocabulary), tokens, f"is no token id: the vocabulary is 0..{vocabulary - 1}"),
        (
            (parents < -1) | (parents >= nodes),
            parents,
            "is no parent: it must come before its child, or be -1",
        ),
        (~np.isfinite(logprobs) | (logprobs > 0.0), logprobs, "is no log-probability: it must be finite and at most 0"),
    ):
        if wrong.any():
            node = int(np.argmax(wrong))
            raise ValueError(f"a proposal's node {node}: {values[node]} {reason}")
    fields = DraftTree.of(tokens, parents, 0, logprobs, EXTERNAL, -1).fields
    return _combine(fields, parents, np.exp(logprobs), budget)


def merge(first: DraftTree, second: DraftTree, budget: Budget) -> DraftTree:
    """Merge two trees: equal paths become one node, the best nodes stay.

    A node of both is as probable, given its parent, as the surer of the two says, and keeps the origin that `first`
    gives it. Where children of one parent then add up to more than 1, all of them are scaled down.

    Args:
        first: A tree.
        second: Another one, of the same sequence.
        budget: Most nodes, and most tokens on a path.
    """
    if not len(second):
        return first
    fields = np.concatenate([first.fields, second.fields], axis=1)
    parents = np.concatenate([first.parents, second.parents + len(first) * (second.parents >= 0)])
    return _combine(fields, parents, np.concatenate([given_parent(first), given_parent(second)]), budget)


def given_parent(tree: DraftTree) -> NDArray[np.float64]:
    """The probability of each node, given its parent.

    Args:
        tree: A tree, or one whose nodes are in any order with parents before their children.

    Returns:
        float64 [nodes].
    """
    above = np.append(tree.probabilities, 1.0)[tree.parents]
    chances: NDArray[np.float64] = tree.probabilities / above
    return chances


class CheckedSource:
    """A source from outside, for one request. An error or an invalid proposal switches it off, with one warning.

    Args:
        source: The source.
        vocabulary: Number of token ids of the model.

    Attributes:
        active: Whether it is not switched off.
        name: Its `name`, or else that of its class.
        needs_hidden_states: Whether it gets the target's hidden states.
        source: As given.
        group: Its `group`; None: it is asked alone.
    """

    def __init__(self, source: DraftSource, vocabulary: int) -> None:
        self.active = True
        self.name = str(getattr(source, "name", "") or type(source).__name__)
        self.needs_hidden_states = bool(getattr(source, "needs_hidden_states", False))
        self.source = source
        self.group: SourceGroup | None = getattr(source, "group", None)
        self._vocabulary = vocabulary

    def propose(self, state: RequestState, budget: Budget) -> DraftTree:
        """The source's proposal as a tree; empty where it failed or is switched off.

        Args:
            state: The request.
            budget: Most nodes, and most tokens on a path.
        """
        return self.checked(lambda: self.source.propose(state, budget), budget)

    def checked(self, propose: Callable[[], Proposal | DraftTree], budget: Budget) -> DraftTree:
        """A proposal as a tree; empty where it failed or the source is switched off.

        Args:
            propose: Makes it.
            budget: Most nodes, and most tokens on a path.
        """
        tree = self._guarded(lambda: check_proposal(propose(), budget, self._vocabulary))
        return DraftTree.empty() if tree is None else tree

    def timed_proposal(self, state: RequestState, budget: Budget) -> tuple[DraftTree, float]:
        """As `propose`, and the seconds that it took.

        Args:
            state: The request.
            budget: Most nodes, and most tokens on a path.
        """
        started = time.perf_counter()
        tree = self.propose(state, budget)
        return tree, time.perf_counter() - started

    @property
    def declared_seconds(self) -> float | None:
        """Its `proposal_seconds`; None: it declares none."""
        return self._guarded(lambda: _declared(getattr(self.source, "proposal_seconds", None)))

    def observe(self, verified: Verified) -> None:
        """Hand it what the target emitted.

        Args:
            verified: The emitted tokens; hidden states are left out for a source that needs none.
        """
        known = verified if self.needs_hidden_states else replace(verified, hidden_states=None)
        self._guarded(lambda: self.source.observe(known))

    def forget(self) -> None:
        """Tell it that the request has ended, also where it was switched off."""
        self.active = True
        self._guarded(self.source.forget)
        self.active = False

    def _guarded(self, call: Callable[[], _Result]) -> _Result | None:
        if not self.active:
            return None
        try:
            return call()
        except Exception as error:
            self.active = False
            warnings.warn(
                f"the draft source {self.name} is switched off for this request: {first_line(error)}",
                ReaderWarning,
                stacklevel=2,
            )
            return None


def _declared(seconds: object) -> float | None:
    if seconds is None:
        return None
    if not isinstance(seconds, (int, float)) or not (math.isfinite(seconds) and seconds >= 0.0):
        raise ValueError(f"proposal_seconds must be None or a number of seconds from 0 on, not {seconds!r}")
    return float(seconds)


def _integers(name: str, values: object) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"a proposal's {name} must be a flat list of integers, not {array.dtype} {array.shape}")
    return array.astype(np.int64)


def _combine(
    fields: NDArray[np.int32], parents: NDArray[np.integer], chances: NDArray[np.float64], budget: Budget
) -> DraftTree:
    """A draft tree of nodes in any order that has parents before their children.

    Args:
        fields: int32 [TREE_FIELDS, nodes]; parents and depths in it are not read.
        parents: int [nodes], -1: the root.
        chances: float64 [nodes], the probability of each node, given its parent.
        budget: Most nodes, and most tokens on a path.
    """
    known: dict[tuple[int, int], int] = {}
    merged = [-1] * (len(parents) + 1)  # the last one is the root's
    nodes: list[int] = []
    for node, (parent, token) in enumerate(zip(parents.tolist(), fields[TOKEN].tolist(), strict=True)):
        merged[node] = known.setdefault((merged[parent], token), len(nodes))
        if merged[node] == len(nodes):
            nodes.append(node)
        else:
            same = nodes[merged[node]]
            chances[same] = max(chances[same], chances[node])
    above = np.array([merged[parent] for parent in parents[nodes]], np.int64)
    chance = chances[nodes]
    chance /= np.maximum(np.bincount(above + 1, chance, len(nodes) + 1), 1.0)[above + 1]
    paths, depths = np.ones(len(nodes) + 1), np.zeros(len(nodes) + 1, np.int64)  # the last ones are the root's
    for node, parent in enumerate(above.tolist()):
        paths[node], depths[node] = paths[parent] * chance[node], depths[parent] + 1
    paths, depths = paths[:-1], depths[:-1]
    # Stable: of equally probable nodes, parents stay before their children.
    order = np.argsort(-paths, kind="stable")
    order = order[(depths[order] <= budget.max_depth) & (paths[order] > 0.0)][: budget.max_nodes]
    place = np.full(len(nodes) + 1, -1, np.int32)
    place[order] = np.arange(len(order))
    chosen = fields[:, np.array(nodes, np.int64)[order]]
    chosen[PARENT], chosen[DEPTH] = place[above[order]], depths[order]
    return DraftTree(chosen, paths[order])
