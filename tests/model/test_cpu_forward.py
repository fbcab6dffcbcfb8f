"""The compiled forward pass gives the model's own logits, and each row's bits whatever stands beside it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from compiled_models import COMMON, SETTINGS, VOCABULARY, error, make_model, own_logits
from numba import config as numba_config
from random_trees import random_tokens, random_tree
from torch import nn

from reader_rag.draft import DraftTree
from reader_rag.model.compiled import forward as cpu_forward
from reader_rag.model.compiled.forward import CpuForward, Rows
from reader_rag.model.cpu import products, rounding
from reader_rag.model.interface import Step, prefill
from reader_rag.model.self_test import keeps_bits, verifies_trees
from reader_rag.model.target import Target

pytestmark = pytest.mark.skipif(bool(numba_config.DISABLE_JIT), reason="compiled loops need the compiler")

UNKNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "other activation": ("Llama", COMMON | {"hidden_act": "gelu"}),
    "rotation that depends on the length": (
        "Llama",
        COMMON | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "other architecture": ("Cohere", COMMON),
    "heads that do not fill vectors": ("Llama", COMMON | {"head_dim": 12}),
}
WINDOWED = ["mistral with a window", "a window shorter than the draft", "gemma2", "gemma3"]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.06, torch.float16: 0.008}
"""Relative errors; in 16 bits the model's own differ from its float32 logits by about as much."""
DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(SETTINGS))
def test_its_logits_are_the_models_own(name: str, dtype: torch.dtype) -> None:
    model = make_model(*SETTINGS[name], dtype)
    target, text, tree = Target(model), random_tokens(2, 45, VOCABULARY), random_tree(3, 12, VOCABULARY)
    assert target.cpu is not None
    cache = target.new_cache(60, 12)
    assert error(prefill(target, text, cache)[0], own_logits(model, text)[-1]) < TOLERANCE[dtype]
    got = target.verify(7, tree, cache)
    assert got.shape == (13, VOCABULARY)
    assert error(got[0], own_logits(model, [*text, 7])[-1]) < TOLERANCE[dtype]
    for node in range(len(tree)):
        path = tree.paths[node + 1, 1 : tree.depths[node] + 1] - 1
        expected = own_logits(model, [*text, 7, *tree.tokens[path].tolist()])[-1]
        assert error(got[node + 1], expected) < TOLERANCE[dtype]
    assert verifies_trees(target)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("committed", [1, 9, 131, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 7, 8, 64))])
