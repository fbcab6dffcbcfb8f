"""What a fixed step computes on the device: nothing in it depends on the contents of a tensor but other contents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from reader_rag.kv_cache.fixed_cache import FixedCache, Slots
from reader_rag.model.fixed_step.attention import attention_configs, joined_in
from reader_rag.model.fixed_step.inputs import InputBuffer
from reader_rag.model.fixed_step.masks import path_columns, step_masks
from reader_rag.model.fixed_step.shapes import StepShape
from reader_rag.model.layer_hooks import noting
from reader_rag.sampling.noise import DeviceTable, DrawInputs, drawn_tokens
from reader_rag.sampling.topk import ranked_tokens


class StepOutputs(NamedTuple):
    """What a fixed step leaves on the device.

    Attributes:
        logits: [rows, width, vocabulary].
        ranked: int32 [rows, width, 1 + best + 1], the result of `ranked_tokens`, and the token drawn; where none is,
            the most probable one.
        hidden: [layers, rows, width, size], outputs of the shape's layers; empty without any.
    """

    logits: torch.Tensor
    ranked: torch.Tensor
    hidden: torch.Tensor


class StepForward:
    """The device's part of a fixed step, as a function from buffers to outputs.

    Args:
        model: The model; its own `forward` is called.
        kinds: Its attention kinds and their spans (`attention_kinds`).
        to_backend: A mask [rows, 1, width, columns] of bool as the model's attention takes it.
        cache: Keys and values.
        inputs: The input buffer.
        layers: The model's decoder layers.

    Attributes:
        has_moved: Whether what the last step accepted was committed since this was last set to False.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kinds: Mapping[str, int],
        to_backend: Callable[[torch.Tensor], torch.Tensor],
        cache: FixedCache,
        inputs: InputBuffer,
        layers: Sequence[nn.Module] = (),
    ) -> None:
        self._model: Any = model
        self._kinds = kinds
        self._to_backend = to_backend
        self._cache = cache
        self._inputs = inputs
        self._layers = layers
        self._noise = DeviceTable.on(model.device)
        self._configs = attention_configs(model)
        self.has_moved = False

    @torch.inference_mode()
    def __call__(self, shape: StepShape) -> StepOutputs:
        """Commit what the last step accepted, and compute a pass over all positions of a shape.

        Args:
            shape: Of the step whose inputs are in the buffer.
        """
        inputs, cache = self._inputs.views(shape), self._cache
        rows = torch.arange(shape.first, shape.first + shape.rows, device=inputs.tokens.device)[:, None]
        if shape.moves:
            cache.write(rows, inputs.targets, cache.read(rows, inputs.sources))
        self.has_moved = True
        if shape.paths:
            masks = dict.fromkeys(self._kinds, path_columns(inputs, shape.shown, shape.past))
        else:
            allowed = step_masks(self._kinds, inputs, shape.shown, shape.past)
            masks = {kind: self._to_backend(mask) for kind, mask in allowed.items()}
        cache.slots = Slots(rows, inputs.columns, shape.first, shape.shown)
        special = shape.past > 0 or shape.paths
        try:
            with noting(self._layers, shape.layers) as found, joined_in(self._configs if special else ()):
                output = self._model(
                    inputs.tokens,
                    position_ids=inputs.positions,
                    attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                    past_key_values=cache,
                    use_cache=True,
                )
        finally:
            cache.slots = None
        logits: torch.Tensor = output.logits
        flat = logits.flatten(0, 1)
        ranked = ranked_tokens(flat)
        drawn = ranked[:, :1]
        if shape.draws:
            drawn = drawn_tokens(flat, DrawInputs.of(inputs.draws, inputs.positions + 1), self._noise)
        ranked = torch.cat([ranked, drawn], dim=1).to(torch.int32).view(shape.rows, shape.width, -1)
        states = [found[layer] for layer in shape.layers]
        return StepOutputs(logits, ranked, torch.stack(states) if states else logits.new_empty(0))
