"""What the target found likely after one or two tokens is remembered, in bounded room, and fades."""

from __future__ import annotations

import doctest
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from reader_rag.draft import SuccessorTable
from reader_rag.draft import successor_table as successors
from reader_rag.draft.kernels import successors as kernels

near = partial(pytest.approx, abs=2e-4)
"""Weights are integers, in 1/65536, and rounded down wherever they fade."""


def best(*tokens: int) -> list[int]:
    """A row of best next tokens, filled up with "no more"."""
    return [*tokens, *[-1] * (kernels.BEST - len(tokens))]


def make_prior(rows: dict[int, list[int]], size: int) -> NDArray[np.int32]:
    return np.array([best(*rows.get(token, [])) for token in range(size)], np.int32).reshape(-1, kernels.BEST)


def learn(table: SuccessorTable, *rows: tuple[int, int, list[int]]) -> None:
    """Rows of the token before (-1: none), the token and the best next ones."""
    for before, token, row in rows:
        table.learn([before], [token], [best(*row)])


def weights(table: SuccessorTable, before: int, token: int) -> list[float]:
    """Weights of the next tokens, in the order of `after`; 1 is what all tokens of a row share."""
    row = kernels.find_entry(table.keys, before, token)
    assert row >= 0
    entry = table.entries[row].tolist()
    tokens, held = entry[1:16], entry[17:32]
    return [weight / (1 << 16) for next_token, weight in zip(tokens, held, strict=True) if next_token >= 0]


def total(table: SuccessorTable, before: int, token: int) -> float:
    """How often an entry was written, fading."""
    return float(table.entries[kernels.find_entry(table.keys, before, token), kernels.TOTAL]) / (1 << 16)


def test_the_example_of_the_docstring_holds() -> None:
    assert doctest.testmod(successors) == (0, 3)


# What follows


def test_what_was_likely_after_two_tokens_is_likely_again() -> None:
    table = SuccessorTable(64)
    table.learn([5], [6], [[7, 8, 9, 10, 11, 12, 13, 14]])
    assert table.after(5, 6) == [7, 8, 9, 10, 11, 12, 13, 14]
    assert weights(table, 5, 6) == near([0.55, 0.16, 0.08, 0.05, 0.035, 0.025, 0.02, 0.015])
    assert total(table, 5, 6) == 1.0


def test_after_another_token_before_what_the_last_one_alone_suggests_is_taken() -> None:
    table = SuccessorTable(64)
    learn(table, (5, 6, [7, 8]))
    assert table.after(4, 6) == table.after(-1, 6) == [7, 8]
    assert table.after(6, 5) == table.after(5, 7) == table.after(-1, 5) == []


def test_two_tokens_come_before_one() -> None:
    table = SuccessorTable(64)
    learn(table, (5, 6, [7]), (1, 6, [9]), (1, 6, [9]))
    assert table.after(5, 6) == [7]
    assert table.after(4, 6) == [9, 7]


def test_a_first_token_has_no_pair() -> None:
    table = SuccessorTable(64)
    learn(table, (-1, 6, [7]))
    assert len(table) == 1
    assert table.after(-1, 6) == table.after(3, 6) == [7]
    # Whatever the negative number is.
    learn(table, (-7, 6, [7]))
    assert len(table) == 1
    assert table.after(-9, 6) == [7]


def test_many_positions_are_learned_at_once_and_in_their_order() -> None:
    at_once, one_by_one = SuccessorTable(64), SuccessorTable(64)
    rows = [(-1, 1, [2, 3]), (1, 2, [3]), (2, 1, [4, 2]), (1, 2, [1, 3])]
    before, tokens, following = zip(*rows, strict=True)
    at_once.learn(np.array(before), np.array(tokens, np.uint16), np.array([best(*row) for row in following]))
    learn(one_by_one, *rows)
    assert np.array_equal(at_once.keys, one_by_one.keys)
    assert np.array_equal(at_once.entries, one_by_one.entries)
    # 3 had 0.55, of which 4/5 are left, and 0.16; 1 has 0.55.
    assert at_once.after(1, 2) == [3, 1]
    at_once.learn([], [], np.zeros((0, 8), np.int32))
    assert np.array_equal(at_once.entries, one_by_one.entries)


