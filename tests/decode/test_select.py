"""Which token the target emits: greedy, or drawn with noise that depends on the seed and the position alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from reader_rag.config import GenerationConfig
from reader_rag.decode.select import Sampled, greedy, gumbel, make_selector

LOGITS = torch.tensor([1.0, 0.0, 2.0, -1.0, 1.5])
DRAWS = 8_000
FAR = 0.02
"""A distance that so many draws of the right distribution stay well below."""


def distance(draw: Callable[[int], int], probabilities: torch.Tensor) -> float:
    """Total variation between `DRAWS` draws, one a position, and the exact probabilities."""
    counts = np.bincount([draw(position) for position in range(DRAWS)], minlength=len(probabilities))
    return float(np.abs(counts / DRAWS - probabilities.numpy()).sum() / 2)


def test_greedy_takes_the_best_token_of_every_row_and_of_equal_ones_the_first() -> None:
    token = greedy(torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 5.0]]), [7, 8])
    assert [token(0), token(1)] == [1, 0]


def test_settings_choose_the_selector() -> None:
    assert make_selector(GenerationConfig()) is greedy
    assert make_selector(GenerationConfig(top_k=3, top_p=0.5, seed=1)) is greedy
    assert isinstance(make_selector(GenerationConfig(temperature=0.1)), Sampled)


# Noise


def test_the_noise_is_the_same_on_every_machine() -> None:
    assert gumbel(0, 0, 4).tolist() == pytest.approx([-1.495452, -0.351137, -0.785907, 0.558675], abs=1e-6)
    assert gumbel(7, 100, 4).tolist() == pytest.approx([-0.321788, 0.062838, 1.412299, 0.732894], abs=1e-6)
    assert gumbel(2**64 - 1, 5, 2).tolist() == pytest.approx([-1.062257, 0.40172], abs=1e-6)


def test_the_noise_depends_on_seed_and_position_alone() -> None:
    assert np.array_equal(gumbel(3, 9, 50), gumbel(3, 9, 50))
    assert np.array_equal(gumbel(3, 9, 50)[:20], gumbel(3, 9, 20))
    assert not np.array_equal(gumbel(3, 9, 50), gumbel(3, 10, 50))
    assert not np.array_equal(gumbel(3, 9, 50), gumbel(4, 9, 50))
    assert not np.array_equal(gumbel(3, 9, 50), gumbel(9, 3, 50))


def test_the_noise_has_the_gumbel_distribution() -> None:
    noise = np.sort(gumbel(1, 1, 20_000).astype(np.float64))
    exact = np.exp(-np.exp(-noise))
    # Kolmogorov-Smirnov: 1.63 / sqrt(n) is the 1% point.
    assert np.abs(exact - (np.arange(20_000) + 0.5) / 20_000).max() < 1.63 / 20_000**0.5


# Draws


def test_a_draw_depends_on_its_logits_seed_and_position_not_on_its_row() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    sampled = Sampled(0.8, 0, 1.0, seed=5)
    together = sampled(logits, [10, 11, 11, 12, 12, 13])
    alone = [sampled(logits[k : k + 1], [position])(0) for k, position in enumerate([10, 11, 11, 12, 12, 13])]
    assert [together(k) for k in range(6)] == alone
    assert [together(k) for k in (3, 3, 0)] == [alone[3], alone[3], alone[0]]


def test_draws_are_pinned() -> None:
    sampled = Sampled(1.0, 0, 1.0, seed=0)
    assert [sampled(LOGITS[None], [position])(0) for position in range(12)] == [4, 2, 4, 2, 2, 2, 4, 4, 0, 2, 0, 2]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.8)]
)
def test_draws_have_the_targets_distribution(temperature: float, top_k: int, top_p: float) -> None:
    sampled = Sampled(temperature, top_k, top_p, seed=11)
    exact = sampled.warp(LOGITS).softmax(-1)
    assert distance(lambda position: sampled(LOGITS[None], [position])(0), exact) < FAR


def test_the_check_of_the_distribution_catches_a_wrong_rule() -> None:
    exact = LOGITS.softmax(-1)

    def uniform_noise(position: int) -> int:
        noise = np.random.default_rng(position).random(len(LOGITS))
        return int((LOGITS.numpy() + noise).argmax())

    def temperature_ignored(position: int) -> int:
        return Sampled(1.0, 0, 1.0, seed=11)(LOGITS[None], [position])(0)

    assert distance(uniform_noise, exact) > FAR
    assert distance(temperature_ignored, (LOGITS / 0.8).softmax(-1)) > FAR


def test_a_low_temperature_takes_the_best_token() -> None:
    sampled = Sampled(0.001, 0, 1.0, seed=2)
    assert {sampled(LOGITS[None], [position])(0) for position in range(200)} == {2}


def test_without_a_seed_every_call_draws_another() -> None:
    logits = torch.zeros(1, 1000)
    first, second = (make_selector(GenerationConfig(temperature=1.0)) for _ in range(2))
    positions = range(20)
    assert [first(logits, [p])(0) for p in positions] == [first(logits, [p])(0) for p in positions]
    assert [first(logits, [p])(0) for p in positions] != [second(logits, [p])(0) for p in positions]


def test_sixteen_bit_logits_are_drawn_from_in_float32() -> None:
    sampled = Sampled(0.7, 0, 0.9, seed=4)
    half = LOGITS.to(torch.bfloat16)
    draws = [sampled(half[None], [position])(0) for position in range(50)]
    assert draws == [sampled(half.float()[None], [position])(0) for position in range(50)]


# Warping


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, 64, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.01])
def test_warping_is_that_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits = 3 * torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1.0:
        expected = TopPLogitsWarper(top_p)(None, expected)
    sampled = Sampled(temperature, top_k, top_p, seed=0)
    assert torch.equal(torch.stack([sampled.warp(row) for row in logits]), expected)


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    scores = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()

    def kept(top_p: float) -> list[int]:
        return torch.isfinite(Sampled(1.0, 0, top_p, seed=0).warp(scores)).nonzero().flatten().tolist()

    assert kept(0.4) == [0]
    assert kept(0.6) == [0, 1]
    assert kept(0.76) == [0, 1, 2]
    assert kept(0.99) == [0, 1, 2, 3]
