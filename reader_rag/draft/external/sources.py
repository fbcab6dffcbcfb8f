"""The draft sources of one request from outside: asked where they pay, corrected, and joined with search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reader_rag.draft.checked_source import CheckedSource, given_parent, merge
from reader_rag.draft.external.state import ExternalState, SourceState
from reader_rag.draft.external.together import Answered, Asking, Drafting
from reader_rag.draft.kernels import proposals as kernels
from reader_rag.draft.kernels.arrays import Proposed
from reader_rag.draft.kernels.pool import rank
from reader_rag.draft.source import Budget, RequestState, Verified
from reader_rag.draft.tree import DraftTree

Float64 = NDArray[np.float64]


@dataclass
class SourceCounts:
    """How often a source was asked in a request, and how its tokens fared.

    Attributes:
        asked: Steps in which it was asked.
        skipped: Steps in which it was not, since its tokens were not expected to pay for its time.
        proposed: Nodes that it proposed.
        accepted: Of these, nodes whose tokens were emitted, whether search proposed them too or not.
    """

    asked: int = 0
    skipped: int = 0
    proposed: int = 0
    accepted: int = 0


@dataclass
class _Asked:
    """A source that was asked in this step.

    Attributes:
        source: The source, by its index.
        own: What it proposed.
        chances: float64 [nodes], the probabilities of `own`, given the parents, as it said.
        before: The part of the draft without it that would have been verified.
        after: The same with it.
        expected: Expected accepted tokens of `before`.
        longer: Tokens that are emitted in the time that a pass over `after` takes longer than one over `before`.
    """

    source: int
    own: DraftTree
    chances: Float64
    before: DraftTree
    after: DraftTree
    expected: float
    longer: float


class ExternalSources:
    """The sources of one request.

    Each source that pays is asked, and the draft grown again with what it proposes, corrected by what it proposed
    before. What it added is counted once the target's tokens are known.

    Args:
        sources: The sources.
        state: What is known of them.
        gated: Whether they are asked only where they pay.
        learns: Whether what they say is corrected, and the corrections are learned.

    Attributes:
        counts: By source, in their order.
    """

    def __init__(
        self, sources: Sequence[CheckedSource], state: ExternalState, *, gated: bool = True, learns: bool = True
    ) -> None:
        self._sources = tuple(sources)
        self._state = state
        self._expected = 0.0
        self._before: float | None = None  # `_expected` in the step before; None: there was none
        self._gated = gated
        self._learns = learns
        self._asked: list[_Asked] = []
        self._paused = [True] * len(self._sources)
        self._counted = learns
        self._emitted = 0
        self.counts = [SourceCounts() for _ in self._sources]

    def __bool__(self) -> bool:
        return bool(self._sources)

    @property
    def active(self) -> bool:
        """Whether any source is not switched off."""
        return any(source.active for source in self._sources)

    @property
    def needs_hidden_states(self) -> bool:
        """Whether any source that is not switched off needs the target's hidden states."""
        return any(source.active and source.needs_hidden_states for source in self._sources)

    @property
    def counts_by_name(self) -> dict[str, SourceCounts]:
        """The counts of each source."""
        return {source.name: counts for source, counts in zip(self._sources, self.counts, strict=True)}

    def drafting(
        self,
        tree: DraftTree,
        state: RequestState,
        budget: Budget,
        join: Callable[[Proposed], DraftTree],
        times: Float64 | None = None,
    ) -> Drafting:
        """Make the draft with what the sources add to it; sources that are asked are yielded.

        Args:
            tree: The draft of search alone.
            state: The request.
            budget: Most nodes, and most tokens on a path.
            join: Grows the draft of search and what is proposed.
            times: float64 [most rows], seconds of passes of 1, 2, ... rows, the root included; None: the whole tree is
                verified, and its size does not matter.
        """
        self._asked, self._counted = [], self._learns
        proposals = DraftTree.empty()
        head = _paying(tree, times)
        self._expected = head.expected_accepted
        for number, source in enumerate(self._sources):
            known = self._state.of(source.name)
            expected = head.expected_accepted
            if not source.active:
                continue
            if self._gated and not self._pays(source, known, expected):
                self.counts[number].skipped += 1
                self._paused[number] = True
                continue
            own, before = self._counted_answer(number, known, (yield Asking(source, state, budget))), head
            chances = given_parent(own)
            if len(own):
                proposals = merge(proposals, self._corrected(own, chances, known), budget)
                tree = join(self._linked(proposals))
                head = _paying(tree, times)
            longer = 0.0 if times is None else float(times[len(head)] - times[len(before)])
            longer *= self._state.pace.rate(self._expected) or 0.0
            self._asked.append(_Asked(number, own, chances, before, head, expected, longer))
        return tree

    def skip(self) -> None:
        """Learn no corrections from this step: what is verified does not show what the target prefers."""
        self._counted = False

    def observe(self, verified: Verified) -> None:
        """Count what was proposed, and hand all sources what the target emitted.

        Args:
            verified: The emitted tokens.
        """
        emitted = np.array(verified.tokens, np.int32)
        self._emitted = len(emitted)
        for asked in self._asked:
            known, own = self._state.of(self._sources[asked.source].name), asked.own
            scratch = known.counts if self._counted else np.zeros_like(known.counts)
            hits = kernels.observe(own.tokens, own.parents, asked.chances, emitted, scratch)
            self.counts[asked.source].accepted += hits
            gain = _walked(asked.after, emitted) - _walked(asked.before, emitted)
            known.payoff.observe(asked.expected, gain - asked.longer)
        self._asked = []
        for source in self._sources:
            source.observe(verified)

    def spent(self, seconds: float, sequences: int = 1) -> None:
        """Count the time of the step that was observed last.

        Args:
            seconds: All of it, with the time of the sources.
            sequences: Sequences that it extended: all of them wait while a source of one is asked.
        """
        if self._emitted:
            self._state.pace.observe(self._before, self._emitted * sequences, seconds)
        self._before = self._expected
        self._emitted = 0
        for source in self._sources:
            self._state.of(source.name).payoff.spent(seconds)

    def forget(self) -> None:
        """End the sources: the request has ended."""
        for source in self._sources:
            source.forget()

    def _pays(self, source: CheckedSource, known: SourceState, expected: float) -> bool:
        """Whether to ask a source beside a draft that is expected to gain so many tokens."""
        declared, rate = source.declared_seconds, self._state.pace.rate(self._expected)
        seconds = known.time.seconds if declared is None else declared
        if seconds is None or rate is None:
            return True
        return known.payoff.asks(expected, seconds * rate, seconds)

    def _counted_answer(self, number: int, known: SourceState, answer: Answered) -> DraftTree:
        """What a source proposed, once its time and its nodes are counted."""
        source, counts = self._sources[number], self.counts[number]
        if source.active:
            known.time.observe(answer.seconds, steady=not self._paused[number])
        self._paused[number] = False
        counts.asked += 1
        counts.proposed += len(answer.tree)
        return answer.tree

    def _corrected(self, own: DraftTree, chances: Float64, known: SourceState) -> DraftTree:
        """A proposal with corrected probabilities, in its own order."""
        corrected = chances.copy()
        if self._learns:
            kernels.correct(own.depths, chances, known.counts, corrected)
        paths = np.ones(len(own) + 1)  # the last one is the root's
        for node, parent in enumerate(own.parents.tolist()):
            paths[node] = paths[parent] * corrected[node]
        return DraftTree(own.fields, paths[:-1])

    def _linked(self, proposals: DraftTree) -> Proposed:
        size = len(proposals)
        links = np.zeros((kernels.LINK_ROWS, size + 1), np.int32)
        kernels.link(proposals.tokens, proposals.parents, links)
        chances = np.concatenate([np.ones(1), given_parent(proposals)])
        return Proposed(links, chances, self._state.joint, size)


def _paying(tree: DraftTree, times: Float64 | None) -> DraftTree:
    """The part of a draft whose verification pays, in a pass over this sequence alone."""
    if times is None or not len(tree):
        return tree
    ratios, owners = np.ones(1), np.empty(len(tree), np.int32)
    size, _ = rank(tree.probabilities, tree.depths, np.array([len(tree)]), ratios, False, times, 0.0, owners)
    return tree.head(size)


def _walked(tree: DraftTree, emitted: NDArray[np.int32]) -> int:
    return int(kernels.walk(tree.tokens, tree.parents, emitted))
