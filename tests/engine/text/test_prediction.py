"""Predicted answers: drafts that change how many steps an answer takes, and never the answer, its citations or what is
kept."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from costs_stub import EverythingPays
from waiting import wait_until

from reader_rag.config import DatastoreConfig, DraftConfig, SamplingParams
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import Generation, Passage
from reader_rag.engine.proposer import Proposer
from reader_rag.errors import ConfigError

DRAFT = DraftConfig(max_nodes=16, max_successors=0, calibrates=False)
PROMPT = "Change the year."
WORDS = "It was the year 1913, and nobody knew."


@pytest.fixture(scope="module")
def engine(tiny_engine: Engine) -> Engine:
    """An engine that verifies everything it drafts."""
    made = Engine(tiny_engine.model, tiny_engine.tokenizer, profile="off")
    made.context.costs.current = EverythingPays()  # type: ignore[assignment]
    return made


def say(engine: Engine, answer: str, prediction: str, **given: Any) -> Generation:
    """An answer whose tokens are those of this text."""
    prompt, tokens = engine.encode(given.pop("prompt", PROMPT)), engine.context.tokenize(answer).token_ids
    start, passages = len(prompt.token_ids), given.pop("passages", ())
    params = SamplingParams(max_tokens=len(tokens), ignore_eos=True, speculate=given.pop("speculate", True))
    options: dict[str, Any] = {"draft": DRAFT, "prediction": prediction} | given
    result = engine.generate(
        prompt,
        params,
        passages,
        sampler=lambda verified: lambda row: tokens[verified.position(row) - start],
        **options,
    )
    assert result.text == answer
    return result


def length(engine: Engine, text: str) -> int:
    return len(engine.context.tokenize(text).token_ids)


def counts(result: Generation) -> tuple[int, int]:
    return result.stats.prediction_accepted, result.stats.prediction_rejected


class TestCounts:
    def test_a_right_prediction_is_accepted_but_for_what_the_model_emits_itself(self, engine: Engine) -> None:
        result = say(engine, WORDS, WORDS)
        tokens = length(engine, WORDS)
        # The first token is the prefill's, and every step but the last emits one that was not drafted.
        assert result.stats.accepted == tokens - 1 - result.stats.steps + (tokens - 1 == result.stats.accepted)
        assert counts(result) == (result.stats.accepted, tokens - result.stats.accepted)
        assert result.stats.accepted_by_source == {"prediction": result.stats.accepted}
        assert result.stats.steps < say(engine, WORDS, "").stats.steps

    def test_accepted_and_rejected_are_the_predictions_length(self, engine: Engine) -> None:
        for prediction in (WORDS.replace("1913", "1914"), WORDS[10:], WORDS * 2, "Else.", "I"):
            assert sum(counts(say(engine, WORDS, prediction))) == length(engine, prediction)

    def test_a_wrong_prediction_is_rejected_whole(self, engine: Engine) -> None:
        assert counts(say(engine, "abcdefgh", "12345")) == (0, 5)

    def test_a_token_that_is_accepted_twice_counts_once(self, engine: Engine) -> None:
        result = say(engine, "KLMNOPQ" * 3, "KLMNOPQ")
        accepted, rejected = counts(result)
        assert (accepted, rejected) == (6, 1)  # the first one comes from the prefill, or follows no "Q" in it
        assert result.stats.accepted > 7

    def test_a_node_of_prompt_and_prediction_counts(self, engine: Engine) -> None:
        """The prediction is among the origins of a node, whichever occurrence is its longest match."""
        result = say(engine, "1234567", "1234567", prompt="Say 1234567 again.")
        assert sum(result.stats.accepted_by_source.values()) == counts(result)[0] > 3

    def test_without_drafts_nothing_is_accepted(self, engine: Engine) -> None:
        assert counts(say(engine, WORDS, WORDS, speculate=False)) == (0, length(engine, WORDS))

    def test_it_is_bounded_by_the_tokens_of_passages(self, engine: Engine) -> None:
        text = "".join(chr(code) for code in range(0x21, 0x7E))
        bounded = DraftConfig(max_nodes=16, max_successors=0, calibrates=False, max_passage_tokens=40)
        accepted, rejected = counts(say(engine, text, text, draft=bounded))
        assert 0 < accepted <= 40
        assert accepted + rejected == length(engine, text)
        nothing = DraftConfig(max_nodes=16, max_successors=0, calibrates=False, max_passage_tokens=0)
        assert counts(say(engine, text, text, draft=nothing)) == (0, length(engine, text))

    def test_its_first_tokens_follow_the_end_of_the_prompt(self, engine: Engine) -> None:
        """The beginning is one among many equal places, and the one whose tokens before it are the prompt's last."""
        prediction = "x1 x2 x3 x4 x5 x6 x7 x8"
        with_lead = say(engine, prediction, prediction)
        assert with_lead.stats.accepted_by_source["prediction"] == with_lead.stats.accepted
        assert with_lead.stats.steps <= 3


