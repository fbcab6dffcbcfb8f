"""What votes weigh, and the counts that correct estimates: rare cells lean on wider classes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from reader_rag.draft import Calibration, Scoring
from reader_rag.draft import calibration as module
from reader_rag.draft.calibration import smoothed
from reader_rag.draft.kernels import cells as kernels

COPIED = (4, 9, 10, 3, 2)
"""Cells of copied candidates: origin, match length, estimate, listed, agreement."""
OTHERS = (3, 10)
"""Cells of candidates that only the successors propose: kind of entry, estimate."""


def split(cells: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Views of the copied candidates' cells and of the others."""
    copied = int(np.prod(COPIED))
    return cells[:copied].reshape(COPIED), cells[copied:].reshape(OTHERS)


# Scoring


def test_votes_grow_with_the_match_length_behind_the_trust_in_each_kind_of_entry() -> None:
    scoring = Scoring(scale=0.5, power=2.0, longest=4, unknown=2.0, pair=5.0, single=4.0, prior=3.0)
    assert scoring.array.tolist() == [2.0, 5.0, 4.0, 3.0, 0.0, 0.5, 2.0, 4.5, 8.0]


def test_the_default_scoring() -> None:
    array = Scoring().array
    assert array.dtype == np.float64
    assert array[:4].tolist() == [1.0, 3.0, 1.5, 0.2]
    assert len(array) == 4 + 129
    assert array[[4, 5, 6, 132]].tolist() == pytest.approx([0.0, 0.1, 0.1 * 2**1.4, 0.1 * 128**1.4])


# Counts and rates


def test_a_blank_calibration_takes_estimates_as_they_are() -> None:
    blank = Calibration.blank()
    assert blank.learns
    assert not Calibration.blank(learns=False).learns
    assert blank.counts.shape == (3, kernels.CELLS) == (3, 2190)
    hits, expected, rates = blank.counts
    assert rates.tolist() == [1.0] * 2190
    assert hits.tolist() == expected.tolist()
    assert all(expected > 0.0)


def test_rates_are_hits_of_expected_hits_within_a_fourfold_either_way() -> None:
    hits = np.ones(kernels.CELLS)
    hits[:6] = [0.0, 0.4, 1.0, 3.0, 8.0, 100.0]
    rates = Calibration(hits, np.full(kernels.CELLS, 2.0)).counts[kernels.RATES]
    assert rates[:7].tolist() == [0.25, 0.25, 0.5, 1.5, 4.0, 4.0, 0.5]
    assert (kernels.LEAST_RATE, kernels.MOST_RATE) == (0.25, 4.0)


def test_a_calibration_counts_for_itself_and_leaves_what_it_began_with() -> None:
    hits, expected = np.ones(kernels.CELLS), np.ones(kernels.CELLS)
    first = Calibration(hits, expected)
    first.counts += 1.0
    assert hits.tolist() == expected.tolist() == [1.0] * kernels.CELLS
    shipped = Calibration()
    before = shipped.counts.copy()
    shipped.counts += 1.0
    assert np.array_equal(Calibration().counts, before)


# Smoothing


def test_cells_that_were_never_seen_are_taken_as_they_are_and_weigh_one_hit() -> None:
    none = np.zeros(kernels.CELLS)
    hits, expected = smoothed(none, none)
    assert hits.tolist() == expected.tolist() == [1.0] * kernels.CELLS


def test_a_copied_cell_is_smoothed_by_wider_and_wider_classes() -> None:
    hits, expected = np.zeros(kernels.CELLS), np.zeros(kernels.CELLS)
    split(hits)[0][1, 2, 3, 2, 1] = 8.0
    split(expected)[0][1, 2, 3, 2, 1] = 4.0
    new_hits, new_expected = smoothed(hits, expected)
    weights = split(new_expected)[0]
    rates = split(new_hits)[0] / weights
    # Twice what was expected, against a weight of 4 for the next wider class, the widest of which leans on 1:
    # (8 + 4 * 1) / 8 = 1.5 for the estimate, (8 + 4 * 1.5) / 8 = 1.75 if what is listed agrees as well, and so on.
    assert rates[1, 2, 3, 2, 1] == pytest.approx(1.96875)  # the cell itself
    assert rates[1, 2, 3, 2, 0] == pytest.approx(1.9375)  # the same but for the agreement of others
    assert rates[0, 2, 3, 2, 1] == pytest.approx(1.875)  # the same estimate, listed and length
    assert rates[1, 5, 3, 2, 1] == pytest.approx(1.75)  # the same estimate and listed
    assert rates[1, 2, 3, 0, 1] == pytest.approx(1.5)  # the same estimate
    assert rates[1, 2, 4, 2, 1] == 1.0
    assert weights[1, 2, 3, 2, 1] == 4.0
    assert (weights == 1.0).sum() == weights.size - 1
    assert np.array_equal(split(new_hits)[1], split(new_expected)[1])


