"""Every family of models that verifies trees decodes the same tokens by the fixed step as by the dynamic one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from costs_stub import EverythingPays
from tiny_models import TREES, WINDOW, make_model
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from reader_rag.bench.generate.random_weights import NoText
from reader_rag.config import DraftConfig, SamplingParams
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import Generation, Prompt
from reader_rag.errors import ReaderWarning
from reader_rag.model.fixed_step.step import FixedStep

TOKENS = 40
MUST_NOT = ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Gemma2", "Gemma3Text", "Phi3")


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
    print(name, notes)
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