class TestAnswers:
    @pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 3}])
    def test_drafted_answers_equal_plain_ones(self, engine: Engine, params: dict[str, Any]) -> None:
        prompt = engine.encode("the man and the inn")
        wanted = SamplingParams(max_tokens=40, **params)
        plain = engine.generate(prompt, SamplingParams(max_tokens=40, speculate=False, **params))
        for prediction in (plain.text, plain.text[5:], f"{plain.text[:20]}other{plain.text[20:]}", "nothing of it"):
            assert engine.generate(prompt, wanted, prediction=prediction).token_ids == plain.token_ids

    def test_a_prediction_is_a_string(self, engine: Engine) -> None:
        for wrong in (5, b"x", "\ud800"):
            with pytest.raises(ConfigError, match="prediction must be a string without lone surrogates"):
                engine.submit(engine.encode("a"), prediction=wrong)  # type: ignore[typeddict-item]


class TestPrivacy:
    PASSAGES: Sequence[Passage] = (Passage("p", "Zebras eat 42 kg of grass."), Passage("", "Lions sleep."))

    def test_it_is_never_cited(self, engine: Engine) -> None:
        result = say(engine, "UVTS 8904321", "UVTS 8904321", passages=self.PASSAGES)
        assert counts(result)[0] > 3
        assert result.copied == ()

    @pytest.mark.parametrize("prompt", [PROMPT, "Text: Zebras eat 42 kg of grass.\n?"])
    def test_what_is_in_a_passage_too_is_cited_as_the_passages(self, engine: Engine, prompt: str) -> None:
        answer = "UVTS: Zebras eat 42 kg of grass. XYZW"
        result = say(engine, answer, answer, passages=self.PASSAGES, prompt=prompt)
        quoted = [(span.passage_id, answer[span.text_start : span.text_end]) for span in result.copied]
        assert [name for name, _ in quoted] == ["p"]
        assert quoted[0][1].strip(".") in self.PASSAGES[0].text
        assert len(quoted[0][1]) >= 20

    @pytest.mark.parametrize("tenant", ["a", "b"])
    def test_nothing_of_it_is_kept(self, tiny_engine: Engine, tmp_path: Path, tenant: str) -> None:
        """An engine that was given a rejected prediction drafts later answers as one that never saw it."""
        learns = DraftConfig(max_nodes=16)
        accepted = []
        for prediction in ("UVTS 8904321 KLMN", ""):
            made = Engine(
                tiny_engine.model,
                tiny_engine.tokenizer,
                datastore=tmp_path / f"with{bool(prediction)}",
                recall=DatastoreConfig(keeps_answers=True),
                profile="off",
            )
            made.context.costs.current = EverythingPays()  # type: ignore[assignment]
            say(made, "abcdefgh", prediction, tenant="a", draft=learns)
            assert made.lookup is not None
            made.lookup.flush()
            later = say(made, "UVTS 8904321 KLMN", "", tenant=tenant, draft=learns)
            accepted.append((later.stats.steps, later.stats.accepted_by_source))
            made.close()
            made.lookup.close()
        assert accepted[0] == accepted[1]


def test_a_finished_request_is_freed_without_the_garbage_collector(tiny_engine: Engine) -> None:
    """With a prediction or a datastore: what it holds may be files of the datastore that were merged since."""
    gc.collect()
    gc.disable()
    try:
        tiny_engine.generate(tiny_engine.encode("the garden"), SamplingParams(max_tokens=4), prediction="the tree")
        wait_until(lambda: not any(type(each) is Proposer for each in gc.get_objects()), "the end of the proposer")
    finally:
        gc.enable()
