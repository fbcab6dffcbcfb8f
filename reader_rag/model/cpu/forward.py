"""The forward pass of Llama-shaped models on the CPU, without PyTorch between the weights and the logits.

It reads the weights of the loaded model where they lie, and the model stays as it is. See `cpu_kernels` for what it
promises: a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from reader_rag.draft.tree import DraftTree
from reader_rag.kv_cache.tree_cache import TreeCache
from reader_rag.model.cpu import kernels
from reader_rag.model.cpu.simd import LANES

Array = NDArray[Any]

_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Models made of the layers below and nothing else."""
_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Position encodings whose angles depend on nothing but the position."""
_HOMES = ("torch.nn.modules.", "transformers.models.", "transformers.activations")
"""Where the classes of a model's parts come from. Another library's part may show the weights that it changes."""
_STORED = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""The type under which NumPy sees the weights of each type."""
_SLOW_PRODUCTS = ("DEFAULT", "AVX2")
"""What PyTorch calls CPUs on which its 16-bit products are slower than ours for many rows too."""

_numba: Any = numba.config
_pool = threading.Lock()
"""Numba's threads serve one parallel loop at a time."""


@dataclass(frozen=True)
class _Linear:
    weight: Array
    """[features, width]"""
    bias: Array
    """float32 [features]"""


@dataclass(frozen=True)
class _Layer:
    """The weights of one decoder layer; `q_norm` and `k_norm` are empty where heads are not normalised."""

    input_norm: Array
    q: _Linear
    k: _Linear
    v: _Linear
    q_norm: Array
    k_norm: Array
    o: _Linear
    gated_norm: Array
    gate: _Linear
    up: _Linear
    down: _Linear


@dataclass(frozen=True)
class Rows:
    """The rows of one text in a pass.

    Attributes:
        tokens: int64 [rows], at least one.
        depths: int64 [rows], positions relative to the committed ones; those of a path are 0, 1, 2, ...
        paths: int32 [rows, longest], the rows of each row's path from its first to itself; what follows is not read.
        cache: Made with `layers`, `heads`, `width` and `dtype` of the pass.
        first_logits: The first row whose logits are wanted.
    """

    tokens: NDArray[np.int64]
    depths: NDArray[np.int64]
    paths: NDArray[np.int32]
    cache: TreeCache
    first_logits: int = 0

    @classmethod
    def of_tree(cls, root: int, tree: DraftTree, cache: TreeCache) -> Rows:
        """A root and the nodes drafted behind it."""
        tokens = np.concatenate([np.array([root], np.int64), tree.tokens])
        depths = np.concatenate([np.zeros(1, np.int64), tree.depths])
        return cls(tokens, depths, tree.paths, cache)

    @classmethod
    def of_text(cls, tokens: NDArray[np.int64], cache: TreeCache, first_logits: int) -> Rows:
        """Tokens one behind the other."""
        order = np.arange(len(tokens))
        paths = np.broadcast_to(order.astype(np.int32), (len(tokens), len(tokens))).copy()
        return cls(tokens, order, paths, cache, first_logits)


class _Unknown(Exception):
    """The model has a part that the kernels do not know."""


