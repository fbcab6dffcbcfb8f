"""Strict mode in fixed shapes: chains and trees have the bits of plain decoding, wherever their texts end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from call_recorder import CallRecorder
from products import place_changes_bits
from random_trees import random_tokens, random_tree
from tiny_models import COMMON, TREES, VOCABULARY, make_model
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from reader_rag.draft import DraftTree
from reader_rag.kv_cache.fixed_cache import FixedCache
from reader_rag.model.fixed_shape import FixedShape
from reader_rag.model.fixed_step.attention import attend_along_paths
from reader_rag.model.fixed_step.forward import StepForward
from reader_rag.model.fixed_step.inputs import InputBuffer, RowInput
from reader_rag.model.fixed_step.masks import path_columns, step_masks
from reader_rag.model.fixed_step.select import add_fixed_step
from reader_rag.model.fixed_step.shapes import WIDTHS, StepShape
from reader_rag.model.fixed_step.step import FixedStep
from reader_rag.model.fixed_step.transfers import Transfers
from reader_rag.model.interface import prefill
from reader_rag.model.quantization.loader import quantise_in_memory
from reader_rag.model.target import Target

LONG: dict[str, Any] = {"max_position_embeddings": 2048}
BRANCHES = ["Llama", "Qwen2", "Qwen3", "Gemma", "Phi", "GPTNeoX", "OPT", "Olmo2", "Granite", "SmolLM3", "Glm4"]
"""Models whose layers attend to everything."""


def strict_target(model: PreTrainedModel, width: int, **options: Any) -> tuple[Target, FixedStep]:
    """A strict target with a fixed step, if this machine's products allow one."""
    if place_changes_bits(model.dtype, width):
        pytest.skip("a row's place changes its bits here")
    target = Target(model, FixedShape(width), forward="torch")
    step = add_fixed_step(target, "on", name="x", **options)
    assert step is not None
    return target, step


def plain_logits(target: Target, text: Sequence[int], path: Sequence[int]) -> torch.Tensor:
    """Logits after each token of a path, decoded plainly behind a text, [path, vocabulary]."""
    cache = target.new_cache(len(text) + len(path), 0)
    prefill(target, text, cache)
    rows = []
    for token in path:
        rows.append(target.verify(token, DraftTree.empty(), cache)[0])
        cache.commit([0])
    cache.release()
    return torch.stack(rows)


def check_bits(target: Target, step: FixedStep, length: int, tree: DraftTree) -> None:
    """Every node of a tree behind so many tokens has the bits of plain decoding along its path."""
    text, root = random_tokens(length, length, VOCABULARY), 7
    cache = target.new_cache(length + 64, len(tree))
    prefill(target, text, cache)
    before = step.passes
    got = target.verify(root, tree, cache)
    assert step.passes == before + 1
    leaves = set(range(len(tree))) - set(tree.parents.tolist())
    for leaf in leaves:
        rows = tree.paths[leaf + 1, : tree.depths[leaf] + 1].tolist()
        path = [root, *(int(tree.tokens[row - 1]) for row in rows[1:])]
        assert torch.equal(got[rows], plain_logits(target, text, path))
    cache.release()


# Chains


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_chains_have_the_bits_of_plain_decoding_at_every_width(width: int) -> None:
    target, step = strict_target(make_model("Llama", COMMON | LONG), width)
    step.verifies_branches = False
    for length in (9, 256 - 2 * width, 256 - width - 3, 300):
        deepest = target.deepest(length)
        assert deepest is not None
        check_bits(target, step, length, DraftTree.from_chain(random_tokens(width, deepest, VOCABULARY)))
        check_bits(target, step, length, DraftTree.from_chain(random_tokens(width, min(2, deepest), VOCABULARY)))


# Trees


@pytest.mark.parametrize("name", BRANCHES)
def test_trees_have_the_bits_of_plain_decoding(name: str) -> None:
    target, step = strict_target(make_model(name, TREES[name] | LONG), 16)
    assert step.verifies_branches
    for length in (9, 200, 300, 700):
        check_bits(target, step, length, random_tree(length, 15, VOCABULARY))


@pytest.mark.parametrize("width", [8, 64])
def test_trees_of_int8_models_have_the_bits_of_plain_decoding(width: int) -> None:
    settings = COMMON | LONG | {"hidden_size": 64, "intermediate_size": 96}
    model = quantise_in_memory(make_model("Llama", settings), torch.bfloat16)
    target = Target(model, FixedShape(width), forward="torch")
    step = add_fixed_step(target, "on", name="x")
    assert step is not None
    assert step.verifies_branches
    for length in (9, 300):
        check_bits(target, step, length, random_tree(length, width - 1, VOCABULARY))


