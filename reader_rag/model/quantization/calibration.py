"""Quantises the decoder layers of a model for its activations on a text that ships with the package.

A model is read layer by layer: hidden states of the text go through one decoder layer, whose weights may be mapped from
a file and are converted to float32 one matrix at a time. Then the factors that are folded into its weights are chosen,
and its weights rounded for the second moments of their inputs.
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

from reader_rag.model.quantization.factors import best_factors
from reader_rag.model.quantization.folding import ARCHITECTURES, Architecture, LayerFolding, architecture_of
from reader_rag.model.quantization.gptq import InputMoments, round_weight
from reader_rag.model.quantization.int8 import Int8Weight, quantise_weight
from reader_rag.model.quantization.parts import limbs_of

_TOKENS = 8192
"""Most tokens of the text: their hidden states are in memory."""
_ROWS = 192
"""Rows of activations with which factors are compared."""


class _Call(NamedTuple):
    """What a model passes to a decoder layer, besides the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Inputs(NamedTuple):
    """What enters linear layers that share their inputs.

    Attributes:
        rows: float32 [rows, width], some rows of each text.
        moments: Of all rows.
    """

    rows: list[torch.Tensor]
    moments: InputMoments


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
        self._model = model
        head = model.get_output_embeddings()
        self._head = next((f"{name}.weight" for name, module in model.named_modules() if module is head), "")
        self.layers = list(_decoder(model).layers)
        self._next = 0
        self._folding = LayerFolding()
        self._moments: dict[str, InputMoments] = {}
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
        own = self._in_layer(name)
        return parameter.detach() if own is None else self._folding.apply(own, parameter)

    @torch.no_grad()
    def quantised(self, name: str, weight: torch.Tensor) -> Int8Weight:
        """A weight with its factors in int8, that of a linear layer or of the output head rounded for its own inputs.

        Args:
            name: Its name, as for `folded`.
            weight: Floating point [features, inputs]; not changed.
        """
        folded = self.folded(name, weight)
        own = self._in_layer(name)
        if own is not None:
            moments = self._moments.get(own.removesuffix(".weight"))
        else:
            moments = self._head_moments() if name == self._head and self._next == len(self.layers) else None
        return quantise_weight(folded) if moments is None else round_weight(folded, moments)

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
        self._moments = {name: one.moments for name, one in inputs.items()}
        folding = LayerFolding(self._architecture.norm_offset)
        for fold in self._architecture.folds:
            readers: list[Any] = [layer.get_submodule(name) for name in fold.readers]
            one = inputs[fold.readers[0]]
            factors = best_factors(
                torch.cat(one.rows),
                one.moments.root_mean_squares(),
                [reader.weight for reader in readers],
                limbs_of(fold.readers[0]),
            )
            folding.add(fold, factors)
            self._moments |= dict.fromkeys(fold.readers, one.moments.divided(factors))
        return folding

    def _in_layer(self, name: str) -> str | None:
        """A parameter's name in its decoder layer, which is folded if it is the next one; None: it is in no layer."""
        for layer, index in self._names.items():
            if name.startswith(f"{layer}."):
                if index >= self._next:
                    self._folding = self.fold_layer(index)
                return name.removeprefix(f"{layer}.")
        return None

    def _head_moments(self) -> InputMoments:
        """Moments of the output head's inputs, from the last layer's hidden states."""
        head: Any = self._model.get_output_embeddings()
        moments = InputMoments(head.in_features)
        for hidden in self._hidden:
            with _forwards(dict.fromkeys(self.layers, lambda *_, found=hidden, **__: found)):
                states = _decoder(self._model)(inputs_embeds=hidden, use_cache=False).last_hidden_state
            moments.add(states.flatten(0, -2).float())
        return moments

    def _run(self, index: int, layer: nn.Module) -> dict[str, _Inputs]:
        """Compute the layer on all texts: what enters its linear layers, by their names."""
        names: dict[nn.Module, str] = {
            module: name for name, module in layer.named_modules() if isinstance(module, nn.Linear)
        }
        normed = {name for fold in self._architecture.folds if "norm" in fold.source for name in fold.readers}
        inputs: dict[str, _Inputs] = {}
        every = max(sum(hidden.shape[1] for hidden in self._hidden) // _ROWS, 1)
        seen: dict[str, torch.Tensor] = {}
        with _in_float32(layer, lambda module, x: seen.__setitem__(names[module], x)):
            for number, calls in enumerate(self._calls):
                call = calls[index]
                out = layer(self._hidden[number], *call.args, **call.kwargs)
                self._hidden[number] = out[0] if isinstance(out, tuple) else out
                share = _shares(self._hidden[number])
                known: dict[int, _Inputs] = {}
                for name, x in seen.items():
                    one = known.get(id(x)) or inputs.get(name) or _Inputs([], InputMoments(x.shape[-1]))
                    if id(x) not in known:  # else another layer that reads the same has added it
                        rows = x.flatten(0, -2) if name in normed else x.flatten(0, -2) * share
                        one.moments.add(rows)
                        one.rows.append(rows[::every].clone())
                    known[id(x)] = inputs[name] = one
                seen.clear()
        return inputs


def texts(tokenizer: PreTrainedTokenizerBase, most: int | None = None) -> list[torch.Tensor]:
    """The text that ships with the package, as conversations in the model's own form: int64 [1, tokens] of each.

    Of tokenizers that need more than 8,192 tokens for it (bytes), the last conversations are left out.

    Args:
        tokenizer: Where it has no chat template for a question and its answer, they follow each other as they are.
        most: Tokens that are kept of a conversation; None: all.
    """
    shipped = files("reader_rag.model.quantization").joinpath("calibration.json").read_text(encoding="utf-8")
    found: list[torch.Tensor] = []
    for pair in json.loads(shipped):
        text = _templated(tokenizer, pair)
        if text is not None:
            ids: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer(f"{pair['user']}\n\n{pair['assistant']}")["input_ids"]
        kept = torch.tensor([ids[:most]])[:, : _TOKENS - sum(one.shape[1] for one in found)]
        if kept.shape[1]:
            found.append(kept)
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


def _shares(hidden: torch.Tensor) -> torch.Tensor:
    """How much an error counts that is added to hidden states: the next norm divides it by their magnitude.

    Args:
        hidden: float32 [1, tokens, width].

    Returns:
        float32 [tokens, 1].
    """
    return hidden.flatten(0, -2).square().mean(-1, keepdim=True).clamp_(min=1e-12).rsqrt()


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
def _in_float32(layer: nn.Module, watch: Callable[[nn.Module, torch.Tensor], None]) -> Iterator[None]:
    """A layer that computes in float32, whatever the type of its weights.

    Args:
        layer: The layer.
        watch: Called with each linear layer in it and what enters it.
    """
    linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    matrices = {id(module.weight) for module in linears}
    others = [parameter for parameter in layer.parameters() if id(parameter) not in matrices]
    stored = [parameter.data for parameter in others]
    for parameter in others:
        parameter.data = parameter.data.float()
    try:
        with _forwards({module: partial(_float32_linear, module, watch) for module in linears}):
            yield
    finally:
        for parameter, data in zip(others, stored, strict=True):
            parameter.data = data


def _float32_linear(module: Any, watch: Callable[[nn.Module, torch.Tensor], None], x: torch.Tensor) -> torch.Tensor:
    watch(module, x)
    return linear(x, module.weight.float(), module.bias)
