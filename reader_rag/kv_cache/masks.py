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
    """Masks of a pass over some texts; made on the device, where only what they are made of is sent.

    Args:
        kinds: See `attention_kinds`.
        visible: [texts, rows, rows], which rows of a text's pass see each other.
        queries: [texts, rows], positions of the rows.
        keys: [texts, shown], the position of what each column holds; -1: nothing that may be seen.
        starts: [texts], the column that a text's first row is written to; the others follow. They are not in `keys`.
        device: Where the masks go.

    Returns:
        By kind bool [texts, 1, rows, shown]: whether a row attends to a column.
    """
    rows = queries.shape[1]
    columns = torch.from_numpy(starts[:, None] + np.arange(rows)).to(device)
    asked = torch.from_numpy(queries).to(device)
    held = torch.from_numpy(keys).to(device, torch.int64)
    full = (held >= 0)[:, None].repeat(1, rows, 1)
    full.scatter_(2, columns[:, None].expand(-1, rows, -1), torch.from_numpy(visible).to(device))
    held.scatter_(1, columns, asked)
    masks = {}
    for kind, span in kinds.items():
        allowed = full
        if kind == "sliding_attention":
            allowed = full & (held[:, None] > asked[:, :, None] - span)
        elif kind == "chunked_attention":
            allowed = full & (held[:, None] // span == asked[:, :, None] // span)
        masks[kind] = allowed[:, None]
    return masks
