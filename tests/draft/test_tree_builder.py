"""Trees are built best first from votes and successors; the probabilities here were worked out by hand."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reader_rag.draft import Calibration, ContextIndex, DraftTree, Scoring, SuccessorTable, TreeBuilder
from reader_rag.draft.kernels import cells as kernels
from reader_rag.draft.kernels.successors import BEST, RANKS
from reader_rag.draft.tree import DATASTORE, SUCCESSOR
from reader_rag.draft.tree_builder import NO_CANDIDATES, DatastoreCandidates

LINEAR = Scoring(scale=1.0, power=1.0)
"""An occurrence whose match is L tokens long has L votes; "none of them" has one."""

near = partial(pytest.approx, abs=2e-5)
"""Ranks weigh 0.55, 0.16, 0.08, ... rounded to 1/65536."""


def build(
    index: ContextIndex,
    *,
    max_nodes: int = 64,
    max_depth: int = 40,
    min_probability: float = 0.0,
    successors: SuccessorTable | None = None,
    calibration: Calibration | None = None,
    scoring: Scoring = LINEAR,
    candidates: DatastoreCandidates = NO_CANDIDATES,
) -> DraftTree:
    builder = TreeBuilder(
        max_candidates=candidates.found,
        max_nodes=max_nodes,
        max_depth=max_depth,
        min_probability=min_probability,
        successors=successors,
        calibration=calibration or Calibration.blank(learns=False),
        scoring=scoring,
    )
    tree = builder.build(index, candidates=candidates)
    tree.check()
    return tree


def linear_builder(*, max_depth: int = 40, learns: bool = False) -> TreeBuilder:
    calibration = Calibration.blank(learns=learns)
    return TreeBuilder(max_depth=max_depth, min_probability=0.0, calibration=calibration, scoring=LINEAR)


def best(*tokens: int) -> list[int]:
    """A row of best next tokens, filled up with "no more"."""
    return [*tokens, *[-1] * (BEST - len(tokens))]


def make_prior(rows: dict[int, list[int]], size: int) -> NDArray[np.int32]:
    return np.array([best(*rows.get(token, [])) for token in range(size)], np.int32)


def same(a: DraftTree, b: DraftTree) -> bool:
    return np.array_equal(a.fields, b.fields) and np.array_equal(a.probabilities, b.probabilities)


def test_one_place_gives_a_chain_whose_nodes_become_surer_with_every_match() -> None:
    #                     0  1  2  3  4
    index = ContextIndex([1, 2, 3, 4, 1])
    tree = build(index, max_depth=3)
    assert tree.tokens.tolist() == [2, 3, 4]
    assert tree.parents.tolist() == [-1, 0, 1]
    assert tree.depths.tolist() == [1, 2, 3]
    # Votes 1, then 2, then 3, against one vote for "none of them".
    assert tree.probabilities.tolist() == pytest.approx([1 / 2, 1 / 2 * 2 / 3, 1 / 2 * 2 / 3 * 3 / 4])
    assert tree.sources.tolist() == [0, 0, 0]
    assert tree.positions.tolist() == [1, 2, 3]
    assert tree.match_lengths.tolist() == [1, 2, 3]


def test_places_that_disagree_make_branches_and_equal_tokens_are_one_node() -> None:
    #                     0  1  2  3  4  5  6  7  8  9
    index = ContextIndex([5, 1, 2, 8, 1, 2, 9, 1, 3, 1])
    # Token 1 was followed by 2 (8), by 2 (9) and by 3 (1); every match is of one token.
    tree = build(index, max_depth=2)
    assert tree.tokens.tolist() == [2, 3, 9, 8, 1]
    assert tree.parents.tolist() == [-1, -1, 0, 0, 1]
    assert tree.depths.tolist() == [1, 1, 2, 2, 2]
    # 2 of 3 + 1 votes and 1 of 3 + 1; below, every occurrence has 2: 2 of 4 + 1 twice after 2, 2 of 2 + 1 after 3.
    assert tree.probabilities.tolist() == pytest.approx([2 / 4, 1 / 4, 2 / 4 * 2 / 5, 2 / 4 * 2 / 5, 1 / 4 * 2 / 3])


def test_a_longer_match_outvotes_a_more_recent_one() -> None:
    #                     0  1  2  3  4  5  6  7  8  9
    index = ContextIndex([1, 2, 3, 4, 9, 3, 5, 1, 2, 3])
    tree = build(index, max_depth=1)
    assert tree.tokens.tolist() == [4, 5]
    assert tree.probabilities.tolist() == pytest.approx([3 / 5, 1 / 5])
    assert tree.positions.tolist() == [3, 6]
    assert tree.match_lengths.tolist() == [3, 1]


def test_context_and_passages_vote_together_and_a_node_names_its_longest_match() -> None:
    index = ContextIndex([7, 2, 4, 1, 2])
    index.add_passage("p", [9, 1, 2, 4, 6])
    tree = build(index, max_depth=2)
    # 4 follows "2" in the context (position 2) and "1 2" in the passage (position 3): 1 + 2 of 3 + 1 votes.
    assert tree.tokens.tolist() == [4, 6, 1]
    assert tree.parents.tolist() == [-1, 0, 0]
    assert tree.probabilities.tolist() == pytest.approx([3 / 4, 3 / 4 * 3 / 6, 3 / 4 * 2 / 6])
    assert tree.sources.tolist() == [1, 1, 0]
    assert tree.positions.tolist() == [3, 4, 3]
    assert tree.match_lengths.tolist() == [2, 3, 2]


def test_nothing_is_copied_across_the_end_of_a_passage() -> None:
    index = ContextIndex([1])
    index.add_passage("p", [1, 2])
    index.add_passage("q", [3, 4])
    assert build(index).tokens.tolist() == [2]


def test_the_most_probable_node_comes_first_however_deep_it_is() -> None:
    #                     0  1  2  3  4  5  6  7  8  9 10 11
    index = ContextIndex([1, 2, 3, 4, 5, 6, 9, 3, 7, 1, 2, 3])
    tree = build(index, max_nodes=4)
    # 4, 5, 6 with 3/5, then times 4/5, 5/6; the rival 7 has 1/5.
    assert tree.tokens.tolist() == [4, 5, 6, 9]
    assert tree.probabilities.tolist() == pytest.approx(
        [3 / 5, 3 / 5 * 4 / 5, 3 / 5 * 4 / 5 * 5 / 6, 3 / 5 * 4 / 5 * 5 / 7]
    )


def test_nothing_to_copy_is_an_empty_tree() -> None:
    assert len(build(ContextIndex([]))) == 0
    assert len(build(ContextIndex([1, 2, 3]))) == 0


def test_a_builder_of_no_nodes_or_no_depth_makes_empty_trees() -> None:
    index = ContextIndex([1, 2, 1])
    assert len(build(index, max_nodes=0)) == 0
    assert len(TreeBuilder().build(index, max_depth=0)) == 0
    assert len(TreeBuilder().build(index, max_depth=-1)) == 0


def test_the_depth_of_one_tree_can_be_less_than_the_builders_but_not_more() -> None:
    builder = linear_builder(max_depth=3)
    index = ContextIndex([1, 2, 3, 4, 5, 6, 7, 1])
    assert builder.build(index, max_depth=2).tokens.tolist() == [2, 3]
    assert builder.build(index, max_depth=9).tokens.tolist() == [2, 3, 4]


def test_a_node_of_less_than_the_least_probability_is_left_out() -> None:
    index = ContextIndex([5, 1, 2, 8, 1, 2, 9, 1, 3, 1])
    assert build(index, max_depth=1, min_probability=0.25).tokens.tolist() == [2, 3]
    assert build(index, max_depth=1, min_probability=0.26).tokens.tolist() == [2]
    assert build(index, max_depth=1, min_probability=0.51).tokens.tolist() == []


def test_a_node_without_a_vote_is_left_out() -> None:
    assert len(build(ContextIndex([1, 2, 1]), scoring=Scoring(scale=0.0))) == 0


def test_matches_longer_than_the_longest_weigh_like_it() -> None:
    index = ContextIndex([1, 2, 3, 4, 5, 1, 2, 3])
    tree = build(index, max_depth=2, scoring=Scoring(scale=1.0, power=1.0, longest=2))
    assert tree.tokens.tolist() == [4, 5]
    assert tree.probabilities.tolist() == pytest.approx([2 / 3, 2 / 3 * 2 / 3])


def test_a_builder_keeps_nothing_from_one_tree_to_the_next() -> None:
    builder = linear_builder()
    first, second = ContextIndex([1, 2, 3, 4, 1, 3, 1]), ContextIndex([6, 5, 6])
    before = builder.build(first)
    builder.build(second)
    assert same(builder.build(first), before)
    assert builder.build(second).tokens.tolist() == [5, 6]


def test_a_tree_does_not_change_when_the_builder_goes_on() -> None:
    builder = linear_builder()
    tree = builder.build(ContextIndex([1, 2, 1]))
    builder.build(ContextIndex([7, 8, 7]))
    assert tree.tokens.tolist() == [2, 1]


def test_an_index_with_more_places_than_the_builder_has_room_for_is_refused() -> None:
    index = ContextIndex([1] * 50, max_occurrences=40)
    with pytest.raises(
        ValueError, match="40 matches in the index and 0 in the datastore, and the builder has room for 20 and 0"
    ):
        TreeBuilder(max_occurrences=10).build(index)


def test_tokens_that_fall_into_one_slot_of_a_hash_table_are_told_apart() -> None:
    text = [0, 1, 2, 0, 3, 1, 0, 2, 3, 0, 1, 3, 0, 2, 1, 0, 4, 0, 1, 2, 0, 3, 0]
    small, large = build(ContextIndex(text)), build(ContextIndex([token << 20 for token in text]))
    assert len(small) == 64
    assert large.tokens.tolist() == [token << 20 for token in small.tokens.tolist()]
    assert large.parents.tolist() == small.parents.tolist()


# Successors


def test_the_successors_of_the_last_two_tokens_are_drafted_where_nothing_can_be_copied() -> None:
    table = SuccessorTable(64)
    table.learn([1], [2], [best(7, 8, 9)])
    tree = build(ContextIndex([1, 2]), max_depth=1, successors=table)
    assert tree.tokens.tolist() == [7, 8, 9]
    # An entry that was written once weighs 3 against 1 for all that it does not list: 3/4 of 0.55, 0.16, 0.08.
    assert tree.probabilities.tolist() == near([0.4125, 0.12, 0.06])
    assert tree.sources.tolist() == [SUCCESSOR] * 3
    assert tree.positions.tolist() == [-1] * 3
    assert tree.match_lengths.tolist() == [2, 2, 2]


def test_the_successors_of_the_last_token_alone_are_trusted_less() -> None:
    table = SuccessorTable(64)
    table.learn([1], [2], [best(7, 8, 9)])
    tree = build(ContextIndex([0, 2]), max_depth=1, successors=table)
    assert tree.tokens.tolist() == [7, 8, 9]
    # 1.5 against 1.
    assert tree.probabilities.tolist() == near([0.33, 0.096, 0.048])
    assert tree.match_lengths.tolist() == [1, 1, 1]
    # The very first token of a text has none before it.
    assert same(build(ContextIndex([2]), max_depth=1, successors=table), tree)


def test_a_pair_entry_is_preferred_over_the_single_one() -> None:
    table = SuccessorTable(64)
    table.learn([1, 3], [2, 2], [best(7), best(8)])
    pair = build(ContextIndex([1, 2]), max_depth=1, successors=table)
    assert pair.tokens.tolist() == [7]
    assert pair.probabilities.tolist() == near([3 / 4 * 0.55])
    # After 2 alone both were seen, 7 earlier: 4/5 of its weight is left, and of the one time that it was seen.
    single = build(ContextIndex([4, 2]), max_depth=1, successors=table)
    assert single.tokens.tolist() == [8, 7]
    assert single.probabilities.tolist() == near([1.5 * 0.55 / (1 + 1.5 * 1.8), 1.5 * 0.44 / (1 + 1.5 * 1.8)])


def test_the_prior_is_used_only_where_nothing_was_learned() -> None:
    table = SuccessorTable(64, make_prior({2: [5, 6], 3: [5]}, 4))
    table.learn([-1], [2], [best(7)])
    unlearned = build(ContextIndex([0, 3]), max_depth=1, successors=table)
    assert unlearned.tokens.tolist() == [5]
    assert unlearned.probabilities.tolist() == near([0.2 / 1.2 * 0.55])
    assert unlearned.sources.tolist() == [SUCCESSOR]
    assert unlearned.positions.tolist() == [-1]
    assert unlearned.match_lengths.tolist() == [1]
    # The entry began as the prior's, seen a third of a time, of which 4/5 are left.
    learned = build(ContextIndex([0, 2]), max_depth=1, successors=table)
    share = 1.5 / (1 + 1.5 * (1 + 0.8 / 3))
    assert learned.tokens.tolist() == [7, 5, 6]
    assert learned.probabilities.tolist() == near([share * 0.55, share * 0.55 * 0.8 / 3, share * 0.16 * 0.8 / 3])


@pytest.mark.parametrize("token", [1, 2, 3, 2**31 - 1])
def test_a_token_outside_the_prior_or_with_no_more_there_has_no_successors(token: int) -> None:
    table = SuccessorTable(0, make_prior({0: [1]}, 3))
    assert len(build(ContextIndex([token]), successors=table)) == 0


def test_successors_follow_successors() -> None:
    table = SuccessorTable(0, make_prior({1: [2], 2: [3]}, 4))
    tree = build(ContextIndex([1]), successors=table)
    step = 0.2 / 1.2 * 0.55
    assert tree.tokens.tolist() == [2, 3]
    assert tree.parents.tolist() == [-1, 0]
    assert tree.probabilities.tolist() == near([step, step**2])


def test_successors_continue_a_copied_branch_by_the_votes_that_are_left() -> None:
    table = SuccessorTable(64)
    table.learn([1], [2], [best(7)])
    tree = build(ContextIndex([1, 2, 1]), max_depth=2, successors=table)
    assert tree.tokens.tolist() == [2, 1, 7]
    assert tree.parents.tolist() == [-1, 0, 0]
    # Behind "1 2" two votes of three are for the copy, 1; of the third 3/4 * 0.55.
    assert tree.probabilities.tolist() == near([1 / 2, 1 / 2 * 2 / 3, 1 / 2 * 1 / 3 * 0.4125])
    assert tree.sources.tolist() == [0, 0, SUCCESSOR]
    assert tree.positions.tolist() == [1, 2, -1]
    assert tree.match_lengths.tolist() == [1, 2, 2]


def test_successors_continue_where_a_copied_text_ends() -> None:
    table = SuccessorTable(64)
    table.learn([1], [2], [best(7)])
    index = ContextIndex([1])
    index.add_passage("p", [1, 2])
    tree = build(index, successors=table)
    assert tree.tokens.tolist() == [2, 7]
    assert tree.parents.tolist() == [-1, 0]
    assert tree.probabilities.tolist() == near([1 / 2, 1 / 2 * 0.4125])
    assert tree.sources.tolist() == [1, SUCCESSOR]


def test_a_copied_token_that_is_also_listed_is_one_node_whose_source_stays_the_copy() -> None:
    table = SuccessorTable(64)
    table.learn([2], [1], [best(9, 2)])
    tree = build(ContextIndex([1, 2, 1]), max_depth=1, successors=table)
    assert tree.tokens.tolist() == [2, 9]
    assert tree.parents.tolist() == [-1, -1]
    # One vote of two is for 2; the other is shared out: 3/4 of 0.16 and of 0.55.
    assert tree.probabilities.tolist() == near([1 / 2 + 1 / 2 * 0.12, 1 / 2 * 0.4125])
    assert tree.sources.tolist() == [0, SUCCESSOR]
    assert tree.positions.tolist() == [1, -1]
    assert tree.match_lengths.tolist() == [1, 2]


def test_the_trust_in_each_kind_of_entry_and_in_none_is_a_setting() -> None:
    table = SuccessorTable(64, make_prior({0: [6]}, 1))
    table.learn([1], [2], [best(7)])
    trust = Scoring(unknown=2.0, pair=4.0, single=2.0, prior=1.0)
    for text, probability in [([1, 2], 4 / 6 * 0.55), ([3, 2], 2 / 4 * 0.55), ([0], 1 / 3 * 0.55)]:
        tree = build(ContextIndex(text), max_depth=1, successors=table, scoring=trust)
        assert tree.probabilities.tolist() == near([probability])
    none = Scoring(pair=0.0, single=0.0, prior=0.0)
    assert len(build(ContextIndex([1, 2]), successors=table, scoring=none)) == 0


def test_what_a_table_learns_later_is_drafted_at_once() -> None:
    table = SuccessorTable(64)
    builder = TreeBuilder(max_depth=1, successors=table, scoring=LINEAR)
    index = ContextIndex([1, 2])
    assert len(builder.build(index)) == 0
    table.learn([1], [2], [best(7)])
    assert builder.build(index).tokens.tolist() == [7]


# Corrections


def test_candidates_that_came_half_as_often_as_estimated_are_half_as_probable() -> None:
    half = Calibration(np.full(kernels.CELLS, 2.0), np.full(kernels.CELLS, 4.0), learns=False)
    tree = build(ContextIndex([1, 2, 3, 4, 1]), max_depth=3, calibration=half)
    assert tree.probabilities.tolist() == pytest.approx([1 / 4, 1 / 4 * 1 / 3, 1 / 4 * 1 / 3 * 3 / 8])
    table = SuccessorTable(64)
    table.learn([1], [2], [best(7)])
    assert build(ContextIndex([1, 2]), successors=table, calibration=half).probabilities.tolist() == near([0.4125 / 2])


@pytest.mark.parametrize(("hits", "rate"), [(0.0, 0.25), (0.5, 0.25), (1.0, 0.5), (4.0, 2.0), (8.0, 4.0), (99.0, 4.0)])
def test_a_correction_is_at_most_fourfold_either_way(hits: float, rate: float) -> None:
    corrected = Calibration(np.full(kernels.CELLS, hits), np.full(kernels.CELLS, 2.0), learns=False)
    table = SuccessorTable(64)
    table.learn([1], [2], [best(9, 7)])
    # 7 alone: 3/4 * 0.16, less than a quarter.
    tree = build(ContextIndex([1, 2]), max_depth=1, successors=table, calibration=corrected)
    assert tree.probabilities[tree.tokens == 7].tolist() == near([0.12 * rate])


def test_no_child_is_surer_than_995_in_1000_however_many_votes_it_has() -> None:
    # 1000 votes of 1001, then 2000 of 2001.
    tree = build(ContextIndex([1, 2, 1]), scoring=Scoring(scale=1000.0, power=1.0), max_depth=2)
    assert tree.probabilities.tolist() == pytest.approx([0.995, 0.995**2])


def test_a_class_of_candidates_is_corrected_apart_from_the_others() -> None:
    rates = np.ones(kernels.CELLS)
    # Prompt, longest match 1, estimate 2/4 (up to 0.6), no successors known, several occurrences agree.
    rates[copy_cell(0, 1, 0.5, 0, True)] = 0.25
    index = ContextIndex([5, 1, 2, 8, 1, 2, 9, 1, 3, 1])
    # Without it 2 is drafted with 2/4 and 3 with 1/4.
    tree = build(index, max_depth=1, calibration=Calibration(rates, np.ones(kernels.CELLS), learns=False))
    assert tree.tokens.tolist() == [3, 2]
    assert tree.probabilities.tolist() == pytest.approx([1 / 4, 1 / 4 * 2 / 4])


# What came of a tree


def counted(calibration: Calibration) -> dict[int, Any]:
    """(hits, expected hits) added to a blank calibration, by the cells that have any."""
    added = calibration.counts[:2] - Calibration.blank().counts[:2]
    return {cell: (added[0, cell], added[1, cell]) for cell in np.flatnonzero(added.any(axis=0)).tolist()}


def test_children_of_accepted_nodes_are_counted_by_cell_and_move_its_rate() -> None:
    builder = linear_builder(max_depth=3, learns=True)
    index = ContextIndex([1, 2, 3, 4, 1])
    assert builder.build(index).tokens.tolist() == [2, 3, 4]
    assert counted(builder.calibration) == {}
    builder.observe([2, 9])
    # 2 came (1/2), 3 did not though 2 came (2/3), 4 was never asked for.
    first, second = copy_cell(0, 1, 1 / 2, 0, False), copy_cell(0, 2, 2 / 3, 0, False)
    assert counted(builder.calibration) == {
        first: (1.0, pytest.approx(1 / 2)),
        second: (0.0, pytest.approx(2 / 3)),
    }
    # Blank cells begin with 4 hits of 4 expected.
    rates = builder.calibration.counts[kernels.RATES]
    assert rates[first] == pytest.approx(5 / 4.5)
    assert rates[second] == pytest.approx(4 / (4 + 2 / 3))
    assert np.delete(rates, [first, second]).tolist() == [1.0] * (kernels.CELLS - 2)
    tree = builder.build(index)
    assert tree.probabilities[:2].tolist() == pytest.approx([1 / 2 * 10 / 9, 1 / 2 * 10 / 9 * 2 / 3 * 6 / 7])
    # The estimate is counted as it was before it was corrected.
    builder.observe([8])
    assert counted(builder.calibration)[first] == (1.0, pytest.approx(1.0))


def test_every_sibling_is_counted_and_the_tokens_may_go_on_below_the_tree() -> None:
    builder = linear_builder(max_depth=1, learns=True)
    # 2 with 2/4 by two occurrences, 3 with 1/4.
    builder.build(ContextIndex([5, 1, 2, 8, 1, 2, 9, 1, 3, 1]))
    builder.observe([3, 1, 5])
    assert counted(builder.calibration) == {
        copy_cell(0, 1, 2 / 4, 0, True): (0.0, pytest.approx(2 / 4)),
        copy_cell(0, 1, 1 / 4, 0, False): (1.0, pytest.approx(1 / 4)),
    }


def test_prompt_output_passages_and_what_the_successors_list_are_counted_apart() -> None:
    table = SuccessorTable(64, make_prior({}, 1))
    table.learn([-1], [1], [best(3, 9)])
    builder = TreeBuilder(
        max_depth=1, min_probability=0.0, successors=table, calibration=Calibration.blank(), scoring=LINEAR
    )
    index = ContextIndex([1, 2, 6])
    index.extend([1, 3, 1])
    index.add_passage("p", [1, 4])
    tree = builder.build(index)
    assert sorted(tree.tokens.tolist()) == [2, 3, 4, 9]
    builder.observe([4])
    # A vote each of 3 + 1; of the rest the successors of 1 have 3/5: 0.55 and 0.16 of it.
    listed, alone = 1 / 4 + 1 / 4 * 0.6 * 0.55, 1 / 4 * 0.6 * 0.16
    assert counted(builder.calibration) == {
        copy_cell(0, 1, 1 / 4, 1, False): (0.0, near(1 / 4)),
        copy_cell(1, 1, listed, 2, False): (0.0, near(listed)),
        copy_cell(2, 1, 1 / 4, 1, False): (1.0, near(1 / 4)),
        successor_cell(1, alone): (0.0, near(alone)),
    }


@pytest.mark.parametrize(("text", "kind"), [([1, 2], 0), ([0, 2], 1), ([3], 2)])
def test_successors_are_counted_by_the_kind_of_their_entry(text: list[int], kind: int) -> None:
    table = SuccessorTable(64, make_prior({3: [7]}, 4))
    table.learn([1], [2], [best(7)])
    builder = TreeBuilder(max_depth=1, successors=table, calibration=Calibration.blank(), scoring=LINEAR)
    estimate = float(builder.build(ContextIndex(text)).probabilities[0])
    builder.observe([7])
    assert counted(builder.calibration) == {successor_cell(kind, estimate): (1.0, pytest.approx(estimate))}


def test_a_calibration_that_does_not_learn_stays_as_it_is() -> None:
    builder = linear_builder()
    before = builder.calibration.counts.copy()
    builder.build(ContextIndex([1, 2, 1]))
    builder.observe([2, 1])
    builder.observe([5])
    assert np.array_equal(builder.calibration.counts, before)


def test_nothing_is_counted_where_nothing_was_drafted() -> None:
    builder = linear_builder(learns=True)
    builder.observe([1])
    builder.build(ContextIndex([1, 2, 1]))
    builder.build(ContextIndex([1, 2, 3]))
    builder.observe([2])
    assert counted(builder.calibration) == {}
    assert builder.acceptance_ratio == 1.0


def test_the_acceptance_ratio_is_1_at_first_falls_while_nothing_is_accepted_and_recovers() -> None:
    builder = linear_builder(max_depth=1, learns=True)
    index = ContextIndex([1, 2, 1])
    assert builder.acceptance_ratio == 1.0
    falling = [builder.acceptance_ratio]
    for _ in range(6):
        builder.build(index)
        builder.observe([9])
        falling.append(builder.acceptance_ratio)
    assert falling == sorted(set(falling), reverse=True)
    # Two hits are given in advance; 1/2 was expected, then 1/2 * 4/4.5 and 95 % of what was before.
    assert falling[1] == pytest.approx(2 / 2.5)
    assert falling[2] == pytest.approx(2 / (2 + 0.95 * 0.5 + 0.5 * 4 / 4.5))
    rising = [builder.acceptance_ratio]
    for _ in range(6):
        builder.build(index)
        builder.observe([2])
        rising.append(builder.acceptance_ratio)
    assert rising == sorted(rising)
    assert rising[-1] == 1.0


# Against a twin in plain Python

LENGTHS = (1, 2, 3, 5, 8, 12, 20, 40)
ESTIMATES = (0.01, 0.03, 0.07, 0.13, 0.23, 0.4, 0.6, 0.8, 0.93)
"""Upper bounds of the buckets but the last."""


def copy_cell(origin: int, length: int, estimate: float, listed: int, agree: bool) -> int:
    """The cell of a copied candidate.

    Args:
        origin: 0: prompt; 1: output; 2: passage.
        length: Of the longest match.
        estimate: Uncorrected.
        listed: 0: no successors are known; 1: it is none of them; 2: it is one.
        agree: Several occurrences propose it.
    """
    coordinates = (origin, bisect_left(LENGTHS, length), bisect_left(ESTIMATES, estimate), listed, int(agree))
    cell = 0
    for at, size in zip(coordinates, (4, 9, 10, 3, 2), strict=True):
        cell = cell * size + at
    return cell


def successor_cell(kind: int, estimate: float) -> int:
    """The cell of a candidate that only the successors propose; kind 0: of two tokens; 1: of one; 2: by the prior."""
    return 4 * 9 * 10 * 3 * 2 + 10 * kind + bisect_left(ESTIMATES, estimate)


class Case(NamedTuple):
    """What a tree is built from; all token ids are multiplied with `stride`."""

    prompt: list[int]
    output: list[int]
    passages: list[list[int]]
    rows: list[tuple[int, int, list[int]]]
    """What the table learned: the token before (-1: none), the token, the best next ones."""
    prior: list[list[int]]
    rates: int
    """Seed of random corrections; 0: none."""
    scoring: Scoring
    stored: list[tuple[int, list[int]]]
    """What the datastore holds: match lengths and tokens."""
    stride: int = 1


class Child(NamedTuple):
    """A child of a node as the twin finds it."""

    chance: float
    source: int
    position: int
    match_length: int


@dataclass
class Drafting:
    """A case made ready."""

    index: ContextIndex
    prompt: int
    table: SuccessorTable
    calibration: Calibration
    scoring: Scoring
    candidates: DatastoreCandidates

    def build(self, *, max_nodes: int = 64, max_depth: int = 40, min_probability: float = 0.0) -> DraftTree:
        return build(
            self.index,
            candidates=self.candidates,
            max_nodes=max_nodes,
            max_depth=max_depth,
            min_probability=min_probability,
            successors=self.table,
            calibration=self.calibration,
            scoring=self.scoring,
        )

    @cached_property
    def entries(self) -> dict[tuple[int, int], list[int]]:
        """The table's entries by the token before (-1: none) and the token."""
        held = zip(self.table.keys.ravel().tolist(), self.table.entries.tolist(), strict=True)
        return {((key >> 31) - 2, key % 2**31): entry for key, entry in held if key >= 0}

    def listed(self, before: int, token: int) -> tuple[int, int, dict[int, int]]:
        """(kind, total, weights by token) of what follows."""
        for kind, first in enumerate((before, -1)):
            entry = self.entries.get((first, token))
            if entry is not None and (kind or before >= 0):
                weights = {t: w for t, w in zip(entry[1:16], entry[17:32], strict=True) if t >= 0}
                return kind, entry[0], weights
        if token >= len(self.table.prior):
            return 2, 0, {}
        row = [t for t in self.table.prior[token].tolist() if t >= 0]
        return 2, 1 << 16 if row else 0, dict(zip(row, RANKS, strict=False))

    def children(self, path: Sequence[int]) -> dict[int, Child]:
        """All children of a path from the root, in the order in which equally probable ones are drafted."""
        corpora = (self.index.sequence.tolist(), self.index.passages.tolist(), self.candidates.tokens.tolist())
        members = [(0, *match) for match in self.index.sequence_matches.T.tolist()]
        members += [(1, *match) for match in self.index.passage_matches.T.tolist()]
        members += [(2, *match) for match in self.candidates.matches.T.tolist()]
        depth = len(path)
        groups: dict[int, list[tuple[int, int, int]]] = {}
        for source, position, length in members:
            text = corpora[source][position : position + depth + 1]
            if len(text) == depth + 1 and text[:-1] == list(path) and text[-1] >= 0:
                groups.setdefault(text[-1], []).append((source, position + depth, length + depth))

        worth, rates = self.scoring.array.tolist(), self.calibration.counts[kernels.RATES]
        unknown, trusts, longest = worth[0], worth[1:4], len(worth) - 5
        votes = {token: sum(worth[4 + min(m[2], longest)] for m in group) for token, group in groups.items()}
        free = sum(votes.values()) + 1.0
        so_far = [-1, *corpora[0], *path]
        kind, total, weights = self.listed(so_far[-2], so_far[-1])
        share = trusts[kind] / (free * (unknown * (1 << 16) + trusts[kind] * total)) if total else 0.0

        found: dict[int, Child] = {}
        for token, group in groups.items():
            estimate = votes[token] / free + weights.get(token, 0) * share
            source, position, length = max(group, key=lambda member: member[2])
            origin = source + 1 if source else int(position >= self.prompt)
            known = 2 if token in weights else 1 if total else 0
            rate = float(rates[copy_cell(origin, length, estimate, known, len(group) > 1)])
            found[token] = Child(min(estimate * rate, 0.995), source, position, length)
        for token, weight in weights.items():
            if token not in groups:
                estimate = weight * share
                rate = float(rates[successor_cell(kind, estimate)])
                found[token] = Child(min(estimate * rate, 0.995), SUCCESSOR, -1, 1 if kind else 2)
        return found

    def twin(self, max_nodes: int, max_depth: int, floor: float) -> DraftTree:
        """The tree from lists and `heapq`; of equally probable candidates the one found first comes first."""
        rows: list[tuple[int, int, int, float, int, int, int]] = []
        heap: list[tuple[float, int, int, tuple[int, ...], Child]] = []
        found = 0

        def expand(node: int, probability: float, path: tuple[int, ...]) -> None:
            nonlocal found
            for token, child in self.children(path).items():
                if probability * child.chance >= floor:
                    found += 1
                    heapq.heappush(heap, (-probability * child.chance, found, node, (*path, token), child))

        if len(self.index):
            expand(-1, 1.0, ())
        while heap and len(rows) < max_nodes:
            negative, _, parent, path, child = heapq.heappop(heap)
            rows.append((path[-1], parent, len(path), -negative, child.source, child.position, child.match_length))
            if len(path) < max_depth:
                expand(len(rows) - 1, -negative, path)
        columns = [np.array(column) for column in zip(*rows, strict=True)] or [np.zeros(0) for _ in range(7)]
        return DraftTree.of(*columns)