class CpuForward:
    """A model as a function from rows of tokens to logits; made by `of`.

    Args:
        model: A model that `of` found to be known.

    Attributes:
        heads: Key heads.
        width: Of a head.
        chunk: Rows of a prompt that are worth computing at once.
    """

    chunk = 64

    def __init__(self, model: PreTrainedModel) -> None:
        base: Any = model.model
        self._dtype = model.dtype
        self._rotary = base.rotary_emb
        self._embedding = self._array(base.embed_tokens.weight)
        self._layers = [self._layer(layer) for layer in base.layers]
        self._norm = self._array(base.norm.weight)
        self._head = self._linear(model.lm_head)
        attention = base.layers[0].self_attn
        self.heads = int(self._layers[0].k.weight.shape[0] // attention.head_dim)
        self.width = int(attention.head_dim)
        self._scale = np.float32(attention.scaling)
        self._epsilon = np.float32(base.norm.variance_epsilon)
        self._cos = self._sin = np.zeros((0, self.width), np.float32)
        self._angles(256)

    @classmethod
    def of(cls, model: PreTrainedModel) -> CpuForward | None:
        """The forward pass of `model`, or None if the model, its type or its device is not known here."""
        if not _is_known(model):
            return None
        try:
            return cls(model)
        except (_Unknown, AttributeError):
            return None

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self._layers)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, keys and values."""
        return self._dtype

    @property
    def prefills_faster(self) -> bool:
        """Whether prompts too are faster here than in PyTorch; by the kind of CPU, so that rounding never varies."""
        return self._dtype != torch.float32 and slow_products()

    def __call__(self, texts: Sequence[Rows]) -> list[torch.Tensor]:
        """One pass over rows of any number of texts. Keys and values are written behind each text's committed ones.

        Args:
            texts: At least one; each with a cache of its own.

        Returns:
            For each text float32 [its rows - first_logits, vocabulary].
        """
        for text in texts:
            if text.cache.length + len(text.tokens) > text.cache.capacity:
                raise IndexError(
                    f"{text.cache.length + len(text.tokens)} positions do not fit a cache of {text.cache.capacity}"
                )
        starts = np.cumsum([0, *(len(text.tokens) for text in texts)])
        committed = np.array([text.cache.length for text in texts])
        capacities = np.array([text.cache.capacity for text in texts])
        tokens, depths = (np.concatenate([getattr(text, name) for text in texts]) for name in ("tokens", "depths"))
        paths = np.zeros((len(tokens), max(text.paths.shape[1] for text in texts)), np.int32)
        for text, start in zip(texts, starts, strict=False):
            paths[start : start + len(text.tokens), : text.paths.shape[1]] = text.paths
        arrays = [text.cache.arrays for text in texts]
        keys, values = (np.array([pair[which].ctypes.data for pair in arrays]) for which in (0, 1))
        strides = [np.array([pair[which].strides[0] for pair in arrays]) for which in (0, 1)]
        like = arrays[0][0][0, 0]
        rows = len(tokens)
        padded = -(-rows // kernels.ROWS_AT_ONCE) * kernels.ROWS_AT_ONCE
        cos, sin = self._angles(max(text.cache.length + int(text.depths.max()) + 1 for text in texts))

        def buffer(features: int, count: int = padded) -> Array:
            return np.zeros((count, features), np.float32)

        first = self._layers[0]
        x = buffer(self._embedding.shape[1])
        x[:rows] = _widened(self._embedding[tokens])
        normed = np.zeros_like(x)
        q, k, v = (buffer(linear.weight.shape[0]) for linear in (first.q, first.k, first.v))
        attended, gated = np.zeros_like(q), buffer(first.gate.weight.shape[0])
        epsilon = self._epsilon
        with _pool:
            threads = torch.get_num_threads()
            numba.set_num_threads(min(threads, _numba.NUMBA_NUM_THREADS))
            if torch.get_num_threads() != threads:  # numba's first threads change PyTorch's: they share OpenMP
                torch.set_num_threads(threads)
            for n, layer in enumerate(self._layers):
                kernels.norm_and_project_three(
                    x, rows, layer.input_norm, epsilon, normed,
                    layer.q.weight, layer.k.weight, layer.v.weight, layer.q.bias, layer.k.bias, layer.v.bias, q, k, v,
                )  # fmt: skip
                kernels.attend(
                    q, k, v, starts, layer.q_norm, layer.k_norm, epsilon, cos, sin, depths, paths, committed,
                    capacities, self._scale, keys + n * strides[0], values + n * strides[1], like, attended,
                )  # fmt: skip
                kernels.project_and_add(attended, rows, layer.o.weight, layer.o.bias, x)
                kernels.norm_and_gate(
                    x, rows, layer.gated_norm, epsilon, normed,
                    layer.gate.weight, layer.up.weight, layer.gate.bias, layer.up.bias, gated,
                )  # fmt: skip
                kernels.project_and_add(gated, rows, layer.down.weight, layer.down.bias, x)
            wanted = [np.arange(starts[n] + text.first_logits, starts[n + 1]) for n, text in enumerate(texts)]
            chosen = np.concatenate(wanted)
            last = buffer(x.shape[1], -(-len(chosen) // kernels.ROWS_AT_ONCE) * kernels.ROWS_AT_ONCE)
            last[: len(chosen)] = x[chosen]
            logits = np.empty((len(last), self._head.weight.shape[0]), np.float32)
            kernels.norm_and_project(
                last, len(chosen), self._norm, epsilon, np.zeros_like(last), self._head.weight, self._head.bias, logits
            )
        return list(torch.from_numpy(logits[: len(chosen)]).split([len(rows) for rows in wanted]))

    def _angles(self, positions: int) -> tuple[Array, Array]:
        """Cosines and sines, float32 [at least `positions`, width], as the model's own module makes them."""
        if len(self._cos) < positions:
            count = 1 << (positions - 1).bit_length()
            with torch.inference_mode():
                cos, sin = self._rotary(torch.empty(0, dtype=self._dtype), torch.arange(count)[None])
            if cos.shape[-1] != self.width:
                raise _Unknown("rotates a part of each head")
            self._cos, self._sin = cos[0].float().numpy(), sin[0].float().numpy()
        return self._cos, self._sin

    def _layer(self, layer: Any) -> _Layer:
        attention, feed = layer.self_attn, layer.mlp
        none = np.zeros(0, self._embedding.dtype)
        normed = hasattr(attention, "q_norm")
        return _Layer(
            input_norm=self._array(layer.input_layernorm.weight),
            q=self._linear(attention.q_proj),
            k=self._linear(attention.k_proj),
            v=self._linear(attention.v_proj),
            q_norm=self._array(attention.q_norm.weight) if normed else none,
            k_norm=self._array(attention.k_norm.weight) if normed else none,
            o=self._linear(attention.o_proj),
            gated_norm=self._array(layer.post_attention_layernorm.weight),
            gate=self._linear(feed.gate_proj),
            up=self._linear(feed.up_proj),
            down=self._linear(feed.down_proj),
        )

    def _linear(self, module: Any) -> _Linear:
        if type(module) is not nn.Linear:  # quantised, or with an adapter
            raise _Unknown(type(module).__name__)
        weight = self._array(module.weight)
        bias = np.zeros(len(weight), np.float32)
        if module.bias is not None:
            bias = module.bias.detach().float().numpy()
        return _Linear(weight, bias)

    def _array(self, tensor: torch.Tensor) -> Array:
        """A parameter as NumPy sees it, not copied."""
        if tensor.dtype != self._dtype or not tensor.is_contiguous():
            raise _Unknown(f"{tensor.dtype} among {self._dtype}")
        return tensor.detach().view(_STORED[self._dtype]).numpy()


