"""Which token the target emits: greedy, or drawn with noise that depends on the seed and the position alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from reader_rag.config import SamplingParams
from reader_rag.draft import DraftTree
from reader_rag.errors import ConfigError
from reader_rag.sampling.noise import gumbel
from reader_rag.sampling.sampler import ProcessedSampler, Processor, Verified, greedy, make_sampler

LOGITS = torch.tensor([1.0, 0.0, 2.0, -1.0, 1.5])
DRAWS = 8_000
FAR = 0.02
"""A distance that so many draws of the right distribution stay well below."""


def after(logits: torch.Tensor, length: int) -> Verified:
    """A pass without a draft, behind so many tokens."""
    return Verified(logits[None], DraftTree.empty(), np.zeros(length, np.int32))


def draws(sampler: ProcessedSampler, logits: torch.Tensor, positions: range) -> list[int]:
    return [sampler(after(logits, position))(0) for position in positions]


def distance(draw: Callable[[int], int], probabilities: torch.Tensor) -> float:
    """Total variation between `DRAWS` draws, one a position, and the exact probabilities."""
    counts = np.bincount([draw(position) for position in range(DRAWS)], minlength=len(probabilities))
    return float(np.abs(counts / DRAWS - probabilities.numpy()).sum() / 2)


def test_greedy_takes_the_best_token_of_every_row_and_of_equal_ones_the_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 5.0]])
    token = greedy(Verified(logits, DraftTree.from_chain([1]), np.array([7], np.int32)))
    assert [token(0), token(1)] == [1, 0]


def test_settings_choose_the_selector() -> None:
    assert make_sampler(SamplingParams()) is greedy
    assert make_sampler(SamplingParams(top_k=3, top_p=0.5, seed=1)) is greedy
    assert isinstance(make_sampler(SamplingParams(), [lambda ids, scores: scores]), ProcessedSampler)
    assert isinstance(make_sampler(SamplingParams(temperature=0.1)), ProcessedSampler)


# Prefixes


def test_a_rows_prefix_is_the_text_and_the_path_to_its_node() -> None:
    #              5     6
    # 1 2 3 - root  \-- 7 -- 8
    tree = DraftTree.of([5, 6, 7, 8], [-1, -1, 0, 2], [1, 1, 2, 3], [0.5, 0.4, 0.3, 0.2])
    verified = Verified(torch.zeros(5, 9), tree, np.array([1, 2, 3], np.int32))
    prefixes = [verified.prefix(row).tolist() for row in range(5)]
    assert prefixes == [[1, 2, 3], [1, 2, 3, 5], [1, 2, 3, 6], [1, 2, 3, 5, 7], [1, 2, 3, 5, 7, 8]]
    assert [verified.position(row) for row in range(5)] == [3, 4, 4, 5, 6]


def test_processors_get_a_rows_prefix_and_a_copy_of_its_logits_in_float32() -> None:
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    kept = logits.clone()
    seen = []

    def spoil(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append((ids.tolist(), scores.dtype, scores.clone()))
        return scores.fill_(0.0)

    token = ProcessedSampler([spoil])(Verified(logits, DraftTree.from_chain([4, 5]), np.array([1, 2], np.int32)))
    assert [token(0), token(2)] == [0, 0]
    assert [ids for ids, _, _ in seen] == [[[1, 2]], [[1, 2, 4, 5]]]
    assert {dtype for _, dtype, _ in seen} == {torch.float32}
    assert torch.equal(seen[1][2], logits[2:].float())
    assert torch.equal(logits, kept)


def test_processors_are_applied_in_order() -> None:
    def double(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * 2

    def ban_the_best(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(scores > 3.5, -torch.inf)

    assert ProcessedSampler([double, ban_the_best])(after(LOGITS, 1))(0) == 4
    assert ProcessedSampler([ban_the_best, double])(after(LOGITS, 1))(0) == 2


@pytest.mark.parametrize("wrong", [lambda ids, scores: scores[0], lambda ids, scores: None])
def test_a_processor_that_returns_no_scores_is_named(wrong: Processor) -> None:
    with pytest.raises(
        ConfigError, match=r"logits processor function must return floating-point scores of shape \[1, 5\], not"
    ):
        ProcessedSampler([wrong])(after(LOGITS, 1))(0)


# Noise


def test_the_noise_is_the_same_on_every_machine() -> None:
    assert gumbel(0, 0, 4).tolist() == [
        0.6748406887054443,
        -0.7535874843597412,
        -0.285719633102417,
        0.07247376441955566,
    ]
    assert gumbel(7, 100, 3).tolist() == [-1.468550205230713, -0.9935727119445801, 0.3808560371398926]
    assert gumbel(2**64 - 1, 5, 2).tolist() == [0.3290896415710449, -0.3878962993621826]


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
    sampler = ProcessedSampler([], seed=5)
    tree = DraftTree.of([1, 2, 1, 2, 1], [-1, -1, 0, 0, 2], [1, 1, 2, 2, 3], [0.5, 0.4, 0.3, 0.2, 0.1])
    together = sampler(Verified(logits, tree, np.zeros(10, np.int32)))
    alone = [sampler(after(logits[k], position))(0) for k, position in enumerate([10, 11, 11, 12, 12, 13])]
    assert [together(k) for k in range(6)] == alone
    assert [together(k) for k in (3, 3, 0)] == [alone[3], alone[3], alone[0]]


def test_draws_are_pinned() -> None:
    assert draws(ProcessedSampler([], seed=0), LOGITS, range(12)) == [2, 2, 0, 1, 2, 2, 0, 2, 2, 2, 2, 0]


@pytest.mark.parametrize(
    "warpers",
    [
        [],
        [TemperatureLogitsWarper(0.5)],
        [TemperatureLogitsWarper(2.0)],
        [TopKLogitsWarper(3)],
        [TopPLogitsWarper(0.8)],
        [TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.95)],
    ],
)
def test_draws_have_the_targets_distribution(warpers: list[Processor]) -> None:
    sampler = ProcessedSampler(warpers, seed=11)
    exact = sampler.scores(after(LOGITS, 1), 0).softmax(-1)
    assert distance(lambda position: sampler(after(LOGITS, position))(0), exact) < FAR


def test_the_check_of_the_distribution_catches_a_wrong_rule() -> None:
    exact = LOGITS.softmax(-1)

    def uniform_noise(position: int) -> int:
        noise = np.random.default_rng(position).random(len(LOGITS))
        return int((LOGITS.numpy() + noise).argmax())

    def temperature_ignored(position: int) -> int:
        return ProcessedSampler([], seed=11)(after(LOGITS, position))(0)

    assert distance(uniform_noise, exact) > FAR
    assert distance(temperature_ignored, (LOGITS / 0.8).softmax(-1)) > FAR


@pytest.mark.parametrize("possible", [0, 1, 7, 200, 999, 1000])
def test_noise_for_the_possible_tokens_alone_is_the_same_noise(possible: int) -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    logits[torch.randperm(1000, generator=torch.Generator().manual_seed(2))[possible:]] = -torch.inf
    perturbed = ProcessedSampler([], seed=6).perturbed(after(logits, 12), 0)
    assert torch.equal(perturbed, logits + torch.from_numpy(gumbel(6, 12, 1000)))


def test_a_low_temperature_takes_the_best_token() -> None:
    assert set(draws(ProcessedSampler([TemperatureLogitsWarper(0.001)], seed=2), LOGITS, range(200))) == {2}


def test_without_a_seed_every_call_draws_another() -> None:
    logits = torch.zeros(1000)
    first, second = (make_sampler(SamplingParams(temperature=1.0)) for _ in range(2))
    drawn = [[sampler(after(logits, p))(0) for p in range(20)] for sampler in (first, first, second)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_sixteen_bit_logits_are_drawn_from_in_float32() -> None:
    sampler, half = ProcessedSampler([TopPLogitsWarper(0.9)], seed=4), LOGITS.to(torch.bfloat16)
    assert draws(sampler, half, range(50)) == draws(sampler, half.float(), range(50))
