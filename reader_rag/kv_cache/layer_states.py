"""Outputs of chosen decoder layers at positions of a sequence, for draft sources that need hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reader_rag.kv_cache.tree_cache import TreeCache


@dataclass(frozen=True, eq=False)
class LayerStates:
    """Hidden states of consecutive positions of a sequence: what a source gets as `Verified.hidden_states`.

    Attributes:
        layers: Which states: n is the output of the n-th decoder layer, 0 the embeddings, as in the `hidden_states` of
            `transformers`, but that the last is not normalised either.
        first: The first position.
        rows: [positions, layers, width], in the type of the target's activations or wider.
    """

    layers: tuple[int, ...]
    first: int
    rows: torch.Tensor

    def of(self, layers: Sequence[int]) -> torch.Tensor:
        """[positions, n * width], the states of n layers side by side.

        Args:
            layers: Some of `layers`, in the order of the result.
        """
        if tuple(layers) != self.layers:
            return torch.cat([self.rows[:, self.layers.index(layer)] for layer in layers], dim=1)
        return self.rows.flatten(1)


class LayerOutputs:
    """Receives the outputs of chosen layers in the passes over one sequence, and keeps those of committed positions.

    A prefill commits what it computed; of a verified draft, who accepts a path commits its rows.

    Args:
        layers: Which, as in `LayerStates`.

    Attributes:
        layers: As given.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._pass: torch.Tensor | None = None
        self._kept: list[torch.Tensor] = []

    @staticmethod
    def bytes_for(positions: int, layers: int, model: Any) -> int:
        """Bytes of the states of a prompt.

        Args:
            positions: Its tokens.
            layers: Number of layers.
            model: A model of `transformers`.
        """
        width = int(getattr(model.config.get_text_config(decoder=True), "hidden_size", 0))
        return positions * layers * width * int(model.dtype.itemsize)

    def receive(self, rows: torch.Tensor) -> None:
        """Take the outputs of a pass.

        Args:
            rows: [rows, layers, width].
        """
        self._pass = rows

    def commit(self, rows: Sequence[int] | None = None) -> None:
        """Keep rows of the last pass; its other rows are dropped.

        Args:
            rows: Which, in order; None: all.
        """
        if self._pass is not None:
            self._kept.append(self._pass if rows is None else _rows_of(self._pass, rows))
        self._pass = None

    def take(self, stop: int) -> LayerStates | None:
        """What was kept since the last call; None: nothing.

        Args:
            stop: Committed positions of the sequence; the last row is that of the last of them.
        """
        if not self._kept:
            return None
        rows, self._kept = torch.cat(self._kept), []
        return LayerStates(self.layers, stop - len(rows), rows)

    def release(self) -> None:
        """Free the memory."""
        self._pass, self._kept = None, []


def commit_all(cache: TreeCache, count: int, outputs: LayerOutputs | None) -> None:
    """Commit all positions of a pass.

    Args:
        cache: The sequence's.
        count: How many there are.
        outputs: Received the outputs of layers; None: nothing did.
    """
    cache.commit(list(range(count)))
    if outputs is not None:
        outputs.commit()


def wanted_layers(receivers: Sequence[LayerOutputs | None]) -> tuple[int, ...]:
    """All layers whose outputs some receivers want, in order.

    Args:
        receivers: Receivers; None wants none.
    """
    return tuple(sorted({layer for outputs in receivers if outputs is not None for layer in outputs.layers}))


def _rows_of(states: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """A copy of some rows by slices: indexes in a list would be one more copy to the device."""
    ends = [n for n in range(1, len(rows)) if rows[n] != rows[n - 1] + 1]
    runs = zip([0, *ends], [*ends, len(rows)], strict=True)
    return torch.cat([states[rows[first] : rows[stop - 1] + 1] for first, stop in runs])
