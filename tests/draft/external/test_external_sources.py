"""What sources from outside propose: joined with search, corrected by what came of it, asked for where it pays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from reader_rag.draft import Calibration, ContextIndex, DraftTree, SuccessorTable, TreeBuilder
from reader_rag.draft.builtin_sources import BuiltinSource
from reader_rag.draft.checked_source import CheckedSource
from reader_rag.draft.external.sources import ExternalSources
from reader_rag.draft.external.state import ExternalState
from reader_rag.draft.external.together import draft_alone
from reader_rag.draft.source import Budget, Proposal, RequestState, Verified
from reader_rag.draft.tree import EXTERNAL, SUCCESSOR
from reader_rag.errors import ReaderWarning

BUDGET = Budget(max_nodes=16, max_depth=8)
COPY = (1, 2, 3, 4, 5, 1, 2)
"""3 4 5 1 2 follows."""


class Chain:
    """Proposes one path at a time, as sure as it is told."""

    needs_hidden_states = False

    def __init__(self, tokens: Sequence[int], probability: float = 0.9, seconds: float | None = 0.0) -> None:
        self.tokens = list(tokens)
        self.probability = probability
        self.proposal_seconds = seconds
        self.asked = self.observed = 0

    def propose(self, state: RequestState, budget: Budget) -> Proposal:
        self.asked += 1
        return Proposal.chain(self.tokens[: budget.max_depth], self.probability)

    def observe(self, verified: Verified) -> None:
        self.observed += 1

    def forget(self) -> None: ...


class Drafting:
    """Search and sources of one request."""

    def __init__(
        self,
        text: Sequence[int],
        *sources: Chain,
        state: ExternalState | None = None,
        gated: bool = False,
        learns: bool = True,
        table: SuccessorTable | None = None,
    ) -> None:
        calibration = Calibration.blank(learns=learns)
        builder = TreeBuilder(max_nodes=16, successors=table, calibration=calibration)
        self.known = state or ExternalState()
        self.search = BuiltinSource(builder, ContextIndex(text), joint=builder.joint(16))
        checked = [CheckedSource(source, vocabulary=100) for source in sources]
        self.external = ExternalSources(checked, self.known, gated=gated, learns=learns)
        self.prompt = len(text)

    def propose(self, times: np.ndarray | None = None) -> DraftTree:
        state = RequestState(self.search.index.sequence, self.prompt)
        tree = self.search.propose(state, BUDGET)
        drafted = draft_alone(
            self.external.drafting(tree, state, BUDGET, lambda new: self.search.join(new, BUDGET), times)
        )
        drafted.check()
        return drafted

    def observe(self, *emitted: int, seconds: float = 1.0) -> None:
        verified = Verified(emitted, len(emitted) - 1)
        self.search.observe(verified)
        self.external.observe(verified)
        self.external.spent(seconds)


def paths(tree: DraftTree) -> dict[tuple[int, ...], tuple[int, float]]:
    """By path, the source of its last node, and its probability."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return dict(zip(found, zip(tree.sources.tolist(), tree.probabilities.tolist(), strict=True), strict=True))