def test_minus_one_ends_a_row() -> None:
    table = SuccessorTable(64)
    table.learn([5], [6], [[7, -1, 8, 9, -1, 10, 11, 12]])
    assert table.after(5, 6) == [7]
    table.learn([5], [6], [best()])
    assert table.after(5, 6) == [7]
    assert weights(table, 5, 6) == near([0.55 * 0.8])
    table.learn([1], [2], [best()])
    assert table.after(1, 2) == []


# Fading


def test_older_rows_fade() -> None:
    table = SuccessorTable(64)
    learn(table, (-1, 6, [7]), (-1, 6, [8]))
    assert table.after(-1, 6) == [8, 7]
    assert weights(table, -1, 6) == near([0.55, 0.44])
    assert total(table, -1, 6) == near(1.8)


def test_what_came_often_outweighs_what_came_once_until_that_comes_again() -> None:
    table = SuccessorTable(64)
    learn(table, (-1, 6, [7]), (-1, 6, [7]), (-1, 6, [7]), (-1, 6, [8]))
    # 0.55 three times: 0.55, 0.99, 1.342; then 4/5 of it.
    assert table.after(-1, 6) == [7, 8]
    assert weights(table, -1, 6) == near([1.0736, 0.55])
    learn(table, (-1, 6, [8]))
    assert table.after(-1, 6) == [8, 7]
    assert weights(table, -1, 6) == near([0.99, 0.85888])


def test_the_ranks_of_a_token_add_up() -> None:
    table = SuccessorTable(64)
    learn(table, (-1, 6, [7, 8, 9]), (-1, 6, [9, 8, 7]))
    # 9: 4/5 of 0.08 and 0.55; 7: 4/5 of 0.55 and 0.08; 8: 4/5 of 0.16 and 0.16.
    assert table.after(-1, 6) == [9, 7, 8]
    assert weights(table, -1, 6) == near([0.614, 0.52, 0.288])


def test_an_entry_keeps_the_15_heaviest_tokens() -> None:
    table = SuccessorTable(64)
    learn(table, (-1, 6, [10, 11, 12, 13, 14, 15, 16, 17]), (-1, 6, [20, 21, 22, 23, 24, 25, 26, 27]))
    # 0.44, 0.128, 0.064, 0.04, 0.028, 0.02, 0.016, 0.012 are left of the first row: 17 has to go. Equally heavy ones
    # (15 and 26) stay in the order of their coming.
    assert table.after(-1, 6) == [20, 10, 21, 11, 22, 12, 23, 13, 24, 14, 25, 15, 26, 16, 27]


def test_a_token_lighter_than_all_that_are_kept_is_left_out() -> None:
    table = SuccessorTable(64)
    first, second = [10, 11, 12, 13, 14, 15, 16, 17], [20, 21, 22, 23, 24, 25, 26]
    learn(table, (-1, 6, first), (-1, 6, first), (-1, 6, second), (-1, 6, second))
    # The new token's 0.015 is less than what is left of 26's 0.02 + 4/5 * 0.02: 0.0288.
    learn(table, (-1, 6, [17, 16, 15, 14, 13, 12, 11, 30]))
    assert sorted(table.after(-1, 6)) == [*first, *second]
    assert min(weights(table, -1, 6)) == near(0.0288)
    # In the first rank it is in, and 26 is out.
    learn(table, (-1, 6, [30]))
    assert sorted(table.after(-1, 6)) == [*first, *second[:-1], 30]


# The prior


def test_before_anything_is_learned_the_prior_is_taken() -> None:
    table = SuccessorTable(64, make_prior({1: [2, 3], 2: [1, 4, 5, 6, 7, 8, 9, 0]}, 4))
    assert table.after(0, 1) == table.after(-1, 1) == [2, 3]
    assert table.after(1, 2) == [1, 4, 5, 6, 7, 8, 9, 0]
    assert table.after(1, 3) == table.after(1, 4) == table.after(1, 2**31 - 1) == []
    assert len(table) == 0


def test_a_new_entry_inherits_from_the_prior() -> None:
    table = SuccessorTable(64, make_prior({6: [1, 2, 3]}, 8))
    learn(table, (-1, 6, [2]))
    # A third of 0.55, 0.16 and 0.08, of which 4/5 are left.
    assert table.after(-1, 6) == [2, 1, 3]
    assert weights(table, -1, 6) == near([0.55 + 0.16 * 0.8 / 3, 0.55 * 0.8 / 3, 0.08 * 0.8 / 3])
    assert total(table, -1, 6) == near(1 + 0.8 / 3)