def ready(case: Case) -> Drafting:
    def ids(tokens: Sequence[int]) -> list[int]:
        return [case.stride * token if token >= 0 else token for token in tokens]

    index = ContextIndex(ids(case.prompt))
    index.extend(ids(case.output))
    for k, passage in enumerate(case.passages):
        index.add_passage(str(k), ids(passage))
    prior = make_prior({token: ids(row) for token, row in enumerate(case.prior)}, len(case.prior))
    table = SuccessorTable(256, prior.reshape(-1, BEST))
    for before, token, row in case.rows:
        table.learn(ids([before]), ids([token]), [best(*ids(row))])
    calibration = Calibration.blank(learns=False)
    if case.rates:
        random = np.random.default_rng(case.rates)
        hits, expected = random.uniform(0.0, 4.0, kernels.CELLS), random.uniform(0.5, 4.0, kernels.CELLS)
        calibration = Calibration(hits, expected, learns=False)
    behind = [[*ids(tokens), -1] for _, tokens in case.stored]
    matches = np.zeros((2, len(behind)), np.int32)
    matches[0] = np.cumsum([0, *map(len, behind)])[:-1]
    matches[1] = [length for length, _ in case.stored]
    tokens = np.array([token for text in behind for token in text], np.int32)
    candidates = DatastoreCandidates(tokens, len(tokens), matches, len(behind))
    return Drafting(index, len(case.prompt), table, calibration, case.scoring, candidates)


