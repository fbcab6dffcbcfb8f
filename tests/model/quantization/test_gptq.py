"""Weights are rounded so that errors cancel: outputs are nearer, and integers are those of the definition."""

from __future__ import annotations

import pytest
import torch

from reader_rag.model.quantization import gptq
from reader_rag.model.quantization.gptq import InputMoments, round_weight
from reader_rag.model.quantization.int8 import Int8Weight, quantise_weight


def correlated(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """Rows of inputs of which each is near to a mixture of a few others."""
    generator = torch.Generator().manual_seed(seed)
    mixture = torch.randn(width // 4, width, generator=torch.Generator().manual_seed(99))
    hidden = torch.randn(rows, width // 4, generator=generator)
    return hidden @ mixture + 0.3 * torch.randn(rows, width, generator=generator)


def moments_of(rows: torch.Tensor) -> InputMoments:
    made = InputMoments(rows.shape[1])
    made.add(rows)
    return made


def output_error(rows: torch.Tensor, weight: torch.Tensor, rounded: Int8Weight) -> float:
    floats = rounded.values.float() * rounded.scales[:, None]
    return float((rows @ (floats - weight).T).square().sum())


def by_definition(weight: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
    """The integers of one block, input by input: what is left is fitted anew to what each error has changed."""
    damped = moments + gptq._DAMPING * moments.diagonal().mean() * torch.eye(len(moments), dtype=torch.float64)
    order = torch.argsort(moments.diagonal(), descending=True, stable=True).tolist()
    steps = (weight.abs().amax(1, keepdim=True) / 127).double()
    work, values = weight.double() / steps, torch.zeros(weight.shape, dtype=torch.int8)
    for number, column in enumerate(order):
        rounded = work[:, column].round().clamp(-127, 127)
        values[:, column] = rounded.to(torch.int8)
        error, rest = work[:, column] - rounded, order[number + 1 :]
        if rest:  # the change of the others that makes the outputs' squared error least
            change = torch.linalg.solve(damped[rest][:, rest], damped[rest, column])
            work[:, rest] += error[:, None] * change
    return values


def test_outputs_are_nearer_than_those_of_rounding_to_nearest() -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(1))
    rounded = round_weight(weight, moments_of(correlated(2000, 64)))
    nearest = quantise_weight(weight)
    assert torch.equal(rounded.scales, nearest.scales)
    others = correlated(500, 64, seed=7)
    assert output_error(others, weight, rounded) < 0.5 * output_error(others, weight, nearest)


@pytest.mark.parametrize("width", [5, 128, 150])  # within a group of columns, one whole, and more
def test_integers_are_those_of_the_definition(width: int) -> None:
    weight = torch.randn(24, width, generator=torch.Generator().manual_seed(1))
    moments = moments_of(correlated(1000, width))
    found = round_weight(weight, moments).values
    expected = by_definition(weight, moments.blocks[0])
    # In float32 now and then a number is rounded to the other side, and those after it follow.
    assert float((found == expected).float().mean()) > 0.98


def test_inputs_that_are_not_correlated_are_rounded_to_nearest() -> None:
    weight = torch.randn(16, 40, generator=torch.Generator().manual_seed(1))
    moments = InputMoments(40)
    moments.blocks = [torch.eye(40, dtype=torch.float64) * torch.arange(1, 41)]
    assert torch.equal(round_weight(weight, moments).values, quantise_weight(weight).values)


def test_inputs_and_features_that_are_never_used_are_no_error() -> None:
    weight = torch.randn(16, 40, generator=torch.Generator().manual_seed(1))
    weight[3] = 0.0
    rows = correlated(100, 40)
    rows[:, 5] = 0.0
    rounded = round_weight(weight, moments_of(rows))
    assert not rounded.values[3].any()
    assert rounded.scales[3] == 0.0
    assert torch.equal(rounded.values[:, 5], quantise_weight(weight).values[:, 5])
    unused = round_weight(weight, moments_of(torch.zeros(10, 40)))
    assert torch.equal(unused.values, quantise_weight(weight).values)


def test_wide_layers_are_rounded_in_equal_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(16, 50, generator=torch.Generator().manual_seed(1))
    rows = correlated(300, 50)
    monkeypatch.setattr(gptq, "_BLOCK", 20)
    moments = moments_of(rows)
    assert [len(block) for block in moments.blocks] == [17, 17, 16]
    whole = rows.double().T @ rows.double()
    torch.testing.assert_close(moments.blocks[1], whole[17:34, 17:34], rtol=1e-5, atol=1e-2)
    found = round_weight(weight, moments)
    assert output_error(rows, weight, found) < output_error(rows, weight, quantise_weight(weight))


def test_features_are_rounded_alike_however_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(37, 24, generator=torch.Generator().manual_seed(1))
    moments = moments_of(correlated(300, 24))
    whole = round_weight(weight, moments)
    monkeypatch.setattr(gptq, "_NUMBERS_AT_ONCE", 24 * 5)
    parts = round_weight(weight, moments)
    assert torch.equal(parts.values, whole.values)
    assert torch.equal(parts.scales, whole.scales)


def test_moments_of_divided_inputs() -> None:
    rows = correlated(60, 16)
    factors = torch.linspace(0.5, 3.0, 16)
    divided, expected = moments_of(rows).divided(factors), moments_of(rows / factors)
    torch.testing.assert_close(divided.blocks[0], expected.blocks[0], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(divided.root_mean_squares(), (rows / factors).square().mean(0).sqrt())
