"""Tiny models with fixed random weights, one of each family, by how drafts are verified on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LogitsProcessor, PreTrainedModel

from reader_rag.sampling.noise import gumbel

VOCABULARY = 96
WINDOW = 16
"""Of models that attend to a window or in chunks."""
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # attention that matters: with the usual 0.02 a wrong mask hardly shows
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
"""For models that would else repeat the last token for ever."""
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
WIDE_HEADS: dict[str, Any] = {"head_dim": 8}
SLIDING: dict[str, Any] = {"sliding_window": WINDOW}
FEW: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SINGLE: dict[str, Any] = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}
MAMBA_LAYER: dict[str, Any] = {"state_size": 8, "conv_kernel": 4, "expand": 2, "initializer_range": 0.2}

TREES: dict[str, dict[str, Any]] = {
    "Llama": COMMON,
    "Qwen2": COMMON,
    "Qwen3": COMMON | WIDE_HEADS,
    "Mistral": COMMON | SLIDING,
    "Ministral": COMMON | SLIDING | WIDE_HEADS,
    "Gemma": COMMON | WIDE_HEADS | UNTIED,
    "Gemma2": COMMON | WIDE_HEADS | SLIDING | UNTIED | {"num_hidden_layers": 3, "attn_logit_softcapping": 5.0},
    "Gemma3Text": COMMON | WIDE_HEADS | SLIDING | UNTIED | {"num_hidden_layers": 7},
    "Cohere": COMMON,
    "Cohere2": COMMON | SLIDING | {"num_hidden_layers": 4},
    "Phi": COMMON,
    "Phi3": COMMON | SLIDING,
    "Llama4Text": COMMON
    | WIDE_HEADS
    | {"num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": WINDOW, "num_hidden_layers": 4},
    "GptOss": COMMON | EXPERTS | WIDE_HEADS | SLIDING | {"num_local_experts": 4},
    "Mixtral": COMMON | EXPERTS | {"num_local_experts": 4},
    "Qwen3Moe": COMMON | EXPERTS | WIDE_HEADS | {"num_experts": 4, "moe_intermediate_size": 32},
    "Olmoe": COMMON | EXPERTS | {"num_experts": 4},
    "DeepseekV3": COMMON
    | EXPERTS
    | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    | {"v_head_dim": 12, "n_routed_experts": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 32}
    | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "GPT2": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    | {"initializer_range": 0.2},
    "GPTJ": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "rotary_dim": 4}
    | {"initializer_range": 0.2},
    "GPTNeoX": SINGLE,
    "GPTBigCode": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    | {"initializer_range": 0.2},
    "OPT": FEW
    | {"ffn_dim": 48, "max_position_embeddings": 256, "word_embed_proj_dim": 32, "init_std": 0.2, "dropout": 0.0},
    "Falcon": FEW | UNTIED | {"alibi": False, "initializer_range": 0.2, "max_position_embeddings": 256},
    "Starcoder2": COMMON | SLIDING,
    "Olmo2": COMMON,
    "Olmo3": COMMON | SLIDING | {"num_hidden_layers": 4},
    "Granite": COMMON,
    "SmolLM3": COMMON | {"num_hidden_layers": 4},
    "StableLm": COMMON,
    "Exaone4": COMMON | SLIDING | {"num_hidden_layers": 4},
    "Glm4": COMMON | WIDE_HEADS,
    "Nemotron": COMMON,
    "Moshi": COMMON | SLIDING | WIDE_HEADS | {"ffn_dim": 48},
}
"""Models on which trees are verified."""

CHAINS: dict[str, dict[str, Any]] = {
    "Bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
    | UNTIED,
    "Falcon-alibi": FEW | UNTIED | {"alibi": True, "initializer_range": 0.2},
    "Mpt": {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "initializer_range": 0.2} | UNTIED,
    "GPTNeo": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "initializer_range": 0.2}
    | {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW, "max_position_embeddings": 256},
}
"""Models on which only chains are: their attention goes by the slot in the cache."""

PLAIN: dict[str, dict[str, Any]] = {
    "Mamba": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2} | MAMBA_LAYER | UNTIED,
    "Mamba2": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8}
    | {"n_groups": 1, "chunk_size": 8}
    | MAMBA_LAYER,
    "FalconMamba": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2} | MAMBA_LAYER | UNTIED,
    "Jamba": COMMON
    | EXPERTS
    | {"num_experts": 2, "num_hidden_layers": 4, "use_mamba_kernels": False}
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "Qwen3Next": COMMON
    | WIDE_HEADS
    | EXPERTS
    | {"num_hidden_layers": 4, "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    | {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "Rwkv": {"vocab_size": VOCABULARY, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2},
    "Bamba": COMMON
    | {"num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 8}
    | {"mamba_d_head": 8, "mamba_chunk_size": 8},
    "FalconH1": COMMON
    | WIDE_HEADS
    | {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
    | {"mamba_chunk_size": 8},
    "Lfm2": COMMON | {"full_attn_idxs": [1]},
    "MiniMax": COMMON | WIDE_HEADS | EXPERTS | {"num_local_experts": 2, "block_size": 8},
}
"""Models that keep a state which cannot be rolled back: they are decoded plainly."""

MODELS: dict[str, dict[str, Any]] = TREES | CHAINS | PLAIN
MIXED_UP: dict[str, dict[str, Any]] = {
    "RecurrentGemma": COMMON | UNTIED | {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": WINDOW},
}
"""Models that keep what they read of a text in their own modules: texts that are read in turn get mixed up."""
EAGER_ONLY = {"GptOss", "Gemma2", "GPTJ", "Bloom", "Mpt", "GPTNeo", "Rwkv"}
"""Models whose own choice of attention is "eager", or the only one."""


WINDOW_IN_CACHE = {"Moshi"}
"""Models whose own cache forgets what lies before the window while their mask shows it: `generate` gives other logits
than a pass over the whole text."""


def make_model(
    name: str,
    settings: dict[str, Any] | None = None,
    attention: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """A model with fixed random weights that never ends an answer by itself.

    Args:
        name: One of `MODELS`; what follows a "-" is no part of the class's name.
        settings: Of its configuration; None: those of `MODELS`.
        attention: The attention backend; None: the model's own choice.
        dtype: Type of the weights.
    """
    config = getattr(transformers, f"{name.split('-')[0]}Config")(**(MODELS[name] if settings is None else settings))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    return model


def long_rope(switch: int) -> PreTrainedModel:
    """Phi-3 whose rotary angles are others once a text is longer than `switch`."""
    rotation = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0, 3.0, 2.0, 6.0],
        "original_max_position_embeddings": switch,
    }
    more = {"sliding_window": None, "rope_parameters": rotation, "original_max_position_embeddings": switch}
    return make_model("Phi3", COMMON | more)


class Noise(LogitsProcessor):
    """The engine's own noise, as the last processor of a greedy `generate`: a draw."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.from_numpy(gumbel(self._seed, input_ids.shape[1], scores.shape[1]))


@torch.inference_mode()
def generated(model: Any, tokens: Sequence[int], max_tokens: int, **options: Any) -> tuple[int, ...]:
    """What `transformers` itself answers, greedily."""
    ids = torch.tensor([list(tokens)])
    settings = {"max_new_tokens": max_tokens, "do_sample": False, "pad_token_id": 0} | options
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
    return tuple(out[0, len(tokens) :].tolist())