def test_a_new_pair_inherits_from_the_single_entry_as_it_was_before() -> None:
    table = SuccessorTable(64, make_prior({6: [4]}, 8))
    learn(table, (-1, 6, [1, 2]), (-1, 6, [1, 2]))
    # Seen 1 + 4/5 + 16/25 / 3 times: 2.01333 times, by which a third of its weight is shared out.
    single = weights(table, -1, 6)
    assert table.after(-1, 6) == [1, 2, 4]
    learn(table, (5, 6, [3]))
    assert table.after(5, 6) == [3, 1, 2, 4]
    seen = 1.8 + 0.64 / 3
    assert weights(table, 5, 6) == near([0.55, *(weight / seen / 3 * 0.8 for weight in single)])
    assert total(table, 5, 6) == near(1 + 0.8 / 3)
    assert table.after(-1, 6) == [1, 3, 2, 4]


def test_a_new_pair_inherits_from_the_prior_where_there_is_no_single_entry() -> None:
    table = SuccessorTable(64, make_prior({6: [1]}, 8))
    learn(table, (5, 6, [3]))
    assert table.after(5, 6) == table.after(4, 6) == [3, 1]
    assert weights(table, 5, 6) == near([0.55, 0.55 * 0.8 / 3])


def test_the_prior_is_never_written() -> None:
    prior = make_prior({token: [(token + k) % 9 for k in range(8)] for token in range(9)}, 9)
    before = prior.copy()
    table = SuccessorTable(16, prior)
    random = np.random.default_rng(0)
    table.learn(random.integers(-1, 9, 300), random.integers(0, 9, 300), random.integers(0, 9, (300, 8)))
    table.after(1, 2)
    assert table.prior is prior
    assert np.array_equal(prior, before)


# Bounded room


@pytest.mark.parametrize(("capacity", "entries"), [(0, 0), (1, 4), (4, 4), (5, 8), (64, 64), (65, 128), (100, 128)])
def test_the_capacity_is_rounded_up_to_a_power_of_two_of_136_bytes_each(capacity: int, entries: int) -> None:
    table = SuccessorTable(capacity)
    assert table.nbytes == entries * 136
    assert len(table) == 0
    if entries:
        assert table.entries.ctypes.data % 64 == 0


def test_far_more_keys_than_room_take_no_more_of_it_and_the_latest_are_known() -> None:
    table = SuccessorTable(64)
    held, keys, entries = table.nbytes, table.keys, table.entries
    for start in range(0, 4000, 100):
        tokens = np.arange(start, start + 100)
        table.learn(tokens, tokens + 1, [best(int(token) + 2) for token in tokens])
        # A set holds at least the four keys written last: the pairs and single tokens of the last two positions.
        for token in tokens[-2:].tolist():
            assert table.after(token, token + 1) == table.after(-1, token + 1) == [token + 2]
            assert kernels.find_entry(table.keys, token, token + 1) >= 0
    assert table.nbytes == held
    assert (table.keys is keys, table.entries is entries) == (True, True)
    assert 56 <= len(table) <= 64
    assert table.after(0, 1) == []
    known = sum(table.after(token, token + 1) == [token + 2] for token in range(3900, 4000))
    assert known > 20


def test_a_new_key_takes_the_place_of_the_one_written_longest_ago() -> None:
    table = SuccessorTable(4)
    learn(table, *[(-1, token, [token + 10]) for token in (1, 2, 3, 4)])
    learn(table, (-1, 1, [11]), (-1, 5, [15]))
    assert [table.after(-1, token) for token in (1, 2, 3, 4, 5)] == [[11], [], [13], [14], [15]]
    # What is looked up is not kept longer for it.
    learn(table, (-1, 6, [16]))
    assert [table.after(-1, token) for token in (1, 2, 3, 4, 5, 6)] == [[11], [], [], [14], [15], [16]]


def test_a_key_that_takes_anothers_place_starts_anew() -> None:
    table = SuccessorTable(4)
    learn(table, *[(-1, token, [token + 10, 20, 21, 22]) for token in (1, 2, 3, 4, 5)])
    assert table.after(-1, 5) == [15, 20, 21, 22]
    assert weights(table, -1, 5) == near([0.55, 0.16, 0.08, 0.05])
    assert total(table, -1, 5) == 1.0


