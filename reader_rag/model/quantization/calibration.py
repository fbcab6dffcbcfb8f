"""Finds the scales that are folded into a model's weights, from its activations on a text that ships with the package.

A model is read layer by layer: hidden states of the text go through one decoder layer, whose weights may be mapped from
a file and are converted to float32 one matrix at a time; then its factors are chosen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from jinja2 import TemplateError
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from reader_rag.model.quantization.folding import ARCHITECTURES, Architecture, Fold, LayerFolding, architecture_of
from reader_rag.model.quantization.int8 import quantise_rows

FOLDING = "smooth-1"
"""Names how factors are chosen. Change it when they change: weights that were quantised before are then made anew."""

_EXPONENTS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
"""Of the activations' magnitude, in the factors that are tried; that of the weights' is the rest to 1."""
_ROWS = 192
"""Rows of activations with which factors are compared."""
_FEATURES_AT_ONCE = 1024


class _Call(NamedTuple):
    """What a model passes to a decoder layer, besides the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Calibration:
    """The activations of a model on the text, one decoder layer after the other.

    Args:
        model: A causal language model in any floating-point type; `can_fold(model)` is true.
        tokenizer: Its tokenizer.

    Attributes:
        layers: The decoder layers.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        architecture = _architecture(model)
        if architecture is None:
            raise ValueError(f"what can be folded in {type(model).__name__} is not known")
        self._architecture = architecture
        self.layers = list(_decoder(model).layers)
        self._next = 0
        self._folding = LayerFolding()
        self._names = {
            name: self.layers.index(module) for name, module in model.named_modules() if module in self.layers
        }
        self._hidden: list[torch.Tensor] = []
        self._calls: list[list[_Call]] = []
        for token_ids in texts(tokenizer, getattr(model.config, "max_position_embeddings", None)):
            hidden, calls = _calls(model, self.layers, token_ids)
            self._hidden.append(hidden)
            self._calls.append(calls)

    def folded(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter of the model with its factors; layers are folded when their first parameter is asked for.

        Args:
            name: Its name in the model, e.g. "model.layers.3.mlp.up_proj.weight"; those of a layer are asked for
                together, and layers in their order.
            parameter: Floating point; not changed.

        Returns:
            float32 where the parameter is in a decoder layer, else the parameter itself.
        """
        for layer, index in self._names.items():
            if name.startswith(f"{layer}."):
                if index >= self._next:
                    self._folding = self.fold_layer(index)
                return self._folding.apply(name.removeprefix(f"{layer}."), parameter)
        return parameter.detach()

    @torch.no_grad()
    def fold_layer(self, index: int) -> LayerFolding:
        """Choose the factors of a decoder layer, from its own weights, which stay as they are.

        Args:
            index: Number of the layer; layers are folded in their order, each once.
        """
        if index != self._next:
            raise ValueError(f"layer {self._next} is the next one, not {index}")
        self._next += 1
        layer = self.layers[index]
        inputs = self._run(index, layer)
        folding = LayerFolding(self._architecture.norm_offset)
        for fold in self._architecture.folds:
            readers: list[Any] = [layer.get_submodule(name) for name in fold.readers]
            factors = best_factors(torch.cat(inputs[fold]), [reader.weight for reader in readers])
            folding.add(fold, factors)
        return folding

    def _run(self, index: int, layer: nn.Module) -> dict[Fold, list[torch.Tensor]]:
        """Compute the layer on all texts: the inputs of its readers, float32 [tokens, channels] of each text."""
        inputs: dict[Fold, list[torch.Tensor]] = {fold: [] for fold in self._architecture.folds}
        watched = {layer.get_submodule(fold.readers[0]): values.append for fold, values in inputs.items()}
        with _in_float32(layer, watched):
            for number, calls in enumerate(self._calls):
                call = calls[index]
                out = layer(self._hidden[number], *call.args, **call.kwargs)
                self._hidden[number] = out[0] if isinstance(out, tuple) else out
        return inputs


def texts(tokenizer: PreTrainedTokenizerBase, most: int | None = None) -> list[torch.Tensor]:
    """The text that ships with the package, as conversations in the model's own form: int64 [1, tokens] of each.

    Args:
        tokenizer: Where it has no chat template for a question and its answer, they follow each other as they are.
        most: Tokens that are kept of a conversation; None: all.
    """
    shipped = files("reader_rag.model.quantization").joinpath("calibration.json").read_text(encoding="utf-8")
    found = []
    for pair in json.loads(shipped):
        text = _templated(tokenizer, pair)
        if text is not None:
            ids: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer(f"{pair['user']}\n\n{pair['assistant']}")["input_ids"]
        found.append(torch.tensor([ids[:most]]))
    return found


