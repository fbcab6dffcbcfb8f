"""Trees are built best first from the votes of all places; the probabilities here were worked out by hand."""

from __future__ import annotations

import heapq
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reader_rag.draft import ContextIndex, CopyWeights, DraftTree, TreeBuilder

LINEAR = CopyWeights(scale=1.0, power=1.0, escape=1.0)
"""A place whose match is L tokens long has L votes; "none of them" has one."""


def build(
    index: ContextIndex,
    *,
    max_nodes: int = 64,
    max_depth: int = 40,
    min_probability: float = 0.0,
    weights: CopyWeights = LINEAR,
) -> DraftTree:
    builder = TreeBuilder(max_nodes=max_nodes, max_depth=max_depth, min_probability=min_probability, weights=weights)
    tree = builder.build(index)
    tree.check()
    return tree


def same(a: DraftTree, b: DraftTree) -> bool:
    return all(np.array_equal(getattr(a, field.name), getattr(b, field.name)) for field in fields(DraftTree))


def test_one_place_gives_a_chain_whose_nodes_become_surer_with_every_match() -> None:
    #                     0  1  2  3  4
    index = ContextIndex([1, 2, 3, 4, 1])
    tree = build(index, max_depth=3)
    assert tree.tokens.tolist() == [2, 3, 4]
    assert tree.parents.tolist() == [-1, 0, 1]
    assert tree.depths.tolist() == [1, 2, 3]
    # Votes 1, then 2, then 3, against one vote of escape.
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
    # 2 of 3 + 1 votes and 1 of 3 + 1; below, every place has 2 votes: 2 of 4 + 1 twice after 2, 2 of 2 + 1 after 3.
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
    builder = TreeBuilder(max_depth=3, min_probability=0.0)
    index = ContextIndex([1, 2, 3, 4, 5, 6, 7, 1])
    assert builder.build(index, max_depth=2).tokens.tolist() == [2, 3]
    assert builder.build(index, max_depth=9).tokens.tolist() == [2, 3, 4]


def test_a_node_of_less_than_the_least_probability_is_left_out() -> None:
    index = ContextIndex([5, 1, 2, 8, 1, 2, 9, 1, 3, 1])
    assert build(index, max_depth=1, min_probability=0.25).tokens.tolist() == [2, 3]
    assert build(index, max_depth=1, min_probability=0.26).tokens.tolist() == [2]
    assert build(index, max_depth=1, min_probability=0.51).tokens.tolist() == []


def test_a_node_without_a_vote_is_left_out() -> None:
    assert len(build(ContextIndex([1, 2, 1]), weights=CopyWeights(scale=0.0))) == 0


def test_matches_longer_than_the_longest_weigh_like_it() -> None:
    index = ContextIndex([1, 2, 3, 4, 5, 1, 2, 3])
    tree = build(index, max_depth=2, weights=CopyWeights(scale=1.0, power=1.0, longest=2))
    assert tree.tokens.tolist() == [4, 5]
    assert tree.probabilities.tolist() == pytest.approx([2 / 3, 2 / 3 * 2 / 3])


def test_a_builder_keeps_nothing_from_one_tree_to_the_next() -> None:
    builder = TreeBuilder(min_probability=0.0)
    first, second = ContextIndex([1, 2, 3, 4, 1, 3, 1]), ContextIndex([6, 5, 6])
    before = builder.build(first)
    builder.build(second)
    assert same(builder.build(first), before)
    assert builder.build(second).tokens.tolist() == [5, 6]


def test_a_tree_does_not_change_when_the_builder_goes_on() -> None:
    builder = TreeBuilder(min_probability=0.0)
    tree = builder.build(ContextIndex([1, 2, 1]))
    builder.build(ContextIndex([7, 8, 7]))
    assert tree.tokens.tolist() == [2, 1]


def test_an_index_with_more_places_than_the_builder_has_room_for_is_refused() -> None:
    index = ContextIndex([1] * 50, max_occurrences=40)
    with pytest.raises(ValueError, match="follows 40 places and the builder has room for 20"):
        TreeBuilder(max_occurrences=10).build(index)


def test_tokens_that_fall_into_one_slot_of_a_hash_table_are_told_apart() -> None:
    text = [0, 1, 2, 0, 3, 1, 0, 2, 3, 0, 1, 3, 0, 2, 1, 0, 4, 0, 1, 2, 0, 3, 0]
    small, large = build(ContextIndex(text)), build(ContextIndex([token << 20 for token in text]))
    assert len(small) == 64
    assert large.tokens.tolist() == [token << 20 for token in small.tokens.tolist()]
    assert large.parents.tolist() == small.parents.tolist()


# Against a twin in plain Python

texts = st.one_of(st.lists(st.integers(0, 4), max_size=60), st.lists(st.integers(0, 4), min_size=30, max_size=60))
passages = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=15), max_size=3)
strides = st.sampled_from([1, 1 << 20])
"""What token ids are multiplied with; multiples of a large power of two all fall into one slot of a hash table."""
votes = st.builds(
    CopyWeights,
    scale=st.sampled_from([0.21, 0.35, 1.0, 3.0]),
    power=st.sampled_from([0.5, 1.0, 1.4]),
    escape=st.sampled_from([0.5, 1.0]),
    longest=st.sampled_from([4, 128]),
)


def make_index(text: list[int], added: list[list[int]]) -> ContextIndex:
    index = ContextIndex(text)
    for k, passage in enumerate(added):
        index.add_passage(str(k), passage)
    return index


