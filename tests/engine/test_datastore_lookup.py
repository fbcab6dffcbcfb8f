"""Answers and texts in a datastore are drafted from, change nothing, and stay with their tenant."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from costs_stub import EverythingPays
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from reader_rag.config import DatastoreConfig, DraftConfig, SamplingParams
from reader_rag.datastore import Cursor, Datastore
from reader_rag.engine.datastore_lookup import answers_of, open_datastore, passages_of, texts_of
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import Generation, Passage, Prompt
from reader_rag.errors import (
    ConfigError,
    DatastoreBusyError,
    DatastoreMismatchError,
    DatastoreNotFoundError,
    EngineClosedError,
)
from reader_rag.sampling.sampler import Verified

ALONE = DraftConfig(max_successors=0, calibrates=False)
"""Nothing is remembered from answer to answer but what the datastore holds."""


class Made:
    """Engines over the tiny model and a folder; closed at the end of the test."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        self._model, self.tokenizer, self.folder = model, tokenizer, folder
        self.vocabulary = model.config.vocab_size
        self._engines: list[Engine] = []

    def __call__(self, *, datastore: bool = True, **recall: Any) -> Engine:
        engine = Engine(
            self._model,
            self.tokenizer,
            draft=ALONE,
            prefix_bytes=0,
            datastore=self.folder if datastore else None,
            recall=DatastoreConfig(**recall),
        )
        engine.context.costs.current = EverythingPays()
        self._engines.append(engine)
        return engine

    def keeping(self) -> Engine:
        return self(keeps_answers=True)

    def opened(self, *, read_only: bool = True) -> Datastore:
        return open_datastore(self.folder, self.tokenizer, self.vocabulary, read_only=read_only)

    def end(self, *engines: Engine) -> None:
        """Close these, or all."""
        for engine in engines or self._engines:
            engine.close()
            if engine.lookup is not None:
                engine.lookup.close()


@pytest.fixture
def made(tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Iterator[Made]:
    made = Made(tiny_model, tiny_tokenizer, tmp_path / "drafts")
    yield made
    made.end()


def ask(engine: Engine, text: str = "what is the answer", tenant: str = "", **generation: Any) -> Generation:
    settings = SamplingParams(**({"max_tokens": 40, "ignore_eos": True} | generation))
    return engine.generate(engine.context.tokenize(text), settings, tenant=tenant)


def drafted(answer: Generation) -> int:
    return answer.stats.accepted_by_source.get("datastore", 0)


@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.0, "seed": 3}])
def test_a_question_that_comes_again_is_drafted_from_its_answer(made: Made, sampled: dict[str, Any]) -> None:
    engine = made.keeping()
    first, again = ask(engine, **sampled), ask(engine, **sampled)
    plain = ask(engine, speculate=False, **sampled)
    assert first.token_ids == again.token_ids == plain.token_ids
    assert drafted(first) == 0
    assert drafted(again) > 30
    assert again.stats.steps < first.stats.steps / 4
    assert drafted(plain) == 0


def test_requests_that_share_passes_find_them_too(made: Made) -> None:
    engine = made.keeping()
    prompt = engine.context.tokenize("what is the answer")
    settings = SamplingParams(max_tokens=40, ignore_eos=True)
    (first,) = engine.generate([prompt], settings)
    again = engine.generate([prompt] * 3, settings)
    assert {answer.token_ids for answer in again} == {first.token_ids}
    assert all(drafted(answer) > 30 for answer in again)


def test_answers_outlive_the_process_and_equal_ones_are_kept_once(made: Made) -> None:
    engine = made.keeping()
    first = ask(engine)
    ask(engine)
    made.end(engine)
    with made.opened() as store:
        assert store.stats()[answers_of("")].documents == 1
    assert drafted(ask(made())) > 30
    assert ask(made()).token_ids == first.token_ids


def test_closing_the_engine_brings_answers_to_the_disk(made: Made) -> None:
    engine = made.keeping()
    ask(engine)
    engine.close()
    with made.opened() as store:
        assert store.stats()[answers_of("")].documents == 1
    with pytest.raises(EngineClosedError):
        ask(engine)


def test_no_tenant_finds_what_another_asked(made: Made) -> None:
    engine = made.keeping()
    ask(engine, tenant="a")
    assert drafted(ask(engine, tenant="b")) == 0
    assert drafted(ask(engine)) == 0
    assert drafted(ask(engine, tenant="a")) > 30


@pytest.mark.parametrize("namespace", [texts_of("a"), passages_of("a"), "shared"])
def test_texts_of_the_tenant_and_shared_ones_are_searched_and_no_others(made: Made, namespace: str) -> None:
    answer = ask(made(datastore=False))
    with made.opened(read_only=False) as store:
        store.add("manual", answer.token_ids, namespace=namespace)
        if namespace == "shared":
            store.share("shared")
    engine = made()
    assert drafted(ask(engine, tenant="a")) > 20
    assert (drafted(ask(engine, tenant="b")) > 20) == (namespace == "shared")


