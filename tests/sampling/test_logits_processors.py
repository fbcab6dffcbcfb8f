"""Whatever changes the scores or ends the text: drafted, plain and `transformers`' decoding give the same tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from costs_stub import EverythingPays
from tiny_models import Noise
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LlamaForCausalLM,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteria,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkLogitsProcessor,
)

from reader_rag.config import DraftConfig, SamplingParams
from reader_rag.config.grammar import Grammar
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import Generation, Prompt
from reader_rag.errors import ConfigError, GrammarError
from reader_rag.sampling.logits_processors import LogitBias, OpenAIPenalties, copy_processors, make_processors

TEXT = "the cat and the dog and the cat and the dog in the of and the cat"
TOKENS = 40
END = 2  # <eos> of the tiny tokenizer
SAMPLED = SamplingParams(max_tokens=TOKENS, temperature=0.9, seed=5)


@pytest.fixture(scope="module")
def engine(tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast) -> Engine:
    """An engine over the tiny model that verifies everything it drafts."""
    return made(tiny_model, tiny_tokenizer)


def made(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Engine:
    engine = Engine(model, tokenizer, draft=DraftConfig(max_nodes=24))
    engine.context.costs.current = EverythingPays()  # type: ignore[assignment]
    return engine


@pytest.fixture(scope="module")
def prompt(engine: Engine) -> Prompt:
    return engine.encode(TEXT)


def theirs(
    model: LlamaForCausalLM, prompt: Prompt, processors: Sequence[Any] = (), max_tokens: int = TOKENS, **options: Any
) -> tuple[int, ...]:
    ids = torch.tensor([list(prompt.token_ids)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        logits_processor=LogitsProcessorList(processors),
        pad_token_id=0,
        **options,
    )
    return tuple(out[0, ids.shape[1] :].tolist())


def both(engine: Engine, prompt: Prompt, generation: SamplingParams, **options: Any) -> Generation:
    """The drafted answer, after making sure that the plain one has the same tokens and text, and drafts were right."""
    plain = engine.generate(prompt, replace(generation, speculate=False), **options)
    drafted = engine.generate(prompt, generation, **options)
    again = engine.generate(prompt, generation, **options)  # with what was learned from the first
    assert drafted.token_ids == again.token_ids == plain.token_ids
    assert drafted.text == plain.text
    assert drafted.finish_reason == plain.finish_reason
    assert again.stats.accepted > 0
    return drafted


# Settings

WARPED: list[tuple[dict[str, Any], list[Any]]] = [
    ({}, []),
    ({"top_k": 5}, [TopKLogitsWarper(5)]),
    ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
    ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
    ({"typical_p": 0.6}, [TypicalLogitsWarper(0.6)]),
    (
        {"top_k": 20, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.9},
        [TopKLogitsWarper(20), TopPLogitsWarper(0.95), MinPLogitsWarper(0.01), TypicalLogitsWarper(0.9)],
    ),
]


@pytest.mark.parametrize(("settings", "warpers"), WARPED)
def test_sampling_is_that_of_transformers_with_the_engines_noise(
    engine: Engine, tiny_model: LlamaForCausalLM, prompt: Prompt, settings: dict[str, Any], warpers: list[Any]
) -> None:
    result = both(engine, prompt, replace(SAMPLED, **settings))
    assert result.token_ids == theirs(tiny_model, prompt, [TemperatureLogitsWarper(0.9), *warpers, Noise(5)])


@pytest.mark.parametrize("max_nodes", [1, 3, 8, 64])
def test_a_seed_gives_the_same_tokens_whatever_the_size_of_the_tree(
    engine: Engine, prompt: Prompt, max_nodes: int
) -> None:
    expected = engine.generate(prompt, replace(SAMPLED, speculate=False)).token_ids
    assert engine.generate(prompt, SAMPLED, draft=DraftConfig(max_nodes=max_nodes)).token_ids == expected


SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
    ({"no_repeat_ngram": 1}, {"no_repeat_ngram_size": 1}),
    ({"suppress_tokens": (241, 155)}, {"suppress_tokens": [241, 155]}),
    (
        {"repetition_penalty": 1.2, "no_repeat_ngram": 3, "suppress_tokens": (7,)},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "suppress_tokens": [7]},
    ),
]


@pytest.mark.parametrize(("ours", "names_of_transformers"), SETTINGS)
def test_penalties_and_bans_are_those_of_transformers(
    engine: Engine,
    tiny_model: LlamaForCausalLM,
    prompt: Prompt,
    ours: dict[str, Any],
    names_of_transformers: dict[str, Any],
) -> None:
    result = both(engine, prompt, SamplingParams(max_tokens=TOKENS, **ours))
    expected = theirs(tiny_model, prompt, **names_of_transformers)
    assert result.token_ids == expected != engine.generate(prompt, SamplingParams(max_tokens=TOKENS)).token_ids


class TestLogitBias:
    def test_it_is_added_to_the_scores_of_its_tokens(self) -> None:
        bias = LogitBias({0: 2.0, 3: -1.5}, torch.device("cpu"))
        assert bias(torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 4)).tolist() == [[3.0, 1.0, 1.0, -0.5]]

    def test_it_comes_before_penalties(self, engine: Engine, prompt: Prompt) -> None:
        """A penalty that multiplies sees the biased score: -1 + 3 = 2 is divided, not multiplied."""
        params = SamplingParams(logit_bias={5: 3.0}, repetition_penalty=2.0)
        made = make_processors(params, engine.tokenizer, prompt_tokens=1, eos_ids=(), device=torch.device("cpu"))
        scores = torch.full((1, 8), -1.0)
        for processor in made:
            scores = processor(torch.tensor([[5]]), scores)
        assert scores[0, 5] == 1.0

    @pytest.mark.parametrize("sampled", [{}, {"temperature": 0.9, "seed": 5}])
    def test_drafted_answers_equal_plain_ones(self, engine: Engine, prompt: Prompt, sampled: dict[str, Any]) -> None:
        params = SamplingParams(max_tokens=TOKENS, **sampled)
        unbiased = engine.generate(prompt, params).token_ids
        banned = both(engine, prompt, replace(params, logit_bias=dict.fromkeys(unbiased[:3], -100.0)))
        assert not set(banned.token_ids) & set(unbiased[:3])
        forced = both(engine, prompt, replace(params, logit_bias={unbiased[0]: 100.0}))
        assert set(forced.token_ids) == {unbiased[0]}

    def test_a_token_beyond_the_vocabulary_is_refused(self, engine: Engine, prompt: Prompt) -> None:
        params = SamplingParams(logit_bias={engine.requests.vocabulary: 1.0})
        with pytest.raises(ConfigError, match="logit_bias has the token id .*; use its tokenizer"):
            engine.submit(prompt, params)


def test_presence_and_frequency_penalties_follow_openais_definition() -> None:
    ids = torch.tensor([[1, 1, 2, 3, 3, 4]])  # the answer is 3 3 4
    scores = OpenAIPenalties(presence=0.5, frequency=0.25, prompt_tokens=3)(ids, torch.zeros(1, 6))
    assert scores.tolist() == [[0.0, 0.0, 0.0, -1.0, -0.75, 0.0]]


@pytest.mark.parametrize("penalties", [{"presence_penalty": 2.0}, {"frequency_penalty": 1.0}])
def test_penalties_count_the_drafted_path_above_a_node(
    engine: Engine, tiny_model: LlamaForCausalLM, prompt: Prompt, penalties: dict[str, float]
) -> None:
    result = both(engine, prompt, SamplingParams(max_tokens=TOKENS, **penalties))  # type: ignore[arg-type]
    ours = OpenAIPenalties(
        penalties.get("presence_penalty", 0.0), penalties.get("frequency_penalty", 0.0), len(prompt.token_ids)
    )
    assert result.token_ids == theirs(tiny_model, prompt, [ours])


def test_bad_words_do_not_come_as_they_are_usually_spelled(engine: Engine, prompt: Prompt) -> None:
    free = engine.generate(prompt, SamplingParams(max_tokens=TOKENS))
    word = free.text.split()[1][:3]
    banned = both(engine, prompt, SamplingParams(max_tokens=TOKENS, bad_words=(word,)))
    assert f" {word}" in free.text
    assert f" {word}" not in banned.text


def test_a_bad_word_without_tokens_is_refused(engine: Engine, prompt: Prompt) -> None:
    class Silent:
        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": []}

    settings: dict[str, Any] = {"prompt_tokens": 1, "eos_ids": [2], "device": torch.device("cpu")}
    with pytest.raises(ConfigError, match="the bad word 'x' has no tokens"):
        make_processors(SamplingParams(bad_words=("x",)), Silent(), **settings)  # type: ignore[arg-type]


def test_an_answer_has_at_least_min_tokens(
    engine: Engine, tiny_model: LlamaForCausalLM, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = engine.generate(prompt, SamplingParams(max_tokens=1)).token_ids[0]
    ends = copy(tiny_model.generation_config)
    ends.eos_token_id = [END, first]  # an answer that would end at once
    monkeypatch.setattr(tiny_model, "generation_config", ends)
    engine = made(tiny_model, engine.tokenizer)
    assert len(engine.generate(prompt, SamplingParams(max_tokens=TOKENS)).token_ids) == 1
    result = both(engine, prompt, SamplingParams(max_tokens=TOKENS, min_tokens=9))
    expected = theirs(tiny_model, prompt, eos_token_id=[END, first], min_new_tokens=9)
    assert len(result.token_ids) >= 9
    assert result.token_ids == expected


# Anyone's processors

BIAS = {(80,): 3.0, (241, 31): 20.0, (241, 248, 177): -5.0}
OWN: dict[str, Any] = {
    "repetition": lambda n, model: RepetitionPenaltyLogitsProcessor(1.5),
    "no repeat": lambda n, model: NoRepeatNGramLogitsProcessor(1),
    "bad words": lambda n, model: NoBadWordsLogitsProcessor([[80], [241, 248]], [END]),
    "forced BOS": lambda n, model: ForcedBOSTokenLogitsProcessor(9),
    "forced EOS": lambda n, model: ForcedEOSTokenLogitsProcessor(n + 17, END),
    "suppress": lambda n, model: SuppressTokensLogitsProcessor([80, 241]),
    "suppress at begin": lambda n, model: SuppressTokensAtBeginLogitsProcessor([286, 31], n),
    "min length": lambda n, model: MinLengthLogitsProcessor(n + 9, END),
    "min new tokens": lambda n, model: MinNewTokensLengthLogitsProcessor(n, 9, END),
    "decay": lambda n, model: ExponentialDecayLengthPenalty((6, 1.3), END, n),
    "bias": lambda n, model: SequenceBiasLogitsProcessor(BIAS),
    "allowed": lambda n, model: PrefixConstrainedLogitsProcessor(lambda _, ids: [3 + len(ids) % 7, 20, 21], 1),
    "no NaN": lambda n, model: InfNanRemoveLogitsProcessor(),
    "epsilon": lambda n, model: EpsilonLogitsWarper(0.01),
    "eta": lambda n, model: EtaLogitsWarper(0.01),
    "top h": lambda n, model: TopHLogitsWarper(0.5),
    "normalised": lambda n, model: LogitNormalization(),
    "watermark": lambda n, model: WatermarkLogitsProcessor(model.config.vocab_size, "cpu", bias=4.0),
    "guidance": lambda n, model: UnbatchedClassifierFreeGuidanceLogitsProcessor(
        1.8, model, unconditional_ids=torch.tensor([[5, 6]])
    ),
}


NEUTRAL = {"min length", "min new tokens", "no NaN", "epsilon", "eta", "top h", "normalised"}
"""Those that leave this greedy answer as it is; the others are there to be seen."""


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", list(OWN))
def test_a_processor_of_transformers_acts_as_in_generate(
    engine: Engine, tiny_model: LlamaForCausalLM, prompt: Prompt, name: str, temperature: float
) -> None:
    prompt = Prompt(prompt.token_ids[:1]) if name == "forced BOS" else prompt  # it acts behind one token only
    length = len(prompt.token_ids)
    seed = 6 if name == "forced BOS" else 5  # with 5, that answer ends at its second token
    generation = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=seed)
    result = both(engine, prompt, generation, logits_processor=[OWN[name](length, tiny_model)])
    drawn = [TemperatureLogitsWarper(temperature), Noise(seed)] if temperature else []
    assert result.token_ids == theirs(tiny_model, prompt, [OWN[name](length, tiny_model), *drawn])
    if not temperature:
        free = engine.generate(prompt, generation).token_ids
        assert (result.token_ids == free) == (name in NEUTRAL)


class Alternating(LogitsProcessor):
    """Keeps state: bans what it banned least, and counts its calls; wrong as soon as a call is missed or repeated."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        best = scores.argsort(descending=True)
        return scores.index_fill(1, best[0, : len(self.lengths) % 3], -torch.inf)


