"""The int8 scheme: weights scaled per output channel, activations per row, both symmetric.

Integer products have no rounding, so a row's product depends neither on the rows beside it, nor on the kernel that
computes it, nor on the number of threads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

GREATEST = 127
"""Magnitude of the largest quantised value; -128 is not used."""


class Int8Weight(NamedTuple):
    """The weight of a linear layer, `values * scales[:, None]`.

    Attributes:
        values: int8 [features, inputs].
        scales: float32 [features].
    """

    values: torch.Tensor
    scales: torch.Tensor


def quantise_weight(weight: torch.Tensor) -> Int8Weight:
    """Round a weight to int8, with one scale for each output channel.

    Args:
        weight: Floating point [features, inputs].
    """
    values, scales = quantise_rows(weight.float())
    return Int8Weight(values, scales)


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows to int8, each with a scale of its own: its greatest magnitude becomes 127.

    Args:
        rows: float32 [rows, width].

    Returns:
        int8 [rows, width] and float32 [rows]; the rows are nearly `values * scales[:, None]`. A row of zeros has the
        scale 0.
    """
    greatest = rows.abs().amax(-1)
    inverse = torch.where(greatest > 0, GREATEST / greatest, 0.0)
    values = torch.round(rows * inverse[:, None]).clamp_(-GREATEST, GREATEST)
    return values.to(torch.int8), greatest / GREATEST
