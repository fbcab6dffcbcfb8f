"""One pass over a draft tree gives, at every node, the logits that plain text gives there, on unpatched models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from products import place_changes_bits
from random_trees import random_tokens, random_tree
from tiny_models import EAGER_ONLY, TREES, VOCABULARY, WINDOW_IN_CACHE, long_rope, make_model
from transformers import PreTrainedModel

from reader_rag.draft import DraftTree
from reader_rag.errors import UnsupportedModelError
from reader_rag.model import fixed_shape
from reader_rag.model import target as step
from reader_rag.model.fixed_shape import FixedShape
from reader_rag.model.interface import prefill
from reader_rag.model.select_target import select_target
from reader_rag.model.self_test import verifies_trees
from reader_rag.model.target import Target


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


@torch.inference_mode()
def plain_logits_of_all(model: PreTrainedModel, texts: list[list[int]]) -> torch.Tensor:
    """[texts, vocabulary], the same for several texts in one pass; what fills them up on the right is seen by none."""
    width = max(map(len, texts))
    logits = model(torch.tensor([text + [0] * (width - len(text)) for text in texts]), use_cache=False).logits
    return logits[torch.arange(len(texts)), torch.tensor([len(text) - 1 for text in texts])].float()


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected).norm() / expected.norm())


CASES = [
    pytest.param(name, attention, id=f"{name}-{attention}")
    for name in sorted(TREES.keys() - WINDOW_IN_CACHE)
    for attention in ("eager", "sdpa")
    if attention == "eager" or name not in EAGER_ONLY
]


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_tree_logits_are_those_of_plain_text_along_every_path(name: str, attention: str) -> None:
    model = make_model(name, attention=attention)
    target = Target(model, forward="torch")
    text = random_tokens(2, 30, VOCABULARY)  # longer than the windows
    cache = target.new_cache(60, 12)
    assert error(prefill(target, text, cache)[0], plain_logits(model, text)) < 1e-4
    for round_ in range(2):
        root, tree = 7 + round_, random_tree(round_, 12, VOCABULARY)
        logits = target.verify(root, tree, cache)
        assert logits.shape == (13, VOCABULARY)
        paths = [tree.tokens[path_to(tree, node)].tolist() for node in range(len(tree))]
        expected = plain_logits_of_all(model, [[*text, root, *path] for path in ([], *paths)])
        assert all(error(*rows) < 1e-4 for rows in zip(logits, expected, strict=True))
        # Keep the deepest path; its nodes lie scattered.
        kept = path_to(tree, int(tree.depths.argmax()))
        assert len(kept) >= 3
        cache.commit([0, *(node + 1 for node in kept)])
        text += [root, *tree.tokens[kept].tolist()]
        assert cache.length == len(text)
    # A plain step after drafted ones sees what was kept.
    logits = target.verify(9, DraftTree.empty(), cache)
    assert error(logits[0], plain_logits(model, [*text, 9])) < 1e-4


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_a_node_that_saw_another_branch_would_show(name: str) -> None:
    model = make_model(name)
    text, tree = random_tokens(2, 30, VOCABULARY), random_tree(0, 12, VOCABULARY)
    straight = plain_logits(model, [*text, 7, *tree.tokens[path_to(tree, 11)].tolist()])
    in_a_row = plain_logits(model, [*text, 7, *tree.tokens.tolist()])
    assert error(straight, in_a_row) > 0.01


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma3Text", "Llama4Text", "GPT2"])
def test_a_prompt_may_be_prefilled_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "chunk_size", lambda _model: 7)
    model = make_model(name)
    target, text = Target(model, forward="torch"), random_tokens(3, 40, VOCABULARY)
    cache = target.new_cache(50, 4)
    assert error(prefill(target, text, cache)[0], plain_logits(model, text)) < 1e-4
    assert cache.length == 40
    assert error(target.verify(5, DraftTree.empty(), cache)[0], plain_logits(model, [*text, 5])) < 1e-4


@pytest.mark.parametrize("name", list(TREES))
def test_the_self_test_passes_models_that_verify(name: str) -> None:
    assert verifies_trees(Target(make_model(name, attention="eager"), forward="torch"))


def test_a_target_for_trees_refuses_what_takes_no_tree_mask() -> None:
    model = make_model("Llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match="the attention backend 'flash_attention_2' takes no tree mask"):
        Target(model)
    with pytest.raises(UnsupportedModelError, match="mamba models keep a state that cannot be rolled back"):
        Target(make_model("Mamba"))
    with pytest.raises(UnsupportedModelError, match="minimax models have layers of kind 'linear_attention'"):
        Target(make_model("MiniMax"))


def test_a_model_that_ignores_positions_fails_the_self_test() -> None:
    model = make_model("Llama")
    forward = model.forward

    def without_positions(*args: Any, position_ids: Any = None, logits_to_keep: int = 0, **kwargs: Any) -> Any:
        return forward(*args, logits_to_keep=logits_to_keep, **kwargs)

    model.forward = without_positions
    assert not verifies_trees(Target(model))


def test_a_model_that_ignores_the_mask_fails_the_self_test() -> None:
    model = make_model("Llama")
    forward = model.forward

    def without_mask(*args: Any, attention_mask: Any = None, logits_to_keep: int = 0, **kwargs: Any) -> Any:
        return forward(*args, logits_to_keep=logits_to_keep, **kwargs)

    model.forward = without_mask
    assert not verifies_trees(Target(model))


@pytest.mark.parametrize(("name", "window"), [("Llama", 256), ("GPT2", 256), ("Bloom", None)])
def test_the_context_window_is_what_the_configuration_says(name: str, window: int | None) -> None:
    assert Target(make_model(name), branches=False).context_window == window


# Rotations that depend on the length


@pytest.mark.parametrize("length", [20, 40, 41, 60])
def test_a_prompt_longer_than_the_switch_is_turned_by_the_angles_behind_it(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "chunk_size", lambda _model: 7)
    model = long_rope(40)
    target, text = Target(model), random_tokens(3, length, VOCABULARY)
    cache = target.new_cache(80, 4)
    assert error(prefill(target, text, cache)[0], plain_logits(model, text)) < 1e-4
    if length > 40:
        assert error(target.verify(5, DraftTree.empty(), cache)[0], plain_logits(model, [*text, 5])) < 1e-4


def test_no_draft_reaches_beyond_the_switch() -> None:
    target = Target(long_rope(40))
    assert [target.deepest(root) for root in (10, 38, 39, 40, 41, 100)] == [29, 1, 0, None, None, None]
    assert Target(make_model("Llama")).deepest(10) is None
    # With one token more, all of the pass turns otherwise.
    text, draft = random_tokens(3, 35, VOCABULARY), random_tokens(4, 5, VOCABULARY)
    rows = []
    for deepest in (4, 5):
        cache = target.new_cache(80, 8)
        prefill(target, text, cache)
        rows.append(target.verify(5, DraftTree.from_chain(draft[:deepest]), cache)[0])
    expected = plain_logits(target.model, [*text, 5])
    assert error(rows[0], expected) < 1e-4
    assert error(rows[1], expected) > 1e-2


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


@pytest.mark.parametrize("width", [4, 9, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Llama", "Gemma3Text", "GPT2"])
def test_in_fixed_shapes_a_chain_gives_the_bits_of_plain_decoding(name: str, dtype: torch.dtype, width: int) -> None:
    model = make_model(name).to(dtype)
    shape = FixedShape(FixedShape.of(model, width).width, bucket=32)
    assert shape.width == {4: 4, 9: 12, 16: 16}[width]
    if place_changes_bits(dtype, shape.width):
        with pytest.raises(UnsupportedModelError, match="exactness='strict' cannot be kept"):
            select_target(model, name=name, exactness="strict", forward="torch", strict_width=width)
        return
    target = Target(model, shape, forward="torch")
    text, draft = random_tokens(5, 40, VOCABULARY), random_tokens(6, min(5, width - 1), VOCABULARY)
    plain = target.new_cache(60, 0)
    prefill(target, text, plain)
    expected = []
    for token in [7, *draft]:
        expected.append(target.verify(token, DraftTree.empty(), plain)[0])
        plain.commit([0])

    drafted = target.new_cache(60, 8)
    prefill(target, text, drafted)
    assert torch.equal(target.verify(7, DraftTree.from_chain(draft), drafted), torch.stack(expected))


@pytest.mark.parametrize("width", range(5, 12))
def test_strict_is_refused_in_shapes_whose_products_change_bits_by_the_place_of_a_row(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not place_changes_bits(torch.float32, width):
        pytest.skip("this machine's products give a row the same bits at any place of this many")
    model = make_model("GPT2")
    monkeypatch.setattr(FixedShape, "of", classmethod(lambda cls, model, width: cls(width)))
    with pytest.raises(UnsupportedModelError, match="exactness='strict' cannot be kept"):
        select_target(model, name="GPT2", exactness="strict", forward="torch", strict_width=width)


def test_fixed_shapes_compute_what_free_ones_do() -> None:
    model = make_model("Mistral")
    text = random_tokens(5, 40, VOCABULARY)
    target = Target(model, FixedShape(width=8, bucket=32), forward="torch")
    cache = target.new_cache(60, 8)
    prefill(target, text, cache)
    logits = target.verify(7, random_tree(0, 3, VOCABULARY), cache)
    assert logits.shape == (4, VOCABULARY)
    assert error(logits[0], plain_logits(model, [*text, 7])) < 1e-4


@pytest.mark.parametrize(
    ("dtype", "slow", "width"),
    [(torch.float32, True, 8), (torch.bfloat16, True, 4), (torch.bfloat16, False, 8), (torch.float16, True, 4)],
)
def test_fixed_shapes_are_as_wide_as_pays_on_the_kind_of_cpu(
    dtype: torch.dtype, slow: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixed_shape, "slow_products", lambda: slow)
    model = make_model("Llama").to(dtype)
    assert FixedShape.of(model).width == width
    assert [FixedShape.of(model, given).width for given in (2, 4, 5, 16, 17)] == [4, 4, 8, 16, 20]