def test_a_processor_that_keeps_state_is_called_once_a_token_in_order(
    engine: Engine, tiny_model: LlamaForCausalLM, prompt: Prompt
) -> None:
    result = both(engine, prompt, SamplingParams(max_tokens=TOKENS), logits_processor=[Alternating()])
    assert result.token_ids == theirs(tiny_model, prompt, [Alternating()])


def test_what_a_processor_remembers_stays_in_its_answer(engine: Engine, prompt: Prompt) -> None:
    given = Alternating()
    engine.generate(prompt, SamplingParams(max_tokens=5), logits_processor=[given])
    assert given.lengths == []


def test_streams_read_in_turn_share_no_state(engine: Engine, prompt: Prompt) -> None:
    given = Alternating()
    alone = engine.generate(prompt, SamplingParams(max_tokens=TOKENS), logits_processor=[given]).token_ids
    streams = [engine.submit(prompt, SamplingParams(max_tokens=TOKENS), logits_processor=[given]) for _ in range(2)]
    running = list(streams)
    while running:
        running = [stream for stream in running if next(stream, None) is not None]
    assert [stream.result.token_ids for stream in streams] == [alone, alone]


def test_copies_share_models_and_tokenizers_however_deep(tiny_model: LlamaForCausalLM, tiny_tokenizer: Any) -> None:
    given = OWN["guidance"](3, tiny_model)
    given.held = {"words": [tiny_tokenizer]}
    [copied], _ = copy_processors([given], [])
    assert copied is not given
    assert copied.model is tiny_model
    assert copied.held is not given.held
    assert copied.held["words"][0] is tiny_tokenizer


