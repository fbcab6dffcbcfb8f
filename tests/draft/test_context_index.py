"""The context index finds every earlier occurrence of the end of the sequence, and how long the repeat is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reader_rag.draft import ContextIndex, Occurrence
from reader_rag.draft.kernels.context import BACKWARD_LIMIT

PLENTY = 1024
"""More matches than any text here has, so that none is left out."""

small_texts = st.one_of(
    st.lists(st.integers(0, 3), max_size=90),
    st.lists(st.integers(0, 3), min_size=40, max_size=90),
    st.lists(st.integers(0, 1), min_size=40, max_size=90),
)


def in_sequence(index: ContextIndex) -> list[tuple[int, int]]:
    """(position of the next token, match length) of every match in prompt and output."""
    return [tuple(match) for match in index.sequence_matches.T.tolist()]


def in_passages(index: ContextIndex) -> list[tuple[int, int]]:
    """(position of the next token, match length) of every match in the added passages."""
    return [tuple(match) for match in index.passage_matches.T.tolist()]


def brute_force(corpus: Sequence[int], sequence: Sequence[int]) -> list[tuple[int, int]]:
    """Every position of the corpus that has a token and follows a repeat of the sequence's end, the latest first."""
    found = []
    for position in range(len(corpus) - 1, 0, -1):
        length = 0
        while (
            length < min(position, len(sequence))
            and corpus[position - 1 - length] == sequence[len(sequence) - 1 - length]
        ):
            length += 1
        if length:
            found.append((position, length))
    return found


def joined(passages: Sequence[Sequence[int]]) -> list[int]:
    return [token for passage in passages for token in [*passage, -1]]


# Places in prompt and output


def test_the_places_after_earlier_repeats_of_the_end_are_found_latest_first() -> None:
    #                     0  1  2  3  4  5  6  7
    index = ContextIndex([1, 2, 3, 9, 2, 3, 1, 2])
    assert in_sequence(index) == [(5, 1), (2, 2)]


def test_a_place_goes_on_when_its_token_comes_and_ends_when_another_does() -> None:
    index = ContextIndex([1, 2, 3, 9, 2, 3, 1, 2])
    index.extend([3])
    assert in_sequence(index) == [(6, 2), (3, 3)]
    index.extend([9])
    assert in_sequence(index) == [(4, 4)]
    index.extend([3])
    assert in_sequence(index) == [(9, 1), (6, 1), (3, 1)]
    index.extend([8])
    assert in_sequence(index) == []


def test_the_last_token_itself_is_no_place_because_nothing_follows_it() -> None:
    assert in_sequence(ContextIndex([5])) == []
    assert in_sequence(ContextIndex([5, 6])) == []
    assert in_sequence(ContextIndex([5, 5])) == [(1, 1)]
    assert in_sequence(ContextIndex([5, 5, 5])) == [(2, 2), (1, 1)]


def test_an_empty_prompt_is_an_empty_index() -> None:
    index = ContextIndex([])
    assert len(index) == 0
    assert in_sequence(index) == in_passages(index) == []
    index.extend([4, 7, 4])
    assert in_sequence(index) == [(1, 1)]


def test_prompt_and_output_are_one_sequence() -> None:
    index = ContextIndex(np.array([3, 1]), reserve=2)
    index.extend([4])
    index.extend([])
    index.extend((1, 5))
    assert index.sequence.tolist() == [3, 1, 4, 1, 5]
    assert len(index) == 5


@given(small_texts)
def test_the_matches_are_those_that_brute_force_finds(text: list[int]) -> None:
    index = ContextIndex([], max_occurrences=PLENTY)
    for token in text:
        index.extend([token])
    assert in_sequence(index) == brute_force(text, text)


@given(small_texts, st.lists(st.integers(1, 40), max_size=10))
def test_extending_in_pieces_finds_the_same_matches_as_token_by_token(text: list[int], pieces: list[int]) -> None:
    index = ContextIndex([], max_occurrences=PLENTY)
    rest = text
    for piece in [*pieces, len(text)]:
        index.extend(rest[:piece])
        rest = rest[piece:]
    expected = brute_force(text, text)
    assert [position for position, _ in in_sequence(index)] == [position for position, _ in expected]
    for (_, length), (_, true) in zip(in_sequence(index), expected, strict=True):
        assert min(true, BACKWARD_LIMIT) <= length <= true


