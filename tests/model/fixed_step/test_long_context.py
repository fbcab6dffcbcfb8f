"""Passes that attend to their past in a call without a mask, and to the columns behind it in another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from call_recorder import CallRecorder
from fixed_targets import Twins, fixed_target, run_and_check, some_steps
from tiny_models import TREES, VOCABULARY, WINDOW, make_model
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from reader_rag.kv_cache.fixed_cache import FixedCache
from reader_rag.model.fixed_step import attention
from reader_rag.model.fixed_step.attention import attend_to_all, attention_configs, joined_attention
from reader_rag.model.fixed_step.forward import StepForward
from reader_rag.model.fixed_step.inputs import InputBuffer, RowInput
from reader_rag.model.fixed_step.long_context import LEAST_PAST, Columns, LongContexts, seconds_on
from reader_rag.model.fixed_step.masks import step_masks
from reader_rag.model.fixed_step.shapes import StepShape
from reader_rag.model.fixed_step.step import FixedStep
from reader_rag.model.fixed_step.transfers import Transfers
from reader_rag.model.interface import Step
from reader_rag.model.target import Target

ONE_CALL = {"GptOss", "Gemma2", "GPTJ", "Falcon"}
"""Models whose attention is their own, or eager."""
ALL_WINDOWS = {"Mistral", "Ministral", "Phi3", "Starcoder2", "Moshi"}
"""Models of which every layer has a window, 16 positions here: no layer sees the whole past of a longer text."""


def always_two(step: FixedStep, target: Target) -> LongContexts:
    """Make a fixed step attend in two calls wherever that is possible."""
    heads = target.config.num_attention_heads
    step.long_contexts = LongContexts(step.cache, target.kinds, heads, None, least=1)
    return step.long_contexts


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The columns of every attention without a mask."""
    seen: list[int] = []

    def counted(query: Any, key: torch.Tensor, *rest: Any) -> Any:
        seen.append(key.shape[2])
        return attend_to_all(query, key, *rest)

    monkeypatch.setattr(attention, "attend_to_all", counted)
    return seen


# Families


@pytest.mark.parametrize("name", TREES)
def test_logits_are_those_of_the_dynamic_step(name: str, calls: list[int]) -> None:
    target, step = fixed_target(name)
    assert (step.long_contexts is None) == (name in ONE_CALL | ALL_WINDOWS)
    if name in ONE_CALL:
        return
    always_two(step, target)
    calls.clear()
    other = Target(make_model(name), forward="torch")
    twins = [Twins(target, other, n, 9 + 11 * n, 180) for n in range(3)]
    for round_ in range(8):
        run_and_check(step, twins[round_ % 3 :] if round_ % 2 else twins[: 1 + round_ % 3], round_)
    assert (len(calls) > 0) == (name not in ALL_WINDOWS)
    assert all(config._attn_implementation == "sdpa" for config in attention_configs(target.model))


@pytest.mark.parametrize("name", sorted(set(TREES) - ONE_CALL - ALL_WINDOWS))
def test_a_pass_in_two_calls_has_no_data_dependent_call(name: str, calls: list[int]) -> None:
    inputs = InputBuffer(torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.inference_mode():
        target = Target(make_model(name, dtype=torch.bfloat16), forward="torch")
        own = target.new_cache(150, 7)
        target.model(torch.ones(1, 9, dtype=torch.int64), past_key_values=own, use_cache=True)
        own.commit(list(range(9)))
        cache = FixedCache(target.config.num_hidden_layers)
        assert cache.join([own], 64) == [0]
        inputs.device = mode.from_tensor(inputs.device)
        forward = StepForward(target.model, target.kinds, target.to_backend, cache, inputs, target.layers)
        outputs = forward(StepShape(0, 1, 16, 112, 1, moves=True, past=64))
        assert outputs.logits.shape == (1, 16, VOCABULARY)
        assert set(calls) == {64}


# Attention


@pytest.mark.parametrize(("heads", "key_heads", "size", "value_size"), [(6, 2, 16, 16), (4, 4, 16, 12), (4, 1, 12, 12)])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_two_calls_are_one(heads: int, key_heads: int, size: int, value_size: int, dtype: Any, most: float) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, heads, 5, size, dtype=dtype), torch.randn(2, key_heads, 40, size, dtype=dtype)
    value = torch.randn(2, key_heads, 40, value_size, dtype=dtype)
    mask = torch.ones(2, 1, 5, 40, dtype=torch.bool)
    mask[:, :, :, 30:] = torch.rand(2, 1, 5, 10) < 0.5
    mask[..., 33] = True
    module: Any = SimpleNamespace(num_key_value_groups=heads // key_heads, is_causal=True)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.4)
    for past in (8, 30):
        got, weights = joined_attention(module, query, key, value, mask[..., past:], scaling=0.4)
        assert weights is None
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected, atol=most, rtol=most)
    whole, _ = joined_attention(module, query, key, value, mask, scaling=0.4)
    assert torch.equal(whole, expected)


def test_kernels_of_a_gpu_return_the_same_shapes() -> None:
    """By their fake tensors, which a build without CUDA has for single calls, but not for views."""
    with FakeTensorMode():
        query, key = (torch.empty(2, 3, n, 16, dtype=torch.bfloat16, device="cuda") for n in (8, 40))
        output, lse = attend_to_all(query, key, key, 0.25)
        assert output.shape == query.shape
        assert lse.shape == (2, 3, 8)
        assert lse.dtype == torch.float32
        query, key = (torch.empty(2, 3, n, 16, device="cuda") for n in (8, 40))
        output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, key, None, True)
        assert output.shape == query.shape
        assert lse.shape == (2, 3, 32)  # padded


