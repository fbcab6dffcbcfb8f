"""The int8 scheme: weights scaled per output channel, activations per row, both symmetric.

Integer products have no rounding, so a row's product depends neither on the rows beside it, nor on the kernel that
computes it, nor on the number of threads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from reader_rag.model.cpu.int8_tile import FEATURES, INPUTS, OFFSET

GREATEST = 127
"""Magnitude of the largest quantised value; -128 is not used."""
_GPU_ROWS, _GPU_MULTIPLE = 32, 8
"""On CUDA, `torch._int_mm` takes more than 16 rows, and inputs and features in multiples of 8."""
_NUMBERS_AT_ONCE = 1 << 20
"""Numbers of a weight that are in float32 at once while it is quantised."""


class Int8Weight(NamedTuple):
    """The weight of a linear layer, `values * scales[:, None]`.

    Attributes:
        values: int8 [features, inputs].
        scales: float32 [features].
    """

    values: torch.Tensor
    scales: torch.Tensor


def quantise_weight(weight: torch.Tensor) -> Int8Weight:
    """Round a weight to int8, with one scale for each output channel; a few rows at once, to bound the memory.

    Args:
        weight: Floating point [features, inputs].
    """
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), device=weight.device)
    rows = max(_NUMBERS_AT_ONCE // weight.shape[1], 1)
    for start in range(0, len(weight), rows):
        part = slice(start, start + rows)
        values[part], scales[part] = quantise_rows(weight[part].float())
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
    inverse = _inverse(greatest, GREATEST)
    return torch.round(rows * inverse[:, None]).to(torch.int8), greatest / GREATEST


def split_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows to two limbs of 8 bits each, for layers whose inputs need more than 8.

    Args:
        rows: float32 [rows, width].

    Returns:
        int8 [rows, 2, width], high and low, and float32 [rows]; the rows are nearly `(256 * high + low) * scales`.
    """
    most = 257 * GREATEST
    greatest = rows.abs().amax(-1)
    inverse = _inverse(greatest, most)
    values = torch.round(rows * inverse[:, None]).to(torch.int32)
    high = (values + 128) >> 8
    return torch.stack([high, values - 256 * high], 1).to(torch.int8), greatest / most


def _inverse(greatest: torch.Tensor, most: int) -> torch.Tensor:
    """`most / greatest`, 0 where that is 0: divided as the compiled loops divide (`most / tensor` rounds twice)."""
    return torch.where(greatest > 0, torch.full_like(greatest, most) / greatest, 0.0)


def multiply(rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Exact products of quantised rows, by PyTorch.

    Args:
        rows: int8 [rows, inputs].
        values: int8 [features, inputs], on the same device.

    Returns:
        int32 [rows, features].
    """
    if rows.device.type == "cpu":
        return torch._int_mm(rows, values.t())
    count, features = len(rows), len(values)
    more = -rows.shape[1] % _GPU_MULTIPLE
    rows = pad(rows, (0, more, 0, -count % _GPU_ROWS))
    values = pad(values, (0, more, 0, -features % _GPU_MULTIPLE))
    return torch._int_mm(rows, values.t())[:count, :features]


def pack(values: torch.Tensor) -> torch.Tensor:
    """The weight in the order in which the compiled loops read it (see `int8_tile`).

    Args:
        values: int8 [features, inputs], on the CPU.

    Returns:
        uint8 [blocks, depth, 64], with zeros for features and inputs that are not there.
    """
    features, inputs = values.shape
    blocks, depth = packed_shape(features, inputs)
    packed = torch.empty((blocks, depth, FEATURES, INPUTS), dtype=torch.uint8)
    for block in range(blocks):  # block by block, so that no copy of the whole is made
        part = values[block * FEATURES : (block + 1) * FEATURES]
        whole = pad(part, (0, depth * INPUTS - inputs, 0, FEATURES - len(part)))
        packed[block] = (whole.view(torch.uint8) ^ OFFSET).view(FEATURES, depth, INPUTS).transpose(0, 1)
    return packed.view(blocks, depth, FEATURES * INPUTS)


def unpack(packed: torch.Tensor, features: int, inputs: int) -> torch.Tensor:
    """The weight that was packed.

    Args:
        packed: uint8 [blocks, depth, 64].
        features: Its features.
        inputs: Its inputs.

    Returns:
        int8 [features, inputs].
    """
    blocks, depth, _ = packed.shape
    values = (packed ^ OFFSET).view(torch.int8).view(blocks, depth, FEATURES, INPUTS).transpose(1, 2)
    return values.reshape(blocks * FEATURES, depth * INPUTS)[:features, :inputs].contiguous()


def packed_shape(features: int, inputs: int) -> tuple[int, int]:
    """Blocks and depth of a packed weight.

    Args:
        features: Rows of the weight: outputs of the layer.
        inputs: Columns of the weight.
    """
    return -(-features // FEATURES), -(-inputs // INPUTS)
