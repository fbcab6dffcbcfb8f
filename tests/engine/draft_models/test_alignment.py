"""A text that grows by one vocabulary's tokens has the same text in another vocabulary's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_tokenizers import bytes_tokenizer, characters_tokenizer, lower_case_tokenizer, spaced_tokenizer

from reader_rag.engine.draft_models.alignment import Alignment, TextTokenizer
from reader_rag.errors import ConfigError

TEXT = "the station is on the other side of it, and the answer is 42.\n\nIn the end (no space)\n  is there an end? a b"
MERGES = ["t h", "th e", "i n", "Ġ the", "Ġ a", "Ġ o", "Ġ in", "o n", "a n", "e n", "en d", "i s", "Ġ is", "Ġ 4"]
SPACED = ["▁ t", "h e", "▁t he", "i n", "▁ a", "▁a n", "e r", "i s", "▁ is", "o n"]


class Noted(TextTokenizer):
    """Notes the lengths of the texts that it tokenizes."""

    def __init__(self, tokenizer: Any) -> None:
        self.lengths_seen: list[int] = []

        def encode(text: str) -> list[int]:
            self.lengths_seen.append(len(text))
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        super().__init__(tokenizer, encode, "the model")


def followed(target: TextTokenizer, own: TextTokenizer, tokens: list[int], sizes: list[int]) -> Alignment:
    """An alignment that followed tokens in pieces, and agreed in text after each that was complete."""
    alignment, read = Alignment(target, own), 0
    for size in [*sizes, len(tokens)]:
        read = min(read + size, len(tokens))
        if alignment.follow(np.array(tokens[:read], np.int32)):
            assert own.decode(alignment.tokens) == target.decode(tokens[:read])
    return alignment


KINDS = {
    "bytes": lambda: Noted(bytes_tokenizer(MERGES)),
    "other bytes": lambda: Noted(bytes_tokenizer(["e r", "t h", "th er", "Ġ i", "Ġi s", "a t", "at i", "Ċ Ċ"])),
    "spaced": lambda: Noted(spaced_tokenizer(SPACED)),
    "characters": lambda: Noted(characters_tokenizer(0)),
}
MADE = {name: make() for name, make in KINDS.items()}


@pytest.mark.parametrize("own", KINDS)
@pytest.mark.parametrize("target", KINDS)
@given(sizes=st.lists(st.integers(1, 9), max_size=40))
def test_the_text_is_the_same_whatever_the_steps(target: str, own: str, sizes: list[int]) -> None:
    tokens = MADE[target].began(TEXT)
    alignment = followed(MADE[target], MADE[own], tokens, sizes)
    assert MADE[own].decode(alignment.tokens) == TEXT


@pytest.mark.parametrize("own", ["bytes", "other bytes", "spaced"])
def test_words_are_written_as_the_tokenizer_writes_them(own: str) -> None:
    text = "the other answer is on the station and the other is in it"
    whole = MADE[own].began(text)
    for size in (1, 2, 3):
        tokens = MADE["characters"].began(text)
        assert followed(MADE["characters"], MADE[own], tokens, [size] * len(tokens)).tokens == whole


@given(text=st.text(st.sampled_from("ab é€😀 \n"), max_size=30), sizes=st.lists(st.integers(1, 3), max_size=90))
def test_characters_of_several_tokens_are_awaited(text: str, sizes: list[int]) -> None:
    target, own = MADE["bytes"], MADE["other bytes"]
    alignment = followed(target, own, target.began(text), sizes)
    assert own.decode(alignment.tokens) == text


def test_bytes_that_are_no_text_are_not_awaited_for_ever() -> None:
    target, own = MADE["bytes"], MADE["other bytes"]
    half = target.began("😀")[:2]
    alignment = Alignment(target, own)
    results = [alignment.follow(np.array((half * 9)[:length], np.int32)) for length in range(1, 19)]
    assert not any(results[:3])
    assert all(results[3:])


def test_a_step_tokenizes_a_few_words() -> None:
    target, own = Noted(bytes_tokenizer(MERGES)), Noted(spaced_tokenizer(SPACED))
    tokens = target.began("the answer is on the other side and " * 200)
    alignment = Alignment(target, own)
    alignment.follow(np.array(tokens[:-60], np.int32))
    own.lengths_seen.clear()
    for length in range(len(tokens) - 59, len(tokens) + 1):
        alignment.follow(np.array(tokens[:length], np.int32))
    assert max(own.lengths_seen) < 20
    long = target.began("x" * 2000)  # without any space
    own.lengths_seen.clear()
    for length in range(len(tokens) + 1, len(tokens) + len(long) + 1):
        alignment.follow(np.array([*tokens, *long][:length], np.int32))
    assert max(own.lengths_seen) < 140


@pytest.mark.parametrize("own", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_a_draft_comes_back_as_tokens_of_the_target(target: str, own: str) -> None:
    ours, theirs = MADE[target], MADE[own]
    tokens = ours.began(TEXT)
    exact = 0
    for length in range(5, len(tokens) - 1, 3):
        sequence = np.array(tokens[:length], np.int32)
        alignment = Alignment(ours, theirs)
        if not alignment.follow(sequence):
            continue
        text = ours.decode(tokens)[len(ours.decode(tokens[:length])) :][:12]
        drafted = theirs.continued(text)
        chances = [-0.5 - n for n in range(len(drafted))]
        found, logprobs = alignment.translated(sequence, drafted, chances)
        assert ours.decode([*sequence.tolist(), *found]) == ours.decode(sequence.tolist()) + text
        assert len(found) == len(logprobs)
        assert sum(logprobs) == pytest.approx(sum(chances))
        assert all(chance <= 0.0 for chance in logprobs)
        exact += found[:2] == tokens[length : length + 2]
    assert exact > 0.6 * (len(tokens) - 6) // 3


def test_a_draft_ends_where_the_other_model_would_end() -> None:
    ours, theirs = MADE["bytes"], MADE["other bytes"]
    sequence = np.array(ours.began("the end"), np.int32)
    alignment = Alignment(ours, theirs)
    assert alignment.follow(sequence)
    (end,) = (token for token in theirs.special if token == 2)
    drafted = [*theirs.continued(" is"), end, *theirs.continued(" the")]
    found, _ = alignment.translated(sequence, drafted, [-1.0] * len(drafted))
    assert ours.decode(found) == " is"
    assert alignment.translated(sequence, [end], [-1.0]) == ([], [])


def test_a_tokenizer_that_does_not_give_texts_back_is_refused() -> None:
    with pytest.raises(ConfigError, match="the tokenizer of the model does not give texts back as they were"):
        Noted(lower_case_tokenizer())