def texts(least: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 4), min_size=least, max_size=most)


rows = st.one_of(
    st.lists(st.integers(0, 9), max_size=BEST, unique=True),
    st.permutations(range(10)).map(lambda tokens: tokens[:BEST]),
)
"""Next tokens: those of the texts and a few others."""
learned = st.tuples(st.integers(-1, 4), st.integers(0, 9), rows)
cases = st.builds(
    Case,
    prompt=st.one_of(texts(0, 60), texts(30, 60), texts(30, 60)),
    output=texts(0, 12),
    passages=st.lists(texts(1, 15), max_size=3),
    rows=st.one_of(st.lists(learned, max_size=30), st.lists(learned, min_size=15, max_size=30)),
    prior=st.lists(rows, max_size=8),
    rates=st.integers(0, 1000),
    scoring=st.builds(
        Scoring,
        scale=st.sampled_from([0.21, 0.35, 1.0, 3.0]),
        power=st.sampled_from([0.5, 1.0, 1.4]),
        longest=st.sampled_from([4, 128]),
        unknown=st.sampled_from([0.0, 1.0, 2.0]),
        pair=st.sampled_from([0.5, 3.0]),
        single=st.sampled_from([0.25, 1.5]),
        prior=st.sampled_from([0.2, 1.0]),
    ),
    stored=st.one_of(st.just([]), st.lists(st.tuples(st.integers(1, 40), texts(1, 12)), max_size=6)),
    # Multiples of a large power of two all fall into one slot of a hash table.
    stride=st.sampled_from([1, 1, 1 << 20]),
)
limits = st.one_of(st.integers(1, 60), st.integers(20, 60))


