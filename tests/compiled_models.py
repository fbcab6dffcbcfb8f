"""Tiny models of the families that run in compiled loops, with random weights, and their own logits."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 97  # odd, so that the last feature has no partner
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALTERNATING: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 16,
}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", COMMON),
    "tied": ("Llama", COMMON | {"tie_word_embeddings": True}),
    "biased": ("Llama", COMMON | {"attention_bias": True, "mlp_bias": True}),
    "one query head for each key head": ("Llama", COMMON | {"num_key_value_heads": 6}),
    "llama 3 rotation": (
        "Llama",
        COMMON
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("Mistral", COMMON | {"sliding_window": None}),
    "qwen2": ("Qwen2", {key: value for key, value in COMMON.items() if key != "head_dim"} | {"hidden_size": 48}),
    "qwen3": ("Qwen3", COMMON | {"head_dim": 16}),
    "heads of 24": ("Llama", COMMON | {"head_dim": 24}),
    "gelu": ("Llama", COMMON | {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral with a window": ("Mistral", COMMON | {"sliding_window": 16}),
    "a window shorter than the draft": ("Mistral", COMMON | {"sliding_window": 3}),
    "ministral": ("Ministral", COMMON | ALTERNATING),
    "qwen2 with a window": (
        "Qwen2",
        COMMON | {"hidden_size": 48, "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "phi-3": ("Phi3", COMMON | {"sliding_window": 16}),
    "phi-3 that rotates half of each head": (
        "Phi3",
        COMMON
        | {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
        | {"partial_rotary_factor": 0.5},
    ),
    "smollm3": ("SmolLM3", COMMON | {"num_hidden_layers": 4}),
    "granite": (
        "Granite",
        COMMON
        | {"embedding_multiplier": 3.1, "residual_multiplier": 0.22, "attention_multiplier": 0.3}
        | {"logits_scaling": 1.7},
    ),
    "olmo2": ("Olmo2", COMMON | {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "olmo3": (
        "Olmo3",
        COMMON
        | ALTERNATING
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            }
        },
    ),
    "gemma": ("Gemma", COMMON),
    "gemma2": (
        "Gemma2",
        COMMON
        | ALTERNATING
        | {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0},
    ),
    "gemma3": ("Gemma3Text", COMMON | ALTERNATING | {"query_pre_attn_scalar": 20, "num_key_value_heads": 1}),
    "gemma3 with soft caps": (
        "Gemma3Text",
        COMMON | ALTERNATING | {"attn_logit_softcapping": 0.1, "final_logit_softcapping": 4.0},
    ),
}


def make_model(name: str, settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    made = getattr(transformers, f"{name}Config")(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()
        for parameter in model.parameters():  # weights of norms and biases that matter
            if parameter.dim() == 1:
                nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model.to(dtype)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


@torch.inference_mode()
def own_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocabulary], by the model's own forward."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0].float()
