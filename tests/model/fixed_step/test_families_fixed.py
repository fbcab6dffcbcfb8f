"""Every family of models that verifies trees decodes the same tokens by the fixed step as by the dynamic one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from call_recorder import CallRecorder
from costs_stub import EverythingPays
from tiny_models import TREES, VOCABULARY, WINDOW, long_rope, make_model
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from reader_rag.bench.generate.random_weights import NoText
from reader_rag.config import DraftConfig, SamplingParams
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import Generation, Prompt
from reader_rag.errors import ConfigError, ReaderWarning
from reader_rag.kv_cache.fixed_cache import FixedCache
from reader_rag.model.fixed_step.forward import StepForward
from reader_rag.model.fixed_step.inputs import InputBuffer
from reader_rag.model.fixed_step.select import add_fixed_step
from reader_rag.model.fixed_step.shapes import StepShape
from reader_rag.model.fixed_step.step import FixedStep
from reader_rag.model.target import Target

TOKENS = 40
GROUPED = ("GptOss", "Mixtral", "Qwen3Moe", "Olmoe", "DeepseekV3")
"""Models whose experts are multiplied in groups: PyTorch reads the groups' sizes on the host, but in bfloat16."""


def prompt_of(length: int) -> list[int]:
    """Tokens that repeat after eleven, so that copies are drafted from the first step on."""
    return [3 + 7 * k % 11 for k in range(length)]


def made(model: PreTrainedModel, **options: Any) -> tuple[Engine, list[str]]:
    """An engine that verifies all that it drafts, and what it reported."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = Engine(model, NoText(), draft=DraftConfig(max_nodes=16), forward="torch", **options)  # type: ignore[arg-type]
    engine.context.costs.current = EverythingPays()  # type: ignore[assignment]
    return engine, [str(note.message) for note in caught if issubclass(note.category, ReaderWarning)]


def step_of(engine: Engine) -> FixedStep:
    step = engine.target.fixed_step
    assert isinstance(step, FixedStep)
    return step


def answer(engine: Engine, length: int, **options: Any) -> Generation:
    return engine.generate(Prompt(prompt_of(length)), SamplingParams(max_tokens=TOKENS, **options))


@pytest.mark.parametrize("name", TREES)
def test_answers_of_the_fixed_step_are_those_of_the_dynamic_one(name: str) -> None:
    model = make_model(name)
    fixed, notes = made(model, cuda_graphs="on")
    assert notes == []
    step = step_of(fixed)
    dynamic, _ = made(model, cuda_graphs="off")
    before = step.passes
    accepted = 0
    for length in (WINDOW - 6, 3 * WINDOW + 12):
        for options in ({}, {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 7}, {"speculate": False}):
            expected, got = answer(dynamic, length, **options), answer(fixed, length, **options)
            assert got.token_ids == expected.token_ids
            accepted += got.stats.accepted
    assert accepted > 10
    assert step.passes > before


@pytest.mark.parametrize("name", TREES)
def test_a_pass_has_no_data_dependent_call(name: str) -> None:
    """Under fake tensors, which have no contents, a call that depends on contents is an error."""
    inputs = InputBuffer(torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.inference_mode():
        dtype = torch.bfloat16 if name in GROUPED else torch.float32
        target = Target(make_model(name, dtype=dtype), forward="torch")
        own = target.new_cache(20, 7)
        target.model(torch.ones(1, 9, dtype=torch.int64), past_key_values=own, use_cache=True)
        own.commit(list(range(9)))
        cache = FixedCache(target.config.num_hidden_layers)
        assert cache.join([own], 64) == [0]
        inputs.device = mode.from_tensor(inputs.device)
        forward = StepForward(target.model, target.kinds, target.to_backend, cache, inputs, target.layers)
        for shape in (StepShape(0, 1, 1, 64, 1), StepShape(0, 1, 16, 128, 1, moves=True, layers=(1,), draws=True)):
            outputs = forward(shape)
            assert outputs.logits.shape == (1, shape.width, VOCABULARY)
            assert outputs.ranked.shape == (1, shape.width, 10)


@pytest.mark.parametrize("name", GROUPED)
def test_experts_in_groups_are_recorded_in_bfloat16_alone(name: str) -> None:
    target = Target(make_model(name), forward="torch")
    with pytest.warns(
        ReaderWarning, match=r"the outcome of _grouped_mm in moe.py:\d+ depends on the contents of tensors"
    ):
        assert add_fixed_step(target, "on", name=name, recorder=CallRecorder()) is None
    assert target.fixed_step is None


def test_rotations_that_depend_on_the_length_and_adapters_keep_the_dynamic_step() -> None:
    target = Target(long_rope(40), forward="torch")
    with pytest.warns(ReaderWarning, match="its rotary angles depend on the length of the text"):
        assert add_fixed_step(target, "on", name="x") is None
    target = Target(make_model("Llama"), forward="torch")
    target.model.model.layers[0].mlp.merged_adapters = []
    with pytest.warns(ReaderWarning, match="adapters may be exchanged at any time"):
        assert add_fixed_step(target, "on", name="x") is None


def test_a_model_that_is_wrong_in_fixed_shapes_keeps_the_dynamic_step() -> None:
    target = Target(make_model("Llama"), forward="torch")
    forward = target.model.forward

    def wrong(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if isinstance(kwargs.get("past_key_values"), FixedCache):
            output.logits = output.logits.roll(1, -1)
        return output

    target.model.forward = wrong  # type: ignore[method-assign]
    with pytest.warns(ReaderWarning, match="its logits are others in fixed shapes"):
        assert add_fixed_step(target, "on", name="x") is None
    with pytest.raises(ConfigError, match="set forward='torch' too"):
        Engine(make_model("Llama"), NoText(), cuda_graphs="on")  # type: ignore[arg-type]
    assert made(make_model("Llama"))[0].target.fixed_step is None  # "auto" on the CPU