def twin(index: ContextIndex, max_nodes: int, max_depth: int, floor: float, weights: CopyWeights) -> DraftTree:
    """The same tree from lists and `heapq`.

    Candidates of equal probability come in the order of the slots that their places have: a node's places are sorted
    by their next token, tokens in the order in which they are first met, within the node's own range of slots.
    """
    corpora = (index.sequence.tolist(), index.passages.tolist())
    places = [(0, *place) for place in index.sequence_matches.T.tolist()]
    places += [(1, *place) for place in index.passage_matches.T.tolist()]
    rows: list[tuple[int, int, int, float, int, int, int]] = []
    heap: list[tuple[float, int, int, int, int, list[tuple[int, int, int]]]] = []

    def expand(node: int, probability: float, depth: int, slot: int, members: list[tuple[int, int, int]]) -> None:
        groups: dict[int, list[tuple[int, int, int]]] = {}
        for source, position, length in members:
            corpus = corpora[source]
            if position + depth < len(corpus) and corpus[position + depth] >= 0:
                groups.setdefault(corpus[position + depth], []).append((source, position, length))
        vote = {
            token: [weights.table[min(m[2] + depth, weights.longest)] for m in group] for token, group in groups.items()
        }
        total = weights.escape + sum(sum(v) for v in vote.values())
        for token, group in groups.items():
            share = probability * sum(vote[token]) / total
            if share >= floor:
                heapq.heappush(heap, (-share, slot, token, node, depth + 1, group))
            slot += len(group)

    expand(-1, 1.0, 0, 0, places)
    while heap and len(rows) < max_nodes:
        negative, slot, token, parent, depth, members = heapq.heappop(heap)
        source, position, length = max(members, key=lambda member: member[2])
        rows.append((token, parent, depth, -negative, source, position + depth - 1, length + depth - 1))
        if depth < max_depth:
            expand(len(rows) - 1, -negative, depth, slot, members)
    columns = [np.array(column) for column in zip(*rows, strict=True)] or [np.zeros(0) for _ in range(7)]
    return DraftTree(*columns)


@given(texts, passages, strides, st.integers(1, 40), st.integers(1, 12), st.sampled_from([1e-12, 0.02, 0.1]), votes)
def test_the_tree_is_that_of_the_twin(
    text: list[int],
    added: list[list[int]],
    stride: int,
    max_nodes: int,
    max_depth: int,
    floor: float,
    weights: CopyWeights,
) -> None:
    index = make_index([stride * token for token in text], [[stride * token for token in p] for p in added])
    tree = build(index, max_nodes=max_nodes, max_depth=max_depth, min_probability=floor, weights=weights)
    expected = twin(index, max_nodes, max_depth, floor, weights)
    assert tree.probabilities.tolist() == pytest.approx(expected.probabilities.tolist(), rel=1e-9)
    # Sums in another order may round otherwise, and so swap nodes that are equally probable: compare paths.
    paths, expected_paths = path_table(tree), path_table(expected)
    if len(tree) < max_nodes and not near_floor(index, max_nodes, max_depth, floor, weights):
        assert paths == expected_paths
    else:
        last = tree.probabilities[-1] * (1 + 1e-9) if len(tree) else 0.0
        sure = {path for path, p in zip(paths, tree.probabilities.tolist(), strict=True) if p > last}
        assert sure <= set(expected_paths)


def near_floor(index: ContextIndex, max_nodes: int, max_depth: int, floor: float, weights: CopyWeights) -> bool:
    low, high = (len(twin(index, max_nodes, max_depth, floor * f, weights)) for f in (1 - 1e-9, 1 + 1e-9))
    return low != high


def path_table(tree: DraftTree) -> dict[tuple[int, ...], tuple[int, int, int]]:
    """Each node's path and where it was copied from."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    origins = zip(tree.sources.tolist(), tree.positions.tolist(), tree.match_lengths.tolist(), strict=True)
    return dict(zip(paths, origins, strict=True))


@given(texts, passages, st.integers(0, 30), st.integers(1, 30), votes)
def test_a_smaller_tree_is_the_head_of_a_larger_one(
    text: list[int], added: list[list[int]], small: int, more: int, weights: CopyWeights
) -> None:
    index = make_index(text, added)
    larger = build(index, max_nodes=small + more, weights=weights)
    assert same(build(index, max_nodes=small, weights=weights), larger.head(small))


@given(texts, passages, votes)
def test_every_node_names_a_true_place_with_a_true_match(
    text: list[int], added: list[list[int]], weights: CopyWeights
) -> None:
    index = make_index(text, added)
    tree = build(index, weights=weights)
    corpora = (index.sequence.tolist(), index.passages.tolist())
    for path, (source, position, length) in path_table(tree).items():
        corpus, so_far = corpora[source], [*text, *path]
        assert corpus[position] == path[-1]
        assert length >= len(path)
        assert corpus[position - length : position] == so_far[len(so_far) - 1 - length : -1]


@given(texts, passages, votes, st.floats(0.0, 0.5), st.integers(1, 6), st.integers(0, 30))
def test_limits_are_kept(
    text: list[int], added: list[list[int]], weights: CopyWeights, floor: float, max_depth: int, max_nodes: int
) -> None:
    index = make_index(text, added)
    tree = build(index, max_nodes=max_nodes, max_depth=max_depth, min_probability=floor, weights=weights)
    assert len(tree) <= max_nodes
    assert all(tree.depths <= max_depth)
    assert all(tree.probabilities >= floor)
