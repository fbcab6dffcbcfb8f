"""Log-probabilities of emitted tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TokenLogprobs:
    """How probable the model held an emitted token, and what it held most probable there.

    Attributes:
        token_id: The token.
        logprob: Natural logarithm of its probability by the model alone, before penalties, bans and temperature.
        top: The most probable tokens with theirs, the best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


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