def test_what_several_share_they_share_as_copies() -> None:
    class Counter(Alternating):
        def __init__(self) -> None:
            super().__init__()
            self.act = self.count

        def count(self, ids: Any, scores: Any) -> bool:
            return len(self.lengths) > 3

    given = Counter()
    [first, again], [criterion] = copy_processors([given, given], [given.count])
    assert first is again is criterion.__self__ is first.act.__self__
    assert first is not given


def test_a_processor_and_a_criterion_alternate_as_in_plain_decoding(engine: Engine, prompt: Prompt) -> None:
    said: list[str] = []

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        said.append(f"choose behind {ids.shape[1]}")
        return scores

    def criterion(ids: torch.Tensor, scores: None) -> bool:
        said.append(f"has {ids.shape[1]}")
        return ids.shape[1] == len(prompt.token_ids) + 8

    for _ in range(2):  # the second time most tokens are drafted
        said.clear()
        done = engine.generate(
            prompt, SamplingParams(max_tokens=TOKENS), logits_processor=[processor], stopping_criteria=[criterion]
        )
        start = len(prompt.token_ids)
        assert said == [line for n in range(start, start + 8) for line in (f"choose behind {n}", f"has {n + 1}")]
    assert done.stats.accepted > 0


def test_nothing_is_asked_behind_a_stop_string(engine: Engine, prompt: Prompt) -> None:
    free = engine.generate(prompt, SamplingParams(max_tokens=TOKENS))
    stop = free.text[9:14]
    asked: list[int] = []

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        asked.append(ids.shape[1])
        return scores

    for _ in range(2):
        asked.clear()
        done = engine.generate(prompt, SamplingParams(max_tokens=TOKENS, stop=(stop,)), logits_processor=[processor])
        assert asked == [len(prompt.token_ids) + n for n in range(len(done.token_ids))]


