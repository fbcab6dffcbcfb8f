"""What is recorded beside an answer: the target's most likely next tokens after every position."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, make_model

from reader_rag.bench.generate.random_weights import NoText
from reader_rag.bench.replay.record import best_after
from reader_rag.config import Forward
from reader_rag.engine.engine import Engine


@pytest.mark.parametrize("forward", ["auto", "torch"])
@pytest.mark.parametrize("length", [1, 2, 150])
def test_the_best_next_tokens_are_the_models_own_at_every_position(forward: Forward, length: int) -> None:
    engine = Engine(make_model("Llama"), NoText(), forward=forward)  # type: ignore[arg-type]
    tokens = np.random.default_rng(0).integers(3, VOCABULARY, length).tolist()
    best = best_after(engine, tokens)
    with torch.inference_mode():
        expected = engine.model(torch.tensor([tokens])).logits[0].topk(8).indices.numpy()
    assert best.shape == (length, 8)
    assert (best[:, 0] == expected[:, 0]).all()
    assert np.mean(best == expected) > 0.95  # equal but for places that rounding may exchange
