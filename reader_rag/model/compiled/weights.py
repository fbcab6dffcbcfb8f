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

from reader_rag.model.cpu.int8_products import PackedLinear
from reader_rag.model.cpu.int8_tile import FEATURES
from reader_rag.model.cpu.layers import FUSED_LINEARS, LINEARS, Buffers, FloatWeights, Int8Weights
from reader_rag.model.cpu.products import ROWS_AT_ONCE, FloatRows, Heads, Linear, Norm
from reader_rag.model.quantization.modules import HalfLinear, Int8Linear, fuse, quantised_rows

Array = NDArray[Any]

_STORED = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""The type under which NumPy sees the weights of each type."""
_MODULES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
"""Names of the linear layers of an attention."""


class UnknownPartError(Exception):
    """The model has a part that the compiled loops do not know."""


@dataclass(frozen=True)
class Weights:
    """The weights of a model.

    Attributes:
        embedding: The embedding's module.
        hidden: The hidden size.
        layers: Of the decoder layers.
        norm: Before the head.
        head: The output head: `Linear`, or `PackedLinear`.
        vocabulary: Features of the head.
        sizes: Features of each of `LINEARS`.
        packed: Depth and limbs of the packed linear layers by the first name of their group; empty if they are not in
            int8.
        head_limbs: Limbs of the head's inputs, where it is in int8.
        held: What the addresses in `layers` belong to.
    """

    embedding: nn.Module
    hidden: int
    layers: FloatWeights | Int8Weights
    norm: Norm
    head: Linear | PackedLinear
    vocabulary: int
    sizes: dict[str, int]
    packed: dict[str, tuple[int, int]]
    head_limbs: int
    held: Any

    @classmethod
    def of(cls, model: PreTrainedModel) -> Weights:
        """The weights of a Llama-shaped model. Int8 layers that share their inputs move together in memory.

        Args:
            model: A model whose layers have the names of Llama's.

        Raises:
            AttributeError: They have others.
            UnknownPartError: A part is of another kind, type or shape.
        """
        base: Any = model.model
        layers, dtype = list(base.layers), model.dtype
        linears = [_linears_of(layer) for layer in layers]
        is_int8 = isinstance(linears[0]["q"], Int8Linear)
        norms, plain = [_norms_of(layer) for layer in layers], torch.float32 if is_int8 else dtype
        none = np.zeros(0, array_of(base.norm.weight, plain).dtype)
        arrays = [[none if norm is None else array_of(norm.weight, plain) for norm in layer] for layer in norms]
        if is_int8:
            held: Any = [[_fused([layer[name] for name in group]) for group in FUSED_LINEARS] for layer in linears]
            shapes = [[linear.weight.shape[:2] for linear in layer] for layer in held]
        else:
            held = [[linear_of(layer[name], dtype) for name in LINEARS] for layer in linears]
            shapes = [[linear.weight.shape for linear in layer] for layer in held]
        widths = [[len(array) for array in layer] for layer in arrays]
        if any(layer != widths[0] for layer in widths) or any(layer != shapes[0] for layer in shapes):
            raise UnknownPartError("layers of different shapes")
        epsilon = np.float32(base.norm.variance_epsilon)
        kind: type[Any] = Int8Weights if is_int8 else FloatWeights
        parts = 3 if is_int8 else 2
        gathered = kind(
            norms=np.array([[array.ctypes.data for array in layer] for layer in arrays]),
            widths=np.array(widths[0]),
            linears=np.array([[[part.ctypes.data for part in linear[:parts]] for linear in layer] for layer in held]),
            shapes=np.array(shapes[0]),
            like=none,
            epsilon=epsilon,
            scale=np.float32(layers[0].self_attn.scaling),
        )
        return cls(
            embedding=base.embed_tokens,
            hidden=len(arrays[0][0]),
            layers=gathered,
            norm=Norm(array_of(base.norm.weight, plain), epsilon),
            head=_head_of(model.lm_head, dtype, none),
            vocabulary=int(model.lm_head.out_features),
            sizes={name: int(linears[0][name].out_features) for name in LINEARS},
            packed=_packed(linears[0], shapes[0]) if is_int8 else {},
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
            x[: len(tokens)] = self.embedding(torch.from_numpy(tokens)).float().numpy()
        return x

    def buffers(self, rows: int) -> Buffers:
        """Room for what the layers compute for so many rows."""

        def buffer(features: int) -> Array:
            return np.zeros((padded(rows), features), np.float32)

        heads = Heads(*(buffer(self.sizes[name]) for name in "qkv"))
        attended, gated = buffer(self.sizes["q"]), buffer(self.sizes["gate"])
        if not self.packed:
            normed = FloatRows(buffer(self.hidden))
            return Buffers(normed, heads, attended, FloatRows(attended), gated, FloatRows(gated))
        inputs = {name: quantised_rows(rows, *sizes) for name, sizes in self.packed.items()}
        return Buffers(inputs["q"], heads, attended, inputs["o"], gated, inputs["down"])

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
        return _fused([module])
    if not isinstance(module, HalfLinear):
        return linear_of(module, dtype)
    weight = array_of(module.weight, dtype)
    return Linear(weight, np.zeros(len(weight), np.float32), like)


def _fused(modules: Sequence[Any]) -> PackedLinear:
    if not all(isinstance(module, Int8Linear) and module.is_packed for module in modules):
        raise UnknownPartError("a linear layer is not in int8 as others are")
    return fuse(modules)


def _packed(linears: dict[str, Any], shapes: Sequence[Any]) -> dict[str, tuple[int, int]]:
    """`Weights.packed` of a layer."""
    limbs = [{linears[name].limbs for name in group} for group in FUSED_LINEARS]
    if any(len(counts) > 1 for counts in limbs) or 2 in limbs[0] | limbs[2]:
        raise UnknownPartError("layers whose inputs are normalised have one limb")
    if any(linears[name].out_features % FEATURES for name in LINEARS):
        raise UnknownPartError(f"features in no multiple of {FEATURES}")
    return {group[0]: (int(shapes[n][1]), limbs[n].pop()) for n, group in enumerate(FUSED_LINEARS)}


def _linears_of(layer: Any) -> dict[str, Any]:
    attention, feed = layer.self_attn, layer.mlp
    linears = {name: getattr(attention, module) for name, module in _MODULES.items()}
    return linears | {"gate": feed.gate_proj, "up": feed.up_proj, "down": feed.down_proj}


def _norms_of(layer: Any) -> list[Any]:
    attention = layer.self_attn
    heads = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else (None, None)
    return [layer.input_layernorm, *heads, layer.post_attention_layernorm]
