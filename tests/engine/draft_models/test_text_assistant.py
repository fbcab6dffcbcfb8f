"""Assistants of another vocabulary draft by text; answers are those of plain decoding."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from costs_stub import EverythingPays
from text_tokenizers import characters_tokenizer, lower_case_tokenizer, model_of, renumbered

from reader_rag.config import BatchConfig, DraftConfig, SamplingParams
from reader_rag.engine.draft_models.text_assistant import TextAssistantModel
from reader_rag.engine.engine import Engine
from reader_rag.errors import ConfigError, ReaderWarning

ALWAYS = DraftConfig(max_nodes=16, max_successors=0, calibrates=False, gated=False, min_probability=0.0)
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 7, "top_p": 0.95}


def saved(model: Any, tokenizer: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Made:
    """An engine over a model of single characters, and the same model with other token ids as its assistant."""

    def __init__(self, folder: Path, *, perfect: bool = True, **options: Any) -> None:
        self.tokenizer, other = characters_tokenizer(0), characters_tokenizer(1)
        model = model_of(self.tokenizer, tie_word_embeddings=False)
        assistant = renumbered(model, self.tokenizer, other) if perfect else model_of(other, num_hidden_layers=1)
        folder = saved(assistant, other, folder)
        self.engine = Engine(model, self.tokenizer, draft=ALWAYS, draft_model=folder, profile="off", **options)
        self.engine.context.costs.current = EverythingPays()  # type: ignore[assignment]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    made = Made(tmp_path / "assistant")
    yield made
    made.engine.close()


def answer(engine: Engine, text: str, **params: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReaderWarning)
        return engine.generate(engine.encode(text), SamplingParams(max_tokens=30, ignore_eos=True, **params))


PROMPTS = ["the station is", "a long prompt " * 12, "def f(x):\n    return"]


@pytest.mark.parametrize("text", PROMPTS)
def test_the_same_model_with_other_token_ids_is_right(made: Made, text: str) -> None:
    """Each token is a character in both vocabularies, so all that it drafts is accepted."""
    result = answer(made.engine, text)
    assert result.token_ids == answer(made.engine, text, speculate=False).token_ids
    assert isinstance(made.engine.draft_model, TextAssistantModel)
    tally = made.engine.draft_model.tally
    special = set(made.tokenizer.all_special_ids) & set(result.token_ids)
    assert not special
    assert tally.drafted == tally.right > 20
    assert result.stats.steps <= 10  # search has a part of the nodes


@pytest.mark.parametrize("params", [{}, SAMPLED])
def test_an_assistant_that_is_wrong_changes_nothing(tmp_path: Path, params: dict[str, Any]) -> None:
    engine = Made(tmp_path / "assistant", perfect=False).engine
    for text in PROMPTS:
        drafted = answer(engine, text, **params)
        assert drafted.token_ids == answer(engine, text, **params, speculate=False).token_ids
        assert drafted.stats.drafted > 0
    engine.close()


@pytest.mark.parametrize("params", [{}, SAMPLED])
def test_a_batch_of_requests(made: Made, params: dict[str, Any]) -> None:
    engine = made.engine
    engine.scheduler.limits = BatchConfig(max_rows=3)
    prompts = [engine.encode(text) for text in PROMPTS]
    settings = SamplingParams(max_tokens=25, ignore_eos=True, **params)
    answers = [one.token_ids for one in engine.generate(prompts, settings)]
    assert answers == [one.token_ids for one in engine.generate(prompts, replace(settings, speculate=False))]


def test_a_cached_prompt_is_not_read_again(tmp_path: Path) -> None:
    made = Made(tmp_path / "assistant", prefix_bytes=1 << 22)
    prefixes = made.engine.draft_model.prefixes  # type: ignore[union-attr]
    assert prefixes is not None
    first = answer(made.engine, PROMPTS[1])
    assert len(prefixes) == 3  # 168 characters and 30 of the answer, but what is drafted last
    assert answer(made.engine, PROMPTS[1]).token_ids == first.token_ids
    made.engine.forget()
    assert len(prefixes) == 0
    made.engine.close()


def test_memory_is_reserved_for_more_tokens_than_the_target_has(made: Made) -> None:
    request = made.engine.requests.build(made.engine.encode("a b"), SamplingParams(max_tokens=97))
    (source,) = request.draft_sources
    model = made.engine.draft_model
    assert isinstance(model, TextAssistantModel)
    assert source.nbytes == model.assistant.target.cache_bytes(150 + ALWAYS.model_tokens, 16)  # type: ignore[attr-defined]


def test_a_vocabulary_that_cannot_be_aligned_is_refused(tmp_path: Path) -> None:
    tokenizer, other = characters_tokenizer(0), lower_case_tokenizer()
    folder = saved(model_of(other), other, tmp_path / "assistant")
    with pytest.raises(
        ConfigError, match=r"the tokenizer of \S+ does not give texts back .* of the same family"
    ) as caught:
        Engine(model_of(tokenizer), tokenizer, draft_model=folder)
    assert "\n" not in str(caught.value)
