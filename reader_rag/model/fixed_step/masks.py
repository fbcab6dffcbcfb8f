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


def path_columns(inputs: StepInputs, shown: int, past: int) -> torch.Tensor:
    """Which column has the key of each place of the text, for every position of a step.

    Args:
        inputs: Of the step.
        shown: Places that are attended to.
        past: Places before the first that is returned: their keys are in the columns of the same number.

    Returns:
        int64 [rows, 1, width, shown - past]: committed places are in their columns, ancestors and the position itself
        wherever the tree has them; -1: nothing is attended to at this place.
    """
    width = inputs.tokens.shape[1]
    numbers = torch.arange(width, device=inputs.tokens.device)
    seen = (inputs.visible[:, :, None] >> numbers) & 1 == 1
    depths = inputs.positions - inputs.lengths
    # [rows, position, seen one, depth]: at most one of those that a position sees has some depth.
    at_depth = seen[:, :, :, None] & (depths[:, None, :, None] == numbers)
    found = torch.where(at_depth, numbers[:, None] + 1, 0).sum(2) - 1
    places = torch.arange(past, shown, device=inputs.tokens.device)[None]
    behind = places - inputs.lengths
    inside = (behind >= 0) & (behind < width)
    own = found.gather(2, behind.clamp(0, width - 1)[:, None].expand(-1, width, -1))
    drafted = torch.where(inside[:, None] & (own >= 0), own + inputs.lengths[:, :, None], -1)
    return torch.where(behind[:, None] < 0, places[:, None], drafted)[:, None]


def sees_all(span: int, shown: int) -> bool:
    """Whether positions of an attention kind see all columns before them.

    Args:
        span: Its window or chunk in positions, 0 for full attention.
        shown: Columns attended to.
    """
    return span == 0 or shown <= span
