"""EAGLE-3 heads with random weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def make_head(
    folder: Path,
    target: Any,
    *,
    layer: dict[str, Any] | None = None,
    speculators: bool = True,
    draft_vocabulary: int | None = None,
    own_embedding: bool = True,
    own_output: bool = True,
    norm_before_residual: bool | None = None,
    layer_ids: Sequence[int] = (),
    scale: float = 0.02,
    output_scale: float | None = None,
) -> Path:
    """Write a head for a model.

    Args:
        folder: Where; it is made.
        target: The configuration of the model.
        layer: Settings of the head's layer in place of the target's.
        speculators: Whether in the speculators format, else in that of the first heads.
        draft_vocabulary: Tokens that it drafts, spread over the vocabulary (`d2t`); None: all.
        own_embedding: Whether it has an embedding of its own.
        own_output: Whether it has an output head of its own.
        norm_before_residual: As the setting; None: left out.
        layer_ids: The hidden states that it takes; empty: left out.
        scale: Of the weights.
        output_scale: Of the output head's; None: `scale`.
    """
    settings = {
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.hidden_size // target.num_attention_heads,
        "num_hidden_layers": 1,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": target.max_position_embeddings,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | (layer or {})
    hidden, width, vocabulary = settings["hidden_size"], settings["head_dim"], settings["vocab_size"]
    queries, keys = settings["num_attention_heads"] * width, settings["num_key_value_heads"] * width
    inner, drafted = settings["intermediate_size"], draft_vocabulary or vocabulary
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    place = "layers.0" if speculators else "midlayer"
    weights = {
        "fc.weight": random(hidden, (len(layer_ids) or 3) * target.hidden_size),
        f"{place}.self_attn.q_proj.weight": random(queries, 2 * hidden),
        f"{place}.self_attn.k_proj.weight": random(keys, 2 * hidden),
        f"{place}.self_attn.v_proj.weight": random(keys, 2 * hidden),
        f"{place}.self_attn.o_proj.weight": random(hidden, queries),
        f"{place}.mlp.gate_proj.weight": random(inner, hidden),
        f"{place}.mlp.up_proj.weight": random(inner, hidden),
        f"{place}.mlp.down_proj.weight": random(hidden, inner),
        f"{place}.hidden_norm.weight": 1 + random(hidden),
        f"{place}.input_layernorm.weight": 1 + random(hidden),
        f"{place}.post_attention_layernorm.weight": 1 + random(hidden),
        "norm.weight": 1 + random(hidden),
    }
    if own_output:
        weights["lm_head.weight"] = random(drafted, hidden) * ((output_scale or scale) / scale)
    if own_embedding:
        weights["embed_tokens.weight"] = random(vocabulary, hidden)
    if draft_vocabulary is not None:
        targets = torch.linspace(0, target.vocab_size - 1, draft_vocabulary).long()
        weights["d2t"] = targets - torch.arange(draft_vocabulary)
        weights["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, targets, True)
    more: dict[str, Any] = {"draft_vocab_size": drafted}
    if layer_ids:
        more["eagle_aux_hidden_state_layer_ids"] = list(layer_ids)
    if norm_before_residual is not None:
        more["norm_before_residual"] = norm_before_residual
    if speculators:
        methods = [{"proposal_type": "greedy", "speculative_tokens": 4}]
        verifier = {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]}
        speculation = {"algorithm": "eagle3", "proposal_methods": methods, "verifier": verifier}
        config: dict[str, Any] = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": speculation | {"default_proposal_method": "greedy"},
            "transformer_layer_config": settings,
            "torch_dtype": "float32",
        } | more
    else:
        config = settings | {"architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "float32"} | more
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