def slow_products() -> bool:
    """Whether PyTorch is slow at products of many rows in 16 bits on this CPU."""
    return torch.backends.cpu.get_cpu_capability() in _SLOW_PRODUCTS


def _is_known(model: PreTrainedModel) -> bool:
    config: Any = model.config
    kind = type(model)
    rotation: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return (
        not _numba.DISABLE_JIT
        and model.device.type == "cpu"
        and model.dtype in _STORED
        and kind.__name__ in _CLASSES
        and kind.__module__.startswith("transformers.models.")
        and getattr(config, "hidden_act", None) == "silu"
        and not getattr(config, "sliding_window", None)
        and rotation.get("rope_type", "default") in _ROTATIONS
        and not head_width(config) % LANES
        and all(type(module).__module__.startswith(_HOMES) for module in model.modules())
        and not any(
            module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
            for module in model.modules()
        )
        and all(parameter.device.type == "cpu" for parameter in model.parameters())
    )


def head_width(config: Any) -> int:
    """Numbers of a query or key of one head, by what configurations usually say."""
    heads = getattr(config, "num_attention_heads", 1)
    return int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def _widened(values: Array) -> Array:
    """float32 of float32, or of the bits of a 16-bit type; see `cpu_kernels`."""
    if values.dtype == np.int16:
        return values.view(np.float16).astype(np.float32)
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values
