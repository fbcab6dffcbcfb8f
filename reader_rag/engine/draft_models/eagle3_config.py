"""The configuration of an EAGLE-3 head, in the speculators format or in that of the first heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig

from reader_rag.errors import UnsupportedModelError

_LAYERS = ("llama", "qwen3")
"""Kinds of decoder layers of a head."""


def is_head(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of a head for another model.

    Args:
        config: Its `config.json`.
    """
    return "speculators_model_type" in config or any("eagle3" in name.lower() for name in _architectures(config))


@dataclass(frozen=True)
class Eagle3Config:
    """What an EAGLE-3 head computes.

    Attributes:
        layer: Its decoder layers, and the rotary encoding.
        target_width: Width of the target's hidden states.
        target_vocabulary: Tokens of the target's embedding and of its output head.
        hidden_layers: Layers of the target whose outputs it takes, ascending: n is the output of the n-th layer.
        draft_vocabulary: Tokens that it can draft.
        norms_queries: Whether queries and keys are normalised (Qwen3).
        norm_before_residual: Whether the residual of its first layer is the normalised hidden state.
        norm_before_fc: Whether all hidden states are normalised together before they are combined.
        fc_norm: Whether the states of each layer are normalised before they are combined.
        norm_output: Whether the state that the next drafted token continues from is normalised.
    """

    layer: LlamaConfig
    target_width: int
    target_vocabulary: int
    hidden_layers: tuple[int, ...]
    draft_vocabulary: int
    norms_queries: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any], name: str, layers: int, vocabulary: int) -> Eagle3Config:
        """Read a `config.json`.

        Args:
            config: Its contents.
            name: The head's name in messages.
            layers: Decoder layers of the target, for the default of `hidden_layers`: the second, the middle one, and
                the third from the end.
            vocabulary: Tokens of the target's embedding and of its output head.

        Raises:
            UnsupportedModelError: It is another kind of head, or a part of it is not known here.
        """
        kind = config.get("speculators_model_type", "eagle3")
        if kind != "eagle3":
            raise UnsupportedModelError(f"{name} is a head of the type {kind!r}, and only 'eagle3' can be used")
        nested = config.get("transformer_layer_config")
        inner = dict(nested if isinstance(nested, Mapping) else config)
        layer_kind = inner.get("model_type", "llama")
        if layer_kind not in _LAYERS:
            raise UnsupportedModelError(f"{name} has layers of the type {layer_kind!r}; known are {', '.join(_LAYERS)}")
        for dropped in ("model_type", "architectures", "torch_dtype", "dtype", "quantization_config"):
            inner.pop(dropped, None)
        layer = LlamaConfig(**inner)
        more: Mapping[str, Any] = config.get("eagle_config") or {}
        if not more.get("use_aux_hidden_state", True):
            raise UnsupportedModelError(f"{name} takes no hidden states of inner layers, so it is no EAGLE-3 head")
        key = "eagle_aux_hidden_state_layer_ids"
        given = config.get(key) or inner.get(key) or more.get(key) or (2, layers // 2, layers - 3)
        return cls(
            layer=layer,
            target_width=int(config.get("target_hidden_size") or layer.hidden_size),
            target_vocabulary=vocabulary,
            hidden_layers=tuple(sorted({int(n) for n in given})),
            draft_vocabulary=int(config.get("draft_vocab_size") or layer.vocab_size),
            norms_queries=layer_kind == "qwen3",
            norm_before_residual=bool(config.get("norm_before_residual", "speculators_model_type" in config)),
            norm_before_fc=bool(config.get("norm_before_fc", more.get("norm_before_fc", False))),
            fc_norm=bool(config.get("fc_norm", False)),
            norm_output=bool(config.get("norm_output", False)),
        )


def _architectures(config: Mapping[str, Any]) -> list[str]:
    named = config.get("architectures") or []
    return [str(name) for name in named]
