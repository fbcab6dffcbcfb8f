"""The target's best next tokens at every row of a pass: what the successor table learns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from reader_rag.draft.successor_table import BEST

_BLOCK = 64
_ROWS_TOGETHER = 512
"""Most rows of several passes that are concatenated, so that one call ranks them."""


@dataclass(frozen=True)
class TopK:
    """The most probable tokens of each row of a pass.

    Attributes:
        argmax: [rows], the most probable token of each row; of equally probable ones, the one with the lowest id; -1
            where its score is NaN or minus infinity.
        best: int32 [rows, BEST], the most probable tokens of each row, most probable first; None: not computed.
    """

    argmax: list[int]
    best: NDArray[np.int32] | None


def fetch_top_k(passes: Sequence[torch.Tensor], *, learns: bool) -> list[TopK | None]:
    """Rank the logits of several sequences' passes on an accelerator, and transfer the results at once.

    Every transfer waits until the device has finished its queue, so one for each sequence would be slow.

    Args:
        passes: Logits of each sequence, [rows, vocabulary], all of one model.
        learns: Whether `TopK.best` is computed.

    Returns:
        For each sequence its `TopK`; None on the CPU, where the sampler computes what it needs.
    """
    if not passes or passes[0].device.type == "cpu":
        return [None] * len(passes)
    return list(rank_passes(passes, learns=learns))


def rank_passes(passes: Sequence[torch.Tensor], *, learns: bool) -> Iterator[TopK]:
    """Rank the logits of several passes on any device.

    Args:
        passes: Logits of each sequence, [rows, vocabulary], all of one model.
        learns: Whether `TopK.best` is computed.

    Yields:
        The `TopK` of each pass.
    """
    groups = [group[0] if len(group) == 1 else torch.cat(group) for group in _groups(passes)]
    ranked = torch.cat([ranked_tokens(logits, learns=learns) for logits in groups]).to("cpu", torch.int32).numpy()
    start = 0
    for logits in passes:
        yield top_k_of(ranked[start : start + len(logits)])
        start += len(logits)


def _groups(passes: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Passes in their order, so many that their rows are few enough to be ranked together, at least one."""
    group: list[torch.Tensor] = []
    for logits in passes:
        if group and sum(map(len, group)) + len(logits) > _ROWS_TOGETHER:
            yield group
            group = []
        group.append(logits)
    yield group


def ranked_tokens(logits: torch.Tensor, *, learns: bool = True) -> torch.Tensor:
    """Rank the scores of some rows where they are.

    Args:
        logits: [rows, vocabulary], of any type, on any device.
        learns: Whether more than the first is wanted.

    Returns:
        int64 [rows, 1 + best] where it learns, else [rows, 1]: the first of the most probable tokens or -1
        (`TopK.argmax`), then the best in any order of equal ones.
    """
    argmax = logits.argmax(-1, keepdim=True)
    argmax = torch.where(logits.gather(-1, argmax) > -torch.inf, argmax, -1)
    return torch.cat([argmax, _highest_places(logits)], dim=-1) if learns else argmax


def top_k_of(ranked: NDArray[np.int32]) -> TopK:
    """What `ranked_tokens` found in some rows.

    Args:
        ranked: int32 [rows, 1 + best] or [rows, 1].
    """
    best = _filled(np.ascontiguousarray(ranked[:, 1:])) if ranked.shape[1] > 1 else None
    return TopK(ranked[:, 0].tolist(), best)


def _highest_places(logits: torch.Tensor) -> torch.Tensor:
    """int64 [rows, BEST or the whole vocabulary], the best first."""
    return logits.topk(min(BEST, logits.shape[-1]), dim=-1).indices


def _filled(best: NDArray[np.int32]) -> NDArray[np.int32]:
    """As wide as `top_tokens` gives them."""
    missing = BEST - best.shape[1]
    return np.pad(best, ((0, 0), (0, missing)), constant_values=-1) if missing else best


def top_tokens(logits: torch.Tensor) -> NDArray[np.int32]:
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
    return _filled(_highest_places(logits).to("cpu", torch.int32).numpy())


@njit(cache=True, nogil=True, fastmath={"nnan", "nsz", "reassoc"})
def _highest(values: Any) -> Any:
    highest = values[0]
    for value in values:
        highest = max(highest, value)
    return highest


@njit(cache=True, nogil=True)
def _best_of_rows(logits: Any, best: Any) -> None:
    """As `top_tokens`: a block of the vocabulary is looked into only if its highest value is among the best so far."""
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