class TestJoining:
    def test_an_equal_token_is_one_node_that_is_surer_and_keeps_where_it_was_copied_from(self) -> None:
        alone = paths(Drafting(COPY).propose())
        tree = paths(Drafting(COPY, Chain([3, 9], 0.5)).propose())
        assert tree[3,][0] == 0
        copied = alone[3,][1]
        assert tree[3,][1] == pytest.approx(copied + 0.5 - 0.5 * copied)
        assert tree[3, 9][0] == EXTERNAL
        assert tree[3, 4][0] == 0  # the copy goes on below it

    def test_what_one_of_them_lacks_is_less_sure(self) -> None:
        alone = paths(Drafting(COPY).propose())
        tree = paths(Drafting(COPY, Chain([9], 0.8)).propose())
        copied = alone[3,][1]
        assert tree[3,][1] == pytest.approx(copied * (1 - 0.8 / 2))
        assert tree[9,] == (EXTERNAL, pytest.approx(0.8 * (1 - copied / 2)))

    def test_successors_go_on_below_a_proposed_token(self) -> None:
        table = SuccessorTable(64)
        table.learn([-1], [9], [[7, -1, -1, -1, -1, -1, -1, -1]])
        tree = paths(Drafting([1, 2], Chain([9], 0.9), table=table).propose())
        assert tree[9, 7][0] == SUCCESSOR

    def test_proposed_nodes_have_no_position(self) -> None:
        tree = Drafting([1, 2], Chain([8, 9])).propose()
        assert tree.tokens.tolist() == [8, 9]
        assert tree.positions.tolist() == [-1, -1]
        assert tree.match_lengths.tolist() == [0, 0]

    def test_an_empty_proposal_leaves_the_tree_as_it_is(self) -> None:
        alone = Drafting(COPY).propose()
        tree = Drafting(COPY, Chain([])).propose()
        assert np.array_equal(tree.fields, alone.fields)
        assert np.array_equal(tree.probabilities, alone.probabilities)

    def test_the_best_nodes_within_the_limit_stay(self) -> None:
        builder = TreeBuilder(max_nodes=3, calibration=Calibration.blank())
        search = BuiltinSource(builder, ContextIndex(COPY), joint=builder.joint(3))
        external = ExternalSources([CheckedSource(Chain([9, 8, 7], 0.95), 100)], ExternalState(), gated=False)
        state, budget = RequestState(search.index.sequence, 7), Budget(3, 8)
        tree = draft_alone(
            external.drafting(search.propose(state, budget), state, budget, lambda new: search.join(new, budget))
        )
        tree.check()
        assert tree.tokens.tolist() == [9, 8, 7]

    def test_two_sources_are_merged(self) -> None:
        tree = paths(Drafting([1, 2], Chain([8], 0.3), Chain([8, 9], 0.5)).propose())
        assert tree[8,][1] == pytest.approx(0.5)
        assert tree[8, 9][1] == pytest.approx(0.25)

    def test_more_nodes_than_there_is_room_for_are_refused(self) -> None:
        drafting = Drafting([1, 2], Chain([3, 4, 5]))
        builder = TreeBuilder(max_proposed=2)
        proposed = drafting.external._linked(DraftTree.from_chain([3, 4, 5]))
        with pytest.raises(ValueError, match="3 proposed nodes, and the builder has room for 2"):
            builder.build(ContextIndex([1, 2]), proposed=proposed)


class TestCorrecting:
    def test_a_source_that_is_never_right_is_believed_less_and_less(self) -> None:
        drafting, chances = Drafting([1, 2], Chain([99], 0.9)), []
        for token in range(10, 30):
            chances.append(paths(drafting.propose())[99,][1])
            drafting.observe(token)
        assert chances == sorted(chances, reverse=True)
        assert chances[0] == pytest.approx(0.9)
        assert chances[-1] < 0.15

    def test_one_that_is_always_right_is_believed(self) -> None:
        source = Chain([], 0.4)
        drafting = Drafting([1, 2], source)
        for token in range(10, 40):
            source.tokens = [token]
            chance = paths(drafting.propose())[token,][1]
            drafting.observe(token)
        assert chance > 0.8

    def test_depths_are_corrected_apart(self) -> None:
        source = Chain([], 0.6)
        drafting = Drafting([1, 2], source)
        for token in range(10, 50):  # right at depth 1, wrong below
            source.tokens = [token, 99]
            tree = paths(drafting.propose())
            drafting.observe(token, 5)
        assert tree[token,][1] > 0.8
        assert tree[token, 99][1] / tree[token,][1] < 0.2

    def test_what_search_says_is_corrected_as_if_nothing_had_been_proposed(self) -> None:
        alone, beside = Drafting(COPY), Drafting(COPY, Chain([3, 9]))
        for drafting in (alone, beside):
            for emitted in ((3, 4), (5, 1), (7,)):
                drafting.propose()
                drafting.observe(*emitted)
        counts = [drafting.search._builder.calibration.counts for drafting in (alone, beside)]
        assert np.array_equal(*counts)
        assert alone.search.acceptance_ratio == beside.search._builder.acceptance_ratio

    def test_without_calibration_nothing_is_learned(self) -> None:
        drafting = Drafting([1, 2], Chain([99], 0.9), learns=False)
        for token in range(10, 20):
            assert paths(drafting.propose())[99,][1] == pytest.approx(0.9)
            drafting.observe(token)

    def test_a_step_whose_draft_a_grammar_shaped_corrects_nothing(self) -> None:
        drafting = Drafting([1, 2], Chain([99], 0.9))
        for token in range(10, 20):
            assert paths(drafting.propose())[99,][1] == pytest.approx(0.9)
            drafting.search.skip()
            drafting.external.skip()
            drafting.observe(token)


