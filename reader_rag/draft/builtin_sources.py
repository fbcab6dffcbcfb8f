"""BuiltinSource: context copies, passages, successors, profile and datastore behind the `DraftSource` protocol.

They are one source, not five whose trees are merged: `TreeBuilder` grows the tree of all of them in one compiled call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from reader_rag.draft.context_index import ContextIndex
from reader_rag.draft.kernels.arrays import Proposed
from reader_rag.draft.source import Budget, RequestState, Verified
from reader_rag.draft.successor_table import SuccessorTable
from reader_rag.draft.tree import DraftTree
from reader_rag.draft.tree_builder import NO_CANDIDATES, DatastoreCandidates, TreeBuilder


class Lookup(Protocol):
    """A datastore as one request searches it."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Follow tokens of the request.

        Args:
            tokens: Those after the ones followed so far.
        """

    def look_up(self) -> DatastoreCandidates:
        """What the datastore holds behind positions like the request's end."""


class BuiltinSource:
    """Proposes from the parts that it is given; a part that is missing proposes nothing.

    Args:
        builder: Grows the trees; has the successor table, with the profile as its prior.
        index: Prompt, output and passages.
        successors: The builder's successor table, if this source updates it; None: it does not update the table.
        lookup: The datastore, which follows the index's sequence so far; None: there is none.
        before_token: Called with the place of each emitted token in its step and the token, before the index follows
            it: where a token was copied from is known from the matches up to it. None: nothing is called.
        joint: Grows the trees of search and proposals from outside, with the same table and calibration as `builder`;
            None: nothing is proposed from outside.

    Attributes:
        index: As given; it follows the emitted tokens.
    """

    needs_hidden_states = False

    def __init__(
        self,
        builder: TreeBuilder,
        index: ContextIndex,
        successors: SuccessorTable | None = None,
        lookup: Lookup | None = None,
        before_token: Callable[[int, int], None] | None = None,
        joint: TreeBuilder | None = None,
    ) -> None:
        self.index = index
        self._builder = builder
        self._joint = joint
        self._candidates = NO_CANDIDATES
        self._joined = False
        self._successors = successors
        self._lookup = lookup
        self._before_token = before_token

    @property
    def acceptance_ratio(self) -> float:
        """Accepted over expected tokens of the last drafts of this kind; see `TreeBuilder.acceptance_ratio`."""
        builder = self._joint if self._joined and self._joint is not None else self._builder
        return builder.acceptance_ratio

    def propose(self, state: RequestState, budget: Budget) -> DraftTree:
        """The best tree of all parts; see `DraftSource.propose`."""
        self._joined = False
        self._candidates = NO_CANDIDATES if self._lookup is None else self._lookup.look_up()
        tree = self._builder.build(self.index, candidates=self._candidates, max_depth=budget.max_depth)
        return tree.head(budget.max_nodes)

    def join(self, proposed: Proposed, budget: Budget) -> DraftTree:
        """The best tree of all parts and of what sources from outside propose, behind the last `propose`.

        `observe` then counts both trees: what search alone estimates is corrected as if nothing had been proposed.

        Args:
            proposed: At least one node, and at most as many as the joint builder has room for.
            budget: Most nodes, and most tokens on a path.
        """
        assert self._joint is not None
        self._joined = True
        tree = self._joint.build(self.index, candidates=self._candidates, proposed=proposed, max_depth=budget.max_depth)
        return tree.head(budget.max_nodes)

    def skip(self) -> None:
        """Count no acceptance for the last tree: another one, or none, is verified."""
        self._builder.skip()
        if self._joint is not None:
            self._joint.skip()

    def observe(self, verified: Verified) -> None:
        """Follow the emitted tokens, count which nodes were accepted, learn successors; see `DraftSource.observe`."""
        self._builder.observe(verified.tokens)
        if self._joined and self._joint is not None:
            self._joint.observe(verified.tokens)
        root = len(self.index) - 1
        if self._before_token is None:
            self._follow(verified.tokens)
        else:
            for place, token in enumerate(verified.tokens):
                self._before_token(place, token)
                self._follow((token,))
        if self._successors is not None and verified.best is not None:
            self._successors.learn_text(self.index.sequence, root, verified.best)

    def drop_lookup(self) -> None:
        """Propose without the datastore from now on."""
        self._lookup = None

    def forget(self) -> None:
        """Nothing is kept of a request but what the table and the calibration learned."""
        self.drop_lookup()

    def _follow(self, tokens: Sequence[int]) -> None:
        self.index.extend(tokens)
        if self._lookup is not None:
            self._lookup.extend(tokens)
