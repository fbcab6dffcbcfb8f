"""An EAGLE-3 head drafts here what it drafts in vLLM: the same random weights, the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from heads import make_head
from transformers import AutoConfig, AutoModelForCausalLM

from reader_rag.draft.source import Budget, RequestState, Verified
from reader_rag.engine.draft_models.eagle3 import Eagle3Model
from reader_rag.engine.draft_models.loading import TargetParts, load_draft_model
from reader_rag.engine.draft_models.source import DraftRequest, ModelSource
from reader_rag.kv_cache.layer_states import LayerOutputs
from reader_rag.model.target import Target

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

PROGRAM = Path(__file__).with_name("eagle_in_vllm.py")
PROMPTS, LENGTH, TOKENS, DRAFTED = 20, 40, 12, 4
LEAST_MARGIN = 1e-3
"""Between the two best scores of a drafted token; below it, rounding may decide."""
HEADS: dict[str, dict[str, Any]] = {
    "all tokens, shared embedding, default layers": {"own_embedding": False},
    "some tokens, own embedding, given layers": {"draft_vocabulary": 16000, "layer_ids": (1, 9, 20)},
    "residual as it is": {"own_embedding": False, "norm_before_residual": False, "layer_ids": (3, 15, 28)},
    "of the first format": {"speculators": False, "draft_vocabulary": 16000},
}


@pytest.fixture(scope="module")
def model() -> str:
    """The folder of the model: what `READER_RAG_VLLM_MODEL` names, or the default one where it was converted before."""
    from reader_rag.model.registry import DEFAULT_MODEL, resolve_model

    return os.environ.get("READER_RAG_VLLM_MODEL") or str(resolve_model(DEFAULT_MODEL))


@pytest.fixture(scope="module")
def target(model: str) -> Target:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
    return Target(loaded)


@pytest.mark.parametrize("kind", HEADS)
def test_the_same_head_drafts_the_same_tokens(model: str, target: Target, tmp_path: Path, kind: str) -> None:
    # A large output head: the scores lie far apart.
    head = make_head(tmp_path / "head", AutoConfig.from_pretrained(model), output_scale=4.0, **HEADS[kind])
    vocabulary = int(target.config.vocab_size)
    prompts = np.random.default_rng(0).integers(10, vocabulary, (PROMPTS, LENGTH)).tolist()
    wanted = {"model": model, "head": str(head), "drafted": DRAFTED, "prompts": prompts, "max_tokens": TOKENS}
    ran = subprocess.run(
        [sys.executable, str(PROGRAM)], input=json.dumps(wanted), capture_output=True, text=True, timeout=900
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    theirs = json.loads(ran.stdout)
    tokenizer: Any = None
    loaded = load_draft_model(head, TargetParts(target, tokenizer, "the model", vocabulary, encode=list))
    assert isinstance(loaded, Eagle3Model)
    request = DraftRequest(LENGTH + TOKENS, "", vocabulary, vocabulary, tokens=DRAFTED, branches=2)
    compared = 0
    for prompt, answer in zip(prompts, theirs, strict=True):
        tokens = np.array([*prompt, *answer["tokens"]], np.int32)
        outputs, cache = LayerOutputs(loaded.head.config.hidden_layers), target.new_cache(len(tokens), 1)
        for _ in target.prefill_chunks(tokens.tolist(), cache, None, outputs):
            pass
        states = outputs.take(len(tokens))
        assert states is not None
        source, start = ModelSource(loaded.open(request)), 0
        for length, drafted in sorted((int(length), drafted) for length, drafted in answer["drafts"].items()):
            if length > len(tokens):
                continue  # behind the answer's end
            part = type(states)(states.layers, start, states.rows[start : length - 1])
            source.observe(Verified((0,), 0, hidden_states=part))
            proposal = source.propose(RequestState(tokens[:length], LENGTH), Budget(2 * DRAFTED, DRAFTED))
            chances = np.array(proposal.logprobs).reshape(DRAFTED, 2)
            assert (chances[:, 0] - chances[:, 1]).min() > LEAST_MARGIN
            assert list(proposal.tokens)[::2] == drafted
            start = length - 1
            compared += 1
        source.forget()
    assert compared >= PROMPTS * (TOKENS // (DRAFTED + 1))
