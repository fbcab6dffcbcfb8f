"""The weights of a model as the compiled loops read them: in place, by address, never copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from reader_rag.model.compiled.architecture import Architecture
from reader_rag.model.cpu.int8_products import PackedLinear
from reader_rag.model.cpu.int8_tile import FEATURES
from reader_rag.model.cpu.layers import FUSED_LINEARS, Buffers, FloatWeights, Form, Int8Weights
from reader_rag.model.cpu.products import ROWS_AT_ONCE, FloatRows, Heads, Linear, Norm
from reader_rag.model.cpu.softcap import scale_logits
from reader_rag.model.quantization.modules import HalfLinear, Int8Linear, fuse, quantised_rows

Array = NDArray[Any]

_STORED = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""The type under which NumPy sees the weights of each type."""


class UnknownPartError(Exception):
    """The model has a part that the compiled loops do not know."""


@dataclass(frozen=True)
class Weights:
    """The weights of a model.

    Attributes:
        architecture: What the model computes around its products.
        embedding: The embedding's module.
        hidden: The hidden size.
        layers: Of the decoder layers.
        form: What they compute around their products.
        norm: Before the head.
        head: The output head: `Linear`, or `PackedLinear`.
        vocabulary: Features of the head.
        sizes: Features of each linear layer of a decoder layer, by the names of `LINEARS`.
        packed: Depth and limbs of the packed linear layers by the first name of their group; empty if they are not in
            int8.
        head_limbs: Limbs of the head's inputs, where it is in int8.
        held: What the addresses in `layers` belong to.
    """

    architecture: Architecture
    embedding: nn.Module
    hidden: int
    layers: FloatWeights | Int8Weights
    form: Form
    norm: Norm
    head: Linear | PackedLinear
    vocabulary: int
    sizes: dict[str, int]
    packed: dict[str, tuple[int, int]]
    head_limbs: int
    held: Any

    @classmethod
    def of(cls, model: PreTrainedModel, architecture: Architecture) -> Weights:
        """The weights of a model. Int8 layers that share their inputs move together in memory.

        Args:
            model: A model whose parts have the usual names.
            architecture: That of the model.

        Raises:
            AttributeError: They have others.
            UnknownPartError: A part is of another kind, type or shape.
        """
        base: Any = model.model
        layers, dtype = list(base.layers), model.dtype
        groups, sizes = [_groups_of(layer, architecture.fused) for layer in layers], _sizes_of(model)
        is_int8 = isinstance(groups[0][0][0], Int8Linear)
        norms = [_norms_of(layer, architecture.norms) for layer in layers]
        plain = torch.float32 if is_int8 else dtype
        none = np.zeros(0, array_of(base.norm.weight, plain).dtype)
        arrays = [[none if norm is None else array_of(norm.weight, plain) for norm in layer] for layer in norms]
        if is_int8:
            if any(size % FEATURES for size in sizes.values()):
                raise UnknownPartError(f"features in no multiple of {FEATURES}")
            held: Any = [
                [
                    _fused(group, [sizes[name] for name in names])
                    for group, names in zip(layer, FUSED_LINEARS, strict=True)
                ]
                for layer in groups
            ]
            shapes = [[linear.weight.shape[:2] for linear in layer] for layer in held]
        else:
            held = [_float_linears(layer, sizes, dtype) for layer in groups]
            shapes = [[linear.weight.shape for linear in layer] for layer in held]
        widths = [[len(array) for array in layer] for layer in arrays]
        if any(layer != widths[0] for layer in widths) or any(layer != shapes[0] for layer in shapes):
            raise UnknownPartError("layers of different shapes")
        form = _form_of(architecture, base.norm, layers[0].self_attn)
        kind: type[Any] = Int8Weights if is_int8 else FloatWeights
        parts = 3 if is_int8 else 2
        gathered = kind(
            norms=np.array([[array.ctypes.data for array in layer] for layer in arrays]),
            widths=np.array(widths[0]),
            linears=np.array([[[part.ctypes.data for part in linear[:parts]] for linear in layer] for layer in held]),
            shapes=np.array(shapes[0]),
            like=none,
        )
        norm = array_of(base.norm.weight, plain)
        return cls(
            architecture=architecture,
            embedding=base.embed_tokens,
            hidden=len(norm),
            layers=gathered,
            form=form,
            norm=Norm(norm, form.epsilon, form.norm_offset, form.norm_rounds_once),
            head=_head_of(model.lm_head, dtype, none),
            vocabulary=int(model.lm_head.out_features),
            sizes=sizes,
            packed=_packed(groups[0], shapes[0]) if is_int8 else {},
            head_limbs=getattr(model.lm_head, "limbs", 1),
            held=(arrays, held),
        )

    @property
    def is_int8(self) -> bool:
        """Whether the linear layers of the decoder layers are in int8."""
        return isinstance(self.layers, Int8Weights)

    def embed(self, tokens: NDArray[np.int64]) -> Array:
        """float32 [rows up to a multiple of 4, hidden size], the embeddings of tokens [rows]."""
        x = np.zeros((padded(len(tokens)), self.hidden), np.float32)
        with torch.inference_mode():
            embedded = self.embedding(torch.from_numpy(tokens))
            if self.architecture.embedding_scale != 1:
                embedded = embedded * self.architecture.embedding_scale
            x[: len(tokens)] = embedded.float().numpy()
        return x

    def scale_logits(self, logits: Array, rows: int) -> None:
        """Divide and cap the first `rows` of the head's outputs, float32 [>= rows, vocabulary], as the model does."""
        divisor, cap = self.architecture.logit_divisor, self.architecture.logit_cap
        if divisor != 1 or cap:
            scale_logits(logits, rows, np.float32(divisor), np.float32(cap), self.layers.like)

    def buffers(self, rows: int, kept: Sequence[int] = ()) -> Buffers:
        """Room for what the layers compute.

        Args:
            rows: Of the pass.
            kept: After how many layers the states are kept, in the order of `Buffers.states`.
        """

        def buffer(features: int) -> Array:
            return np.zeros((padded(rows), features), np.float32)

        heads = Heads(*(buffer(self.sizes[name]) for name in "qkv"))
        attended, gated, branch = buffer(self.sizes["q"]), buffer(self.sizes["gate"]), buffer(self.hidden)
        places = np.full(len(self.layers.norms) + 1, -1)
        places[list(kept)] = np.arange(len(kept))
        last = (branch, places, np.zeros((len(kept), padded(rows), self.hidden), np.float32))
        if not self.packed:
            normed = FloatRows(buffer(self.hidden))
            return Buffers(normed, heads, attended, FloatRows(attended), normed, gated, FloatRows(gated), *last)
        inputs = {name: quantised_rows(rows, *sizes) for name, sizes in self.packed.items()}
        return Buffers(inputs["q"], heads, attended, inputs["o"], inputs["gate"], gated, inputs["down"], *last)

    def logits(self, rows: int) -> Array:
        """Room for the outputs of the head: float32 [rows up to a multiple of 4, at least the vocabulary]."""
        return np.empty((padded(rows), len(self.head.bias)), np.float32)

    def head_inputs(self, rows: int) -> Any:
        """Room for the inputs of the head."""
        if isinstance(self.head, PackedLinear):
            return quantised_rows(rows, self.head.weight.shape[1], self.head_limbs)
        return FloatRows(np.zeros((padded(rows), self.hidden), np.float32))