def path_table(tree: DraftTree) -> dict[tuple[int, ...], tuple[int, int, int]]:
    """Each node's path and where it was copied from, in the tree's order."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    origins = zip(tree.sources.tolist(), tree.positions.tolist(), tree.match_lengths.tolist(), strict=True)
    return dict(zip(paths, origins, strict=True))


def chance_of(tree: DraftTree, path: tuple[int, ...]) -> float:
    """A node's probability given its parent."""
    above, node = 1.0, -1
    for token in path:
        if node >= 0:
            above = float(tree.probabilities[node])
        child = tree.child(node, token)
        assert child is not None
        node = child
    return float(tree.probabilities[node]) / above


@settings(max_examples=200)
@given(cases, limits, st.integers(1, 12), st.sampled_from([1e-12, 1e-12, 0.001, 0.02, 0.1]))
def test_the_tree_is_that_of_the_twin(case: Case, max_nodes: int, max_depth: int, floor: float) -> None:
    drafting = ready(case)
    tree = drafting.build(max_nodes=max_nodes, max_depth=max_depth, min_probability=floor)
    expected = drafting.twin(max_nodes, max_depth, floor)
    # Sums in another order may round otherwise: a node at the floor may be missing, and equally probable ones swapped.
    sizes = {len(drafting.twin(max_nodes, max_depth, floor * factor)) for factor in (1 - 1e-9, 1 + 1e-9)}
    if len(sizes) > 1:
        return
    assert tree.probabilities.tolist() == pytest.approx(expected.probabilities.tolist(), rel=1e-9)
    paths, expected_paths = path_table(tree), path_table(expected)
    gaps = np.diff(tree.probabilities) < -1e-9 * tree.probabilities[1:]
    if len(tree) < max_nodes:
        assert paths == expected_paths
    else:
        # Which of those as probable as the last one are in, and in which order, is a matter of rounding.
        least = tree.probabilities[-1] * (1 + 1e-9)
        sure = {path: paths[path] for path, p in zip(paths, tree.probabilities.tolist(), strict=True) if p > least}
        assert sure.items() <= expected_paths.items()
    if gaps.all():
        assert list(paths)[:-1] == list(expected_paths)[:-1]


