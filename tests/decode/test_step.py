"""One pass over a draft tree gives, at every node, the logits that plain text gives there, on unpatched models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from random_trees import random_tokens, random_tree
from transformers import AutoModelForCausalLM, PreTrainedModel

from reader_rag.decode import step
from reader_rag.decode.engine import Engine
from reader_rag.decode.selftest import keeps_bits, verifies_trees
from reader_rag.decode.step import FixedShape, Target
from reader_rag.draft import DraftTree
from reader_rag.errors import UnsupportedModelError

VOCABULARY = 96
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
EXPERTS = {"num_experts_per_tok": 2}
FEW = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": COMMON,
    "Qwen2": COMMON,
    "Qwen3": COMMON | {"head_dim": 8},
    "Mistral": COMMON | {"sliding_window": 16},
    "Gemma2": COMMON | {"head_dim": 8, "sliding_window": 16, "num_hidden_layers": 3},
    "Gemma3Text": COMMON | {"head_dim": 8, "sliding_window": 16, "num_hidden_layers": 7},
    "Cohere2": COMMON | {"sliding_window": 16, "num_hidden_layers": 4},
    "Phi3": COMMON | {"sliding_window": 16},
    "Llama4Text": COMMON
    | {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 16}
    | {"num_hidden_layers": 4},
    "GptOss": COMMON | EXPERTS | {"head_dim": 8, "sliding_window": 16, "num_local_experts": 4},
    "Mixtral": COMMON | EXPERTS | {"num_local_experts": 4},
    "Qwen3Moe": COMMON | EXPERTS | {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 32},
    "DeepseekV3": COMMON
    | EXPERTS
    | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    | {"v_head_dim": 12, "n_routed_experts": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 32}
    | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "GPT2": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    | {"initializer_range": 0.2},
    "GPTNeoX": {key: value for key, value in COMMON.items() if key != "num_key_value_heads"},
    "OPT": FEW
    | {"ffn_dim": 48, "max_position_embeddings": 256, "word_embed_proj_dim": 32, "init_std": 0.2, "dropout": 0.0},
}
EAGER_ONLY = {"GptOss", "Gemma2"}
UNSUPPORTED: dict[str, dict[str, Any]] = {
    "Mamba": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2},
    "Qwen3Next": COMMON | {"head_dim": 8, "num_hidden_layers": 4},
    "Bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2},
    "Falcon": FEW | {"alibi": True, "initializer_range": 0.2},
    "Mpt": {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "initializer_range": 0.2},
    "GPTNeo": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    | {"attention_types": [[["global", "local"], 1]]},
    "Jamba": COMMON | EXPERTS | {"num_experts": 2},
}


def make_model(name: str, settings: dict[str, Any], attention: str = "sdpa") -> PreTrainedModel:
    """A model of that class with fixed random weights, float32."""
    config = getattr(transformers, f"{name}Config")(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()


def path_to(tree: DraftTree, node: int) -> list[int]:
    """The nodes from the root's child down to `node`."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = int(tree.parents[node])
    return path


@torch.inference_mode()
def plain_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Logits after the last of these tokens, without a cache."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0, -1].float()


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected).norm() / expected.norm())


CASES = [
    pytest.param(name, attention, id=f"{name}-{attention}")
    for name in CONFIGS
    for attention in ("eager", "sdpa")
    if attention == "eager" or name not in EAGER_ONLY
]


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_tree_logits_are_those_of_plain_text_along_every_path(name: str, attention: str) -> None:
    model = make_model(name, CONFIGS[name], attention)
    target = Target(model, forward="torch")
    text = random_tokens(2, 30, VOCABULARY)  # longer than the windows
    cache = target.new_cache(60, 12)
    assert error(target.prefill(text, cache)[0], plain_logits(model, text)) < 1e-4
    for round_ in range(2):
        root, tree = 7 + round_, random_tree(round_, 12, VOCABULARY)
        logits = target.verify(root, tree, cache)
        assert logits.shape == (13, VOCABULARY)
        assert error(logits[0], plain_logits(model, [*text, root])) < 1e-4
        for node in range(len(tree)):
            path = [*text, root, *tree.tokens[path_to(tree, node)].tolist()]
            assert error(logits[node + 1], plain_logits(model, path)) < 1e-4
        # Keep the deepest path; its nodes lie scattered.
        kept = path_to(tree, int(tree.depths.argmax()))
        assert len(kept) >= 3
        cache.keep([0, *(node + 1 for node in kept)])
        text += [root, *tree.tokens[kept].tolist()]
        assert cache.length == len(text)
    # A plain step after drafted ones sees what was kept.
    logits = target.verify(9, DraftTree.empty(), cache)
    assert error(logits[0], plain_logits(model, [*text, 9])) < 1e-4


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_a_node_that_saw_another_branch_would_show(name: str) -> None:
    model = make_model(name, CONFIGS[name])
    text, tree = random_tokens(2, 30, VOCABULARY), random_tree(0, 12, VOCABULARY)
    straight = plain_logits(model, [*text, 7, *tree.tokens[path_to(tree, 11)].tolist()])
    in_a_row = plain_logits(model, [*text, 7, *tree.tokens.tolist()])
    assert error(straight, in_a_row) > 0.01


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma3Text", "Llama4Text", "GPT2"])
def test_a_prompt_may_be_prefilled_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "PREFILL_CHUNK", 7)
    model = make_model(name, CONFIGS[name])
    target, text = Target(model, forward="torch"), random_tokens(3, 40, VOCABULARY)
    cache = target.new_cache(50, 4)
    assert error(target.prefill(text, cache)[0], plain_logits(model, text)) < 1e-4
    assert cache.length == 40
    assert error(target.verify(5, DraftTree.empty(), cache)[0], plain_logits(model, [*text, 5])) < 1e-4


