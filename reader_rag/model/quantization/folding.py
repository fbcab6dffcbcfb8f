"""Moves scales of activations into the weights before them, which changes nothing in floating point (SmoothQuant).

A few channels of the activations are much larger than the others, so that a row whose largest value becomes 127 leaves
few steps to the rest. Dividing such a channel by a factor where it is made, and multiplying the weights that read it by
that factor, leaves the products as they are and makes the rows even (arXiv 2211.10438). It costs nothing when the model
runs: the factors are in the weight of a norm, or in the rows of a linear layer.

Where channels are made and who reads them is declared for each architecture below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn


class Fold(NamedTuple):
    """Channels whose scale can be moved. Modules are named by their path within a decoder layer.

    Attributes:
        source: Makes the channels: a norm, or a linear layer.
        readers: Linear layers that read the channels; nothing else does, but for products with other activations.
        is_second_half: The channels are the second half of the features of `source` (fused gate and up projections).
    """

    source: str
    readers: tuple[str, ...]
    is_second_half: bool = False


class Architecture(NamedTuple):
    """What can be folded in the decoder layers of a model.

    Attributes:
        folds: The channels, in the order in which a layer computes them.
        norm_offset: What a norm adds to its weight before multiplying: 1.0 where the weight is stored as w - 1.
    """

    folds: tuple[Fold, ...]
    norm_offset: float = 0.0


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_DOWN = Fold("mlp.up_proj", ("mlp.down_proj",))
_LLAMA = (Fold("input_layernorm", _QKV), Fold("post_attention_layernorm", _GATE_UP), _DOWN)
_GEMMA2 = (Fold("input_layernorm", _QKV), Fold("pre_feedforward_layernorm", _GATE_UP), _DOWN)
_PHI3 = (
    Fold("input_layernorm", ("self_attn.qkv_proj",)),
    Fold("post_attention_layernorm", ("mlp.gate_up_proj",)),
    Fold("mlp.gate_up_proj", ("mlp.down_proj",), is_second_half=True),
)

ARCHITECTURES: Mapping[str, Architecture] = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "qwen3", "smollm3", "granite"), Architecture(_LLAMA)),
    "gemma": Architecture(_LLAMA, norm_offset=1.0),
    **dict.fromkeys(("gemma2", "gemma3_text"), Architecture(_GEMMA2, norm_offset=1.0)),
    "phi3": Architecture(_PHI3),
    **dict.fromkeys(("cohere", "cohere2"), Architecture((Fold("input_layernorm", _QKV + _GATE_UP), _DOWN))),
    # Norms come after the products: what q, k, v, gate and up read is the residual stream itself.
    **dict.fromkeys(("olmo2", "olmo3"), Architecture((_DOWN,))),
}
"""By `model_type` of the configuration. What is not here is not folded."""


class LayerFolding:
    """The factors of one decoder layer.

    Args:
        norm_offset: As in `Architecture`.
    """

    def __init__(self, norm_offset: float = 0.0) -> None:
        self._norm_offset = norm_offset
        self._factors: list[tuple[Fold, torch.Tensor]] = []

    def add(self, fold: Fold, factors: torch.Tensor) -> None:
        """Divide channels by factors where they are made, and multiply the weights that read them.

        Args:
            fold: The channels.
            factors: float32 [channels], above 0.
        """
        self._factors.append((fold, factors))

    @torch.no_grad()
    def apply(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter of the layer with its factors, float32; where it has none, the parameter as it is.

        Args:
            name: Its name in the layer, e.g. "mlp.up_proj.weight".
            parameter: Floating point; not changed.
        """
        module, _, own = name.rpartition(".")
        folded = parameter.detach().float()
        for fold, factors in self._factors:
            if module in fold.readers and own == "weight":
                folded = folded * factors
            elif module == fold.source:
                folded = self._divided(folded, fold, factors)
        return folded

    def _divided(self, parameter: torch.Tensor, fold: Fold, factors: torch.Tensor) -> torch.Tensor:
        """The weight or the bias of a source; a norm's weight has as many dimensions as its bias."""
        if fold.is_second_half:
            factors = torch.cat([torch.ones_like(factors), factors])
        if parameter.dim() == 2:
            return parameter / factors[:, None]
        # A linear layer's bias has no offset, nor does a norm's; no architecture here has both an offset and a bias.
        return (parameter + self._norm_offset) / factors - self._norm_offset


def architecture_of(model_type: str, layer: nn.Module) -> Architecture | None:
    """What can be folded in a model; None: it is unknown, or its modules are not those that were declared.

    Args:
        model_type: `model_type` of the configuration.
        layer: A decoder layer of the model.
    """
    architecture = ARCHITECTURES.get(model_type)
    if architecture is None:
        return None
    modules = dict(layer.named_modules())
    for fold in architecture.folds:
        readers = [modules.get(name) for name in fold.readers]
        source = modules.get(fold.source)
        if not all(isinstance(reader, nn.Linear) and type(reader) is nn.Linear for reader in readers):
            return None
        if getattr(source, "weight", None) is None or len(list(source.children())):  # type: ignore[union-attr]
            return None
    return architecture