def test_the_attention_of_the_configuration_comes_back_after_an_error() -> None:
    target, step = fixed_target()
    always_two(step, target)
    twin = Twins(target, Target(target.model, forward="torch"), 1, 70)
    seen = []

    def fails(*args: Any, **kwargs: Any) -> Any:
        seen.append(target.model.config._attn_implementation)
        raise ZeroDivisionError

    target.model.forward = fails  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        step.run(some_steps([twin], 1))
    assert seen == [attention.JOINED]
    assert target.model.config._attn_implementation == "sdpa"


# Masks


@pytest.mark.parametrize(("shown", "windowed"), [(WINDOW, 6), (48, 48)])
def test_layers_with_a_window_keep_a_mask_over_all_columns_once_it_excludes_some(shown: int, windowed: int) -> None:
    inputs = InputBuffer(torch.device("cpu"))
    shape = StepShape(0, 1, 4, shown, 1, past=10)
    (step,) = [Step(5, some_tree(), None)]  # type: ignore[arg-type]
    inputs.fill(shape, {0: RowInput(step.root, step.tree, 12, [])}, 63, Transfers())
    kinds = {"sliding_attention": WINDOW, "full_attention": 0}
    masks, whole = (step_masks(kinds, inputs.views(shape), shown, past) for past in (10, 0))
    assert list(masks) == list(kinds)
    assert masks["sliding_attention"].shape == (1, 1, 4, windowed)
    assert torch.equal(masks["full_attention"], whole["full_attention"][..., 10:])
    assert torch.equal(masks["sliding_attention"], whole["sliding_attention"][..., -windowed:])
    assert whole["full_attention"][..., :10].all()


def some_tree() -> Any:
    from random_trees import random_tree

    return random_tree(1, 3, VOCABULARY)


# The choice


def columns_of(seconds: Callable[..., float] | None, **options: Any) -> LongContexts:
    """The choice of a Llama whose cache has 4,096 columns."""
    target, step = fixed_target()
    step.run(some_steps([Twins(target, Target(target.model, forward="torch"), 1, 9, 3900)], 1))
    assert step.cache.columns == 4096
    return LongContexts(step.cache, target.kinds, 4, seconds, **options)


def test_columns_behind_the_past_are_few_and_take_few_values() -> None:
    choice = columns_of(None)
    assert choice.columns(LEAST_PAST - 1, LEAST_PAST - 1, 1, 16) == Columns(0, 512)
    seen = set()
    for length in range(LEAST_PAST, 4000):
        past, shown = choice.columns(length, length, 1, 16)
        assert past <= length
        assert length + 16 <= shown <= 1.25 * length + 16
        seen.add((past, shown))
    assert len(seen) == 16  # four between powers of two
    assert choice.columns(1000, 1900, 4, 8) == Columns(896, 896 + 1024 + 8)  # a block of 128, doubled three times
    assert choice.columns(4031, 4031, 1, 64) == Columns(3584, 4096)  # no more than there are


@pytest.mark.parametrize(("costs", "past"), [((1.0, 2.0), 1024), ((2.0, 1.0), 0)])
def test_the_cheaper_way_is_measured_once_for_like_passes(costs: tuple[float, float], past: int) -> None:
    measured: list[float] = []

    def seconds(function: Callable[[], None]) -> float:
        function()
        measured.append(costs[len(measured) % 2])
        return measured[-1]

    choice = columns_of(seconds)
    assert choice.columns(100, 100, 1, 16).past == 0
    assert measured == []
    for length in (1024, 1100, 1030):
        assert choice.columns(length, length, 1, 16).past == past
    assert choice.columns(1300, 1300, 1, 16).past == (1280 if past else 0)
    assert len(measured) == 2
    choice.columns(1024, 1024, 1, 4)
    choice.columns(2100, 2100, 1, 4)
    assert len(measured) == 6


def test_calls_are_timed_as_they_run() -> None:
    recorder, calls = CallRecorder(), [0]

    def function() -> None:
        calls[0] += 1
        torch.zeros(1).add_(1)

    assert seconds_on(torch.device("cpu"), None)(function) > 0
    called = calls[0]
    assert called > 10
    assert seconds_on(torch.device("cpu"), recorder)(function) > 0
    assert calls[0] == called + 2  # a call, and its recording
    assert recorder.graphs[0].replays > 10


# Recorded passes


@pytest.fixture
def recorded() -> Iterator[tuple[Target, FixedStep]]:
    target, step = fixed_target("Gemma3Text", recorder=CallRecorder())
    always_two(step, target)
    yield target, step
    assert not step.graphs.refused


def test_replays_are_right_for_other_lengths_of_the_same_past(recorded: tuple[Target, FixedStep]) -> None:
    target, step = recorded
    other = Target(make_model("Gemma3Text"), forward="torch")
    for n in range(5):
        twin = Twins(target, other, n, 65 + n, 180)
        for _ in range(3):
            run_and_check(step, [twin], 3, 4)
        twin.fixed.release()
    assert step.graphs.replays >= 5
    assert {shape.past for shape in step.graphs.shapes} == {64}
