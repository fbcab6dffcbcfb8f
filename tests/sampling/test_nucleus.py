"""Top-p: as `transformers`' to the last bit, nearly always without its sort."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from transformers import TopPLogitsWarper

from reader_rag.sampling.nucleus import TopP

NO_IDS = torch.zeros(1, 1, dtype=torch.int64)

SCORES = arrays(
    np.float32,
    st.integers(1, 300),
    elements=st.one_of(
        st.sampled_from([0.0, -0.0, 1.0, -1.0, -float("inf")]),  # equal ones
        st.floats(-30, 30, width=32),
    ),
)


@given(SCORES, st.one_of(st.sampled_from([0.0, 0.5, 0.9]), st.floats(0, 1)))
def test_the_nucleus_is_that_of_transformers(scores: NDArray[np.float32], top_p: float) -> None:
    held = torch.from_numpy(scores.copy())[None]
    assert torch.equal(TopP(top_p)(NO_IDS, held), TopPLogitsWarper(top_p)(NO_IDS, held))
    assert torch.equal(held[0], torch.from_numpy(scores))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_nucleus_of_a_whole_vocabulary_and_of_several_texts(dtype: torch.dtype) -> None:
    scores = (3 * torch.randn(3, 50_000, generator=torch.Generator().manual_seed(1))).to(dtype)
    ids = torch.zeros(3, 1, dtype=torch.int64)
    for held in (scores, scores[:1], scores[1:2].masked_fill(scores[1:2] > 5, torch.nan)):
        expected = TopPLogitsWarper(0.9)(ids, held)
        assert torch.equal(TopP(0.9)(ids, held).nan_to_num(1e9), expected.nan_to_num(1e9))


@pytest.mark.parametrize("top_p", [0.3, 0.8, 0.95])
@pytest.mark.parametrize("spread", [1.0, 2.5, 4.0])
def test_scores_like_a_models_are_rarely_sorted(monkeypatch: pytest.MonkeyPatch, top_p: float, spread: float) -> None:
    """The wider the scores, the fewer are in the nucleus; flat ones, which no model gives, are sorted all."""
    generator = torch.Generator().manual_seed(3)
    rows = spread * torch.randn(60, 20_000, generator=generator)
    rows[:, :30] += torch.linspace(14, 4, 30)
    expected = [TopPLogitsWarper(top_p)(NO_IDS, row[None]) for row in rows]
    warper, sorts = TopP(top_p), []
    reference = warper._reference
    monkeypatch.setattr(warper, "_reference", lambda ids, scores: sorts.append(1) or reference(ids, scores))
    for row, masked in zip(rows, expected, strict=True):
        assert torch.equal(warper(NO_IDS, row[None]), masked)
    assert len(sorts) <= 15


@pytest.mark.parametrize("scores", [[-np.inf] * 4, [np.inf, 1.0, 0.0, 0.0], [1.0, np.nan, 0.0, 2.0]])
def test_scores_that_are_no_numbers_are_left_to_transformers(scores: list[float]) -> None:
    held = torch.tensor([scores])
    assert torch.equal(
        TopP(0.9)(NO_IDS, held).nan_to_num(7.0), TopPLogitsWarper(0.9)(NO_IDS, held.clone()).nan_to_num(7.0)
    )
