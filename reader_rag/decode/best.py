"""The target's best next tokens at every row of a pass: what the successor table learns."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from reader_rag.draft.successors import BEST

_BLOCK = 64


def best_tokens(logits: torch.Tensor) -> NDArray[np.int32]:
    """The `BEST` most probable next tokens of each row, the best first; -1 where the vocabulary has fewer.

    Args:
        logits: [rows, vocabulary], of any type, on any device.

    Returns:
        int32 [rows, BEST]; of equally probable tokens, the first come first on the CPU.
    """
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        best = np.empty((len(logits), BEST), np.int32)
        _best_of_rows(logits.numpy(), best)
        return best
    count = min(BEST, logits.shape[-1])
    found = logits.topk(count, dim=-1).indices.to("cpu", torch.int32).numpy()
    return np.pad(found, ((0, 0), (0, BEST - count)), constant_values=-1)


@njit(cache=True, nogil=True, fastmath={"nnan", "nsz", "reassoc"})
def _highest(values: Any) -> Any:
    highest = values[0]
    for value in values:
        highest = max(highest, value)
    return highest


@njit(cache=True, nogil=True)
def _best_of_rows(logits: Any, best: Any) -> None:
    """As `best_tokens`: a block of the vocabulary is looked into only if its highest value is among the best so far."""
    rows, vocabulary = logits.shape
    kept = best.shape[1]
    values = np.empty(kept, logits.dtype)
    for row in range(rows):
        values[:] = -np.inf
        best[row] = -1
        for start in range(0, vocabulary, _BLOCK):
            block = logits[row, start : min(start + _BLOCK, vocabulary)]
            if not _highest(block) > values[kept - 1]:
                continue
            for k in range(block.shape[0]):
                value = block[k]
                if value <= values[kept - 1]:
                    continue
                at = kept - 1
                while at > 0 and values[at - 1] < value:
                    values[at] = values[at - 1]
                    best[row, at] = best[row, at - 1]
                    at -= 1
                values[at] = value
                best[row, at] = start + k