def _templated(tokenizer: PreTrainedTokenizerBase, pair: dict[str, str]) -> str | None:
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        text: Any = tokenizer.apply_chat_template(
            [{"role": role, "content": pair[role]} for role in ("user", "assistant")], tokenize=False
        )
    except TemplateError:  # a template for other conversations; calibration needs no particular form
        return None
    return str(text)


def best_factors(inputs: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """The factors with which int8 products of activations and weights are nearest to those in floating point.

    Tried are `(activations' magnitude) ** a / (weights' magnitude) ** (1 - a)` for several a, and none (1.0).

    Args:
        inputs: float32 [rows, channels], activations.
        weights: Floating point [features, channels] of each linear layer that reads them.

    Returns:
        float32 [channels].
    """
    rows = inputs[torch.linspace(0, len(inputs) - 1, min(_ROWS, len(inputs))).long()]
    activations = inputs.square().mean(0).sqrt().clamp_(min=1e-5)
    magnitudes = torch.stack([weight.abs().amax(0).float() for weight in weights]).amax(0).clamp_(min=1e-5)
    candidates = [torch.ones_like(activations)]
    candidates += [activations**exponent / magnitudes ** (1 - exponent) for exponent in _EXPONENTS]
    errors = [_error(rows, weights, factors) for factors in candidates]
    return candidates[min(range(len(candidates)), key=errors.__getitem__)]


def _error(rows: torch.Tensor, weights: list[torch.Tensor], factors: torch.Tensor) -> float:
    """Squared error of int8 products relative to the products, summed over the layers."""
    values, scales = quantise_rows(rows / factors)
    quantised = values.float() * scales[:, None]
    total = 0.0
    for weight in weights:
        error = exact = 0.0
        for part in weight.split(_FEATURES_AT_ONCE):
            part = part.float()
            values, scales = quantise_rows(part * factors)
            products = linear(rows, part)
            error += float((linear(quantised, values.float() * scales[:, None]) - products).square().sum())
            exact += float(products.square().sum())
        total += error / max(exact, 1e-30)
    return total


def can_fold(model: PreTrainedModel) -> bool:
    """Whether it is known what can be folded in a model; its weights may be on the meta device."""
    return _architecture(model) is not None


def _architecture(model: PreTrainedModel) -> Architecture | None:
    kind = model.config.model_type
    return architecture_of(kind, _decoder(model).layers[0]) if kind in ARCHITECTURES else None


def _decoder(model: PreTrainedModel) -> Any:
    return model.get_decoder()


@torch.no_grad()
def _calls(
    model: PreTrainedModel, layers: list[nn.Module], token_ids: torch.Tensor
) -> tuple[torch.Tensor, list[_Call]]:
    """The first layer's hidden states and what the model passes to each layer; no layer computes anything."""
    calls: list[_Call] = []

    def record(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(_Call(args, kwargs))
        return hidden

    first: list[torch.Tensor] = []
    handle = layers[0].register_forward_pre_hook(lambda _, args: first.append(args[0]))
    with _forwards(dict.fromkeys(layers, record)):
        embedding: Any = model.get_input_embeddings()
        _decoder(model)(inputs_embeds=embedding(token_ids).float(), use_cache=False)
    handle.remove()
    return first[0], calls


@contextmanager
def _forwards(forwards: dict[nn.Module, Callable[..., torch.Tensor]]) -> Iterator[None]:
    """Modules with another `forward`."""
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.forward


@contextmanager
def _in_float32(layer: nn.Module, watched: dict[nn.Module, Callable[[torch.Tensor], None]]) -> Iterator[None]:
    """A layer that computes in float32, whatever the type of its weights.

    Args:
        layer: The layer.
        watched: Called with the rows that enter a linear layer.
    """
    linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    matrices = {id(module.weight) for module in linears}
    others = [parameter for parameter in layer.parameters() if id(parameter) not in matrices]
    stored = [parameter.data for parameter in others]
    for parameter in others:
        parameter.data = parameter.data.float()
    try:
        with _forwards({module: partial(_float32_linear, module, watched.get(module)) for module in linears}):
            yield
    finally:
        for parameter, data in zip(others, stored, strict=True):
            parameter.data = data


def _float32_linear(module: Any, watch: Callable[[torch.Tensor], None] | None, x: torch.Tensor) -> torch.Tensor:
    if watch is not None:
        watch(x.flatten(0, -2))
    return linear(x, module.weight.float(), module.bias)