def test_accepted_branches_are_moved_and_leave_the_bits_as_they_are() -> None:
    target, step = strict_target(make_model("Llama", COMMON | LONG), 16, recorder=CallRecorder())
    random = np.random.default_rng(3)
    text, root = random_tokens(1, 230, VOCABULARY), 5  # to the next number of columns
    decoded: list[int] = []
    cache = target.new_cache(400, 15)
    prefill(target, text, cache)
    for round_ in range(24):
        deepest = target.deepest(cache.length)
        assert deepest is not None
        tree = random_tree(round_, 15, VOCABULARY)
        tree = tree if tree.depths.max() <= deepest else DraftTree.empty()
        node = int(random.integers(-1, len(tree)))
        rows = tree.paths[node + 1, : tree.depths[node] + 1].tolist() if node >= 0 else [0]
        path = [root, *(int(tree.tokens[row - 1]) for row in rows[1:])]
        got = target.verify(root, tree, cache)
        decoded += path
        assert torch.equal(got[rows], plain_logits(target, text, decoded)[-len(path) :])
        cache.commit(rows)
        root = int(random.integers(VOCABULARY))
    assert step.graphs.replays > 5
    assert not step.graphs.refused


@pytest.mark.parametrize("name", ["Mistral", "Gemma3Text", "Gemma2", "Llama4Text"])
def test_windows_and_other_attention_keep_chains(name: str) -> None:
    model = make_model(name)
    if place_changes_bits(torch.float32, 16):
        pytest.skip("a row's place changes its bits here")
    step = add_fixed_step(Target(model, FixedShape(16), forward="torch"), "on", name="x")
    assert step is None or not step.verifies_branches


def test_a_model_whose_rows_depend_on_their_place_keeps_chains() -> None:
    model = make_model("Llama", COMMON | LONG)
    if place_changes_bits(torch.float32, 16):
        pytest.skip("a row's place changes its bits here")
    head, inner = model.lm_head, model.lm_head.forward

    def other_behind_trees(states: torch.Tensor) -> torch.Tensor:
        """Adds a last bit where positions of a pass are not those of a chain or of plain decoding."""
        logits = inner(states)
        return torch.nextafter(logits, logits + 1) if places[-1] else logits

    places = [False]
    forward = model.forward

    def watched(ids: torch.Tensor, position_ids: Any = None, **kwargs: Any) -> Any:
        places.append(position_ids is not None and bool((position_ids.diff() == 0).any() and len(ids[0].unique()) > 9))
        return forward(ids, position_ids=position_ids, **kwargs)

    head.forward, model.forward = other_behind_trees, watched  # type: ignore[method-assign]
    step = add_fixed_step(Target(model, FixedShape(16), forward="torch"), "on", name="x", max_bytes=1 << 30)
    assert step is not None
    assert not step.verifies_branches
    assert step.cache.max_bytes == 1 << 30


# Attention along paths


def test_columns_of_paths() -> None:
    inputs, shape = InputBuffer(torch.device("cpu")), StepShape(0, 1, 4, 10, 1, past=2, paths=True)
    tree = DraftTree.of([1, 2, 3], [-1, -1, 1], [1, 1, 2], np.full(3, 0.5))
    inputs.fill(shape, {0: RowInput(5, tree, 4, [])}, 63, Transfers())
    columns = path_columns(inputs.views(shape), 10, 2)
    assert columns[0, 0].tolist() == [
        [2, 3, 4, -1, -1, -1, -1, -1],
        [2, 3, 4, 5, -1, -1, -1, -1],
        [2, 3, 4, 6, -1, -1, -1, -1],
        [2, 3, 4, 6, 7, -1, -1, -1],
    ]


@pytest.mark.parametrize(("heads", "key_heads", "value_size"), [(6, 2, 16), (4, 4, 12), (4, 1, 16)])
def test_attention_along_paths_is_that_of_the_mask(heads: int, key_heads: int, value_size: int) -> None:
    inputs, shape = InputBuffer(torch.device("cpu")), StepShape(0, 2, 16, 64, 1, past=20, paths=True)
    trees = {row: RowInput(5, random_tree(row, 15, VOCABULARY), 21 + 5 * row, []) for row in range(2)}
    inputs.fill(shape, trees, 99, Transfers())
    views = inputs.views(shape)
    torch.manual_seed(0)
    query, key = torch.randn(2, heads, 16, 16), torch.randn(2, key_heads, 64, 16)
    value = torch.randn(2, key_heads, 64, value_size)
    for past in (0, 20):
        got = attend_along_paths(query, key, value, path_columns(views, 64, past), 0.3)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=step_masks({"full_attention": 0}, views, 64)["full_attention"],
            scale=0.3,
            enable_gqa=True,
        )
        torch.testing.assert_close(got, expected.transpose(1, 2), atol=1e-5, rtol=0)


def test_a_pass_along_paths_has_no_data_dependent_call() -> None:
    inputs = InputBuffer(torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.inference_mode():
        target = Target(make_model("Llama"), forward="torch")
        own = target.new_cache(150, 7)
        target.model(torch.ones(1, 9, dtype=torch.int64), past_key_values=own, use_cache=True)
        own.commit(list(range(9)))
        cache = FixedCache(target.config.num_hidden_layers)
        assert cache.join([own], 64) == [0]
        inputs.device = mode.from_tensor(inputs.device)
        forward = StepForward(target.model, target.kinds, target.to_backend, cache, inputs, target.layers)
        outputs = forward(StepShape(0, 1, 16, 128, 1, moves=True, past=48, paths=True))
        assert outputs.logits.shape == (1, 16, VOCABULARY)
