"""How the decoder models of the compiled loops differ, declared for each class of `transformers`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

Activation = Literal["silu", "gelu_pytorch_tanh"]
"""Activations of gated feed-forward layers, as configurations name them."""

_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Position encodings whose angles depend on nothing but the position."""
_SWITCHED = "longrope"
"""The position encoding that has other angles from a position on, for all of a text that reaches it."""


@dataclass(frozen=True)
class Architecture:
    """What a model computes around its matrix products. The defaults are those of `LlamaForCausalLM`.

    Attributes:
        windows: For each layer how many positions a row sees, its own included; 0: all.
        rotations: For each layer which of `rotary_kinds` its queries and keys are rotated by; -1: none.
        rotary_kinds: What the model's rotary module is asked for: a kind of layers, or None where it knows one kind.
        rotation_switch: The position from which on a text has other angles, in all rows of a pass; 0: there is none.
        rotation_rounds_once: In 16 bits, cosines and sines stay in float32 and a rotated number is rounded once.
        norms: The names of a layer's normalisations: of the input of attention, of its output, of the input of the
            feed-forward layers, of their output. None: there is none.
        norm_offset: Added to every weight of a normalisation.
        norm_rounds_once: In 16 bits, a normalised row is rounded after its product with the weights, not before it too.
        fused: Whether the weights of q, k and v are one matrix, and those of gate and up.
        activation: Of the gate.
        embedding_scale: What the outputs of the embedding are multiplied by.
        residual_scale: What the outputs of attention and of the feed-forward layers are multiplied by.
        score_cap: Soft cap of the attention scores; 0: none.
        logit_divisor: What logits are divided by.
        logit_cap: Soft cap of the logits; 0: none.
    """

    windows: tuple[int, ...]
    rotations: tuple[int, ...]
    rotary_kinds: tuple[str | None, ...] = (None,)
    rotation_switch: int = 0
    rotation_rounds_once: bool = False
    norms: tuple[str | None, ...] = ("input_layernorm", None, "post_attention_layernorm", None)
    norm_offset: float = 0.0
    norm_rounds_once: bool = False
    fused: bool = False
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    score_cap: float = 0.0
    logit_divisor: float = 1.0
    logit_cap: float = 0.0


def architecture_of(model: Any) -> Architecture | None:
    """What `model` computes around its matrix products, or None if it is not one of the known ones.

    Args:
        model: A causal language model of `transformers`.
    """
    kind, config = type(model), model.config
    declare = _FAMILIES.get(kind.__name__)
    if declare is None or not kind.__module__.startswith("transformers.models."):
        return None
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    switch = _switch_of(config)
    if activation not in ("silu", "gelu_pytorch_tanh") or switch is None:
        return None
    if getattr(config, "use_bidirectional_attention", None):
        return None
    found = declare(model)
    return None if found is None else replace(found, activation=activation, rotation_switch=switch)


def _switch_of(config: Any) -> int | None:
    """`Architecture.rotation_switch`, or None if the model has a position encoding that is not known."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    nested = [kind for kind in parameters.values() if isinstance(kind, dict)]
    if parameters.get("rope_type") == _SWITCHED:
        return int(parameters["original_max_position_embeddings"])
    kinds = [parameters] if "rope_type" in parameters or not nested else nested
    return 0 if all(kind.get("rope_type", "default") in _ROTATIONS for kind in kinds) else None


def _full(model: Any) -> Architecture | None:
    """Llama: every layer sees all positions."""
    config = model.config
    if getattr(config, "sliding_window", None):
        return None
    return Architecture((0,) * config.num_hidden_layers, (0,) * config.num_hidden_layers)


def _one_window(model: Any) -> Architecture:
    """Mistral: every layer has the same window, or none has one."""
    config = model.config
    window = getattr(config, "sliding_window", None) or 0
    return Architecture((int(window),) * config.num_hidden_layers, (0,) * config.num_hidden_layers)


def _layer_types(model: Any) -> Architecture | None:
    """Qwen2, Qwen3, Ministral: the configuration has a kind of attention for each layer."""
    config = model.config
    spans = {"full_attention": 0, "sliding_attention": config.sliding_window}
    windows = [spans.get(kind) for kind in config.layer_types]
    if any(window is None for window in windows):
        return None
    return Architecture(tuple(int(window or 0) for window in windows), (0,) * config.num_hidden_layers)


def _phi3(model: Any) -> Architecture:
    """Phi-3, Phi-4: fused projections; a part of each head may be rotated."""
    return replace(_one_window(model), fused=True)


def _smollm3(model: Any) -> Architecture | None:
    """SmolLM3: some layers have no position encoding."""
    found, rotated = _layer_types(model), model.config.no_rope_layers  # 1: has one
    return None if found is None else replace(found, rotations=tuple(0 if one else -1 for one in rotated))


def _granite(model: Any) -> Architecture | None:
    """Granite 3: multipliers of embeddings, residuals and logits; that of the scores is the attention's `scaling`."""
    found, config = _full(model), model.config
    if found is None:
        return None
    return replace(
        found,
        embedding_scale=float(config.embedding_multiplier),
        residual_scale=float(config.residual_multiplier),
        logit_divisor=float(config.logits_scaling),
    )