def test_a_processor_may_run_the_model_and_compute_gradients(
    engine: Engine, tiny_model: LlamaForCausalLM, prompt: Prompt
) -> None:
    def asks(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        inner = int(tiny_model(ids[:, -3:]).logits[0, -1].argmax())
        with torch.enable_grad():
            held = scores.clone().requires_grad_()
            [gradient] = torch.autograd.grad((held[0, inner] ** 2).sum(), held)
        return scores + 0.1 * gradient

    both(engine, prompt, SamplingParams(max_tokens=12), logits_processor=[asks])


@pytest.mark.parametrize("kind", ["logits_processor", "stopping_criteria"])
def test_what_cannot_be_called_or_copied_is_refused_before_any_work(engine: Engine, prompt: Prompt, kind: str) -> None:
    class Sealed(Alternating):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("a file is open")

    def three(ids: Any, scores: Any, more: Any) -> Any:
        return scores

    for wrong, message in (
        ([3], "must be callable with token ids and scores; 3 is not"),
        ([Alternating], "must be callable with token ids and scores; <class .* is not"),
        ([three], "must be callable with token ids and scores .*'more'"),
        (Alternating(), "must be a list, not Alternating"),
        ([Sealed()], "cannot be copied.*a file is open"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.submit(prompt, **{kind: wrong})  # type: ignore[arg-type]


# What ends an answer


class EndsAtLength(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        return torch.full((1,), input_ids.shape[1] >= self._length)


@pytest.mark.parametrize("more", [1, 2, 7, 23])
def test_a_stopping_criterion_ends_an_answer_inside_an_accepted_draft_too(
    engine: Engine, tiny_model: LlamaForCausalLM, prompt: Prompt, more: int
) -> None:
    criterion = EndsAtLength(len(prompt.token_ids) + more)
    settings = SamplingParams(max_tokens=TOKENS)
    plain = engine.generate(prompt, replace(settings, speculate=False), stopping_criteria=[criterion])
    drafted = engine.generate(prompt, settings, stopping_criteria=[criterion])
    assert drafted.token_ids == plain.token_ids == theirs(tiny_model, prompt, stopping_criteria=[criterion])
    assert len(drafted.token_ids) == more
    assert drafted.finish_reason == plain.finish_reason == "stop"


def test_every_criterion_is_asked_after_every_token(engine: Engine, prompt: Prompt) -> None:
    asked: list[int] = []

    def never(ids: torch.Tensor, scores: None) -> bool:
        asked.append(ids.shape[1])
        return False

    criteria = [EndsAtLength(len(prompt.token_ids) + 12), never]
    engine.generate(prompt, SamplingParams(max_tokens=TOKENS), stopping_criteria=criteria)
    assert asked == [len(prompt.token_ids) + n for n in range(1, 13)]


def test_a_stop_string_may_be_part_of_the_text(engine: Engine, prompt: Prompt) -> None:
    free = engine.generate(prompt, SamplingParams(max_tokens=TOKENS)).text
    stop = free[9:14]
    end = free.index(stop)
    without = both(engine, prompt, SamplingParams(max_tokens=TOKENS, stop=(stop,)))
    included = both(engine, prompt, SamplingParams(max_tokens=TOKENS, stop=(stop,), include_stop=True))
    assert without.text == free[:end]
    assert included.text == free[: end + len(stop)]
    assert included.token_ids == without.token_ids


# Grammars

GRAMMARS = {
    "schema": Grammar.json_schema(
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 8}, "tags": {"enum": ["red", "green"]}},
            "required": ["name", "tags"],
            "additionalProperties": False,
        }
    ),
    "regex": Grammar.regex("the (cat|dog)( and the (cat|dog)){3}"),
    "lark": Grammar.lark('start: "(" start ")" | "in the end"'),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", list(GRAMMARS))
def test_answers_under_a_grammar_are_the_same_drafted_and_plain_and_obey_it(
    engine: Engine, prompt: Prompt, name: str, temperature: float
) -> None:
    pytest.importorskip("llguidance")
    settings = SamplingParams(max_tokens=90, temperature=temperature, seed=3, grammar=GRAMMARS[name])
    result = both(engine, prompt, settings)
    assert (result.finish_reason, result.token_ids[-1]) == ("stop", END)
    assert result.stats.steps < len(result.token_ids) / 2  # forced tokens cost no pass of their own
    if name == "schema":
        answer = json.loads(result.text)
        assert list(answer) == ["name", "tags"]
        assert len(answer["name"]) <= 8
        assert answer["tags"] in ("red", "green")
    elif name == "regex":
        assert re.fullmatch(GRAMMARS[name].text, result.text)
    else:
        assert re.fullmatch(r"(\(*)in the end(\)*)", result.text)
        assert result.text.count("(") == result.text.count(")")


@pytest.mark.parametrize("changed", [{"repetition_penalty": 2.0}, {"top_p": 0.5}, {"suppress_tokens": (80,)}])
def test_nothing_undoes_a_grammar(engine: Engine, prompt: Prompt, changed: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    base: dict[str, Any] = {"max_tokens": 60, "temperature": 2.0, "seed": 1, "grammar": GRAMMARS["regex"]}

    def wants(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([200]), torch.inf)

    result = both(engine, prompt, SamplingParams(**base | changed), logits_processor=[wants])
    assert re.fullmatch(GRAMMARS["regex"].text, result.text)


def test_what_leaves_a_grammar_no_token_is_an_error(engine: Engine, prompt: Prompt) -> None:
    pytest.importorskip("llguidance")
    starts = tuple(range(3, engine.model.config.vocab_size))
    settings = SamplingParams(max_tokens=5, grammar=GRAMMARS["regex"], suppress_tokens=starts)
    for speculate in (True, False):
        with pytest.raises(GrammarError, match="forbid every token that the grammar allows here"):
            engine.generate(prompt, replace(settings, speculate=speculate))


def test_a_grammar_without_drafts_learns_nothing_wrong(engine: Engine, prompt: Prompt) -> None:
    pytest.importorskip("llguidance")
    free = engine.generate(prompt, SamplingParams(max_tokens=TOKENS)).token_ids
    engine.generate(prompt, SamplingParams(max_tokens=60, grammar=GRAMMARS["schema"]), tenant="t")
    assert engine.generate(prompt, SamplingParams(max_tokens=TOKENS), tenant="t").token_ids == free


def test_a_grammar_that_does_not_compile_is_refused_before_any_work(engine: Engine, prompt: Prompt) -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(ConfigError, match="this regex grammar cannot be followed"):
        engine.submit(prompt, SamplingParams(grammar=Grammar.regex("a(b")))


# Log-probabilities


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_log_probabilities_are_the_models_own(
    engine: Engine, tiny_model: LlamaForCausalLM, prompt: Prompt, temperature: float
) -> None:
    settings = SamplingParams(
        max_tokens=12, temperature=temperature, seed=1, repetition_penalty=1.3, logprobs=3, speculate=False
    )
    plain = engine.generate(prompt, settings)
    drafted = engine.generate(prompt, replace(settings, speculate=True))
    text = [*prompt.token_ids, *drafted.token_ids]
    with torch.inference_mode():
        exact = tiny_model(torch.tensor([text])).logits[0].log_softmax(-1)[len(prompt.token_ids) - 1 : -1]
    assert len(drafted.logprobs) == len(drafted.token_ids)
    for ours, reference, token, row in zip(drafted.logprobs, plain.logprobs, drafted.token_ids, exact, strict=True):
        assert ours.token_id == reference.token_id == token
        assert ours.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert ours.logprob == pytest.approx(reference.logprob, abs=1e-4)
        assert [best for best, _ in ours.top] == row.topk(3).indices.tolist()
        assert [value for _, value in ours.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


def test_log_probabilities_come_with_the_chunks_and_end_with_the_answer(engine: Engine, prompt: Prompt) -> None:
    settings = SamplingParams(max_tokens=TOKENS, logprobs=0, stop=("e",))
    with engine.submit(prompt, settings) as stream:
        chunks = list(stream)
        result = stream.result
    assert tuple(held for chunk in chunks for held in chunk.logprobs) == result.logprobs
    assert [held.token_id for held in result.logprobs] == list(result.token_ids)
    assert {held.top for held in result.logprobs} == {()}


def test_nothing_is_reported_unasked(engine: Engine, prompt: Prompt) -> None:
    assert engine.generate(prompt, SamplingParams(max_tokens=3)).logprobs == ()


# Bad settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_p": 0.0}, r"top_p must be in \(0\.0, 1\.0\]"),
        ({"min_p": -0.1}, r"min_p must be in \[0\.0, 1\.0\]"),
        ({"min_p": 1.5}, r"min_p must be in \[0\.0, 1\.0\]"),
        ({"typical_p": 0.0}, r"typical_p must be in \(0\.0, 1\.0\]"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"temperature": float("nan")}, "temperature must be at least 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
        ({"presence_penalty": 2.5}, r"presence_penalty must be in \[-2\.0, 2\.0\]"),
        ({"frequency_penalty": float("nan")}, r"frequency_penalty must be in \[-2\.0, 2\.0\]"),
        ({"no_repeat_ngram": -1}, "no_repeat_ngram must be at least 0"),
        ({"max_tokens": 3, "min_tokens": 4}, r"min_tokens must be in 0\.\.max_tokens \(3\), not 4"),
        ({"bad_words": ("",)}, "bad_words must be a tuple of strings that are not empty"),
        ({"bad_words": "word"}, "bad_words must be a tuple of strings that are not empty, not 'word'"),
        ({"stop": ("",)}, "stop must be a tuple of strings that are not empty"),
        ({"suppress_tokens": (-1,)}, "suppress_tokens must be a tuple of token ids"),
        ({"grammar": GRAMMARS["regex"], "min_tokens": 3}, "min_tokens cannot be combined with grammar"),
        ({"temperature": "0.8"}, "temperature must be .*'0.8'"),
        ({"max_tokens": 4.5}, "max_tokens must be at least 1, not 4.5"),
        ({"max_tokens": None}, "max_tokens must be at least 1, not None"),
        ({"top_k": 2.5}, "top_k must be at least 0"),
        ({"seed": True}, r"seed must be .*True"),
        ({"seed": 1.5}, "seed must be in"),
        ({"stop": None}, "stop must be a tuple of strings that are not empty, not None"),
        ({"suppress_tokens": 5}, "suppress_tokens must be a tuple of token ids, not 5"),
        ({"grammar": "a*"}, "grammar must be a Grammar"),
        ({"grammar": GRAMMARS["regex"], "ignore_eos": True}, "ignore_eos cannot be combined with grammar"),
        (
            {"logit_bias": {3: 101.0}},
            r"logit_bias must be a dictionary of token ids and numbers in \[-100\.0, 100\.0\]",
        ),
        ({"logprobs": -1}, r"logprobs must be in 0\.\.100 or None"),
    ],
)
def test_settings_out_of_range_are_refused_when_they_are_made(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**settings)