def test_a_successors_cell_is_smoothed_by_the_other_kinds_of_the_same_estimate() -> None:
    hits, expected = np.zeros(kernels.CELLS), np.zeros(kernels.CELLS)
    split(hits)[1][1, 2] = 0.0
    split(expected)[1][1, 2] = 12.0
    new_hits, new_expected = smoothed(hits, expected)
    weights = split(new_expected)[1]
    rates = split(new_hits)[1] / weights
    # None of 12: (0 + 4 * 1) / 16 for all kinds, (0 + 4 * 1/4) / 16 for this one.
    assert rates[1, 2] == pytest.approx(1 / 16)
    assert rates[[0, 2], 2].tolist() == pytest.approx([1 / 4, 1 / 4])
    assert rates[1, 3] == 1.0
    # None weighs more than 6 hits expected.
    assert weights[1, 2] == 6.0
    assert np.array_equal(split(new_hits)[0], split(new_expected)[0])


def test_a_cell_that_was_seen_often_goes_by_its_own_counts() -> None:
    hits, expected = np.zeros(kernels.CELLS), np.zeros(kernels.CELLS)
    split(hits)[0][0, 0, 5, 1] = [30_000.0, 5_000.0]
    split(expected)[0][0, 0, 5, 1] = [10_000.0, 10_000.0]
    new_hits, new_expected = smoothed(hits, expected)
    assert split(new_hits / new_expected)[0][0, 0, 5, 1].tolist() == pytest.approx([3.0, 0.5], rel=1e-3)


@given(st.integers(0, 2**32), st.sampled_from([0.01, 1.0, 1000.0]))
def test_smoothed_counts_are_positive_and_their_rates_lie_between_those_measured_and_one(
    seed: int, scale: float
) -> None:
    random = np.random.default_rng(seed)
    expected = scale * random.exponential(size=kernels.CELLS) * random.integers(0, 2, kernels.CELLS)
    measured = random.uniform(0.1, 3.0, kernels.CELLS)
    hits, weights = smoothed(measured * expected, expected)
    assert np.array_equal(weights, np.clip(expected, 1.0, 6.0))
    rates = hits / weights
    assert 0.1 <= rates.min() <= rates.max() <= 3.0
    counts = Calibration(hits, weights).counts
    assert np.allclose(counts[kernels.RATES], np.clip(rates, 0.25, 4.0))


# What is shipped


def test_the_shipped_counts_are_one_for_every_cell_and_were_made_on_much_text() -> None:
    with np.load(module._PRIORS, allow_pickle=False) as file:
        hits, expected = file["hits"], file["expected"]
    assert hits.shape == expected.shape == (kernels.CELLS,)
    assert np.isfinite(hits).all()
    assert np.isfinite(expected).all()
    assert hits.min() >= 0.0
    assert expected.min() >= 0.0
    assert hits.sum() > 1000.0


def test_a_calibration_starts_from_the_shipped_counts() -> None:
    hits, expected, rates = Calibration().counts
    assert hits.shape == (kernels.CELLS,)
    assert hits.min() > 0.0
    assert expected.min() >= 1.0
    assert expected.max() <= 6.0
    assert rates.min() >= kernels.LEAST_RATE
    assert rates.max() <= kernels.MOST_RATE
    assert np.allclose(rates, np.clip(hits / expected, kernels.LEAST_RATE, kernels.MOST_RATE))
    assert Calibration().learns
    assert not Calibration(learns=False).learns
