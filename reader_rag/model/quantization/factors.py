"""Chooses the factors by which channels of the activations are divided, and the weights that read them multiplied.

Factors trade the rounding of activations for that of weights: what makes a row of activations even makes those of
weights uneven. Inputs that are multiplied in two limbs are hardly rounded, so their factors suit the weights.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from reader_rag.model.quantization.int8 import quantise_rows, split_rows

FOLDING = "smooth-3"
"""Names how factors are chosen. Change it when they change: weights that were quantised before are then made anew."""

_ACTIVATION_EXPONENT, _WEIGHT_EXPONENT = 0.3, 0.5
"""The refinement begins with activation ** 0.3 / weight ** 0.5 of each channel's magnitudes."""
_WEIGHTS_SHARE = 0.6
"""Share of the rounding error of weights that is left where `gptq` lets errors of one row compensate each other."""
_STEPS, _RATE = 50, 0.1
"""Steps of Adam that refine the factors, and its learning rate, which falls linearly to 0."""
_FEATURES = 512
"""Rows of each weight, at most, by which factors are compared: all would take long."""
_LEAST = 1e-4
"""Least magnitude of a channel, relative to the mean: a channel that is hardly used gets no extreme factor."""


@torch.no_grad()
def best_factors(
    rows: torch.Tensor, magnitudes: torch.Tensor, weights: list[torch.Tensor], limbs: int = 1
) -> torch.Tensor:
    """The factors with which quantised products of activations and weights are nearest to those in floating point.

    They are refined from powers of the channels' magnitudes in the activations and in the weights.

    Args:
        rows: float32 [rows, channels], some activations.
        magnitudes: float32 [channels], root mean squares of all of them.
        weights: Floating point [features, channels] of each linear layer that reads them.
        limbs: Limbs of 8 bits in which these layers multiply the activations.

    Returns:
        float32 [channels], above 0.
    """
    activation = _relative(magnitudes)
    weight = _relative(torch.stack([weight.abs().amax(0).float() for weight in weights]).amax(0))
    chosen = [_some(weight, _FEATURES).float() for weight in weights]
    start = activation**_ACTIVATION_EXPONENT / weight**_WEIGHT_EXPONENT
    tried = (torch.ones_like(start), start, _refined(start, rows, chosen, limbs))
    return min(tried, key=lambda factors: _error(rows, chosen, factors, limbs))


@torch.enable_grad()
def _refined(factors: torch.Tensor, rows: torch.Tensor, weights: list[torch.Tensor], limbs: int) -> torch.Tensor:
    """Factors that are changed, each by itself, for a smaller expected error.

    Rounding errors are taken for independent and evenly spread over a step. The step of a row is its greatest magnitude
    divided by the greatest integer.

    Args:
        factors: float32 [channels], where to begin.
        rows: float32 [rows, channels], some activations.
        weights: float32 [features, channels] of each layer.
        limbs: Limbs of 8 bits in which the layers multiply the activations.
    """
    finer = 1.0 if limbs == 1 else 1.0 / 257**2  # squared steps of two limbs, relative to those of one
    squares = rows.square().sum(0)
    columns = [weight.square().sum(0) for weight in weights]
    exact = [linear(rows, weight).square().sum().clamp_(min=1e-30) for weight in weights]
    logarithms = factors.log().requires_grad_()
    optimizer = torch.optim.Adam([logarithms], lr=_RATE)
    rates = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, _STEPS)
    for _ in range(_STEPS):
        current = logarithms.exp()
        row_steps = (rows / current).abs().amax(1).square().sum() * finer
        spread = (squares / current.square()).sum()
        error = torch.zeros(())
        for weight, column, product in zip(weights, columns, exact, strict=True):
            weight_steps = (weight * current).abs().amax(1).square().sum()
            of_rows = row_steps * (column * current.square()).sum()
            error = error + (of_rows + _WEIGHTS_SHARE * weight_steps * spread) / product
        optimizer.zero_grad()
        error.log().backward()
        optimizer.step()
        rates.step()
    return logarithms.detach().exp()


def _error(rows: torch.Tensor, weights: list[torch.Tensor], factors: torch.Tensor, limbs: int) -> float:
    """Squared error of quantised products relative to the products, summed over the layers."""
    noise = _rounded(rows / factors, limbs) * factors - rows
    total = 0.0
    for weight in weights:
        exact = float(linear(rows, weight).square().sum())
        of_rows = float(linear(noise, weight).square().sum())
        of_weight = float(linear(rows, _rounded(weight * factors, 1) / factors - weight).square().sum())
        total += (of_rows + _WEIGHTS_SHARE * of_weight) / max(exact, 1e-30)
    return total


def _rounded(rows: torch.Tensor, limbs: int) -> torch.Tensor:
    if limbs == 1:
        values, scales = quantise_rows(rows)
        return values.float() * scales[:, None]
    both, scales = split_rows(rows)
    return (256.0 * both[:, 0].float() + both[:, 1].float()) * scales[:, None]


def _relative(magnitudes: torch.Tensor) -> torch.Tensor:
    """Magnitudes in units of their mean, none of them 0."""
    return (magnitudes / magnitudes.mean().clamp_(min=1e-30)).clamp_(min=_LEAST)


def _some(rows: torch.Tensor, most: int) -> torch.Tensor:
    """At most so many rows, evenly spread."""
    return rows[torch.linspace(0, len(rows) - 1, min(most, len(rows))).long()]