@pytest.mark.parametrize("name", ["llama", "one query head for each key head", "qwen3", *WINDOWED])
def test_a_drafted_rows_bits_are_those_of_plain_decoding(name: str, committed: int, dtype: torch.dtype) -> None:
    target = Target(make_model(*SETTINGS[name], dtype))
    text, tree = random_tokens(committed, committed, VOCABULARY), random_tree(committed, 19, VOCABULARY)
    drafted = target.new_cache(committed + 20, len(tree))
    prefill(target, text, drafted)
    got = target.verify(7, tree, drafted)
    leaves = [node for node in range(len(tree)) if node not in tree.parents]
    for leaf in leaves:
        plain = target.new_cache(committed + 20, 0)
        prefill(target, text, plain)
        for row in tree.paths[leaf + 1, : tree.depths[leaf] + 1]:
            token = int(tree.tokens[row - 1]) if row else 7
            assert torch.equal(target.verify(token, DraftTree.empty(), plain)[0], got[row])
            plain.commit([0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_kept_of_a_tree_is_what_plain_decoding_would_have_written(dtype: torch.dtype) -> None:
    target, text, tree = (
        Target(make_model(*SETTINGS["llama"], dtype)),
        random_tokens(5, 21, VOCABULARY),
        random_tree(5, 12, VOCABULARY),
    )
    path = tree.paths[int(tree.depths.argmax()) + 1].tolist()
    assert len(path) >= 4
    drafted, plain = target.new_cache(40, 12), target.new_cache(40, 12)
    for cache in (drafted, plain):
        prefill(target, text, cache)
    target.verify(7, tree, drafted)
    drafted.commit(path)
    for row in path:
        target.verify(int(tree.tokens[row - 1]) if row else 7, DraftTree.empty(), plain)
        plain.commit([0])
    assert drafted.length == plain.length == 21 + len(path)
    for left, right in zip(drafted.arrays, plain.arrays, strict=True):
        assert np.array_equal(left[:, :, : drafted.length], right[:, :, : drafted.length])


@pytest.mark.parametrize("faster", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_prompt_may_be_prefilled_here_or_by_the_model(
    dtype: torch.dtype, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_forward, "_SLOW_PRODUCTS", (torch.backends.cpu.get_cpu_capability(),) if faster else ())
    model, text = make_model(*SETTINGS["llama"], dtype), random_tokens(6, 150, VOCABULARY)  # three chunks
    target = Target(model)
    assert target.cpu is not None
    assert target.cpu.prefills_faster == faster
    cache = target.new_cache(160, 4)
    assert error(prefill(target, text, cache)[0], own_logits(model, text)[-1]) < TOLERANCE[dtype]
    assert cache.length == 150
    assert error(target.verify(5, DraftTree.empty(), cache)[0], own_logits(model, [*text, 5])[-1]) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["llama", "olmo2", *WINDOWED])
def test_rows_have_the_same_bits_in_chunks_of_any_size(name: str, dtype: torch.dtype) -> None:
    target, text = Target(make_model(*SETTINGS[name], dtype)), np.array(random_tokens(6, 70, VOCABULARY))
    assert target.cpu is not None
    logits, caches = [], []
    for size in (1, 7, 70):
        cache = target.new_cache(70, 0)
        parts = []
        for chunk in np.split(text, range(size, 70, size)):
            parts += target.cpu([Rows.of_text(chunk, cache, 0)])
            cache.commit(list(range(len(chunk))))
        logits.append(torch.cat(parts))
        caches.append(cache.arrays[0][:, :, :70].copy())
    for other, cached in zip(logits[1:], caches[1:], strict=True):
        assert torch.equal(logits[0], other)
        assert np.array_equal(caches[0], cached)
    assert error(logits[0], own_logits(target.model, text.tolist())) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["phi-3", "gemma2"])
def test_texts_of_a_batch_have_the_bits_that_they_have_alone(name: str) -> None:
    target, tree = Target(make_model(*SETTINGS[name])), random_tree(4, 9, VOCABULARY)
    steps = []
    for length in (3, 40, 17):
        cache = target.new_cache(length, len(tree))
        prefill(target, random_tokens(length, length, VOCABULARY), cache)
        steps.append(Step(5, tree, cache))
    for step, together in zip(steps, target.verify_batch(steps), strict=True):
        assert torch.equal(target.verify(step.root, step.tree, step.cache), together)


@pytest.mark.parametrize("faster", [True, False])
def test_angles_that_change_at_a_length(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuForward, "prefills_faster", faster)
    rotation = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    rotation |= {"short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 6.0]}
    settings = COMMON | {"hidden_size": 48, "original_max_position_embeddings": 64, "rope_parameters": rotation}
    target = Target(make_model("Phi3", settings))
    assert target.cpu is not None
    steps, expected = [], []
    for length, tree in ((30, DraftTree.from_chain([5, 6])), (63, DraftTree.empty()), (300, DraftTree.from_chain([8]))):
        assert target.deepest(length) is None or len(tree) <= target.deepest(length)
        text, cache = random_tokens(length, length, VOCABULARY), target.new_cache(length, 2)
        logits = prefill(target, text, cache)
        assert error(logits[0], own_logits(target.model, text)[-1]) < 1e-5
        steps.append(Step(7, tree, cache))
        expected.append(own_logits(target.model, [*text, 7, *tree.tokens.tolist()])[length:])
    for got, own in zip(target.verify_batch(steps), expected, strict=True):
        assert error(got, own) < 1e-5


def test_no_weight_is_copied() -> None:
    model = make_model(*SETTINGS["llama"])
    target = Target(model)
    cache = target.new_cache(20, 0)
    prefill(target, [5, 6, 7], cache)
    before = target.verify(8, DraftTree.empty(), cache)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-1)
        model.lm_head.weight.mul_(2)
    after = target.verify(8, DraftTree.empty(), cache)
    assert error(after, own_logits(model, [5, 6, 7, 8])[-1:]) < 1e-5
    assert error(after, before) > 0.1


def test_positions_beyond_the_cache_are_refused() -> None:
    target = Target(make_model(*SETTINGS["llama"]))
    cache = target.new_cache(4, 0)  # and a root
    prefill(target, [5, 6, 7], cache)
    with pytest.raises(IndexError, match="6 positions do not fit a cache of 5"):
        target.verify(8, DraftTree.from_chain([9, 10]), cache)


@pytest.mark.parametrize("name", list(UNKNOWN))
def test_models_of_another_shape_run_in_their_own_forward(name: str) -> None:
    model = make_model(*UNKNOWN[name])
    assert CpuForward.of(model) is None
    assert verifies_trees(Target(model))


def test_attention_of_another_kind_is_unknown() -> None:
    chunks = make_model("Ministral", COMMON | {"layer_types": ["chunked_attention"] * 2})
    assert CpuForward.of(chunks) is None
    assert CpuForward.of(make_model("Gemma3Text", COMMON | {"use_bidirectional_attention": True})) is None


def test_changed_models_run_in_their_own_forward() -> None:
    assert CpuForward.of(make_model(*SETTINGS["llama"], torch.float64)) is None

    hooked = make_model(*SETTINGS["llama"])
    hooked.model.layers[0].register_forward_hook(lambda module, args, output: output)
    assert CpuForward.of(hooked) is None

    class Adapted(nn.Linear):
        pass

    adapted = make_model(*SETTINGS["llama"])
    adapted.model.layers[0].mlp.up_proj = Adapted(36, 50, bias=False)
    assert CpuForward.of(adapted) is None

    mixed = make_model(*SETTINGS["llama"])
    mixed.model.layers[1].self_attn.o_proj.to(torch.bfloat16)
    assert CpuForward.of(mixed) is None


def test_the_models_own_forward_can_be_asked_for() -> None:
    model = make_model(*SETTINGS["llama"])
    assert Target(model).cpu is not None
    assert Target(model, forward="torch").cpu is None


@pytest.mark.slow
def test_the_threads_of_pytorch_stay_as_they_are() -> None:
    """In a process of its own: it is the first compiled loop that makes numba's threads."""
    program = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from reader_rag.model.target import Target

torch.set_num_threads(1)
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
target = Target(LlamaForCausalLM(config).eval())
assert target.cpu is not None
from reader_rag.draft import DraftTree
target.verify(1, DraftTree.empty(), target.new_cache(4, 0))
print(torch.get_num_threads())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"]


def test_rounding_is_that_of_float16() -> None:
    bits = np.arange(-(1 << 15), 1 << 15, 7, dtype=np.int16)
    halves = bits.view(np.float16)
    numbers = ~np.isnan(halves)
    exact = halves[numbers].astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        tie = exact + np.spacing(halves[numbers]).astype(np.float32) / 2
        past = np.nextafter(tie, np.float32(np.inf))
        values = np.concatenate([v[~np.isnan(v)] for v in (exact, tie, past)])
        expected = values.astype(np.float16)
    assert [rounding.widen(value) for value in bits[numbers]] == exact.tolist()
    assert [rounding.narrowed(value, bits) for value in values] == expected.view(np.int16).tolist()
    assert [rounding.rounded(value, bits) for value in values] == expected.astype(np.float32).tolist()
    assert np.isnan(rounding.rounded(np.float32(np.nan), bits))
    assert np.isnan(rounding.widen(np.int16(rounding.narrowed(np.float32(np.nan), bits))))


def test_rounding_is_that_of_bfloat16() -> None:
    values = np.concatenate(
        [
            np.random.default_rng(0).normal(size=1000).astype(np.float32),
            np.array([0.0, -0.0, 1e-40, 3.4e38, np.inf, -np.inf, 1.00390625, 1.01171875], np.float32),  # two ties
        ]
    )
    like = np.zeros(1, np.uint16)
    expected = torch.from_numpy(values).bfloat16()
    bits = expected.view(torch.uint16).numpy()
    assert [rounding.narrowed(value, like) for value in values] == bits.tolist()
    assert [rounding.rounded(value, like) for value in values] == expected.float().tolist()
    assert [rounding.widen(value) for value in bits] == expected.float().tolist()
    assert np.isnan(rounding.rounded(np.float32(np.nan), like))
    exact = np.zeros(1, np.float32)
    assert rounding.rounded(np.float32(0.1), exact) == rounding.narrowed(np.float32(0.1), exact) == np.float32(0.1)
    assert rounding.widen(np.float32(0.1)) == np.float32(0.1)


def test_its_exponential_is_that_of_numpy() -> None:
    x = np.linspace(-80, 80, 20001, dtype=np.float32)
    got = np.array([products.exp(value) for value in x])
    assert np.abs(got / np.exp(x.astype(np.float64)) - 1).max() < 3e-7
    assert products.exp(np.float32(-1000)) < 1e-37
    assert np.isfinite(products.exp(np.float32(1000)))


def test_the_self_test_of_strict_decoding_tries_a_tree() -> None:
    target = Target(make_model(*SETTINGS["llama"], torch.bfloat16))
    assert keeps_bits(target)
    assert target.cpu is not None
    compute = target.cpu

    class MixesRows(CpuForward):
        def __call__(self, texts: Sequence[Rows], asked: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
            return [logits + logits.mean(0) * 1e-3 for logits in compute(texts)]

    target.cpu = MixesRows.of(target.model)
    assert not keeps_bits(target)
