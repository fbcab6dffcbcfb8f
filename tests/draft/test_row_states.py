"""Rows are recognised by their tokens, whichever rows they move to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from reader_rag.draft.kernels.rows import BASE, LIVE, PROMPT, SIZE, tokens_of
from reader_rag.draft.row_states import RowStates


class Batch:
    """Rows with texts, and their drafting states."""

    def __init__(self, rows: int, **options: int) -> None:
        self.texts = np.zeros((rows, 400), np.int32)
        self.states = RowStates(rows, 4, **options)

    def show(self, *texts: Sequence[int], rows: Sequence[int] | None = None, came: int = 1) -> list[int]:
        """The state of each row, after rows hold these texts."""
        at = range(len(texts)) if rows is None else rows
        for row, text in zip(at, texts, strict=True):
            self.texts[row, : len(text)] = text
            self.texts[row, len(text) :] = 77  # what stood there before
        lengths = np.array([len(text) for text in texts])
        found = self.states.update(self.texts, np.array(at), lengths, np.full(len(texts), came))
        for state, text in zip(found.tolist(), texts, strict=True):
            assert self.known(state) == list(text)[self.states.states[state, BASE] :]
        return [int(state) for state in found]

    def known(self, state: int) -> list[int]:
        row = self.states.states[state]
        return [int(token) for token in tokens_of(row)[: row[SIZE]]]


A, B, C = [1, 2, 3], [4, 5, 6], [7, 8, 9]


def test_a_request_that_grows_in_its_row_keeps_its_state() -> None:
    batch = Batch(2)
    first = batch.show(A, B)
    assert batch.show([*A, 1], [*B, 4, 5]) == first


def test_requests_that_change_rows_keep_their_states() -> None:
    batch = Batch(3)
    a, b, c = batch.show(A, B, C)
    assert batch.show([*C, 0], [*A, 0], [*B, 0]) == [c, a, b]


def test_a_request_that_left_and_comes_back_in_another_row_keeps_its_state() -> None:
    batch = Batch(2)
    a, b = batch.show(A, B)
    for token in range(10):
        assert batch.show([*B, *range(token)]) == [b]
    assert batch.show([*A, 5], rows=[1]) == [a]


def test_a_row_with_a_new_request_gets_a_new_state() -> None:
    batch = Batch(2)
    a, _ = batch.show(A, B)
    changed = [1, 9, 3, 5]
    assert batch.show(changed, rows=[0])[0] != a
    assert len(batch.states) == 3


def test_requests_that_differ_in_one_early_token_are_distinguished() -> None:
    batch = Batch(1)
    text = list(range(300))
    a = batch.show(text)
    other = [*text, 5]
    other[3] = 0
    assert batch.show(other) != a


def test_a_request_that_became_shorter_is_indexed_again() -> None:
    batch = Batch(1)
    a = batch.show([*A, 4])
    b = batch.show(A)
    assert a != b


def test_equal_requests_have_a_state_each() -> None:
    batch = Batch(3)
    first = batch.show(A, A, A)
    assert sorted(set(first)) == sorted(first)
    second = batch.show([*A, 5], [*A, 6], [*A, 5])
    assert sorted(second) == sorted(first)


def test_the_longest_of_several_that_agree_is_taken() -> None:
    batch = Batch(3)
    _, longer, _ = batch.show([1], [1, 2], [5])
    assert batch.show([9], [9, 9], [1, 2, 3])[2] == longer


def test_what_came_in_the_first_step_is_output_and_the_rest_the_prompt() -> None:
    batch = Batch(1)
    state = batch.show([1, 2, 3, 4, 5], came=2)[0]
    assert batch.states.states[state, PROMPT] == 3


def test_a_request_not_seen_for_a_while_is_dropped_with_its_memory() -> None:
    batch = Batch(2)
    batch.show(A, list(range(300)))
    for token in range(100):
        batch.show([*A, *range(token)])
    assert len(batch.states) == 1
    assert int(batch.states.states[:, LIVE].sum()) == 1
    small = Batch(2)
    small.show([*A, *range(99)])
    assert batch.states.nbytes <= 2 * small.states.nbytes


def test_there_are_never_more_states_than_twice_the_rows() -> None:
    batch = Batch(2)
    for number in range(50):
        batch.show([number, 1], [number, 2])
    assert len(batch.states) == 4


def test_of_a_long_request_the_end_is_indexed() -> None:
    batch = Batch(1, max_tokens=64)
    text = list(range(100))
    state = batch.show(text, came=10)[0]
    assert batch.known(state) == text[68:]
    assert batch.states.states[state, PROMPT] == 90 - 68
    while len(text) < 300:
        text += [len(text), len(text) + 1]
        assert batch.show(text) == [state]
        assert 32 <= len(batch.known(state)) <= 64
    assert batch.states.states[state, PROMPT] == 0
    assert batch.states.nbytes < 64 * 40


def test_memory_for_outputs_beside_the_requests_is_bounded() -> None:
    batch = Batch(1, max_ended_tokens=100)
    for number in range(60):
        batch.show([number, *range(200, 209)], came=9)
        assert batch.states.ended.size <= 100
    held = batch.states.ended.tokens[: batch.states.ended.size].tolist()
    assert len(held) >= 50
    assert held == [*range(200, 209), -1] * (len(held) // 10)


@pytest.mark.parametrize("others", [0, 5])
def test_matches_are_those_of_the_whole_request(others: int) -> None:
    batch = Batch(1)
    text = [1, 2, 3, 1, 2, 4, 1]
    batch.show(*[text[:-1]])
    state = batch.show([*text, *[2] * (others > 0)])[0]
    followed = batch.states.matches[state, 0]
    # 1 stood before 4 and before 1; 1 2 before 5 and before 2.
    assert followed[:, :2].tolist() == ([[4, 1], [1, 1]] if not others else [[5, 2], [2, 2]])
