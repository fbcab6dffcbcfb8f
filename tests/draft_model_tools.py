"""Draft models over tiny targets, and what tests ask of them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from heads import make_head
from tiny_models import COMMON, VOCABULARY, make_model

from reader_rag.config import DraftConfig, SamplingParams
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import Generation, Prompt
from reader_rag.errors import ReaderWarning

TOKENS = 23
CHAIN = DraftConfig(
    max_nodes=16, max_successors=0, calibrates=False, gated=False, min_probability=0.0, model_branches=1
)
"""A random model is sure of nothing: all that it drafts enters the tree."""
TREE = DraftConfig(max_nodes=16, max_successors=0, calibrates=False, gated=False)
SAMPLED = {"temperature": 0.8, "seed": 7, "top_p": 0.95, "repetition_penalty": 1.2}
LAYERS = COMMON | {"num_hidden_layers": 8}
"""Of a target deep enough for a head's default layers."""


def prompt_of(length: int, seed: int = 0) -> Prompt:
    return Prompt(np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist())


def random_assistant() -> Any:
    """A smaller model with other weights."""
    return make_model("Llama", COMMON | {"hidden_size": 16, "num_hidden_layers": 1})


def answer(engine: Engine, prompt: Prompt, length: int = TOKENS, **options: Any) -> Generation:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReaderWarning)  # a source that fails is switched off with a warning
        return engine.generate(prompt, SamplingParams(max_tokens=length, ignore_eos=True, **options), tenant="t")


def draft_model(kind: str, model: Any, folder: Path) -> dict[str, Any]:
    """The argument of an engine over `model` that gives it a draft model."""
    if kind == "head":
        return {"draft_model": make_head(folder / "head", model.config, scale=0.2)}
    return {"assistant": model if kind == "perfect" else random_assistant()}
