"""Every family of the compiled loops in int8: its own logits, and trees with the bits of plain decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from accelerate import init_empty_weights
from compiled_models import SETTINGS, VOCABULARY, error, make_model, own_logits
from numba import config as numba_config
from random_trees import random_tokens, random_tree
from transformers import AutoModelForCausalLM, PreTrainedModel

from reader_rag.draft import DraftTree
from reader_rag.model.compiled.forward import CpuForward, Rows
from reader_rag.model.interface import prefill
from reader_rag.model.quantization.loader import SCHEME
from reader_rag.model.quantization.parts import assemble, is_tied, layout_of, tensors_of
from reader_rag.model.target import Target

pytestmark = pytest.mark.skipif(bool(numba_config.DISABLE_JIT), reason="compiled loops need the compiler")

BLOCKS: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 80, "head_dim": 16}
"""Features of int8 layers are multiples of 16."""
FAMILIES = ["llama", "qwen2", "qwen3", "mistral with a window", "phi-3", "smollm3", "granite", "olmo2", "olmo3"]
FAMILIES += ["gemma", "gemma2", "gemma3"]
FAST = ("llama", "qwen3", "mistral with a window", "gemma3")
TIED = {"tie_word_embeddings": True}


def int8_model(name: str, settings: dict[str, Any] | None = None) -> PreTrainedModel:
    """A tiny model with int8 linear layers, and 16 bits where nothing else is said."""
    kind, family = SETTINGS[name]
    model = make_model(kind, family | BLOCKS | (settings or {}))
    layout = layout_of(model, SCHEME, torch.bfloat16, is_tied=is_tied(model))
    tensors = dict(tensors_of(model, layout))
    with init_empty_weights(include_buffers=False):
        skeleton: PreTrainedModel = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    assemble(skeleton, layout, tensors.pop)
    skeleton.cache_dtype = torch.float32  # type: ignore[assignment]  # of the model's own keys and values
    return skeleton.eval()


@pytest.mark.parametrize("settings", [{}, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("name", FAMILIES)
def test_its_logits_are_the_models_own(name: str, settings: dict[str, Any]) -> None:
    model, text = int8_model(name, settings), random_tokens(2, 45, VOCABULARY)
    expected, got = own_logits(model, text), loops_logits(model, text)
    assert error(got, expected) < 0.03  # last bits become steps of 1/32767, and some of these steps of 1/127
    heads = [
        getattr(layer.self_attn, name)
        for layer in model.model.layers
        for name in ("q_proj", "k_proj", "v_proj", "qkv_proj")
        if hasattr(layer.self_attn, name)
    ]
    assert {part.limbs for part in heads} == {2}
    for part in heads:
        part.limbs = 1
    expected, got = own_logits(model, text), loops_logits(model, text)
    assert float(((got - expected).norm(dim=1) / expected.norm(dim=1)).median()) < 1e-5
    assert error(got, expected) < 0.03  # in a few rows a last bit becomes a step of 1/127


def loops_logits(model: PreTrainedModel, text: list[int]) -> torch.Tensor:
    """[tokens, vocabulary], by the compiled loops."""
    target = Target(model)
    assert target.cpu is not None
    (got,) = target.cpu([Rows.of_text(np.array(text), target.new_cache(len(text), 0), 0)])
    return got


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_a_drafted_rows_bits_are_those_of_plain_decoding(name: str) -> None:
    target, text, tree = Target(int8_model(name)), random_tokens(4, 37, VOCABULARY), random_tree(4, 19, VOCABULARY)
    drafted = target.new_cache(60, len(tree))
    prefill(target, text, drafted)
    got = target.verify(7, tree, drafted)
    for leaf in (node for node in range(len(tree)) if node not in tree.parents):
        plain = target.new_cache(60, 0)
        prefill(target, text, plain)
        for row in tree.paths[leaf + 1, : tree.depths[leaf] + 1]:
            token = int(tree.tokens[row - 1]) if row else 7
            assert torch.equal(target.verify(token, DraftTree.empty(), plain)[0], got[row])
            plain.commit([0])


@pytest.mark.parametrize("name", ["llama", "phi-3"])
def test_layers_that_do_not_fill_blocks_are_computed_by_the_model(name: str) -> None:
    assert CpuForward.of(int8_model(name, {"intermediate_size": 50})) is None
