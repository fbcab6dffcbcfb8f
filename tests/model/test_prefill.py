"""What a prompt's chunks show to the successor table, without changing the answer's first logits."""

from __future__ import annotations

import pytest
import torch
from random_trees import random_tokens
from tiny_models import TREES, VOCABULARY, make_model

from reader_rag.model import target as step
from reader_rag.model.fixed_shape import FixedShape
from reader_rag.model.interface import prefill
from reader_rag.model.target import Target


@pytest.mark.parametrize("fixed", [None, FixedShape(width=5, bucket=64)])
@pytest.mark.parametrize("name", sorted(TREES))
def test_what_is_seen_of_a_prompt_changes_no_bit_and_ranks_what_comes_next(
    name: str, fixed: FixedShape | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "PREFILL_CHUNK", 32)
    model = make_model(name)
    target, text = Target(model, fixed, forward="torch"), random_tokens(5, 40, VOCABULARY)
    seen: dict[int, torch.Tensor] = {}
    unseen = prefill(target, text, target.new_cache(40, 1))
    logits = prefill(target, text, target.new_cache(40, 1), seen.__setitem__)
    assert torch.equal(logits, unseen)
    with torch.inference_mode():
        whole = model(torch.tensor([text]), use_cache=False).logits[0]
    assert sorted(seen) == [0, 32]
    assert torch.equal(torch.cat([seen[0], seen[32]]).argmax(-1), whole.argmax(-1))
    assert not any(module._forward_hooks for module in model.modules())
