"""Attention masks of a fixed step, computed on the device from its inputs: no size depends on their contents."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from reader_rag.model.fixed_step.inputs import StepInputs


def step_masks(kinds: Mapping[str, int], inputs: StepInputs, shown: int, past: int = 0) -> dict[str, torch.Tensor]:
    """What each position of a step attends to.

    Args:
        kinds: Attention kind to its window or chunk length in positions, 0 for full attention.
        inputs: Of the step.
        shown: Columns attended to.
        past: Columns before the mask where a kind of layer sees all of them.

    Returns:
        By kind, bool [rows, 1, width, shown - past], for kinds that do not see all columns [rows, 1, width, shown].
    """
    starts = {kind: past if sees_all(span, shown) else 0 for kind, span in kinds.items()}
    masks: dict[str, torch.Tensor] = {}
    for start in dict.fromkeys(starts.values()):
        some = {kind: span for kind, span in kinds.items() if starts[kind] == start}
        masks |= _masks_from(start, some, inputs, shown)
    return {kind: masks[kind] for kind in kinds}


def _masks_from(start: int, kinds: Mapping[str, int], inputs: StepInputs, shown: int) -> dict[str, torch.Tensor]:
    """Masks over the columns from `start` on."""
    width = inputs.tokens.shape[1]
    columns = torch.arange(start, shown, device=inputs.tokens.device)[None]
    behind = columns - inputs.lengths
    written = (behind >= 0) & (behind < width)
    place = behind.clamp(0, width - 1)
    seen = (inputs.visible[:, :, None] >> place[:, None, :]) & 1 == 1
    full = torch.where(written[:, None, :], seen, (behind < 0)[:, None, :])
    keys = torch.where(written, inputs.positions.gather(1, place), columns)[:, None, :]
    queries = inputs.positions[:, :, None]
    masks = {}
    for kind, span in kinds.items():
        allowed = full
        if kind == "sliding_attention":
            allowed = full & (keys > queries - span)
        elif kind == "chunked_attention":
            allowed = full & (keys // span == queries // span)
        masks[kind] = allowed[:, None]
    return masks


def sees_all(span: int, shown: int) -> bool:
    """Whether positions of an attention kind see all columns before them.

    Args:
        span: Its window or chunk in positions, 0 for full attention.
        shown: Columns attended to.
    """
    return span == 0 or shown <= span