def test_a_pair_that_takes_the_place_of_its_own_single_entry_inherits_from_it() -> None:
    table = SuccessorTable(4)
    learn(table, (-1, 6, [1, 2]), (-1, 7, [9]), (-1, 8, [9]), (-1, 9, [9]), (5, 6, [3]))
    # All four ways were taken, and 6's was the oldest.
    assert table.after(5, 6) == [3, 1, 2]
    assert weights(table, 5, 6) == near([0.55, 0.55 * 0.8 / 3, 0.16 * 0.8 / 3])
    assert table.after(-1, 6) == [3]


def test_no_capacity_remembers_nothing() -> None:
    table = SuccessorTable(0, make_prior({6: [1]}, 8))
    learn(table, (5, 6, [7]))
    assert table.after(5, 6) == [1]
    assert table.after(5, 7) == SuccessorTable(0).after(5, 6) == []
    assert table.nbytes == len(table) == 0


def test_large_token_ids_of_one_set_are_told_apart() -> None:
    table = SuccessorTable(4)
    ids = [0, 1 << 20, 1 << 30, 2**31 - 1]
    for k, before in enumerate(ids[:2]):
        table.learn([before], [2**31 - 1], [best(ids[k])])
    assert [table.after(before, 2**31 - 1)[:1] for before in ids[:2]] == [[0], [1 << 20]]
    assert table.after(5, 2**31 - 1) == [1 << 20, 0]


# Against a twin in plain Python

RANKS = (36045, 10486, 5243, 3277, 2294, 1638, 1311, 983)
"""0.55, 0.16, 0.08, 0.05, 0.035, 0.025, 0.02, 0.015 of 65536."""


class Twin:
    """A table without bounds."""

    def __init__(self, prior: list[list[int]]) -> None:
        self.prior = prior
        self.entries: dict[tuple[int, int], tuple[int, list[tuple[int, int]]]] = {}

    def entry(self, before: int, token: int) -> tuple[int, list[tuple[int, int]]]:
        """The total, and tokens with their weights."""
        for key in ((before, token), (-1, token)):
            if key in self.entries:
                return self.entries[key]
        if token < len(self.prior):
            return 65536, list(zip(self.prior[token], RANKS, strict=False))
        return 0, []

    def learn(self, before: int, token: int, row: list[int]) -> None:
        for first in (before, -1) if before >= 0 else (-1,):
            written, held = self.entries.get((first, token)) or self.inherited(token)
            written += 65536 - written // 5
            held = [(t, w - w // 5) for t, w in held]
            for following, weight in zip(row, RANKS, strict=False):
                known = dict(held)
                if following not in known and len(held) == 15:
                    if held[-1][1] >= weight:
                        continue
                    held = held[:-1]
                weight += known.get(following, 0)
                held = [(t, w) for t, w in held if t != following]
                at = sum(w >= weight for _, w in held)
                held = [*held[:at], (following, weight), *held[at:]]
            self.entries[first, token] = written, held

    def inherited(self, token: int) -> tuple[int, list[tuple[int, int]]]:
        written, held = self.entry(-1, token)
        if not written:
            return 0, []
        share = 65536 // 3 / written
        return 65536 // 3, [(t, int(w * share)) for t, w in held]


@given(
    st.lists(
        st.tuples(st.integers(-1, 3), st.integers(0, 3), st.lists(st.integers(0, 30), max_size=8, unique=True)),
        max_size=60,
    ),
    st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True), max_size=4),
    st.sampled_from([1, 7919]),
)
def test_a_table_with_room_enough_is_the_twin(
    rows: list[tuple[int, int, list[int]]], prior: list[list[int]], stride: int
) -> None:
    table, twin = SuccessorTable(1 << 12, make_prior(dict(enumerate(prior)), len(prior))), Twin(prior)
    # No set is so full that anything is dropped.
    for before, token, row in rows:
        first, last = stride * before if before >= 0 else -1, stride * token
        learn(table, (first, last, row))
        twin.learn(first, last, row)
    assert len(table) == len(twin.entries)
    for (before, token), (written, held) in twin.entries.items():
        entry = table.entries[kernels.find_entry(table.keys, before, token)].tolist()
        assert entry[0] == written
        assert entry[1 : 1 + len(held)] == [t for t, _ in held]
        assert entry[17 : 17 + len(held)] == [w for _, w in held]
        assert entry[1 + len(held) : 16] == [-1] * (15 - len(held))
    for before in range(-1, 5):
        for token in range(5):
            expected = [t for t, _ in twin.entry(stride * before if before >= 0 else -1, stride * token)[1]]
            assert table.after(stride * before if before >= 0 else -1, stride * token) == expected
