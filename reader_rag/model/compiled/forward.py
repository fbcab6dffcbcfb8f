"""The forward pass of known decoder models on the CPU, without PyTorch between the weights and the logits.

It reads the weights of the loaded model in place, and the model stays as it is. The bits of a row do not depend on the
rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from reader_rag.draft.tree import DraftTree
from reader_rag.kv_cache.hidden_states import HiddenStates
from reader_rag.kv_cache.layer_states import LayerOutputs
from reader_rag.kv_cache.tree_cache import TreeCache
from reader_rag.model.compiled.angles import Angles
from reader_rag.model.compiled.architecture import Architecture, architecture_of
from reader_rag.model.compiled.weights import UnknownPartError, Weights, padded
from reader_rag.model.cpu.attention import Caches, Paths
from reader_rag.model.cpu.attention_tile import MOST_WIDTH
from reader_rag.model.cpu.layers import compute_layers, norm_and_project
from reader_rag.model.cpu.threads import numba_threads

Array = NDArray[Any]

_HOMES = ("torch.nn.modules.", "transformers.models.", "transformers.activations", "reader_rag.model.quantization.")
"""Where the classes of a model's parts come from. Another library's part may show the weights that it changes."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDTH_MULTIPLE = 8
"""The width of a head is a multiple of it."""
_SLOW_PRODUCTS = ("DEFAULT", "AVX2")
"""What PyTorch calls CPUs on which its 16-bit products are slower than ours for many rows too."""

_numba: Any = numba.config


@dataclass(frozen=True)
class Rows:
    """The rows of one text in a pass.

    Attributes:
        tokens: int64 [rows], at least one.
        depths: int64 [rows], positions relative to the committed ones; those of a path are 0, 1, 2, ...
        paths: int32 [rows, longest], the rows of each row's path from its first to itself; what follows is not read.
        cache: Made with `layers`, `heads`, `width` and `dtype` of the pass.
        first_logits: The first row whose logits are wanted.
        states: Receives the hidden states of the rows, before the last normalisation; None: they are dropped.
        outputs: Receives the rows of chosen layers; None: they are dropped.
    """

    tokens: NDArray[np.int64]
    depths: NDArray[np.int64]
    paths: NDArray[np.int32]
    cache: TreeCache
    first_logits: int = 0
    states: HiddenStates | None = None
    outputs: LayerOutputs | None = None

    @classmethod
    def of_tree(cls, root: int, tree: DraftTree, cache: TreeCache, outputs: LayerOutputs | None = None) -> Rows:
        """A root and the nodes drafted behind it."""
        tokens = np.concatenate([np.array([root], np.int64), tree.tokens])
        depths = np.concatenate([np.zeros(1, np.int64), tree.depths])
        return cls(tokens, depths, tree.paths, cache, outputs=outputs)

    @classmethod
    def of_text(
        cls,
        tokens: NDArray[np.int64],
        cache: TreeCache,
        first_logits: int,
        states: HiddenStates | None = None,
        outputs: LayerOutputs | None = None,
    ) -> Rows:
        """Tokens one behind the other."""
        order = np.arange(len(tokens))
        paths = np.broadcast_to(order.astype(np.int32), (len(tokens), len(tokens))).copy()
        return cls(tokens, order, paths, cache, first_logits, states, outputs)