def padded(rows: int) -> int:
    """Rows of the arrays of activations, a multiple of four."""
    return -(-rows // ROWS_AT_ONCE) * ROWS_AT_ONCE


def array_of(tensor: torch.Tensor, dtype: torch.dtype) -> Array:
    """A parameter as NumPy sees it, not copied.

    Args:
        tensor: The parameter.
        dtype: The type that it must have.

    Raises:
        UnknownPartError: It has another type, or does not lie in one piece.
    """
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise UnknownPartError(f"{tensor.dtype} among {dtype}")
    return tensor.detach().view(_STORED[dtype]).numpy()


def linear_of(module: Any, dtype: torch.dtype) -> Linear:
    """A linear layer in floating point.

    Args:
        module: The layer.
        dtype: The type that its weight must have.

    Raises:
        UnknownPartError: It is quantised, has an adapter, or is of another type.
    """
    if type(module) is not nn.Linear:
        raise UnknownPartError(type(module).__name__)
    weight = array_of(module.weight, dtype)
    bias = np.zeros(len(weight), np.float32)
    if module.bias is not None:
        bias = module.bias.detach().float().numpy()
    return Linear(weight, bias, weight)


def _head_of(module: Any, dtype: torch.dtype, like: Array) -> Linear | PackedLinear:
    """The output head; `like` has the type that logits are rounded to."""
    if isinstance(module, Int8Linear):
        return _fused([module], [module.out_features])
    if not isinstance(module, HalfLinear):
        return linear_of(module, dtype)
    weight = array_of(module.weight, dtype)
    return Linear(weight, np.zeros(len(weight), np.float32), like)


def _fused(modules: Sequence[Any], sizes: Sequence[int]) -> PackedLinear:
    """Int8 layers that share their inputs as one product, of parts of `sizes` features."""
    if not all(isinstance(module, Int8Linear) and module.is_packed for module in modules):
        raise UnknownPartError("a linear layer is not in int8 as others are")
    if len(modules) < len(sizes):
        _check_sizes(modules[0].out_features, sizes)
    return fuse(modules)


def _float_linears(groups: Sequence[Sequence[Any]], sizes: dict[str, int], dtype: torch.dtype) -> list[Linear]:
    """Those of a decoder layer in floating point, in the order of `LINEARS`; a part of a fused one is a view of it."""
    linears = []
    for modules, names in zip(groups, FUSED_LINEARS, strict=True):
        found = [linear_of(module, dtype) for module in modules]
        if len(found) < len(names):
            found = _split(found[0], [sizes[name] for name in names])
        linears += found
    return linears


def _split(linear: Linear, sizes: Sequence[int]) -> list[Linear]:
    """A linear layer as several, of `sizes` features each."""
    _check_sizes(len(linear.weight), sizes)
    ends = np.cumsum(sizes)[:-1]
    parts = zip(np.split(linear.weight, ends), np.split(linear.bias, ends), strict=True)
    return [Linear(weight, bias, weight) for weight, bias in parts]


def _check_sizes(features: int, sizes: Sequence[int]) -> None:
    if sum(sizes) != features:
        raise UnknownPartError(f"{features} features of a fused layer where {sum(sizes)} are expected")


def _packed(groups: Sequence[Sequence[Any]], shapes: Sequence[Any]) -> dict[str, tuple[int, int]]:
    """`Weights.packed` of a layer."""
    limbs = [{module.limbs for module in modules} for modules in groups]
    if any(len(counts) > 1 for counts in limbs) or 2 in limbs[2]:
        raise UnknownPartError("layers that share their inputs have as many limbs, those of a gate one")
    return {group[0]: (int(shapes[n][1]), limbs[n].pop()) for n, group in enumerate(FUSED_LINEARS)}


def _groups_of(layer: Any, fused: bool) -> list[list[Any]]:
    """The linear layers of a decoder layer, those that share their inputs together, in the order of `FUSED_LINEARS`."""
    attention, feed = layer.self_attn, layer.mlp
    output, down = [attention.o_proj], [feed.down_proj]
    if fused:
        return [[attention.qkv_proj], output, [feed.gate_up_proj], down]
    return [[attention.q_proj, attention.k_proj, attention.v_proj], output, [feed.gate_proj, feed.up_proj], down]


def _sizes_of(model: Any) -> dict[str, int]:
    """`Weights.sizes` of a model."""
    attention, feed = model.model.layers[0].self_attn, model.model.layers[0].mlp
    keys, gated = int(model.config.num_key_value_heads * attention.head_dim), int(feed.down_proj.in_features)
    sizes = {"q": int(attention.o_proj.in_features), "k": keys, "v": keys, "o": int(attention.o_proj.out_features)}
    return sizes | {"gate": gated, "up": gated, "down": int(feed.down_proj.out_features)}


def _norms_of(layer: Any, names: Sequence[str | None]) -> list[Any]:
    """The normalisations of a decoder layer, in the order of `NORMS`."""
    attention = layer.self_attn
    heads = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else (None, None)
    before, *others = (None if name is None else getattr(layer, name) for name in names)
    return [before, *heads, *others]


def _form_of(architecture: Architecture, norm: Any, attention: Any) -> Form:
    """What the kernels take of an architecture, of a normalisation and of a layer's attention."""
    epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return Form(
        rotations=np.array(architecture.rotations),
        windows=np.array(architecture.windows),
        score_scale=np.float32(attention.scaling),
        score_cap=np.float32(architecture.score_cap),
        epsilon=np.float32(epsilon),
        norm_offset=np.float32(architecture.norm_offset),
        norm_rounds_once=architecture.norm_rounds_once,
        residual_scale=np.float32(architecture.residual_scale),
        gelu=architecture.activation == "gelu_pytorch_tanh",
    )