def _olmo(found: Architecture | None) -> Architecture | None:
    """OLMo 2 and 3: normalisations of the outputs alone, q and k normalised before they are split into heads."""
    if found is None:
        return None
    return replace(
        found,
        norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        norm_rounds_once=True,
        rotation_rounds_once=True,
    )


def _olmo2(model: Any) -> Architecture | None:
    """OLMo 2: every layer sees all positions."""
    return _olmo(_full(model))


def _olmo3(model: Any) -> Architecture | None:
    """OLMo 3: windows, and angles by the kind of layer."""
    found = _olmo(_layer_types(model))
    return None if found is None else _angles_by_kind(found, model)


def _gemma(model: Any) -> Architecture | None:
    """Gemma: weights of normalisations count from 1."""
    found = _full(model)
    return None if found is None else _gemma_parts(found)


def _gemma2(model: Any) -> Architecture | None:
    """Gemma 2: windows in every second layer, normalised outputs, soft caps of scores and logits."""
    found, config = _layer_types(model), model.config
    if found is None:
        return None
    return replace(
        _gemma_parts(found),
        norms=_GEMMA_NORMS,
        score_cap=float(config.attn_logit_softcapping or 0),
        logit_cap=float(config.final_logit_softcapping or 0),
    )


def _gemma3(model: Any) -> Architecture | None:
    """Gemma 3: angles by the kind of layer, q and k normalised; its attention takes no soft cap."""
    found, config = _layer_types(model), model.config
    if found is None:
        return None
    found = replace(_gemma_parts(found), norms=_GEMMA_NORMS, logit_cap=float(config.final_logit_softcapping or 0))
    return _angles_by_kind(found, model)


_GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def _gemma_parts(found: Architecture) -> Architecture:
    """What all Gemmas have, beside an embedding that scales its outputs."""
    return replace(found, norm_offset=1.0, norm_rounds_once=True)


def _angles_by_kind(found: Architecture, model: Any) -> Architecture:
    """Rotations by the kinds of layers of the configuration."""
    kinds: tuple[str, ...] = tuple(sorted(set(model.config.layer_types)))
    rotations = tuple(kinds.index(kind) for kind in model.config.layer_types)
    return replace(found, rotary_kinds=kinds, rotations=rotations)


_FAMILIES: dict[str, Callable[[Any], Architecture | None]] = {
    "LlamaForCausalLM": _full,
    "MistralForCausalLM": _one_window,
    "MinistralForCausalLM": _layer_types,
    "Qwen2ForCausalLM": _layer_types,
    "Qwen3ForCausalLM": _layer_types,
    "Phi3ForCausalLM": _phi3,
    "SmolLM3ForCausalLM": _smollm3,
    "GraniteForCausalLM": _granite,
    "Olmo2ForCausalLM": _olmo2,
    "Olmo3ForCausalLM": _olmo3,
    "GemmaForCausalLM": _gemma,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
}
"""The classes of `transformers.models` whose layers are the loops' layers, and how each differs."""
