"""EAGLE-3: a head of one decoder layer that drafts from the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reader_rag.draft.source import Proposal, Verified
from reader_rag.engine.draft_models.eagle3_head import Eagle3Head, KeysAndValues
from reader_rag.engine.draft_models.eagle3_prefix import HeadPrefix
from reader_rag.engine.draft_models.source import DraftModel, DraftRequest
from reader_rag.kv_cache.layer_states import LayerStates
from reader_rag.kv_cache.prefix_cache import PrefixCache


class Eagle3Model(DraftModel):
    """An EAGLE-3 head as a draft model.

    Args:
        head: The head, on the target's device.
        name: Its name in messages.
        prefixes: Keys and values of earlier sequences, in blocks; None: none are kept.

    Attributes:
        head: As given.
    """

    def __init__(self, head: Eagle3Head, name: str, prefixes: PrefixCache | None = None) -> None:
        super().__init__(name, prefixes)
        self.head = head

    def open(self, request: DraftRequest) -> Eagle3Stream:
        """Begin a sequence; see `DraftModel.open`."""
        return Eagle3Stream(self, request)

    def follow(
        self, streams: Sequence[Eagle3Stream], sequences: Sequence[NDArray[np.int32]]
    ) -> list[torch.Tensor | None]:
        """Compute the rows that wait, sequence by sequence; see `DraftModel.follow`."""
        return [stream.follow(tokens) for stream, tokens in zip(streams, sequences, strict=True)]

    def advance(self, streams: Sequence[Eagle3Stream], tokens: Sequence[int]) -> list[torch.Tensor]:
        """Compute the rows of drafted tokens, sequence by sequence; see `DraftModel.advance`."""
        return [stream.advance(token) for stream, token in zip(streams, tokens, strict=True)]


class Eagle3Stream:
    """A head on one sequence; see `Stream`.

    Row p of the head takes the target's hidden state at position p and the token behind it. Rows of the sequence are
    computed when it drafts next, from the states that `observe` brought; those of drafted tokens, which continue from
    the head's own states, are dropped by the next `follow`. Positions that the target took from its prefix cache bring
    no states: their rows come from the head's own prefix cache. The head does not attend to rows that are not there.

    Args:
        model: The head.
        request: The request.

    Attributes:
        model: As given.
        request: As given.
    """

    def __init__(self, model: Eagle3Model, request: DraftRequest) -> None:
        self.model, head = model, model.head
        self.hidden_layers = head.config.hidden_layers
        layer: Any = head.config.layer
        like = head.fc.weight
        self._heads, self._width = int(layer.num_key_value_heads), int(layer.head_dim)
        self._layers = int(layer.num_hidden_layers)
        self._positions = min(request.positions + request.tokens, layer.max_position_embeddings)
        row = 2 * self._layers * self._heads * self._width + layer.hidden_size
        self.nbytes = self._positions * row * like.dtype.itemsize
        self._head = head
        self.request = request
        self._cache: KeysAndValues | None = None
        self._waiting: list[torch.Tensor] = []
        self._rows = self._stop = self._next = 0
        self._state = like
        self._tokens = np.zeros(0, np.int32)
        self._ends: dict[int, torch.Tensor] = {}
        self._whole = True  # no position is left out

    def translated(self, sequence: NDArray[np.int32], proposal: Proposal) -> Proposal:
        """The draft itself; see `Stream.translated`."""
        return proposal

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
        if len(tokens) + self.request.tokens > self._positions or not self._waiting or self._stop != len(tokens) - 1:
            return None
        states = torch.cat(self._waiting)
        self._waiting.clear()
        begins = self._cache is None
        if self._cache is None:
            like = self._head.fc.weight
            self._cache = KeysAndValues(self._layers, self._heads, self._positions, self._width, like)
            states = self._with_prefix(self._cache, states, tokens)
        self._cache.length = self._rows  # without the rows of drafted tokens
        first = self._stop - len(states)
        self._whole &= first == self._rows
        behind = torch.from_numpy(tokens[first + 1 :].astype(np.int64)).to(states.device)
        logits, self._state = self._head(behind, states, first, self._cache)
        self._cache.length = self._rows = self._rows + len(states)
        self._next = self._stop
        self._tokens = tokens.copy()
        self._note_ends(first, states)
        if begins:
            self._keep_prefix()
        return self._in_target(logits)

    def advance(self, token: int) -> torch.Tensor:
        """Compute the row of a drafted token; returns logits [1, the target's vocabulary or another width]."""
        assert self._cache is not None
        behind = torch.tensor([token], device=self._state.device)
        logits, self._state = self._head(behind, self._state, self._next, self._cache)
        self._cache.length += 1
        self._next += 1
        return self._in_target(logits)

    def release(self) -> None:
        """Keep the prefix, and free the memory."""
        self._keep_prefix()
        self._cache = None
        self._waiting.clear()
        self._ends.clear()

    def _with_prefix(self, cache: KeysAndValues, states: torch.Tensor, tokens: NDArray[np.int32]) -> torch.Tensor:
        """Restore what another sequence left of the same prefix.

        Args:
            cache: An empty one.
            states: Combined hidden states [rows, width] of the positions up to the last token but one.
            tokens: All tokens of the sequence.

        Returns:
            Those states whose rows are to be computed, with that of the prefix's last position.
        """
        first = self._stop - len(states)
        if self.model.prefixes is None:
            return states
        prefix = HeadPrefix(cache, {})
        restored = self.model.prefixes.restore(self.request.tenant, tokens[: self._stop], prefix)
        self._rows, self._ends = cache.length, prefix.ends
        if not restored or first > restored:
            return states
        return torch.cat([prefix.ends[restored - 1], states[restored - first :]])

    def _note_ends(self, first: int, states: torch.Tensor) -> None:
        """Keep the hidden states of the last positions of blocks.

        Args:
            first: The first position.
            states: [rows, width], combined hidden states from it on.
        """
        if self.model.prefixes is not None:
            block = self.model.prefixes.block
            for row in range(-(first + 1) % block, len(states), block):
                self._ends[first + row] = states[row : row + 1].clone()

    def _keep_prefix(self) -> None:
        """Put what was computed into the prefix cache, if it begins with the sequence."""
        if self.model.prefixes is not None and self._cache is not None and self._whole:
            prefix = HeadPrefix(self._cache, self._ends)
            self.model.prefixes.insert(self.request.tenant, self._tokens[: self._rows], prefix)

    def _in_target(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [1, width of the target's] of the tokens that the head can draft; minus infinity elsewhere."""
        targets = self._head.targets
        if targets is None:
            return logits
        wide = logits.new_full((1, self.request.width), -torch.inf)
        wide[:, targets] = logits
        return wide