@pytest.mark.parametrize("name", list(CONFIGS))
def test_the_self_test_passes_models_that_verify(name: str) -> None:
    assert verifies_trees(Target(make_model(name, CONFIGS[name], "eager"), forward="torch"))


@pytest.mark.parametrize("exactness", ["fast", "strict"])
@pytest.mark.parametrize("name", list(UNSUPPORTED))
def test_models_that_cannot_verify_are_refused(name: str, exactness: Any, tiny_tokenizer: Any) -> None:
    model = make_model(name, UNSUPPORTED[name], "eager")
    with pytest.raises(UnsupportedModelError, match="drafts cannot be verified"):
        Engine(model, tiny_tokenizer, exactness=exactness)


def test_attention_backends_without_a_tree_mask_are_refused() -> None:
    model = make_model("Llama", CONFIGS["Llama"])
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match="'flash_attention_2' takes no tree mask; .*attn_implementation"):
        Target(model)


def test_a_model_that_ignores_positions_fails_the_self_test() -> None:
    model = make_model("Llama", CONFIGS["Llama"])
    forward = model.forward

    def without_positions(*args: Any, position_ids: Any = None, logits_to_keep: int = 0, **kwargs: Any) -> Any:
        return forward(*args, logits_to_keep=logits_to_keep, **kwargs)

    model.forward = without_positions
    assert not verifies_trees(Target(model))


def test_a_model_that_ignores_the_mask_fails_the_self_test() -> None:
    model = make_model("Llama", CONFIGS["Llama"])
    forward = model.forward

    def without_mask(*args: Any, attention_mask: Any = None, logits_to_keep: int = 0, **kwargs: Any) -> Any:
        return forward(*args, logits_to_keep=logits_to_keep, **kwargs)

    model.forward = without_mask
    assert not verifies_trees(Target(model))


@pytest.mark.parametrize(
    ("settings", "window"), [(CONFIGS["Llama"], 256), (CONFIGS["GPT2"], 256), (UNSUPPORTED["Bloom"], None)]
)
def test_the_context_window_is_what_the_configuration_says(settings: dict[str, Any], window: int | None) -> None:
    name = next(name for name, other in (CONFIGS | UNSUPPORTED).items() if other is settings)
    assert Target(make_model(name, settings, "eager")).context_window == window


# Fixed shapes


def test_attended_positions_grow_in_buckets_and_depend_on_the_roots_position_alone() -> None:
    shape = FixedShape(width=17, bucket=256)
    assert [shape.shown(root) for root in (0, 100, 239, 240, 495, 496)] == [256, 256, 256, 512, 512, 768]


@pytest.mark.parametrize("root", [0, 1, 200, 222, 223, 230, 238, 239, 240, 255, 256, 495, 496])
def test_no_chain_reaches_a_position_that_plain_decoding_attends_in_another_shape(root: int) -> None:
    shape = FixedShape(width=17, bucket=256)
    longest = shape.longest_chain(root)
    assert 0 <= longest <= 16
    assert all(shape.shown(root + j) == shape.shown(root) for j in range(longest + 1))
    assert longest == 16 or shape.shown(root + longest + 1) != shape.shown(root)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Llama", "Gemma3Text", "GPT2"])
def test_in_fixed_shapes_a_chain_gives_the_bits_of_plain_decoding(name: str, dtype: torch.dtype) -> None:
    model = make_model(name, CONFIGS[name]).to(dtype)
    target = Target(model, FixedShape(width=9, bucket=32), forward="torch")
    if not keeps_bits(target):
        pytest.skip("kernels of this machine compute a row by its neighbours, which the engine refuses")
    text, draft = random_tokens(5, 40, VOCABULARY), random_tokens(6, 5, VOCABULARY)
    plain = target.new_cache(60, 0)
    target.prefill(text, plain)
    expected = []
    for token in [7, *draft]:
        expected.append(target.verify(token, DraftTree.empty(), plain)[0])
        plain.keep([0])

    drafted = target.new_cache(60, 8)
    target.prefill(text, drafted)
    zeros = np.zeros(5, np.int32)
    chain = DraftTree.of(
        tokens=np.array(draft, np.int32),
        parents=np.arange(-1, 4, dtype=np.int32),
        depths=np.arange(1, 6, dtype=np.int32),
        probabilities=np.full(5, 0.5),
        sources=zeros,
        positions=zeros,
        match_lengths=zeros,
    )
    assert torch.equal(target.verify(7, chain, drafted), torch.stack(expected))


def test_fixed_shapes_compute_what_free_ones_do() -> None:
    model = make_model("Mistral", CONFIGS["Mistral"])
    text = random_tokens(5, 40, VOCABULARY)
    target = Target(model, FixedShape(width=9, bucket=32), forward="torch")
    cache = target.new_cache(60, 8)
    target.prefill(text, cache)
    logits = target.verify(7, random_tree(0, 3, VOCABULARY), cache)
    assert logits.shape == (4, VOCABULARY)
    assert error(logits[0], plain_logits(model, [*text, 7])) < 1e-4
