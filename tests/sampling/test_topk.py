"""The best next tokens of a row are those that sorting it gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from reader_rag.sampling.topk import fetch_top_k, rank_passes, top_tokens

INF = float("inf")


def distinct(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    """Logits [rows, vocabulary] without equal values in a row; multiples of 1/8, which float32 holds exactly."""
    random = np.random.default_rng(seed)
    ranks = np.stack([random.permutation(vocabulary) for _ in range(rows)])
    return torch.from_numpy((ranks - vocabulary // 2).astype(np.float32) / 8)


def padded(*tokens: int) -> list[int]:
    return [*tokens, *[-1] * (8 - len(tokens))]


@pytest.mark.parametrize("vocabulary", [8, 9, 63, 64, 65, 100, 128, 1000, 4097])
def test_the_eight_best_are_those_of_topk_whether_or_not_blocks_of_64_fill_the_vocabulary(vocabulary: int) -> None:
    logits = distinct(20, vocabulary, seed=vocabulary)
    found = top_tokens(logits)
    assert found.dtype == np.int32
    assert found.tolist() == logits.topk(8, dim=-1).indices.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("vocabulary", range(1, 8))
def test_a_vocabulary_of_fewer_than_eight_tokens_is_listed_whole_and_filled_up_with_minus_one(
    vocabulary: int, dtype: torch.dtype
) -> None:
    # The last token is the best one, the first the worst.
    logits = torch.arange(vocabulary).to(dtype)[None]
    assert top_tokens(logits).tolist() == [padded(*reversed(range(vocabulary)))]


def test_rows_do_not_mix() -> None:
    falling = torch.arange(70, 0, -1, dtype=torch.float32)
    rising = torch.arange(70, dtype=torch.float32)
    flat_but_one = torch.zeros(70)
    flat_but_one[66] = 1.0
    assert top_tokens(torch.stack([falling, rising, flat_but_one])).tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [69, 68, 67, 66, 65, 64, 63, 62],
        [66, 0, 1, 2, 3, 4, 5, 6],
    ]


def test_no_rows_give_no_rows() -> None:
    assert top_tokens(torch.zeros(0, 100)).shape == (0, 8)
    assert top_tokens(torch.zeros(0, 100, dtype=torch.bfloat16)).shape == (0, 8)


# Equal values


def test_of_equally_probable_tokens_the_first_come_first_in_one_block_and_across_blocks() -> None:
    assert top_tokens(torch.zeros(1, 200)).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    logits = torch.zeros(1, 200)
    logits[0, [10, 63, 64, 130, 199]] = 1.0  # blocks begin at 0, 64, 128 and 192
    logits[0, [150, 20]] = 2.0
    # The two of 2, then the five of 1, then the first of the others.
    assert top_tokens(logits).tolist() == [[20, 150, 10, 63, 64, 130, 199, 0]]


def test_a_later_equal_of_the_eighth_does_not_displace_it() -> None:
    logits = torch.tensor([[8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 1.0, *[0.0] * 60, 1.0]])
    assert top_tokens(logits).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


# Values that are no ordinary numbers


def test_tokens_that_are_ruled_out_come_behind_all_others() -> None:
    # 70 tokens, all but nine of them ruled out; of those nine, 3 is the worst.
    logits = torch.full((1, 70), -INF)
    for rank, token in enumerate([65, 2, 69, 0, 40, 64, 63, 12, 3]):
        logits[0, token] = -1e30 * rank
    assert top_tokens(logits).tolist() == [[65, 2, 69, 0, 40, 64, 63, 12]]


def test_tokens_that_are_ruled_out_are_never_listed_however_few_others_there_are() -> None:
    logits = torch.full((3, 70), -INF)
    logits[0, [69, 1]] = torch.tensor([2.0, 1.0])
    logits[1, 30] = -3e38
    assert top_tokens(logits).tolist() == [padded(69, 1), padded(30), padded()]


def test_whole_blocks_that_are_ruled_out_hide_nothing_behind_them() -> None:
    logits = torch.full((1, 300), -INF)
    logits[0, 256:] = torch.arange(44, dtype=torch.float32)
    assert top_tokens(logits).tolist() == [[299, 298, 297, 296, 295, 294, 293, 292]]


def test_an_infinite_logit_is_the_best() -> None:
    logits = distinct(1, 100)
    logits[0, 77] = INF
    assert top_tokens(logits)[0, 0] == 77


# Other types and layouts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_give_the_same_tokens_as_float32(dtype: torch.dtype) -> None:
    # At most 250 distinct integers: bfloat16 holds those up to 256 exactly.
    random = np.random.default_rng(1)
    logits = torch.from_numpy(np.stack([random.permutation(250) for _ in range(10)])).to(dtype)
    found = top_tokens(logits)
    assert found.dtype == np.int32
    assert found.tolist() == top_tokens(logits.float()).tolist()


def test_tokens_that_are_ruled_out_come_last_in_bfloat16_too() -> None:
    logits = torch.full((1, 70), -INF, dtype=torch.bfloat16)
    logits[0, [69, 1, 30]] = torch.tensor([2.0, 1.0, -5.0], dtype=torch.bfloat16)
    assert top_tokens(logits)[0, :3].tolist() == [69, 1, 30]


def test_logits_that_do_not_lie_in_one_piece_are_read_as_they_are_meant() -> None:
    logits = distinct(6, 300, seed=2)
    expected = logits.topk(8, dim=-1).indices
    assert top_tokens(logits[::2]).tolist() == expected[::2].tolist()
    assert top_tokens(logits.T.contiguous().T).tolist() == expected.tolist()
    assert top_tokens(logits[:, 100:200]).tolist() == logits[:, 100:200].topk(8, dim=-1).indices.tolist()


def test_the_logits_are_left_as_they_were() -> None:
    logits = distinct(3, 100)
    before = logits.clone()
    top_tokens(logits)
    assert torch.equal(logits, before)


# Of several texts

PASSES = st.lists(st.integers(1, 300), min_size=1, max_size=6)


@given(PASSES, st.integers(1, 20), st.sampled_from([torch.float32, torch.bfloat16]))
def test_what_is_fetched_together_is_what_each_pass_says_alone(
    rows: list[int], vocabulary: int, dtype: torch.dtype
) -> None:
    passes = [distinct(count, vocabulary, seed=k).to(dtype) for k, count in enumerate(rows)]
    for learns in (True, False):
        together = list(rank_passes(passes, learns=learns))
        assert len(together) == len(passes)
        for found, logits in zip(together, passes, strict=True):
            assert found.argmax == logits.argmax(-1).tolist()
            assert (found.best is not None) == learns
            assert found.best is None or found.best.tolist() == top_tokens(logits).tolist()


def test_of_equally_probable_tokens_the_first_is_the_highest() -> None:
    (found,) = rank_passes([torch.tensor([[1.0, 3.0, 3.0, 0.0]])], learns=True)
    assert found.argmax == [1]


def test_nothing_is_fetched_from_main_memory() -> None:
    assert fetch_top_k([distinct(1, 9), distinct(2, 9)], learns=True) == [None, None]
    assert fetch_top_k([], learns=True) == []


# Against sorting

ROWS = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(1, 200)),
    elements=st.one_of(
        st.sampled_from([0.0, 1.0, 2.0]),  # ties
        st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False),
    ),
)


@given(ROWS)
def test_the_best_are_the_first_of_a_stable_sort_by_falling_logits(logits: NDArray[np.float32]) -> None:
    # A stable sort keeps equal values in their order: the first comes first.
    order = np.argsort(-logits, axis=1, kind="stable")[:, :8]
    expected = [padded(*row) for row in order.tolist()]
    assert top_tokens(torch.from_numpy(logits.copy())).tolist() == expected
