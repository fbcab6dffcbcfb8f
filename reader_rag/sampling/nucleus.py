"""Nucleus sampling (top-p, arXiv 1904.09751) on the CPU: which scores stay, without sorting the vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from transformers import LogitsProcessor, TopPLogitsWarper

from reader_rag.util.vector_math import FUSED, exp

_BLOCK = 256
"""Scores whose probabilities are summed in float32, before they are added up in float64."""
_DISTANCES = (6.0, 9.0, 12.0, 16.0)
"""How far below the highest score the scores that are sorted may lie; the first distance that takes in enough."""
_CERTAIN = 5e-6
"""Probability by which sums must miss the limit. Rounding moves the sums of `transformers` by a tenth of that."""


class TopP(LogitsProcessor):
    """`TopPLogitsWarper` of `transformers`, to the last bit, and faster on the CPU.

    `TopPLogitsWarper` sorts the whole vocabulary, which takes a good part of a small model's step. Here the few scores
    near the highest are sorted. Where rounding or the order of equal scores decides, `TopPLogitsWarper` is called.

    Args:
        top_p: Sum that the probabilities of the tokens that stay must reach, in 0..1.
    """

    def __init__(self, top_p: float) -> None:
        self.top_p = top_p
        self._reference = TopPLogitsWarper(top_p)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Mask the scores of all tokens outside the nucleus.

        Args:
            input_ids: Not used.
            scores: [texts, vocabulary].

        Returns:
            As `scores`; minus infinity for the others.
        """
        if scores.device.type == "cpu" and scores.dtype == torch.float32 and len(scores) == 1:
            values = scores.detach().contiguous().numpy()[0]
            highest = values.max()
            if np.isfinite(highest):
                lowest, certain = _lowest_of_nucleus(values, highest, 1.0 - self.top_p)
                if certain:
                    return torch.from_numpy(_from(values, lowest))[None]
        masked: torch.Tensor = self._reference(input_ids, scores)
        return masked


@njit(cache=True, fastmath=FUSED, error_model="numpy", nogil=True)
def _weigh(values: Any, highest: Any, weights: Any) -> None:
    for n in range(values.shape[0]):
        weights[n] = exp(values[n] - highest)


@njit(cache=True, fastmath={"reassoc", "nsz"}, error_model="numpy", nogil=True)
def _sums(values: Any, weights: Any, low: Any) -> Any:
    """Of the weights of a block: of all, and of those whose value is below `low`."""
    total = below = np.float32(0)
    for n in range(weights.shape[0]):
        total += weights[n]
        below += weights[n] if values[n] < low else np.float32(0)
    return total, below


@njit(cache=True, error_model="numpy", nogil=True)
def _lowest_of_nucleus(values: Any, highest: Any, removed: Any) -> Any:
    """The lowest score of the nucleus.

    Args:
        values: float32 [vocabulary], numbers and minus infinity.
        highest: Of them, finite.
        removed: Most probability that all removed tokens may have together.

    Returns:
        The score, and whether it is certain: whether neither rounding nor the order of equal scores decides.
    """
    weights = np.empty_like(values)
    _weigh(values, highest, weights)
    low, below, limit, doubt = highest, 0.0, 0.0, 0.0
    for distance in _DISTANCES:
        low, below, total = np.float32(highest - np.float32(distance)), 0.0, 0.0
        for start in range(0, values.shape[0], _BLOCK):
            stop = start + _BLOCK
            all_of_block, below_of_block = _sums(values[start:stop], weights[start:stop], low)
            total += all_of_block
            below += below_of_block
        limit, doubt = removed * total, _CERTAIN * total
        if below < limit - doubt:
            break
    else:
        return highest, False
    ranked = np.sort(values[values >= low])
    reached = below
    for n in range(len(ranked)):
        before = reached
        reached += exp(np.float32(ranked[n] - highest))
        if reached > limit - doubt:
            differs = n == 0 or ranked[n - 1] < ranked[n]
            return ranked[n], differs and before < limit - doubt and reached > limit + doubt
    return highest, False


@njit(cache=True, nogil=True)
def _from(values: NDArray[np.float32], lowest: Any) -> Any:
    """A copy of the scores, those below `lowest` minus infinity."""
    kept = np.empty_like(values)
    for n in range(values.shape[0]):
        kept[n] = values[n] if values[n] >= lowest else np.float32(-np.inf)
    return kept
