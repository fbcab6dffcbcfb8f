"""Rounds weights so that their rounding errors cancel on the activations of a text (GPTQ, arXiv 2210.17323).

Rounding a weight to the nearest number errs by up to half a step. Inputs of a linear layer are correlated: the error of
one weight can be made up for by the weights of other inputs, which are still to be rounded. How much of it each of them
takes follows from the second moments of the inputs. Only the integers differ from those of rounding to nearest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit, prange

from reader_rag.model.cpu.threads import numba_threads
from reader_rag.model.quantization.int8 import GREATEST, Int8Weight

ROUNDING = "gptq-1"
"""Names how weights are rounded. Change it when that changes: weights that were quantised before are then made anew."""

_BLOCK = 1024
"""Most inputs whose moments are kept together: time and memory grow with the square of the width otherwise."""
_COLUMNS = 128
"""Inputs that are rounded before the weights of the block's other inputs are changed."""
_NUMBERS_AT_ONCE = 1 << 20
"""Numbers of a weight that are in float32 at once while it is rounded."""
_DAMPING = 0.2
"""Share of the mean squared input that is added to each: the text is short, and its correlations are partly chance."""


class InputMoments:
    """Second moments of the inputs of a linear layer, within blocks of neighbouring inputs.

    Args:
        width: Number of inputs.

    Attributes:
        blocks: float64 [inputs, inputs] of each block: the sum over rows of the products of each two inputs.
        rows: Number of rows that were added.
    """

    def __init__(self, width: int) -> None:
        count = -(-width // _BLOCK)
        sizes = [width // count + (number < width % count) for number in range(count)]
        self.blocks = [torch.zeros(size, size, dtype=torch.float64) for size in sizes]
        self.rows = 0

    def add(self, rows: torch.Tensor) -> None:
        """Add rows of inputs.

        Args:
            rows: float32 [rows, width].
        """
        parts = rows.split([len(block) for block in self.blocks], 1)
        for block, part in zip(self.blocks, parts, strict=True):
            block += part.T @ part
        self.rows += len(rows)

    def root_mean_squares(self) -> torch.Tensor:
        """The root mean square of each input, float32 [width]."""
        squares = torch.cat([block.diagonal() for block in self.blocks])
        return (squares / max(self.rows, 1)).sqrt().float()

    def divided(self, factors: torch.Tensor) -> InputMoments:
        """The moments of inputs that are divided by factors.

        Args:
            factors: float32 [width], above 0.
        """
        made = InputMoments(len(factors))
        made.rows = self.rows
        parts = factors.double().split([len(block) for block in self.blocks])
        for number, (block, part) in enumerate(zip(self.blocks, parts, strict=True)):
            made.blocks[number] = block / part[:, None] / part
        return made


class _Plan(NamedTuple):
    """How the inputs of a block are rounded.

    Attributes:
        order: Their numbers in the block, the largest moments first: there are many left to make up for their errors.
        shares: As `_error_shares` returns them, of the inputs in this order.
    """

    order: torch.Tensor
    shares: torch.Tensor


@torch.no_grad()
def round_weight(weight: torch.Tensor, moments: InputMoments) -> Int8Weight:
    """Round a weight to int8, with one scale for each output channel, for least errors of the layer's outputs.

    Scales are those of rounding to nearest: the greatest magnitude of a channel is 127 steps.

    Args:
        weight: Floating point [features, inputs], on the CPU.
        moments: Of the inputs.
    """
    plans = [_planned(block) for block in moments.blocks]
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight))
    rows = max(_NUMBERS_AT_ONCE // weight.shape[1], 1)
    for start in range(0, len(weight), rows):
        features = slice(start, start + rows)
        part = weight[features].float()
        scales[features] = part.abs().amax(1) / GREATEST
        steps = part / torch.where(scales[features] > 0, scales[features], 1.0)[:, None]
        rounded = [
            _round_block(block, plan)
            for block, plan in zip(steps.split([len(plan.order) for plan in plans], 1), plans, strict=True)
        ]
        values[features] = torch.cat(rounded, 1)
    return Int8Weight(values, scales)


def _planned(moments: torch.Tensor) -> _Plan:
    order = torch.argsort(moments.diagonal(), descending=True, stable=True)
    return _Plan(order, _error_shares(moments[order][:, order]))


def _round_block(steps: torch.Tensor, plan: _Plan) -> torch.Tensor:
    """The integers of the weights of a block.

    Args:
        steps: float32 [features, inputs], weights in units of their channel's scale.
        plan: How they are rounded.
    """
    work = steps[:, plan.order]
    values = torch.empty(work.shape, dtype=torch.int8)
    for start in range(0, len(plan.order), _COLUMNS):
        stop = min(start + _COLUMNS, len(plan.order))
        part = work[:, start:stop].contiguous()
        errors, rounded = torch.empty_like(part), torch.empty(part.shape, dtype=torch.int8)
        with numba_threads():
            _round_columns(
                part.numpy(), plan.shares[start:stop, start:stop].contiguous().numpy(), rounded.numpy(), errors.numpy()
            )
        values[:, start:stop] = rounded
        work[:, stop:] -= errors @ plan.shares[start:stop, stop:]
    found = torch.empty_like(values)
    found[:, plan.order] = values
    return found


def _error_shares(moments: torch.Tensor) -> torch.Tensor:
    """How an error is made up for: row i has what the weights of later inputs take of the error of input i.

    Args:
        moments: float64 [inputs, inputs].

    Returns:
        float32 [inputs, inputs], upper triangular; each row is divided by its diagonal, which is 1.
    """
    mean = moments.diagonal().mean()
    damped = moments + torch.eye(len(moments), dtype=torch.float64) * (_DAMPING * mean if mean > 0 else 1.0)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper = torch.linalg.cholesky(inverse, upper=True)
    shares: torch.Tensor = upper / upper.diagonal()[:, None]
    return shares.float()


@njit(parallel=True, cache=True)
def _round_columns(
    work: np.ndarray[Any, Any],
    shares: np.ndarray[Any, Any],
    values: np.ndarray[Any, Any],
    errors: np.ndarray[Any, Any],
) -> None:
    """Round neighbouring inputs one after the other; rows do not depend on each other.

    Args:
        work: float32 [features, inputs], weights in steps; changed.
        shares: float32 [inputs, inputs], as `_error_shares` returns them.
        values: int8 [features, inputs], filled with the integers.
        errors: float32 [features, inputs], filled with the error of each when it was rounded, in steps.
    """
    features, inputs = work.shape
    for feature in prange(features):
        row = work[feature]
        for column in range(inputs):
            value = min(max(np.rint(row[column]), np.float32(-GREATEST)), np.float32(GREATEST))
            error = row[column] - value
            values[feature, column] = np.int8(value)
            errors[feature, column] = error
            for later in range(column + 1, inputs):
                row[later] -= error * shares[column, later]
