"""Requests that cannot be answered: each is refused by one line that names what is wrong, and harms no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from reader_rag.config import Grammar, SamplingParams
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import Passage, Prompt
from reader_rag.errors import CallbackError, ConfigError, PromptError, ReaderError, ScoresError
from reader_rag.llm import ReaderLLM
from reader_rag.llm.messages import describe_grammar

FOUR = SamplingParams(max_tokens=4)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ude00\ud83d", "x" * 50 + "\udce9"])
def test_lone_surrogates_are_refused_in_every_text(tiny_engine: Engine, text: str) -> None:
    says = "lone surrogate .character"
    with pytest.raises(PromptError, match=says):
        tiny_engine.encode(text)
    with pytest.raises(PromptError, match=says):
        tiny_engine.submit(tiny_engine.encode("a"), FOUR, passages=[Passage("p", text)])
    for settings in ({"stop": (text,)}, {"bad_words": (text,)}):
        with pytest.raises(ConfigError, match="a tuple of strings"):
            SamplingParams(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="without lone surrogates"):
        Grammar.regex(text)


@pytest.mark.parametrize(
    "token_ids",
    [[1.0, 2.0], [1, 2.5], ["1"], [None], [[1, 2]], 5, None, "abc", [1 << 70], np.ones(3), torch.ones(3), [1 + 0j]],
    ids=repr,
)
def test_token_ids_must_be_integers(tiny_engine: Engine, token_ids: Any) -> None:
    with pytest.raises(PromptError, match="a list of integers"):
        tiny_engine.submit(Prompt(token_ids), FOUR)


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple, list])
def test_token_ids_of_any_integer_type_give_the_same_answer(tiny_engine: Engine, kind: Callable[[Any], Any]) -> None:
    prompt = tiny_engine.encode("the garden")
    expected = tiny_engine.generate(prompt, FOUR).token_ids
    assert tiny_engine.generate(Prompt(kind(list(prompt.token_ids))), FOUR).token_ids == expected


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"prompt": "text"}, "a prompt must be a Prompt, not str"),
        ({"prompt": None}, "a prompt must be a Prompt"),
        ({"prompt": Prompt([1], offsets=[(0, 1), (1, 2)])}, "offsets as many as its token ids"),
        ({"prompt": Prompt([1], text=5)}, "text must be a string"),  # type: ignore[arg-type]
        ({"params": {"max_tokens": 4}}, "params must be SamplingParams, not dict"),
        ({"passages": "text"}, "passages must be a list"),
        ({"passages": ["text"]}, "a passage must be a Passage"),
        ({"passages": [Passage("a", 5)]}, "a passage must be a Passage"),  # type: ignore[arg-type]
        ({"draft": 5}, "draft must be DraftConfig, not 5"),
        ({"recall": "no"}, "recall must be bool, not 'no'"),
        ({"sampler": 5}, "sampler must be callable"),
        ({"draft_sources": 5}, "draft_sources must be a list"),
        ({"logits_processor": lambda ids, scores: scores}, "logits_processor must be a list"),
        ({"stopping_criteria": [5]}, "must be callable"),
        ({"tenant": 5}, "a tenant's name must be a string"),
        ({"tenant": "a\nb"}, "control or invisible characters"),
        ({"tenant": "\ud800"}, "control or invisible characters"),
        ({"tenant": "x" * 257}, "at most 256 characters"),
        ({"stream": True}, "unknown argument 'stream'"),
    ],
)
def test_arguments_of_another_type_are_refused(tiny_engine: Engine, arguments: dict[str, Any], says: str) -> None:
    given = {"prompt": tiny_engine.encode("a"), "params": FOUR} | arguments
    with pytest.raises(ReaderError, match=says) as caught:
        tiny_engine.submit(**given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"prompt": None}, "a prompt must be a Prompt, or a list of them, not NoneType"),
        ({"prompt": "text"}, "a prompt must be a Prompt, or a list of them, not str"),
        ({"prompt": iter([Prompt([1])])}, "a prompt must be a Prompt, or a list of them"),
        ({"prompt": [None]}, "a prompt must be a Prompt, not NoneType"),
        ({"params": 5}, "params must be a list, with one entry for each prompt, not int"),
        ({"params": [None, 5]}, "1 prompts"),
        ({"passages": None}, "passages must be a list, with one entry for each prompt, not NoneType"),
        ({"passages": [None]}, "passages must be a list"),
        ({"draft_sources": [None]}, "draft_sources are functions that make a source, not NoneType"),
    ],
)
def test_arguments_of_many_prompts_of_another_type_are_refused(
    tiny_engine: Engine, arguments: dict[str, Any], says: str
) -> None:
    given = {"prompt": [tiny_engine.encode("a")], "params": FOUR} | arguments
    with pytest.raises(ReaderError, match=says):
        tiny_engine.generate(**given)


@pytest.mark.parametrize("messages", [None, 5, "text", [None], ["text"], [["role", "user"]], b"x"])
def test_messages_of_another_type_are_refused(tiny_engine: Engine, messages: Any) -> None:
    with pytest.raises(ConfigError, match="messages must be a list of mappings"):
        tiny_engine.encode_chat(messages)


@pytest.mark.parametrize("prompt", [None, 5, ["text"], b"x", True])
def test_prompts_of_an_llm_are_strings(tiny_engine: Engine, prompt: Any) -> None:
    describe_grammar("Answer in JSON, described once:", Grammar.json_schema({"type": "object"}))
    llm = ReaderLLM.from_engine(tiny_engine, max_tokens=3)
    for formatted in (False, True):
        with pytest.raises(PromptError, match="a prompt must be a string, not"):
            llm.complete(prompt, formatted=formatted)


@pytest.mark.parametrize("given", [None, 5, True, object()])
def test_arguments_of_an_llm_of_another_type_are_refused(tiny_engine: Engine, given: Any) -> None:
    llm = ReaderLLM.from_engine(tiny_engine, max_tokens=3)
    with pytest.raises(ConfigError, match="sources must be a sequence"):
        llm.with_sources(given)
    for window in ("5", 5.0, [5], float("nan")):
        with pytest.raises(ConfigError, match="context_window must be an integer or None"):
            ReaderLLM.from_engine(tiny_engine, context_window=window)


def test_a_schema_without_a_bottom_is_refused(tiny_engine: Engine) -> None:
    pytest.importorskip("llguidance", reason="needs the extra 'grammar'")
    schema = json.loads('{"properties": {"a": ' * 300 + "{}" + "}}" * 300)
    with pytest.raises(ConfigError, match="json_schema grammar cannot be read"):
        tiny_engine.generate(tiny_engine.encode("a"), SamplingParams(grammar=Grammar.json_schema(schema)))


@pytest.mark.parametrize("tenant", [None, 5, "a\nb", "\ud800", "x" * 257])
def test_a_tenant_that_is_none_cannot_be_forgotten(tiny_engine: Engine, tenant: Any) -> None:
    with pytest.raises(ConfigError, match="a tenant's name"):
        tiny_engine.forget(tenant)


@pytest.mark.parametrize("returned", [None, "yes", object, {}, [None], [1, [2]]], ids=repr)
def test_a_criterion_must_say_whether_to_stop(tiny_engine: Engine, returned: Any) -> None:
    def undecided(ids: torch.Tensor, _: None) -> Any:
        return returned

    with pytest.raises(CallbackError, match="the stopping criterion undecided must return True or False"):
        tiny_engine.generate(tiny_engine.encode("a"), FOUR, stopping_criteria=[undecided])


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("speculate", [True, False])
def test_scores_without_a_number_are_an_error(
    tiny_engine: Engine, value: float, temperature: float, speculate: bool
) -> None:
    def spoil(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, value)

    params = SamplingParams(max_tokens=12, temperature=temperature, speculate=speculate, seed=1)
    with pytest.raises(ScoresError, match="all scores are NaN or minus infinity after the logits processors"):
        tiny_engine.generate(tiny_engine.encode("a"), params, logits_processor=[spoil])
    suppressed = SamplingParams(max_tokens=12, suppress_tokens=tuple(range(tiny_engine.requests.vocabulary)))
    with pytest.raises(ScoresError):
        tiny_engine.generate(tiny_engine.encode("a"), suppressed)


@pytest.mark.parametrize(
    "returned",
    [None, 5, "scores", torch.zeros(3), torch.zeros(1, 3), torch.zeros(1, 2, 3)],
    ids=["none", "int", "str", "1d", "2d", "3d"],
)
def test_a_processor_must_return_scores(tiny_engine: Engine, returned: Any) -> None:
    with pytest.raises(ConfigError, match="must return floating-point scores of shape"):
        tiny_engine.generate(tiny_engine.encode("a"), FOUR, logits_processor=[lambda ids, scores: returned])
    with pytest.raises(ConfigError, match="must return floating-point scores of shape .* not torch.int64"):
        tiny_engine.generate(tiny_engine.encode("a"), FOUR, logits_processor=[lambda ids, scores: scores.long()])


@pytest.mark.parametrize("changed", [torch.Tensor.to_sparse, lambda scores: scores.to("meta")], ids=["sparse", "meta"])
def test_scores_that_no_token_can_be_chosen_by_are_refused(tiny_engine: Engine, changed: Any) -> None:
    with pytest.raises(ConfigError, match="must return floating-point scores"):
        tiny_engine.generate(tiny_engine.encode("a"), FOUR, logits_processor=[lambda ids, scores: changed(scores)])


@pytest.mark.parametrize("token", [-1, 1 << 40, 2.0, None, "a"])
def test_a_sampler_must_choose_a_token_of_the_model(tiny_engine: Engine, token: Any) -> None:
    with pytest.raises(CallbackError, match="no token id in 0.."):
        tiny_engine.generate(tiny_engine.encode("a"), FOUR, sampler=lambda verified: lambda row: token)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(2), GeneratorExit(), ValueError("x"), MemoryError()])
def test_an_error_of_a_callback_arrives_with_its_type_and_harms_no_other_request(
    tiny_engine: Engine, error: BaseException
) -> None:
    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise error

    prompt = tiny_engine.encode("the garden")
    others = [tiny_engine.submit(prompt, SamplingParams(max_tokens=16)) for _ in range(3)]
    with pytest.raises(type(error)):
        tiny_engine.generate(tiny_engine.encode("a"), FOUR, logits_processor=[fails])
    assert {other.finish().token_ids for other in others} == {
        tiny_engine.generate(prompt, SamplingParams(max_tokens=16)).token_ids
    }


def test_integers_of_numpy_give_the_same_answer(tiny_engine: Engine) -> None:
    prompt = tiny_engine.encode("the garden")
    given = {"max_tokens": 6, "no_repeat_ngram": 3, "top_k": 9, "seed": 5, "logprobs": 2, "min_tokens": 2}
    expected = tiny_engine.generate(prompt, SamplingParams(**given, temperature=0.5)).token_ids
    for kind in (np.uint8, np.int64):
        params = SamplingParams(**{name: kind(value) for name, value in given.items()}, temperature=np.float32(0.5))  # type: ignore[arg-type]
        assert tiny_engine.generate(prompt, params).token_ids == expected


def test_integers_are_taken_for_numbers(tiny_engine: Engine) -> None:
    prompt = tiny_engine.encode("the garden")
    for name in ("temperature", "repetition_penalty"):
        whole, number = (SamplingParams(max_tokens=4, seed=1, **{name: value}) for value in (2, 2.0))  # type: ignore[arg-type]
        assert tiny_engine.generate(prompt, whole).token_ids == tiny_engine.generate(prompt, number).token_ids
