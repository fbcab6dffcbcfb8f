"""Log-probabilities of emitted tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reader_rag.engine.outputs import TokenLogprobs


def token_logprobs(logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """What the model itself held of emitted tokens: before penalties, bans, temperature and the like.

    Args:
        logits: [rows, vocabulary].
        rows: Of each token, where it was emitted.
        tokens: The tokens.
        top: So many most probable tokens with each.
    """
    found = []
    for row, token in zip(rows, tokens, strict=True):
        # Row by row, so that the sum does not depend on how many rows there are.
        values = logits[row].float().log_softmax(-1)
        best = values.topk(min(top, len(values)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        found.append(TokenLogprobs(token, float(values[token]), tuple(pairs)))
    return found
