"""Sources from outside: what they propose is checked, merged with other drafts, and never trusted."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reader_rag.draft import ContextIndex, DraftTree, SuccessorTable, TreeBuilder
from reader_rag.draft.builtin_sources import BuiltinSource
from reader_rag.draft.checked_source import CheckedSource, check_proposal, merge
from reader_rag.draft.source import Budget, DraftSource, Proposal, RequestState, Verified
from reader_rag.draft.tree import EXTERNAL, SOURCES
from reader_rag.errors import ReaderWarning

BUDGET = Budget(max_nodes=8, max_depth=4)
STATE = RequestState(np.array([1, 2, 3], np.int32), prompt_length=2)


def proposal(tokens: Any, parents: Any, probabilities: Any) -> Proposal:
    return Proposal(tokens, parents, np.log(probabilities))


def checked(tokens: Any, parents: Any, probabilities: Any, budget: Budget = BUDGET) -> DraftTree:
    tree = check_proposal(proposal(tokens, parents, probabilities), budget, vocabulary=10)
    tree.check()
    return tree


class Toy:
    """Proposes what it was made with, and records every call."""

    needs_hidden_states = False

    def __init__(self, *proposals: Any) -> None:
        self.proposals = list(proposals)
        self.observed: list[Verified] = []
        self.forgotten = 0

    def propose(self, state: RequestState, budget: Budget) -> Proposal | DraftTree:
        following = self.proposals.pop(0)
        if isinstance(following, Exception):
            raise following
        return following  # type: ignore[no-any-return]

    def observe(self, verified: Verified) -> None:
        self.observed.append(verified)

    def forget(self) -> None:
        self.forgotten += 1


class TestCheckedProposals:
    def test_nodes_come_in_falling_path_probability(self) -> None:
        tree = checked([5, 6, 7], [-1, 0, -1], [0.3, 0.9, 0.6])
        assert tree.tokens.tolist() == [7, 5, 6]
        assert tree.parents.tolist() == [-1, -1, 1]
        assert tree.depths.tolist() == [1, 1, 2]
        assert tree.probabilities.tolist() == pytest.approx([0.6, 0.3, 0.27])
        assert tree.sources.tolist() == [EXTERNAL] * 3
        assert tree.positions.tolist() == [-1] * 3
        assert SOURCES[EXTERNAL] == "external"

    def test_equal_tokens_under_one_parent_are_one_node_as_probable_as_the_surer(self) -> None:
        tree = checked([5, 6, 5, 7], [-1, 0, -1, 2], [0.5, 0.5, 0.6, 0.25])
        assert tree.tokens.tolist() == [5, 6, 7]
        assert tree.parents.tolist() == [-1, 0, 0]
        assert tree.probabilities.tolist() == pytest.approx([0.6, 0.3, 0.15])

    def test_children_that_add_up_to_more_than_1_are_scaled_down(self) -> None:
        assert checked([5, 6], [-1, -1], [1.0, 0.6]).probabilities.tolist() == pytest.approx([0.625, 0.375])

    def test_nodes_deeper_than_the_budget_are_dropped(self) -> None:
        assert checked([1, 2, 3], [-1, 0, 1], [0.5] * 3, Budget(8, 2)).tokens.tolist() == [1, 2]

    def test_a_chain_and_an_empty_proposal(self) -> None:
        tree = check_proposal(Proposal.chain([4, 5], 0.8), BUDGET, 10)
        assert tree.tokens.tolist() == [4, 5]
        assert tree.probabilities.tolist() == pytest.approx([0.8, 0.64])
        assert len(check_proposal(Proposal.chain([]), BUDGET, 10)) == 0

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (proposal([10], [-1], [0.5]), r"node 0: 10 is no token id: the vocabulary is 0\.\.9"),
            (proposal([1, -1], [-1, 0], [0.5, 0.5]), "node 1: -1 is no token id"),
            (proposal([1, 2], [-1, 1], [0.5, 0.5]), "node 1: 1 is no parent: it must come before its child, or be -1"),
            (proposal([1], [-2], [0.5]), "node 0: -2 is no parent"),
            (proposal([1], [-1], [1.5]), "node 0: 0.4.* is no log-probability: it must be finite and at most 0"),
            (Proposal([1], [-1], [float("nan")]), "node 0: nan is no log-probability"),
            (Proposal([1], [-1], [-float("inf")]), "node 0: -inf is no log-probability"),
            (proposal([1] * 9, range(-1, 8), [0.5] * 9), "9 nodes, and the budget is 8"),
            (proposal([1, 2], [-1], [0.5]), r"2 tokens, 1 parents and logprobs of shape \(1,\)"),
            (proposal([1, 2], [-1, 0], [[0.5, 0.5]]), r"logprobs of shape \(1, 2\)"),
            (proposal([1.5], [-1], [0.5]), r"tokens must be a flat list of integers, not float64 \(1,\)"),
            (proposal([[1]], [-1], [0.5]), r"tokens must be a flat list of integers, not int64 \(1, 1\)"),
        ],
    )
    def test_what_is_wrong_is_named(self, wrong: Proposal, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            check_proposal(wrong, BUDGET, vocabulary=10)

    def test_anything_but_a_proposal_is_refused(self) -> None:
        with pytest.raises(TypeError, match="propose must return a Proposal, not list"):
            check_proposal([1, 2], BUDGET, 10)  # type: ignore[arg-type]

    def test_a_tree_is_checked_like_a_proposal_and_has_no_origins(self) -> None:
        copied = DraftTree.of([5, 6], [-1, 0], [1, 2], [0.5, 0.4], sources=0, positions=[7, 8])
        tree = check_proposal(copied, BUDGET, 10)
        assert tree.probabilities.tolist() == pytest.approx([0.5, 0.4])
        assert tree.sources.tolist() == [EXTERNAL] * 2
        assert tree.positions.tolist() == [-1, -1]
        with pytest.raises(ValueError, match="node 1: 6 is no token id"):
            check_proposal(copied, BUDGET, 6)

    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.floats(0.01, 1.0)), max_size=12))
    def test_every_valid_proposal_becomes_a_valid_tree(self, nodes: list[tuple[int, int, float]]) -> None:
        parents = [back % (node + 1) - 1 for node, (_, back, _) in enumerate(nodes)]
        tokens, chances = [token for token, _, _ in nodes], [chance for _, _, chance in nodes]
        tree = checked(tokens, parents, chances, Budget(12, 3))
        assert len(tree) <= 12
        assert tree.depths.max(initial=0) <= 3


class TestMerging:
    def test_equal_paths_are_one_node_that_keeps_the_origin_of_the_first(self) -> None:
        copied = DraftTree.of([5, 6], [-1, 0], [1, 2], [0.5, 0.4], sources=0, positions=[7, 8], match_lengths=[3, 4])
        tree = merge(copied, checked([5, 9, 3], [-1, 0, -1], [0.6, 0.1, 0.2]), BUDGET)
        tree.check()
        assert tree.tokens.tolist() == [5, 6, 3, 9]
        assert tree.parents.tolist() == [-1, 0, -1, 0]
        # 5 is as sure as the second says; 6 keeps its 0.8 below it.
        assert tree.probabilities.tolist() == pytest.approx([0.6, 0.48, 0.2, 0.06])
        assert tree.sources.tolist() == [0, 0, EXTERNAL, EXTERNAL]
        assert tree.positions.tolist() == [7, 8, -1, -1]
        assert tree.match_lengths.tolist() == [3, 4, 0, 0]

    def test_the_best_nodes_within_the_budget_stay(self) -> None:
        copied = DraftTree.from_chain([1, 2, 3], 0.5)
        tree = merge(copied, checked([4, 5], [-1, 0], [0.45, 0.9]), Budget(3, 4))
        tree.check()
        assert tree.tokens.tolist() == [1, 4, 5]

    def test_a_tree_merged_with_nothing_is_itself(self) -> None:
        tree = DraftTree.from_chain([1, 2])
        assert merge(tree, DraftTree.empty(), BUDGET) is tree
        assert merge(DraftTree.empty(), tree, BUDGET).tokens.tolist() == [1, 2]


class TestSwitchingOff:
    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (RuntimeError("no model\nat all"), "the draft source Toy is switched off for this request: no model"),
            (RuntimeError(), "switched off for this request: RuntimeError"),
            (proposal([10], [-1], [0.5]), "node 0: 10 is no token id"),
            (None, "propose must return a Proposal, not NoneType"),
        ],
    )
    def test_a_source_that_fails_is_not_asked_again_and_warns_once(self, wrong: object, message: str) -> None:
        toy = Toy(Proposal.chain([4]), wrong, Proposal.chain([5]))
        source = CheckedSource(toy, vocabulary=10)
        assert source.propose(STATE, BUDGET).tokens.tolist() == [4]
        with pytest.warns(ReaderWarning, match=message):
            assert len(source.propose(STATE, BUDGET)) == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(source.propose(STATE, BUDGET)) == 0
            source.observe(Verified((1,), 0))
            source.forget()
        assert not source.active
        assert toy.observed == []
        assert toy.forgotten == 1

    def test_an_error_in_observe_switches_it_off_too(self) -> None:
        class Broken(Toy):
            def observe(self, verified: Verified) -> None:
                raise ValueError("cannot learn")

        source = CheckedSource(Broken(Proposal.chain([4])), vocabulary=10)
        with pytest.warns(ReaderWarning, match="the draft source Broken is switched off .*: cannot learn"):
            source.observe(Verified((1,), 0))
        assert len(source.propose(STATE, BUDGET)) == 0

    def test_an_interrupt_goes_through(self) -> None:
        class Interrupted(Toy):
            def forget(self) -> None:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            CheckedSource(Interrupted(), vocabulary=10).forget()


class TestBuiltinSource:
    def test_it_proposes_what_its_builder_builds_and_follows_what_is_emitted(self) -> None:
        source: DraftSource = BuiltinSource(TreeBuilder(max_depth=3), ContextIndex([1, 2, 3, 4, 1]))
        first = source.propose(RequestState(np.array([1, 2, 3, 4, 1], np.int32), 5), Budget(64, 2))
        assert isinstance(first, DraftTree)
        assert first.tokens.tolist() == [2, 3]
        source.observe(Verified((2, 3), accepted=1))
        second = source.propose(RequestState(np.array([1, 2, 3, 4, 1, 2, 3], np.int32), 5), Budget(1, 3))
        assert isinstance(second, DraftTree)
        assert second.tokens.tolist() == [4]

    def test_it_learns_the_best_tokens_at_the_root_and_behind_each_accepted_token(self) -> None:
        table = SuccessorTable(64)
        source = BuiltinSource(TreeBuilder(successors=table), ContextIndex([1, 2]), table)
        best = np.full((2, 8), -1, np.int32)
        best[:, 0] = 7, 9
        source.observe(Verified((7, 8), accepted=1, best=best))
        assert table.after(1, 2) == [7]
        assert table.after(2, 7) == [9]
        assert table.after(7, 8) == []
