"""EAGLE-3: a head of one decoder layer that drafts from the target's hidden states."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reader_rag.draft.source import Verified
from reader_rag.engine.draft_models.eagle3_head import Eagle3Head, KeysAndValues
from reader_rag.engine.draft_models.source import DraftRequest, DraftTally
from reader_rag.kv_cache.layer_states import LayerStates


class Eagle3Model:
    """An EAGLE-3 head as a draft model.

    Args:
        head: The head, on the target's device.
        name: Its name in messages.

    Attributes:
        head: As given.
        name: As given.
        tally: What it did.
    """

    def __init__(self, head: Eagle3Head, name: str) -> None:
        self.head = head
        self.name = name
        self.tally = DraftTally()

    def open(self, request: DraftRequest) -> Eagle3Stream:
        """Begin a sequence; see `DraftModel.open`."""
        return Eagle3Stream(self.head, request)

    def forget(self, tenant: str) -> None:
        """Nothing is kept of a request that ended."""


class Eagle3Stream:
    """A head on one sequence; see `Stream`.

    Row p of the head takes the target's hidden state at position p and the token behind it. Rows of the sequence are
    computed when it drafts next, from the states that `observe` brought; those of drafted tokens, which continue from
    the head's own states, are dropped by the next `follow`. Positions that the target took from its prefix cache have
    no hidden states, so the head does not attend to them.

    Args:
        head: The head.
        request: The request.
    """

    def __init__(self, head: Eagle3Head, request: DraftRequest) -> None:
        self.hidden_layers = head.config.hidden_layers
        layer: Any = head.config.layer
        like = head.fc.weight
        self._heads, self._width = int(layer.num_key_value_heads), int(layer.head_dim)
        self._layers = int(layer.num_hidden_layers)
        self._positions = min(request.positions + request.tokens, layer.max_position_embeddings)
        row = 2 * self._layers * self._heads * self._width + layer.hidden_size
        self.nbytes = self._positions * row * like.dtype.itemsize
        self._head = head
        self._request = request
        self._cache: KeysAndValues | None = None
        self._waiting: list[torch.Tensor] = []
        self._rows = self._stop = self._next = 0
        self._state = like

    @torch.inference_mode()
    def observe(self, verified: Verified) -> None:
        """Take the target's hidden states at further positions; see `Stream.observe`."""
        states = verified.hidden_states
        if isinstance(states, LayerStates):
            if states.first != self._stop:  # the rows between have no states
                self._waiting.clear()
            self._waiting.append(self._head.combine(states.of(self.hidden_layers)))
            self._stop = states.first + len(states.rows)

    def follow(self, tokens: NDArray[np.int32]) -> torch.Tensor | None:
        """Compute the rows that wait; None where there are none, or no room in the head's window."""
        if len(tokens) + self._request.tokens > self._positions or not self._waiting or self._stop != len(tokens) - 1:
            return None
        states = torch.cat(self._waiting)
        self._waiting.clear()
        if self._cache is None:
            like = self._head.fc.weight
            self._cache = KeysAndValues(self._layers, self._heads, self._positions, self._width, like)
        self._cache.length = self._rows  # without the rows of drafted tokens
        first = self._stop - len(states)
        behind = torch.from_numpy(tokens[first + 1 :].astype(np.int64)).to(states.device)
        logits, self._state = self._head(behind, states, first, self._cache)
        self._cache.length = self._rows = self._rows + len(states)
        self._next = self._stop
        return self._in_target(logits)

    def advance(self, token: int) -> torch.Tensor:
        """Compute the row of a drafted token; see `Stream.advance`."""
        assert self._cache is not None
        behind = torch.tensor([token], device=self._state.device)
        logits, self._state = self._head(behind, self._state, self._next, self._cache)
        self._cache.length += 1
        self._next += 1
        return self._in_target(logits)

    def release(self) -> None:
        """Free the memory."""
        self._cache = None
        self._waiting.clear()

    def _in_target(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [1, width of the target's] of the tokens that the head can draft; minus infinity elsewhere."""
        targets = self._head.targets
        if targets is None:
            return logits
        wide = logits.new_full((1, self._request.width), -torch.inf)
        wide[:, targets] = logits
        return wide
