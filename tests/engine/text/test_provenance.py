"""An answer knows which of its characters were copied from which passage."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from costs_stub import EverythingPays
from hypothesis import given, settings
from hypothesis import strategies as st

from reader_rag.config import DraftConfig, SamplingParams
from reader_rag.draft.source import Budget, Proposal, RequestState, Verified
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import CopiedSpan, Generation, Passage

DRAFT = DraftConfig(max_nodes=16, max_successors=0, calibrates=False)


@pytest.fixture(scope="module")
def engine(tiny_engine: Engine) -> Engine:
    """An engine of byte tokens that verifies everything it drafts."""
    made = Engine(tiny_engine.model, tiny_engine.tokenizer)
    made.context.costs.current = EverythingPays()  # type: ignore[assignment]
    return made


def say(
    engine: Engine, prompt: str, answer: str, passages: Sequence[Passage], *, stop: tuple[str, ...] = ()
) -> Generation:
    """An answer whose tokens are those of this text."""
    encoded = engine.encode(prompt)
    tokens = engine.context.tokenize(answer).token_ids
    start = len(encoded.token_ids)
    options = SamplingParams(max_tokens=len(tokens), stop=stop, ignore_eos=True)
    result = engine.generate(
        encoded,
        options,
        passages,
        draft=DRAFT,
        sampler=lambda verified: lambda row: tokens[verified.position(row) - start],
    )
    check(result, passages)
    return result


def check(result: Generation, passages: Sequence[Passage]) -> None:
    """Spans come in order, do not overlap, and have the same characters on both sides."""
    texts = {passage.id: passage.text for passage in passages}
    at = 0
    for span in result.copied:
        copied = texts[span.passage_id][span.passage_start : span.passage_end]
        assert result.text[span.text_start : span.text_end] == copied
        assert copied == copied.strip() != ""
        assert at <= span.text_start
        at = span.text_end


def quotes(result: Generation) -> list[tuple[str, str]]:
    """The copied stretches: passage and text."""
    return [(span.passage_id, result.text[span.text_start : span.text_end]) for span in result.copied]


def test_what_is_copied_from_a_passage_in_the_prompt_is_located_in_it(engine: Engine) -> None:
    passage = Passage("p", "Zebras eat 42 kg of grass.")
    result = say(engine, f"Text: {passage.text}\nQ: how much?\n", "They eat 42 kg a day.", [passage])
    # " eat 42 kg": the blank before "eat" may be of any copy; the passage's stretch begins after it.
    assert quotes(result) == [("p", "eat 42 kg")]
    assert result.copied == (CopiedSpan("p", 7, 16, 5, 14),)


def test_what_is_copied_from_a_passage_that_is_not_in_the_prompt_is_located_too(engine: Engine) -> None:
    passages = [Passage("p", "Zebras eat 42 kg of grass."), Passage("q", "Lions sleep 20 hours.")]
    result = say(engine, "How long?", "A lion: Lions sleep 20 hours.", passages)
    assert ("q", "ions sleep 20 hours.") in [(name, text[-20:]) for name, text in quotes(result)]
    assert result.stats.accepted_by_source["passage"] > 10


def test_an_answer_from_two_passages_names_both_in_its_order(engine: Engine) -> None:
    passages = [Passage("first", "XYZW 1234567"), Passage("second", "UVTS 8904321")]
    result = say(engine, "?", "UVTS 8904321XYZW 1234567", passages)
    assert [name for name, _ in quotes(result)] == ["second", "first"]
    assert [text for _, text in quotes(result)] == ["UVTS 8904321", "XYZW 1234567"]


def test_what_is_in_no_passage_has_no_source(engine: Engine) -> None:
    result = say(engine, "abcdefgh abcdefgh", "abcdefgh", [Passage("p", "12345")])
    assert result.copied == ()
    assert result.stats.accepted_by_source == {"context": 6}


def test_characters_of_several_tokens_are_copied_whole(engine: Engine) -> None:
    passage = Passage("p", "Prix: 5 € à Zürich 😀 oui")
    for prompt in ("?", f"Text: {passage.text}\n?"):
        result = say(engine, prompt, "Prix: 5 € à Zürich 😀 oui", [passage])
        assert quotes(result) == [("p", "Prix: 5 € à Zürich 😀 oui")]


def test_a_copy_that_ends_inside_a_character_is_kept_up_to_it(engine: Engine) -> None:
    # Both emoji begin with the same three of their four bytes.
    result = say(engine, "?", "KLMN 7😁", [Passage("p", "KLMN 7😀")])
    assert quotes(result) == [("p", "KLMN 7")]


def test_a_copy_that_a_stop_string_cuts_is_kept_up_to_it(engine: Engine) -> None:
    passage = Passage("p", "KLMN 7 is the end")
    # "the" is one token with its blank; the stop string ends the text inside it.
    result = say(engine, "?", "KLMN 7 is the end", [passage], stop=("he",))
    assert result.text == "KLMN 7 is t"
    assert quotes(result) == [("p", "KLMN 7 is t")]


def test_a_copy_of_earlier_output_inherits_its_source(engine: Engine) -> None:
    result = say(engine, "?", "KLMN 78; KLMN 78", [Passage("p", "KLMN 78")])
    assert quotes(result) == [("p", "KLMN 78"), ("p", "KLMN 78")]


def test_the_targets_own_token_goes_on_a_copy_where_it_is_the_next_one(engine: Engine) -> None:
    # With one node a step every second token is the target's own, and the passage's next one.
    passage = Passage("p", "KLMN 789 QRST")
    encoded = engine.encode("?")
    tokens = engine.context.tokenize(passage.text).token_ids
    result = engine.generate(
        encoded,
        SamplingParams(max_tokens=len(tokens)),
        [passage],
        draft=DraftConfig(max_nodes=1),
        sampler=lambda verified: lambda row: tokens[verified.position(row) - 1],
    )
    check(result, [passage])
    assert quotes(result) == [("p", "KLMN 789 QRST")]
    assert result.stats.accepted == 6


def test_blanks_around_a_passage_count_in_its_characters(engine: Engine) -> None:
    passage = Passage("p", "\n  KLMN 789  \n")
    for prompt in ("?", "Text: KLMN 789.\n"):
        result = say(engine, prompt, "KLMN 789", [passage])
        assert result.copied == (CopiedSpan("p", 3, 11, 0, 8),)


def test_a_passage_that_stands_twice_in_the_prompt_is_located_by_its_own_characters(engine: Engine) -> None:
    passage = Passage("p", "KLMN 789")
    result = say(engine, "KLMN 789 / KLMN 789 /", "KLMN 789", [passage])
    assert result.copied == (CopiedSpan("p", 0, 8, 0, 8),)


def test_an_empty_passage_is_nothing(engine: Engine) -> None:
    assert say(engine, "abc", "abc", [Passage("p", ""), Passage("q", " \n")]).copied == ()


class _WaitsAfterOneStep:
    """A draft source that proposes nothing, and holds up the second decode step until `closed` is set."""

    needs_hidden_states = False

    def __init__(self) -> None:
        self.closed = threading.Event()

    def propose(self, state: RequestState, budget: Budget) -> Proposal:
        if len(state.tokens) > state.prompt_length + 1:
            self.closed.wait(60)
        return Proposal.chain([])

    def observe(self, verified: Verified) -> None:
        pass

    def forget(self) -> None:
        pass


def test_a_closed_stream_still_knows_what_was_copied(engine: Engine) -> None:
    passage = Passage("p", "KLMN 789 QRST")
    encoded = engine.encode("?")
    tokens = engine.context.tokenize(passage.text).token_ids
    waiting = _WaitsAfterOneStep()
    stream = engine.submit(
        encoded,
        SamplingParams(max_tokens=len(tokens)),
        [passage],
        draft=DraftConfig(max_nodes=4, max_successors=0, calibrates=False),
        sampler=lambda verified: lambda row: tokens[verified.position(row) - 1],
        draft_sources=[lambda: waiting],
    )
    try:
        next(stream)
        next(stream)
        during = stream.result.copied
        stream.close()
        assert during == stream.result.copied
        assert quotes(stream.result) == [("p", "KLMN 7")]
    finally:
        waiting.closed.set()


texts = st.one_of(st.text("ab é€", min_size=1, max_size=25), st.text("ab é", min_size=12, max_size=25))


@settings(max_examples=60)
@given(texts, st.lists(texts, min_size=1, max_size=3), st.lists(st.booleans(), min_size=3, max_size=3), st.booleans())
def test_spans_are_always_true(
    engine: Engine, answer: str, passages: list[str], inside: list[bool], stopped: bool
) -> None:
    prompt = "Q " + " | ".join(text for text, shown in zip(passages, inside, strict=False) if shown)
    say(engine, prompt, answer, [Passage(str(k), text) for k, text in enumerate(passages)], stop=("a b",) * stopped)