def test_a_match_found_at_once_is_measured_to_64_tokens_and_one_that_was_followed_to_its_end() -> None:
    text = list(range(100)) * 2
    followed = ContextIndex([])
    for token in text:
        followed.extend([token])
    assert in_sequence(followed) == [(100, 100)]

    at_once = ContextIndex(text)
    ((position, length),) = in_sequence(at_once)
    assert position == 100
    assert 64 <= length <= 100
    at_once.extend([0, 1, 2])
    assert in_sequence(at_once) == [(103, length + 3), (3, 3)]


def test_a_match_is_not_followed_over_tokens_that_came_all_at_once() -> None:
    text = list(range(10, 42))
    index = ContextIndex([7, *text, 7])
    assert in_sequence(index) == [(1, 1)]
    index.extend([5, *text])
    # The 32 tokens of the text agree, the one before them does not.
    assert in_sequence(index) == [(33, 32)]


# Bounded room


def test_a_long_match_outlives_more_recent_short_ones() -> None:
    #                     0  1  2  3  4  5  6  7  8  9
    index = ContextIndex([1, 2, 3, 4, 3, 5, 3, 6, 1, 2], max_occurrences=2)
    assert in_sequence(index) == [(2, 2)]
    index.extend([3])
    # Token 3 also stands before 7, 5: one of the two matches is kept for the match of length 3.
    assert in_sequence(index) == [(7, 1), (3, 3)]


def test_no_more_places_are_followed_than_allowed_and_the_most_recent_are_taken() -> None:
    index = ContextIndex([7, 0] * 10 + [7], max_occurrences=3)
    assert [position for position, _ in in_sequence(index)] == [19, 17, 15]
    index.extend([0])
    assert [position for position, _ in in_sequence(index)] == [20, 18, 16]


@given(small_texts, st.integers(1, 4))
def test_with_little_room_every_match_is_still_a_true_one(text: list[int], room: int) -> None:
    index = ContextIndex([], max_occurrences=room)
    true = dict(brute_force(text, text))
    for token in text:
        index.extend([token])
    matches = in_sequence(index)
    assert len(matches) == min(room, len(true))
    assert matches == sorted(matches, reverse=True)
    for position, length in matches:
        assert min(true[position], BACKWARD_LIMIT) <= length <= true[position]


# Passages


def test_passages_are_searched_besides_the_sequence() -> None:
    index = ContextIndex([8, 1, 2])
    index.add_passage("a", [1, 2, 3])
    index.add_passage("b", [5, 2, 6, 2])
    assert index.passages.tolist() == [1, 2, 3, -1, 5, 2, 6, 2, -1]
    # The last match, position 8, is the end of passage b: nothing can be copied from there.
    assert in_passages(index) == [(8, 1), (6, 1), (2, 2)]
    assert in_sequence(index) == []
    index.extend([6])
    assert in_passages(index) == [(7, 2)]


def test_separators_are_never_matched() -> None:
    index = ContextIndex([1, 2])
    index.add_passage("a", [1, 2])
    index.add_passage("b", [3, 4])
    index.extend([3])
    # "1 2 | 3" is not "1 2 3": the match that starts in passage b is of one token.
    assert in_passages(index) == [(4, 1)]


@given(small_texts, st.lists(small_texts.filter(len), max_size=4))
def test_matches_in_passages_are_those_that_brute_force_finds(text: list[int], passages: list[list[int]]) -> None:
    before = ContextIndex([], max_occurrences=PLENTY)
    after = ContextIndex(text, max_occurrences=PLENTY)
    for k, passage in enumerate(passages):
        before.add_passage(str(k), passage)
        after.add_passage(str(k), passage)
    for token in text:
        before.extend([token])
    expected = brute_force(joined(passages), text)
    assert before.passages.tolist() == after.passages.tolist() == joined(passages)
    assert in_passages(before) == expected
    assert [position for position, _ in in_passages(after)] == [position for position, _ in expected]
    for (_, length), (_, true) in zip(in_passages(after), expected, strict=True):
        assert min(true, BACKWARD_LIMIT) <= length <= true


def test_the_oldest_passages_go_first_when_the_bound_is_reached() -> None:
    index = ContextIndex([1], max_passage_tokens=8)
    index.add_passage("a", [1, 2])
    index.add_passage("b", [3, 4])
    assert index.passages.tolist() == [1, 2, -1, 3, 4, -1]
    index.add_passage("c", [1, 5])
    assert index.passages.tolist() == [3, 4, -1, 1, 5, -1]
    assert in_passages(index) == [(4, 1)]
    assert index.locate(1, 1) == Occurrence("b", 1, apart=True)
    assert index.locate(1, 4) == Occurrence("c", 1, apart=True)
    index.add_passage("d", [9] * 7)
    assert index.passages.tolist() == [*[9] * 7, -1]
    assert in_passages(index) == []


