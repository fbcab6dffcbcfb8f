"""What the rows of a pass may attend to, by true positions, for every attention kind of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reader_rag.errors import UnsupportedModelError


def attention_kinds(config: Any) -> dict[str, int]:
    """The model's attention kinds and the span (window or chunk) of each, 0 for full attention.

    Raises:
        UnsupportedModelError: A layer's kind has no tree mask (state-space, linear attention, ...).
    """
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    spans = {
        "full_attention": 0,
        "sliding_attention": window,
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    for kind in layers:
        if spans.get(kind) is None:
            raise UnsupportedModelError(f"{config.model_type} models have layers of kind {kind!r}")
    return {kind: int(spans[kind] or 0) for kind in dict.fromkeys(layers)}


def attention_masks(
    kinds: Mapping[str, int],
    visible: NDArray[np.bool_],
    queries: NDArray[np.int64],
    keys: NDArray[np.int32],
    starts: NDArray[np.int64],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """The attention masks of a forward pass over several sequences, computed on the device.

    Args:
        kinds: Attention kind to its window or chunk length in positions, 0 for full attention (`attention_kinds`).
        visible: [sequences, rows, rows], which rows of a sequence's pass attend to each other.
        queries: [sequences, rows], positions of the rows.
        keys: [sequences, columns], the position of the entry in each column of the cache; -1: masked.
        starts: [sequences], the column of a sequence's first row; its other rows follow. `keys` does not have them.
        device: Device of the masks.

    Returns:
        By kind, bool [sequences, 1, rows, columns]: whether a row attends to a column.
    """
    rows = queries.shape[1]
    columns = torch.from_numpy(starts[:, None] + np.arange(rows)).to(device)
    query_positions = torch.from_numpy(queries).to(device)
    key_positions = torch.from_numpy(keys).to(device, torch.int64)
    full = (key_positions >= 0)[:, None].repeat(1, rows, 1)
    full.scatter_(2, columns[:, None].expand(-1, rows, -1), torch.from_numpy(visible).to(device))
    key_positions.scatter_(1, columns, query_positions)
    masks = {}
    for kind, span in kinds.items():
        allowed = full
        if kind == "sliding_attention":
            allowed = full & (key_positions[:, None] > query_positions[:, :, None] - span)
        elif kind == "chunked_attention":
            allowed = full & (key_positions[:, None] // span == query_positions[:, :, None] // span)
        masks[kind] = allowed[:, None]
    return masks
