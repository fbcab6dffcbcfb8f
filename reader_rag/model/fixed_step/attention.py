"""Attention of fixed steps: in two calls joined by log-sum-exp, or along each node's path.

**Two calls**: over the past without a mask, over the columns behind it with one.

PyTorch's fused kernels either take no mask or read one number of it for each query and key. In a long context nearly
all keys are seen by all positions of a pass, so a mask of `width x shown` says nothing for most of them. The joined
result is that of one call, up to rounding:

    out = out_past * sigmoid(lse_past - lse_tail) + out_tail * sigmoid(lse_tail - lse_past)

**Along paths**, in strict mode: a node's ancestors lie in other columns than the same tokens of plain decoding, and a
sum in another order has other bits. So the columns behind the past are gathered for each position, in the order of the
text: a key of some position is in the same place of the same product, whatever tree it is in. Its cost is one copy of
these columns for each position of the pass.

Models call both through the attention interface of `transformers`, under the name `JOINED`, which their configuration
has during a pass only. The mask's type tells which: bool for two calls, int64 for paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

JOINED = "reader_rag_joined"
"""The name of `joined_attention` in the attention interface of `transformers`."""
_WIDEST_HEAD = 256
"""Most numbers of a head that the fused kernels take."""


def joined_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention whose mask may have fewer columns than there are keys: those before them are seen by all queries.

    Args:
        module: The attention module.
        query: [rows, heads, width, size].
        key: [rows, key heads, columns, size].
        value: [rows, key heads, columns, value size].
        attention_mask: bool [rows, 1, width, last columns]; with as many columns as there are keys, or None, the
            attention is that of `sdpa`. int64 of that shape: the column of the key at each place, -1 for none.
        dropout: Probability of the attention's dropout; 0 outside training.
        scaling: Factor of the scores; None: 1 / sqrt(size).
        kwargs: What else the model hands to its attention.

    Returns:
        [rows, width, heads, value size], and None: no attention weights.
    """
    past = 0 if attention_mask is None else key.shape[2] - attention_mask.shape[-1]
    if attention_mask is not None and attention_mask.dtype == torch.int64:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend_along_paths(query, key, value, attention_mask, scale), None
    if attention_mask is None or past == 0:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    rows, heads, width, size = query.shape
    scale = size**-0.5 if scaling is None else scaling
    # The queries of a group share their keys: as rows of one product, keys are read once and never repeated.
    folded = query.reshape(rows, key.shape[1], -1, size)
    before, lse_before = attend_to_all(folded, key[:, :, :past], value[:, :, :past], scale)
    behind, lse_behind = _attend_to_masked(folded, key[:, :, past:], value[:, :, past:], attention_mask, scale)
    share = torch.sigmoid(lse_before - lse_behind)[..., None]
    joined = (before * share + behind * (1 - share)).to(query.dtype)
    return joined.view(rows, heads, width, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(JOINED, joined_attention)


def attend_to_all(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention without a mask, by the device's fused kernel where it takes these heads.

    Args:
        query: [rows, heads, n, size].
        key: [rows, heads, columns, size].
        value: [rows, heads, columns, value size].
        scale: Factor of the scores.

    Returns:
        [rows, heads, n, value size], and float32 [rows, heads, n], the log of the summed exponentials of the scores.
    """
    size, aten = query.shape[-1], torch.ops.aten
    if size == value.shape[-1] and size <= _WIDEST_HEAD and size % 8 == 0:
        if query.device.type == "cpu":
            output, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=scale)
            return output, lse
        if query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16):
            output, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, False, scale=scale)
            return output, lse
        if query.device.type == "cuda":
            output, lse, *_ = aten._scaled_dot_product_efficient_attention(query, key, value, None, True, scale=scale)
            return output, lse[:, :, : query.shape[2]]  # which it pads to a multiple of 32
    return _attend(query @ key.transpose(2, 3), value, scale)


def attend_along_paths(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, columns: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of each position to the past, and to columns of its own in the order of the text.

    Args:
        query: [rows, heads, width, size].
        key: [rows, key heads, columns, size].
        value: [rows, key heads, columns, value size].
        columns: int64 [rows, 1, width, last columns], which column stands at each place; -1: none.
        scale: Factor of the scores.

    Returns:
        [rows, width, heads, value size].
    """
    rows, heads, width, size = query.shape
    key_heads, past = key.shape[1], key.shape[2] - columns.shape[-1]
    groups = heads // key_heads
    row = torch.arange(rows, device=query.device)[:, None, None]
    at = columns[:, 0].clamp(min=0)
    # [rows, width, places, key heads, size] as [rows, key heads, width, places, size]
    keys, values = (states.transpose(1, 2)[row, at].permute(0, 3, 1, 2, 4) for states in (key, value))
    grouped = query.view(rows, key_heads, groups, width, size).transpose(2, 3)  # [rows, key heads, width, groups, size]
    places = (grouped @ keys.transpose(3, 4)).transpose(2, 3).masked_fill(columns[:, :, None] < 0, float("-inf"))
    folded = query.reshape(rows, key_heads, -1, size)
    before = (folded @ key[:, :, :past].transpose(2, 3)).view(rows, key_heads, groups, width, past)
    # One softmax along a row: its bits depend on nothing beside the row.
    weights = torch.softmax(torch.cat([before, places], -1).float() * scale, -1).to(value.dtype)
    of_places = (weights[..., past:].transpose(2, 3) @ values).transpose(2, 3)
    of_past = weights[..., :past].reshape(rows, key_heads, groups * width, past) @ value[:, :, :past]
    joined = of_past.view_as(of_places) + of_places
    return joined.reshape(rows, heads, width, -1).transpose(1, 2).contiguous()


def _attend_to_masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend_to_all` for few keys, with a mask [rows, 1, width, columns] for all heads of a group."""
    scores = query @ key.transpose(2, 3)
    rows, heads, _, columns = scores.shape
    grouped = scores.view(rows, heads, -1, mask.shape[2], columns)
    return _attend(grouped.masked_fill(~mask[:, :, None], float("-inf")).view_as(scores), value, scale)


def _attend(scores: torch.Tensor, value: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum of values, and the log-sum-exp of scores [rows, heads, n, columns], in float32 between."""
    scores = scores.float() * scale
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(value.dtype) @ value, lse


def attention_configs(model: PreTrainedModel) -> list[Any]:
    """The configurations by which a model's modules select the attention `sdpa`, each once.

    Args:
        model: The model.
    """
    found = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    return [config for config in found.values() if getattr(config, "_attn_implementation", None) == "sdpa"]


@contextmanager
def joined_in(configs: Sequence[Any]) -> Iterator[None]:
    """Select `joined_attention` while a pass runs.

    Args:
        configs: Of `attention_configs`.
    """
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = JOINED
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name
