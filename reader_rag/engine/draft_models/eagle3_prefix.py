"""What the prefix cache keeps of an EAGLE-3 head: its keys and values, and hidden states of the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from reader_rag.engine.draft_models.eagle3_head import KeysAndValues
from reader_rag.kv_cache.tree_cache import States


class HeadPrefix:
    """A sequence in a head, from which blocks of a `PrefixCache` are taken, or which is filled with them.

    Row p is computed from the target's hidden state at position p and the token behind it. So the tokens of a block
    decide its rows but the last: a block has the keys and values of the rows from the one before its first position on,
    and the hidden state of its last position, from which the next row is computed once the token behind it is known.

    Args:
        cache: Keys and values of the rows.
        ends: Combined hidden states [1, width] of the last positions of blocks.

    Attributes:
        ends: As given; `restore` adds those of its blocks.
    """

    def __init__(self, cache: KeysAndValues, ends: Mapping[int, torch.Tensor]) -> None:
        self.ends = dict(ends)
        self._cache = cache

    @torch.inference_mode()
    def states(self, start: int, stop: int) -> States:
        """Copies for a block of positions `start` to `stop - 1`; see `Restorable.states`."""
        return [(self._cache.copy(max(start - 1, 0), stop - 1), self.ends[stop - 1].clone())]

    @torch.inference_mode()
    def restore(self, blocks: Sequence[States]) -> None:
        """Fill an empty head; see `Restorable.restore`."""
        for block in blocks:
            pair: Any = block[0]
            self._cache.append(pair[0])
            self.ends[self._cache.length] = pair[1]
