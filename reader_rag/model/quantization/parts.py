"""Which part of a model is stored in which form, and a model made of stored tensors.

Linear layers, output head and embedding become int8; large parts of other kinds stay in 16 bits; norms, biases and
everything else are float32, as are the activations between them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from reader_rag.errors import ModelError
from reader_rag.model.fingerprint import QuantizationScheme
from reader_rag.model.quantization.int8 import Int8Weight, quantise_weight
from reader_rag.model.quantization.modules import HalfEmbedding, HalfLinear, Int8Embedding, Int8Linear

Form = Literal["int8", "half", "tied", "int8 table", "table of head", "half table", "island"]
"""How a module is stored. Linear layers: "int8"; "half": 16 bits; "tied": an output head of the embedding's own 16-bit
weight. Embeddings: "int8 table"; "table of head": the head's int8 weight; "half table": 16 bits. "island": a part that
computes in 16 bits, whose inputs and outputs are converted."""
_HEAD_LIMBS = 2
_TWO_LIMBS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "down_proj")
"""Linear layers whose inputs decide where attention looks, or have outliers that no folding evens out."""
_READ_DIRECTLY = ("dt_proj",)
"""Linear layers whose weight the model uses without calling them (Mamba's step sizes)."""

Tensors = Callable[[str], torch.Tensor]
"""Gives a stored tensor by its name."""


class Layout(NamedTuple):
    """The form of every module that has one; what is in none of them is float32.

    Attributes:
        forms: Form by the module's name.
        half: Type of what is stored in 16 bits.
    """

    forms: dict[str, Form]
    half: torch.dtype


def layout_of(
    model: PreTrainedModel,
    scheme: QuantizationScheme,
    half: torch.dtype,
    *,
    is_tied: bool,
    unquantised: Collection[str] = (),
) -> Layout:
    """Decide the form of each module of a model; its weights may be on the meta device.

    Args:
        model: The model.
        scheme: Decides the form of the output head.
        half: Type of what is not quantised.
        is_tied: Whether the output head has the embedding's weight.
        unquantised: Names of linear layers that stay in 16 bits.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_int8_head = scheme.head == "int8" and is_linear(head)
    forms: dict[str, Form] = {}
    for name, module in model.named_modules():
        if module is head and is_linear(head):
            forms[name] = "int8" if is_int8_head and name not in unquantised else "tied" if is_tied else "half"
        elif module is embedding and isinstance(module, nn.Embedding):
            forms[name] = _table_form(module, scheme, is_int8_head and is_tied)
        elif is_linear(module) and not name.endswith(_READ_DIRECTLY):
            forms[name] = "half" if name in unquantised else "int8"
        elif _is_island(module):
            forms[name] = "island"
    return Layout(forms, half)


def is_linear(module: nn.Module | None) -> bool:
    """Whether a module is a linear layer and nothing else."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def is_tied(model: PreTrainedModel) -> bool:
    """Whether a loaded model's output head has the weight of its embedding."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    return head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", head)


def _is_island(module: nn.Module) -> bool:
    """Whether a module holds large weights without being a linear layer: GPT-2's projections, experts as one tensor."""
    if isinstance(module, Conv1D):
        return True
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return False
    return any(sum(size > 1 for size in parameter.shape) > 2 for parameter in module.parameters(recurse=False))


def _table_form(embedding: nn.Embedding, scheme: QuantizationScheme, is_of_head: bool) -> Form:
    is_plain = type(embedding) is nn.Embedding
    if scheme.head != "int8":
        return "half table" if is_plain else "island"
    if not is_plain and not hasattr(embedding, "embed_scale"):
        return "island"  # it does something else with the rows
    return "table of head" if is_of_head else "int8 table"


def limbs_of(name: str) -> int:
    """Limbs of 8 bits of the activations that a linear layer multiplies: 2 where one costs much of the quality.

    Args:
        name: Name of the layer, which is not the output head.
    """
    return 2 if name.rpartition(".")[2] in _TWO_LIMBS else 1


def tensors_of(
    model: PreTrainedModel,
    layout: Layout,
    prefix: str = "",
    read: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, parameter: parameter.detach(),
    quantise: Callable[[str, torch.Tensor], Int8Weight] = lambda _, weight: quantise_weight(weight),
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that are stored of a model or of a part of it, in the order of its modules.

    On a model on the meta device they have the same names, types and shapes, and no content.

    Args:
        model: The model.
        layout: The forms of its modules.
        prefix: Name of a module; only what is in it is stored. "": all.
        read: From a parameter's name and the parameter, what is to be stored of it in floating point.
        quantise: From a weight's name and the weight, what is to be stored of it in int8.
    """
    for name, module in model.named_modules():
        if prefix and name != prefix and not name.startswith(f"{prefix}."):
            continue
        form = layout.forms.get(name)
        if form in ("int8", "int8 table"):
            weight = quantise(f"{name}.weight", _weight(module))
            yield f"{name}.values", weight.values
            yield f"{name}.scales", weight.scales
        elif form in ("half", "half table"):
            yield f"{name}.weight", _weight(module).to(layout.half)
        if form in ("int8", "half", "tied"):
            bias = getattr(module, "bias", None)
            if bias is not None:
                yield f"{name}.bias", read(f"{name}.bias", bias).float()
        elif form == "island":
            for own, parameter in module.named_parameters(recurse=False):
                yield _joined(name, own), parameter.detach().to(layout.half)
        elif form is None:
            for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                yield _joined(name, own), read(_joined(name, own), parameter).float()
        for own, buffer in module.named_buffers(recurse=False):
            if own not in module._non_persistent_buffers_set:
                yield _joined(name, own), buffer


def assemble(skeleton: PreTrainedModel, layout: Layout, tensors: Tensors) -> None:
    """Give a model without weights the stored tensors.

    Args:
        skeleton: A model whose parameters are on the meta device; its modules are replaced.
        layout: The forms of its modules.
        tensors: The stored tensors, on the device of the model; each is asked for once.

    Raises:
        ModelError: A parameter is not among the stored ones.
    """
    modules = dict(skeleton.named_modules())
    embedding = skeleton.get_input_embeddings()
    head_name = next((name for name, module in modules.items() if module is skeleton.get_output_embeddings()), "")
    made: dict[str, nn.Module] = {}
    ordered = sorted(
        layout.forms.items(), key=lambda item: item[1] in ("tied", "table of head")
    )  # behind what they use
    for name, form in ordered:
        module: Any = modules[name]
        bias = tensors(f"{name}.bias") if form in ("int8", "half", "tied") and module.bias is not None else None
        if form == "int8":
            weight = Int8Weight(tensors(f"{name}.values"), tensors(f"{name}.scales"))
            made[name] = Int8Linear(weight, bias, _HEAD_LIMBS if name == head_name else limbs_of(name))
        elif form == "half":
            made[name] = _half(_parameter(tensors(f"{name}.weight")), bias)
        elif form == "tied":
            of_embedding = next(part for part in (*made.values(), embedding) if isinstance(part, nn.Embedding))
            made[name] = _half(of_embedding.weight, bias)
        elif form == "table of head":
            made[name] = Int8Embedding(cast(Int8Linear, made[head_name]), _factor(module))
        elif form == "int8 table":
            weight = Int8Weight(tensors(f"{name}.values"), tensors(f"{name}.scales"))
            made[name] = Int8Embedding(Int8Linear(weight), _factor(module))
        elif form == "half table":
            made[name] = _table(module, tensors(f"{name}.weight"))
        else:
            _fill(name, module, tensors)
            _convert_around(module, layout.half)
    for name, module in modules.items():
        if name not in layout.forms:
            _fill(name, module, tensors)
    for name, module in made.items():
        parent, _, own = name.rpartition(".")
        setattr(modules[parent], own, module)
    missing = [name for name, parameter in skeleton.named_parameters() if parameter.device.type == "meta"]
    if missing:
        raise ModelError(f"{len(missing)} of the model's weights were not stored ({missing[0]}, ...): report this")
    skeleton.requires_grad_(False)


def quantised_share(model: PreTrainedModel, layout: Layout) -> float:
    """Share of a model's parameters that is stored in int8, 0 to 1.

    Args:
        model: The model; its weights may be on the meta device.
        layout: The forms of its modules.
    """
    of_another = {f"{name}.weight" for name, form in layout.forms.items() if form in ("tied", "table of head")}
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if name not in of_another}
    in_int8 = [f"{name}.weight" for name, form in layout.forms.items() if form in ("int8", "int8 table")]
    int8 = sum(sizes.get(name, 0) for name in in_int8)
    return int8 / max(sum(sizes.values()), 1)


def _weight(module: Any) -> torch.Tensor:
    weight: torch.Tensor = module.weight
    return weight.detach()


def _joined(name: str, own: str) -> str:
    return f"{name}.{own}" if name else own


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _half(weight: Any, bias: torch.Tensor | None) -> HalfLinear:
    made = HalfLinear(weight.shape[1], len(weight), bias=bias is not None, device="meta")
    made.weight = weight
    if bias is not None:
        made.bias = _parameter(bias)
    return made


def _factor(embedding: Any) -> float:
    """What an embedding multiplies its rows with (Gemma)."""
    return float(getattr(embedding, "embed_scale", 1.0))


def _table(embedding: nn.Embedding, weight: torch.Tensor) -> HalfEmbedding:
    made = HalfEmbedding(len(weight), weight.shape[1], padding_idx=embedding.padding_idx, device="meta")
    made.weight = _parameter(weight)
    return made


def _fill(name: str, module: nn.Module, tensors: Tensors) -> None:
    """Replace the parameters and persistent buffers of a module itself."""
    for own in [key for key, parameter in module._parameters.items() if parameter is not None]:
        module._parameters[own] = _parameter(tensors(_joined(name, own)))
    for own in [key for key, buffer in module._buffers.items() if buffer is not None]:
        if own not in module._non_persistent_buffers_set:
            module._buffers[own] = tensors(_joined(name, own))


def _convert_around(module: nn.Module, half: torch.dtype) -> None:
    """Convert what enters a module to its type, and what leaves it to float32."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(_to(value, half) for value in args), {name: _to(value, half) for name, value in kwargs.items()}

    def leave(_module: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(_to(value, torch.float32) for value in output)
        return _to(output, torch.float32)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave)


def _to(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