def test_of_a_passage_longer_than_the_bound_the_first_part_is_kept() -> None:
    index = ContextIndex([1], max_passage_tokens=4)
    index.add_passage("a", range(10))
    assert index.passages.tolist() == [0, 1, 2, -1]


@pytest.mark.parametrize("bound", [0, 1])
def test_a_bound_without_room_for_a_token_keeps_no_passages(bound: int) -> None:
    index = ContextIndex([1], max_passage_tokens=bound)
    index.add_passage("a", [1, 2])
    assert len(index.passages) == 0


@given(st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=12), st.integers(0, 20))
def test_the_passages_never_exceed_their_bound_and_are_the_newest_that_fit(
    passages: list[list[int]], bound: int
) -> None:
    index = ContextIndex([0], max_passage_tokens=bound)
    for k, passage in enumerate(passages):
        index.add_passage(str(k), passage)
    kept: list[list[int]] = []
    for passage in reversed([p[: max(bound - 1, 0)] for p in passages]):
        if not passage:
            continue
        if len(joined([passage, *kept])) > bound:
            break
        kept.insert(0, passage)
    assert index.passages.tolist() == joined(kept)
    assert len(index.passages) <= bound


# Where a token was copied from


def test_marked_passages_and_added_ones_are_located_and_the_rest_belongs_to_none() -> None:
    index = ContextIndex([9, 1, 2, 3, 9, 4, 5, 9])
    index.mark_passage("first", 1, 4)
    index.mark_passage("second", 5, 7)
    index.add_passage("apart", [6, 7])
    index.add_passage("last", [8])
    assert [index.locate(0, k).passage_id for k in range(8)] == [
        *(None, "first", "first", "first"),
        *(None, "second", "second", None),
    ]
    assert index.locate(0, 6) == Occurrence("second", 6, apart=False)
    assert index.locate(1, 1) == Occurrence("apart", 1, apart=True)
    assert index.locate(1, 3) == Occurrence("last", 0, apart=True)


def test_where_marks_overlap_the_first_counts() -> None:
    index = ContextIndex([1, 2, 3])
    index.mark_passage("a", 0, 2)
    index.mark_passage("b", 1, 3)
    assert [index.locate(0, k).passage_id for k in range(3)] == ["a", "a", "b"]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 2), (3, 2), (0, 4)])
def test_marks_outside_the_sequence_are_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=f"no tokens {start}..{stop} in a sequence of 3"):
        ContextIndex([1, 2, 3]).mark_passage("a", start, stop)


# Input and memory


def test_negative_token_ids_are_refused_wherever_they_come_from() -> None:
    with pytest.raises(ValueError, match="must not be negative: -2"):
        ContextIndex([1, -2])
    index = ContextIndex([1])
    with pytest.raises(ValueError, match="must not be negative: -1"):
        index.extend([2, -1])
    with pytest.raises(ValueError, match="must not be negative: -1"):
        index.add_passage("a", [-1])
    assert index.sequence.tolist() == [1]
    assert len(index.passages) == 0


def test_token_ids_are_a_flat_list() -> None:
    with pytest.raises(ValueError, match="flat list, not of shape"):
        ContextIndex(np.zeros((1, 2), np.int64))


def test_token_ids_are_never_cut_to_fit() -> None:
    with pytest.raises(ValueError, match="must fit 32 bits: 4294967301"):
        ContextIndex(np.array([1, 2**32 + 5], np.int64))
    with pytest.raises(ValueError, match="must be integers, not float64"):
        ContextIndex([1, 2.5])  # type: ignore[list-item]


@pytest.mark.parametrize("distinct", [32_000, 500])
def test_a_text_of_32000_tokens_takes_at_most_32_bytes_a_token(distinct: int) -> None:
    text = np.random.default_rng(0).integers(0, distinct, 32_000)
    assert ContextIndex(text).nbytes <= 32 * len(text)


@settings(max_examples=20)
@given(
    st.lists(
        st.one_of(st.integers(0, 2**31 - 1), st.integers(0, 2047).map(lambda k: k << 20)),
        min_size=1,
        max_size=300,
        unique=True,
    )
)
def test_large_and_colliding_token_ids_are_kept_apart(tokens: list[int]) -> None:
    index = ContextIndex(tokens)
    for position, token in enumerate(tokens[:-1]):
        index.extend([token])
        assert in_sequence(index)[-1] == (position + 1, position + 1)