@given(cases)
def test_every_probability_is_the_product_of_the_chances_along_the_path(case: Case) -> None:
    drafting = ready(case)
    tree = drafting.build(max_nodes=30)
    for (path, origin), probability in zip(path_table(tree).items(), tree.probabilities.tolist(), strict=True):
        steps = [drafting.children(path[:k])[path[k]] for k in range(len(path))]
        assert probability == pytest.approx(float(np.prod([step.chance for step in steps])), rel=1e-9)
        assert origin == steps[-1][1:]


@given(cases, st.integers(0, 30), st.integers(1, 30))
def test_a_smaller_tree_is_the_head_of_a_larger_one(case: Case, small: int, more: int) -> None:
    drafting = ready(case)
    larger = drafting.build(max_nodes=small + more)
    assert same(drafting.build(max_nodes=small), larger.head(small))


@given(cases)
def test_every_copied_node_names_a_true_place_with_a_true_match(case: Case) -> None:
    drafting = ready(case)
    corpora = (drafting.index.sequence.tolist(), drafting.index.passages.tolist(), drafting.candidates.tokens.tolist())
    stored = dict(drafting.candidates.matches.T.tolist())
    for path, (source, position, length) in path_table(drafting.build()).items():
        if source == SUCCESSOR:
            assert position == -1
            continue
        corpus, so_far = corpora[source], [*corpora[0], *path]
        assert corpus[position] == path[-1]
        if source == DATASTORE:  # what stands before is the datastore's to know
            start = position + 1 - len(path)
            assert (corpus[start : position + 1], length) == (list(path), stored[start] + len(path) - 1)
            continue
        assert length >= len(path)
        assert corpus[position - length : position] == so_far[len(so_far) - 1 - length : -1]