def test_forgetting_a_tenant_removes_its_answers_from_the_disk_and_nobody_elses(made: Made) -> None:
    engine = made.keeping()
    for tenant in ("a", "b"):
        ask(engine, tenant=tenant)
    engine.forget("a")
    assert drafted(ask(engine, tenant="b")) > 30
    assert engine.lookup is not None
    assert answers_of("a") not in engine.lookup.datastore.namespaces()
    assert drafted(ask(engine, tenant="a")) == 0


def test_answers_that_were_broken_off_or_are_very_short_are_not_kept(made: Made) -> None:
    engine = made.keeping()
    ask(engine, max_tokens=4)
    with engine.submit(engine.context.tokenize("what is this"), SamplingParams(max_tokens=40)) as stream:
        next(stream)
    assert engine.lookup is not None
    assert engine.lookup.datastore.stats().get(answers_of(""), None) is None


def test_the_oldest_answers_go_when_there_are_too_many(made: Made) -> None:
    engine = made(keeps_answers=True, max_answer_tokens=150)
    for question in ("what is a", "what is b", "what is c", "what is d"):
        ask(engine, question)
        assert engine.lookup is not None
        engine.lookup.flush()  # bounds are seen to with a commit
    assert drafted(ask(engine, "what is d")) > 20
    assert engine.lookup.datastore.stats()[answers_of("")].tokens <= 150


def test_nothing_is_written_unless_answers_are_kept(made: Made) -> None:
    made.end(made.keeping())
    before = sorted(path.name for path in made.folder.rglob("*"))
    ask(made())
    assert sorted(path.name for path in made.folder.rglob("*")) == before


def test_an_answer_is_right_and_complete_when_the_datastore_fails(
    made: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = made.keeping()
    first = ask(engine)

    def fail(*_: object, **__: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(Cursor, "search", fail)
    monkeypatch.setattr(Datastore, "add", fail)
    with caplog.at_level(logging.ERROR):
        assert ask(engine).token_ids == first.token_ids
    assert "drafted without it" in caplog.text
    assert "could not be added" in caplog.text


class TestWhatCannotBe:
    def test_there_is_no_datastore_to_read(self, made: Made) -> None:
        with pytest.raises(DatastoreNotFoundError, match="no datastore at"):
            made()

    def test_answers_are_to_be_kept_nowhere(self, made: Made) -> None:
        with pytest.raises(ConfigError, match="keeps_answers needs a datastore"):
            made(datastore=False, keeps_answers=True)

    def test_two_processes_keep_answers(self, made: Made) -> None:
        made.keeping()
        with pytest.raises(DatastoreBusyError, match="another process writes"):
            made.keeping()

    def test_it_is_of_another_tokenizer(self, made: Made) -> None:
        Datastore.open(made.folder, vocabulary=made.vocabulary, tokenizer="another").close()
        with pytest.raises(DatastoreMismatchError):
            made()

    @pytest.mark.parametrize(
        "wrong",
        [{"max_answer_tokens": 0}, {"max_answer_age_s": 0.0}, {"max_places": 0}, {"reach": 0}, {"least_match": 65}],
    )
    def test_a_setting_is_out_of_its_range(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            DatastoreConfig(**wrong)


def test_prompts_of_one_token_are_kept_whole(made: Made) -> None:
    engine = made.keeping()
    settings = SamplingParams(max_tokens=20, ignore_eos=True)
    prompt = Prompt((7,), "")
    first, again = engine.generate(prompt, settings), engine.generate(prompt, settings)
    assert first.token_ids == again.token_ids


def test_a_request_may_leave_the_datastore_alone(made: Made) -> None:
    engine = made.keeping()
    prompt = engine.context.tokenize("what is the answer")
    settings = SamplingParams(max_tokens=40, ignore_eos=True)
    first = engine.generate(prompt, settings, recall=False)
    assert engine.lookup is not None
    assert engine.lookup.datastore.namespaces() == []
    engine.generate(prompt, settings)
    again = engine.generate(prompt, settings, recall=False)
    assert first.token_ids == again.token_ids
    assert drafted(again) == 0


def test_what_an_earlier_answer_copied_is_still_told_when_the_answer_comes_from_the_datastore(made: Made) -> None:
    engine = made.keeping()
    passage = Passage("heron", "the heron stands in the water and waits for the fish to come near")
    prompt = engine.context.tokenize(f"passages: {passage.text} question: what does it do")
    said = engine.context.tokenize("I see that the heron stands in the water and waits for it").token_ids

    def forced(verified: Verified) -> Any:
        return lambda row: said[verified.position(row) - len(prompt.token_ids)]

    settings = SamplingParams(max_tokens=len(said), ignore_eos=True)
    first, again = (engine.generate(prompt, settings, [passage], sampler=forced) for _ in range(2))
    assert first.token_ids == again.token_ids == said
    assert drafted(again) > 10
    for answer in (first, again):
        longest = max(answer.copied, key=lambda span: span.text_end - span.text_start)
        assert longest.passage_id == "heron"
        copied = answer.text[longest.text_start : longest.text_end]
        assert "heron stands in the water and waits for" in copied
        assert passage.text[longest.passage_start : longest.passage_end] == copied