class CpuForward:
    """A model as a function from rows of tokens to logits; made by `of`.

    Args:
        model: A model that `of` found to be known.
        architecture: What it computes around its products.

    Attributes:
        heads: Key heads.
        width: Of a head.
        chunk: Rows of a prompt that are worth computing at once.
        last_norm: The module whose inputs are hidden states as `__call__` takes and gives them.
    """

    chunk = 256

    def __init__(self, model: PreTrainedModel, architecture: Architecture) -> None:
        self._dtype = getattr(model, "cache_dtype", model.dtype)
        self.last_norm: nn.Module = cast(Any, model).model.norm
        self._weights = weights = Weights.of(model, architecture)
        self.width = int(cast(Any, model).model.layers[0].self_attn.head_dim)
        self.heads = weights.sizes["k"] // self.width
        activations = torch.float32 if weights.is_int8 else self._dtype
        self._angles = Angles(cast(Any, model).model.rotary_emb, architecture, activations)

    @classmethod
    def of(cls, model: PreTrainedModel) -> CpuForward | None:
        """The forward pass of `model`, or None if the model, its type or its device is not known here."""
        architecture = architecture_of(model)
        if architecture is None or not _is_known(model):
            return None
        try:
            return cls(model, architecture)
        except (UnknownPartError, AttributeError):
            return None

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self._weights.layers.norms)

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values; of weights too, where they are not in int8."""
        return self._dtype

    @property
    def prefills_faster(self) -> bool:
        """Whether prompts too are faster here than in PyTorch; by the kind of CPU, so that rounding never varies."""
        return self._weights.is_int8 or (self._dtype != torch.float32 and slow_products())

    def __call__(self, texts: Sequence[Rows], asked: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """One pass over rows of any number of texts. Keys and values are written behind each text's committed ones.

        Args:
            texts: At least one; each with a cache of its own.
            asked: Hidden states of earlier rows, [rows, hidden width] each, whose logits are wanted too.

        Returns:
            For each text float32 [its rows - first_logits, vocabulary], then for each of `asked` [rows, vocabulary].
        """
        for text in texts:
            if text.cache.length + len(text.tokens) > text.cache.capacity:
                raise IndexError(
                    f"{text.cache.length + len(text.tokens)} positions do not fit a cache of {text.cache.capacity}"
                )
        starts = np.cumsum([0, *(len(text.tokens) for text in texts)])
        tokens, depths = (np.concatenate([getattr(text, name) for text in texts]) for name in ("tokens", "depths"))
        paths = np.zeros((len(tokens), max(text.paths.shape[1] for text in texts)), np.int32)
        for text, start in zip(texts, starts, strict=False):
            paths[start : start + len(text.tokens), : text.paths.shape[1]] = text.paths
        same = paths == np.arange(paths.shape[1])
        chain = np.minimum(np.where(same.all(1), paths.shape[1], same.argmin(1)), depths + 1)
        own_paths = Paths(depths, paths, chain, torch.get_num_threads())
        caches = self._caches(texts, starts)
        rotation = self._angles.at(depths + np.repeat(caches.committed, np.diff(starts)), starts)
        rows, weights = len(tokens), self._weights
        x = weights.embed(tokens)
        spans = [slice(starts[n] + text.first_logits, starts[n + 1]) for n, text in enumerate(texts)]
        wanted = [*(x[span] for span in spans), *(states.float().numpy() for states in asked)]  # views of what comes
        count = sum(map(len, wanted))
        last = np.zeros((padded(count), x.shape[1]), np.float32)
        logits = weights.logits(count)
        kept = sorted({layer for text in texts if text.outputs is not None for layer in text.outputs.layers})
        buffers, head_inputs = weights.buffers(rows, kept), weights.head_inputs(count)
        with numba_threads():
            compute_layers(x, rows, weights.layers, weights.form, rotation, own_paths, caches, buffers)
            np.concatenate(wanted, out=last[:count])
            norm_and_project(last, count, weights.norm, head_inputs, weights.head, logits)
            weights.scale_logits(logits, count)
        for text, start in zip(texts, starts, strict=False):
            if text.states is not None:
                text.states.append(torch.from_numpy(x[start : start + len(text.tokens)]), len(text.tokens))
            if text.outputs is not None:
                chosen = buffers.states[[kept.index(layer) for layer in text.outputs.layers]]
                part = chosen[:, start : start + len(text.tokens)].swapaxes(0, 1)
                text.outputs.receive(torch.from_numpy(part).to(self._dtype, copy=True))
        return list(torch.from_numpy(logits[:count, : weights.vocabulary]).split([len(rows) for rows in wanted]))

    def _caches(self, texts: Sequence[Rows], starts: NDArray[np.int64]) -> Caches:
        arrays = [text.cache.arrays for text in texts]
        keys, values = (np.array([pair[which].ctypes.data for pair in arrays]) for which in (0, 1))
        committed = np.array([text.cache.length for text in texts])
        capacities = np.array([text.cache.capacity for text in texts])
        return Caches(starts, committed, capacities, keys, values, arrays[0][0][0, 0])


def slow_products() -> bool:
    """Whether PyTorch is slow at products of many rows in 16 bits on this CPU."""
    return torch.backends.cpu.get_cpu_capability() in _SLOW_PRODUCTS


def _is_known(model: PreTrainedModel) -> bool:
    return (
        not _numba.DISABLE_JIT
        and model.device.type == "cpu"
        and model.dtype in _DTYPES
        and not head_width(model.config) % _WIDTH_MULTIPLE
        and head_width(model.config) <= MOST_WIDTH
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