@given(cases, st.floats(0.0, 0.5), st.integers(1, 6), st.integers(0, 30))
def test_limits_are_kept(case: Case, floor: float, max_depth: int, max_nodes: int) -> None:
    tree = ready(case).build(max_nodes=max_nodes, max_depth=max_depth, min_probability=floor)
    assert len(tree) <= max_nodes
    assert all(tree.depths <= max_depth)
    assert all(tree.probabilities >= floor)


@given(cases, st.integers(1, 20), st.lists(st.integers(0, 9), max_size=4))
def test_hits_and_expected_hits_are_those_of_all_children_of_accepted_nodes(
    case: Case, max_nodes: int, wanted: list[int]
) -> None:
    drafting = ready(case)
    drafting.calibration.learns = True
    before = drafting.calibration.counts.copy()
    rates = before[kernels.RATES]
    builder = TreeBuilder(
        max_nodes=max_nodes,
        min_probability=0.0,
        successors=drafting.table,
        calibration=drafting.calibration,
        scoring=drafting.scoring,
    )
    tree = builder.build(drafting.index)
    tokens = [case.stride * token for token in wanted]
    builder.observe(tokens)
    asked = [
        path for path in path_table(tree) if list(path[:-1]) == tokens[: len(path) - 1] and len(path) <= len(tokens)
    ]
    chances = [chance_of(tree, path) for path in asked]
    added = drafting.calibration.counts - before
    assert added[kernels.HITS].sum() == pytest.approx(sum(list(path) == tokens[: len(path)] for path in asked))
    moved = np.flatnonzero(added[kernels.EXPECTED])
    assert len(moved) <= len(asked)
    # A node's chance is its estimate times its cell's rate, but for the bound.
    corrected = float((added[kernels.EXPECTED] * rates).sum())
    assert corrected == pytest.approx(sum(chances), rel=1e-9) or max(chances) > 0.994
    hits, expected = drafting.calibration.counts[: kernels.RATES]
    assert np.allclose(drafting.calibration.counts[kernels.RATES], np.clip(hits / expected, 0.25, 4.0))
    fresh = (len([path for path in asked if list(path) == tokens[: len(path)]]) + 2) / (sum(chances) + 2)
    assert builder.acceptance_ratio == pytest.approx(min(fresh, 1.0))