class TestAsking:
    def test_a_source_that_never_pays_is_hardly_asked_after_the_warm_up(self) -> None:
        state, source = ExternalState(), Chain([99], seconds=0.5)
        for request in range(10):
            drafting = Drafting([1, 2], source, state=state, gated=True)
            for token in range(10, 60):
                drafting.propose()
                drafting.observe(token)
            counts = drafting.external.counts_by_name["Chain"]
            assert counts.asked + counts.skipped == 50
            if request:
                assert counts.asked <= 1
        assert source.observed == 500  # it follows the answer all the same

    def test_one_that_pays_is_asked_in_every_step(self) -> None:
        source = Chain([], seconds=0.5)
        drafting = Drafting([1, 2], source, gated=True)
        for token in range(10, 90, 4):
            source.tokens = [token, token + 1, token + 2]
            drafting.propose()
            drafting.observe(token, token + 1, token + 2, token + 3, seconds=1.5)
        counts = drafting.external.counts[0]
        assert (counts.asked, counts.skipped) == (20, 0)
        assert (counts.proposed, counts.accepted) == (60, 60)

    def test_inside_a_copy_it_is_not_asked_and_elsewhere_it_is(self) -> None:
        source = Chain([], seconds=0.3)
        state = ExternalState()
        copied = [*range(10, 60)]
        asked = {"copy": 0, "new": 0}
        for _ in range(12):
            drafting = Drafting([*copied, 1, *copied[:10]], source, state=state, gated=True)
            for place in range(10, 40, 10):  # search is as right as the source
                source.tokens = copied[place : place + 5]
                before = source.asked
                drafting.propose()
                asked["copy"] += source.asked - before
                drafting.observe(*copied[place : place + 10])
            drafting = Drafting([1, 2], source, state=state, gated=True)
            for token in range(61, 91, 6):
                source.tokens = list(range(token, token + 5))
                before = source.asked
                drafting.propose()
                asked["new"] += source.asked - before
                drafting.observe(*range(token, token + 6))
        assert asked["new"] > 55
        assert asked["copy"] < 18

    def test_without_the_gate_it_is_asked_in_every_step(self) -> None:
        source = Chain([99], seconds=100.0)
        drafting = Drafting([1, 2], source)
        for token in range(10, 40):
            drafting.propose()
            drafting.observe(token)
        assert source.asked == 30

    def test_nodes_that_do_not_pay_for_their_verification_add_nothing(self) -> None:
        # Each row of a pass takes a tenth of a step. The source adds one token in two.
        times = 1.0 + 0.1 * np.arange(32)
        source = Chain([], 0.5, seconds=0.0)
        drafting = Drafting([1, 2], source, gated=True)
        for token in range(10, 50):
            source.tokens = [token if token % 2 else 99]
            drafting.propose(times)
            drafting.observe(*((token, 5) if token % 2 else (token,)))
        gain = drafting.known.of("Chain").payoff.estimate(0.0)
        assert 0.25 < gain < 0.45  # half a token, less what the row takes

    def test_a_time_that_is_none_switches_the_source_off(self) -> None:
        drafting = Drafting([1, 2], Chain([9], seconds=-1.0), gated=True)
        with pytest.warns(ReaderWarning, match="proposal_seconds must be None or a number of seconds from 0 on"):
            drafting.propose()
        assert not drafting.external.active

    def test_calls_are_timed_where_a_source_does_not_say(self) -> None:
        drafting = Drafting([1, 2], Chain([9], seconds=None))
        drafting.propose()
        seconds = drafting.known.of("Chain").time.seconds
        assert seconds is not None
        assert seconds > 0.0
