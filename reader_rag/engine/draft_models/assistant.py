"""Assistant models: smaller causal language models of the target's vocabulary."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

from reader_rag.draft.source import Verified
from reader_rag.draft.tree import DraftTree
from reader_rag.engine.draft_models.source import DraftRequest, DraftTally
from reader_rag.kv_cache.prefix_cache import PrefixCache
from reader_rag.kv_cache.tree_cache import TreeCache
from reader_rag.model.target import Target

_FEW = 16
"""Tokens that are read in one verification pass; more of them are prefilled."""


class AssistantModel:
    """A causal language model that drafts.

    Args:
        target: The assistant as `select_target` made it.
        name: Its name in messages.
        prefixes: Keys and values of earlier sequences, in blocks; None: none are kept.

    Attributes:
        target: As given.
        name: As given.
        prefixes: As given.
        window: Most positions that it reads.
        tally: What it did.
    """

    def __init__(self, target: Target, name: str, prefixes: PrefixCache | None = None) -> None:
        self.target = target
        self.name = name
        self.prefixes = prefixes
        self.tally = DraftTally()
        self.window = target.context_window or 1 << 30

    def open(self, request: DraftRequest) -> AssistantStream:
        """Begin a sequence; see `DraftModel.open`."""
        return AssistantStream(self, request)

    def forget(self, tenant: str) -> None:
        """Drop the prefixes of a tenant; see `DraftModel.forget`."""
        if self.prefixes is not None:
            self.prefixes.forget(tenant)


class AssistantStream:
    """An assistant on one sequence; see `Stream`.

    Keys and values of drafted tokens stay until `follow` finds that the sequence has other ones, so tokens that were
    accepted are not read again.

    Args:
        model: The assistant.
        request: The request.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(self, model: AssistantModel, request: DraftRequest) -> None:
        self._model = model
        self._request = request
        self._positions = min(request.positions + request.tokens, model.window)
        self.nbytes = model.target.cache_bytes(self._positions, _FEW)
        self._cache: TreeCache | None = None
        self._read = np.zeros(0, np.int32)
        self._agreed = 0

    def follow(self, tokens: NDArray[np.int32]) -> torch.Tensor | None:
        """Read what is new of the sequence; None once it leaves no room in the assistant's window."""
        if len(tokens) + self._request.tokens > self._positions:
            return None
        cache = self._cache
        if cache is None:
            cache = self._cache = self._begin(tokens)
        end = min(cache.length, len(tokens) - 1)  # the last token is read again: its logits are wanted
        same = self._read[self._agreed : end] == tokens[self._agreed : end]
        self._agreed += len(same) if same.all() else int(same.argmin())
        if self._agreed < cache.length:
            cache.roll_back(self._agreed)
        new = tokens[self._agreed :].tolist()
        if len(new) > _FEW:
            logits = deque(self._model.target.prefill_chunks(new, cache), maxlen=1).pop()
        else:
            logits = self._model.target.verify(new[0], DraftTree.from_chain(new[1:]), cache)[-1:]
            cache.commit(list(range(len(new))))
        self._read[: len(tokens)] = tokens
        return logits

    def advance(self, token: int) -> torch.Tensor:
        """Read a drafted token; see `Stream.advance`."""
        cache = self._cache
        assert cache is not None
        self._read[cache.length] = token
        logits = self._model.target.verify(token, DraftTree.empty(), cache)
        cache.commit([0])
        return logits

    def observe(self, verified: Verified) -> None:
        """Nothing: `follow` reads what was emitted."""

    def release(self) -> None:
        """Keep the prefix, and free keys and values."""
        cache, self._cache = self._cache, None
        if cache is None:
            return
        if self._model.prefixes is not None:
            self._model.prefixes.insert(self._request.tenant, self._read[: cache.length], cache)
        cache.release()

    def _begin(self, tokens: NDArray[np.int32]) -> TreeCache:
        """A KV cache, filled with what another sequence left of the same prefix."""
        cache = self._model.target.new_cache(self._positions, _FEW)
        self._read = np.zeros(self._positions + 1, np.int32)
        if self._model.prefixes is not None:
            restored = self._model.prefixes.restore(self._request.tenant, tokens, cache)
            self._read[:restored] = tokens[:restored]
        return cache
