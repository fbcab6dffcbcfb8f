"""Outputs of chosen decoder layers at positions of a sequence, for draft sources that need hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

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
            return self.rows[:, [self.layers.index(layer) for layer in layers]].flatten(1)
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
            self._kept.append(self._pass if rows is None else self._pass[list(rows)])
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


def decoder_layers(decoder: nn.Module | None, count: int) -> Sequence[nn.Module]:
    """The decoder layers of a model; empty where they are not found.

    Args:
        decoder: What computes the states of all tokens.
        count: How many layers the configuration names.
    """
    for module in () if decoder is None else decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    return ()


@contextmanager
def collecting(part: nn.Module | None, *, inputs: bool) -> Iterator[list[torch.Tensor]]:
    """Collects the states that enter or leave a part of a model in its own passes meanwhile.

    Args:
        part: The part; None: nothing is collected.
        inputs: Whether what enters it is collected, else what leaves it.
    """
    found: list[torch.Tensor] = []
    if part is None:
        yield found
        return
    if inputs:
        hook = part.register_forward_pre_hook(lambda _module, given: found.append(given[0]))
    else:
        hook = part.register_forward_hook(lambda _module, _inputs, output: found.append(output[0]))
    try:
        yield found
    finally:
        hook.remove()


@contextmanager
def recording(layers: Sequence[nn.Module], parts: Sequence[tuple[LayerOutputs | None, int]]) -> Iterator[None]:
    """Hand the outputs of layers in a model's own pass to their receivers.

    Args:
        layers: The decoder layers.
        parts: For each text of the pass its receiver, None: its states are dropped, and how many of its rows count.
    """
    with noting(layers, wanted_layers([outputs for outputs, _ in parts])) as found:
        yield
    for text, (outputs, rows) in enumerate(parts):
        if outputs is not None:
            outputs.receive(torch.stack([found[layer][text, :rows] for layer in outputs.layers], dim=1))


def wanted_layers(receivers: Sequence[LayerOutputs | None]) -> tuple[int, ...]:
    """All layers whose outputs some receivers want, in order.

    Args:
        receivers: Receivers; None wants none.
    """
    return tuple(sorted({layer for outputs in receivers if outputs is not None for layer in outputs.layers}))


@contextmanager
def noting(layers: Sequence[nn.Module], wanted: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Notes the outputs of layers, [texts, rows, width], in a model's own pass meanwhile.

    Args:
        layers: The decoder layers.
        wanted: Which of them, as in `LayerStates`.
    """
    found: dict[int, torch.Tensor] = {}
    hooks = [_hook(layers, layer, found) for layer in wanted]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _hook(layers: Sequence[nn.Module], layer: int, found: dict[int, torch.Tensor]) -> Any:
    """A hook that notes the states [texts, rows, width] after so many layers."""
    if layer == 0:
        return layers[0].register_forward_pre_hook(_noted_input(found), with_kwargs=True)
    return layers[layer - 1].register_forward_hook(_noted_output(layer, found))


def _noted_input(found: dict[int, torch.Tensor]) -> Callable[[nn.Module, Any, Any], None]:
    def note(_module: nn.Module, arguments: Any, named: Any) -> None:
        found[0] = arguments[0] if arguments else named["hidden_states"]

    return note


def _noted_output(layer: int, found: dict[int, torch.Tensor]) -> Callable[[nn.Module, Any, Any], None]:
    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        found[layer] = output if isinstance(output, torch.Tensor) else output[0]

    return note
