"""Draft models beside everything else that decodes: batches, prefix cache, grammars, processors, a datastore."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from costs_stub import EverythingPays
from heads import make_head
from tiny_models import COMMON, make_model
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from reader_rag.config import BatchConfig, DatastoreConfig, DraftConfig, Grammar, SamplingParams
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import Generation, Prompt

KINDS = ["perfect", "random", "head"]
SHARED = "the tin in the station is an on and to the other in this " * 4
"""A prefix of more than two blocks of the prefix cache."""
PROMPTS = [
    "what is the answer to that",
    SHARED + "one",
    SHARED + "two and three",
    "zebra",
]
LENGTHS = [30, 8, 16, 20]
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 3, "top_k": 40, "repetition_penalty": 1.1}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "grammar": {"grammar": Grammar.regex("(the |tin |in |[0-9]+ ){9,60}")},
    "sampled grammar": SAMPLED | {"grammar": Grammar.regex("(the |tin |in |[0-9]+ ){9,60}")},
}


@pytest.fixture(params=KINDS)
def engine(
    request: pytest.FixtureRequest,
    tiny_model: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> Iterator[Engine]:
    """An engine with a draft model, a prefix cache, and a datastore that keeps answers."""
    options: dict[str, Any] = {"assistant": tiny_model}
    if request.param == "random":
        small = COMMON | {"vocab_size": len(tiny_tokenizer), "max_position_embeddings": 2048, "num_hidden_layers": 1}
        options = {"assistant": make_model("Llama", small)}
    if request.param == "head":
        options = {"draft_model": make_head(tmp_path / "head", tiny_model.config, scale=0.3, layer_ids=(0, 1, 2))}
    engine = Engine(
        tiny_model,
        tiny_tokenizer,
        draft=DraftConfig(gated=False),
        profile="off",
        datastore=tmp_path / "store",
        recall=DatastoreConfig(keeps_answers=True),
        **options,
    )
    engine.context.costs.current = EverythingPays()  # type: ignore[assignment]
    yield engine
    engine.close()
    assert engine.lookup is not None
    engine.lookup.close()


def decode(engine: Engine, prompts: list[Prompt], **params: Any) -> list[Generation]:
    each = [SamplingParams(max_tokens=length, **params) for length in LENGTHS]
    return engine.generate(prompts, each, tenant="t")


def test_answers_are_those_of_plain_decoding_whatever_decodes_beside_it(engine: Engine) -> None:
    """Every answer is decoded twice with drafts: the second time with its prefix cached and itself in the datastore."""
    engine.scheduler.limits = BatchConfig(max_rows=3)
    prompts = [engine.encode(text) for text in PROMPTS]
    for name, params in PARAMS.items():
        engine.forget("t")
        plain = [answer.token_ids for answer in decode(engine, prompts, speculate=False, **params)]
        engine.forget("t")
        first, again = (decode(engine, prompts, **params) for _ in range(2))
        for drafted in (first, again):
            assert [answer.token_ids for answer in drafted] == plain, name
            assert all(sum(counts.asked for counts in a.stats.draft_sources.values()) > 0 for a in drafted)
        assert again[1].stats.reused_tokens > 0
        assert again[0].stats.accepted_by_source.get("datastore", 0) > 0
