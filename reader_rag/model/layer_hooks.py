"""Hooks on the decoder layers of a model, which note what enters or leaves them in its own passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from reader_rag.kv_cache.layer_states import LayerOutputs, wanted_layers


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
