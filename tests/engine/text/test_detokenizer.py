"""Text comes out in whole characters, never past a stop string, and the same however many tokens a step emits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reader_rag.engine.text.detokenizer import Detokenizer


class Words:
    """A tokenizer whose token k is the k-th word of a list; it decodes by joining."""

    def __init__(self, *words: str) -> None:
        self._words = words

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(self._words[token] for token in tokens)


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def pieces(assembler: Detokenizer, tokens: Sequence[int]) -> list[str]:
    """What is handed out after each token, and at the end."""
    out = []
    for token in tokens:
        stopped = assembler.push(token)
        out.append(assembler.take())
        if stopped:
            break
    assembler.finish()
    return [*out, assembler.take()]


def spelled(*words: str, stop: Sequence[str] = ()) -> list[str]:
    """The pieces of an answer whose tokens are these words."""
    return pieces(Detokenizer(Words(*words), stop), range(len(words)))


# Whole characters


def test_an_emoji_of_four_tokens_comes_out_with_the_last_of_them(tiny_tokenizer: Any) -> None:
    tokens = encode(tiny_tokenizer, "a😀b")
    assert len(tokens) == 6
    assert pieces(Detokenizer(tiny_tokenizer), tokens) == ["a", "", "", "", "😀", "b", ""]


def test_ends_tell_where_the_text_was_after_each_token(tiny_tokenizer: Any) -> None:
    assembler = Detokenizer(tiny_tokenizer)
    for token in encode(tiny_tokenizer, "the é<eos>!"):
        assembler.push(token)
    #                         the  _  é1 é2 <eos> !
    assert assembler.ends == [3, 4, 4, 5, 5, 6]
    assert assembler.text == "the é!"


def test_half_a_character_at_the_end_is_shown_as_the_tokenizer_shows_it(tiny_tokenizer: Any) -> None:
    tokens = encode(tiny_tokenizer, "a😀")[:3]
    assembler = Detokenizer(tiny_tokenizer)
    assert pieces(assembler, tokens) == ["a", "", "", "\ufffd"]
    assert assembler.text == tiny_tokenizer.decode(tokens) == "a\ufffd"
    assert assembler.ends == [1, 1, 2]


def test_bytes_that_are_no_character_do_not_hold_up_what_follows(tiny_tokenizer: Any) -> None:
    half = encode(tiny_tokenizer, "😀")[0]
    tokens = [half, *encode(tiny_tokenizer, "ab")]
    assert pieces(Detokenizer(tiny_tokenizer), tokens) == ["", "\ufffda", "b", ""]


def test_special_tokens_have_no_text(tiny_tokenizer: Any) -> None:
    tokens = encode(tiny_tokenizer, "a<bos>b<eos>")
    assert len(tokens) == 4
    assert pieces(Detokenizer(tiny_tokenizer), tokens) == ["a", "", "b", "", ""]


def test_the_first_token_is_spelled_by_what_precedes_it() -> None:
    class Spaced(Words):
        """Words are parted by blanks; a text's first word has none."""

        def decode(self, tokens: Sequence[int], **_: Any) -> str:
            return " ".join(self._words[token] for token in tokens)

    tokenizer = Spaced("one", "two", "three")
    assert pieces(Detokenizer(tokenizer), [1, 2]) == ["two", " three", ""]
    assert pieces(Detokenizer(tokenizer, before=[0]), [1, 2]) == [" two", " three", ""]


@given(st.text(max_size=30))
def test_every_text_comes_out_as_it_was(tiny_tokenizer: Any, text: str) -> None:
    tokens = encode(tiny_tokenizer, text)
    assembler = Detokenizer(tiny_tokenizer)
    assert (
        "".join(pieces(assembler, tokens)) == assembler.text == tiny_tokenizer.decode(tokens, skip_special_tokens=True)
    )


@given(st.lists(st.integers(3, 258), max_size=40))
def test_any_bytes_come_out_as_the_tokenizer_decodes_them(tiny_tokenizer: Any, tokens: list[int]) -> None:
    assembler = Detokenizer(tiny_tokenizer)
    handed_out = pieces(assembler, tokens)
    assert "".join(handed_out) == tiny_tokenizer.decode(tokens)
    assert len(assembler.ends) == len(tokens)
    assert [0, *assembler.ends] == sorted([0, *assembler.ends])
    assert not tokens or assembler.ends[-1] == len(assembler.text)


# Stop strings


def test_the_text_ends_before_a_stop_string() -> None:
    assert spelled("one ", "END", " two", stop=["END"]) == ["one ", "", ""]


def test_a_stop_string_may_span_tokens_and_none_of_it_is_handed_out() -> None:
    assert spelled("a", "b\n", "\n", "Quest", "ion: c", stop=["\n\nQuestion:"]) == ["a", "b", "", "", "", ""]


def test_a_stop_string_may_begin_and_end_inside_a_token() -> None:
    assert spelled("xxST", "OPyy", "zz", stop=["STOP"]) == ["xx", "", ""]


def test_what_only_looked_like_a_stop_string_is_handed_out_when_that_is_certain() -> None:
    assert spelled("1", "<", "/", "b", "<", "/a>", "2", stop=["</a>"]) == ["1", "", "", "</b", "", "", ""]


def test_the_longest_possible_start_is_held_back() -> None:
    assert spelled("a", "a", "a", "b", stop=["aab"]) == ["", "", "a", "", ""]


def test_what_is_held_back_comes_out_when_the_answer_ends() -> None:
    assert spelled("one", "\n", stop=["\n\n"]) == ["one", "", "\n"]


def test_the_stop_string_that_begins_first_counts() -> None:
    assert spelled("abcd", stop=["cd", "bc"]) == ["a", ""]
    assert spelled("abcd", stop=["bc", "abcd"]) == ["", ""]


def test_a_shorter_stop_string_ends_the_text_before_a_longer_one_can() -> None:
    assert spelled("a", "b", "c", "d", stop=["abcd", "bc"]) == ["", "", "a", ""]


def test_nothing_is_taken_after_a_stop_string() -> None:
    assembler = Detokenizer(Words("a", "STOP", "b"), ["STOP"])
    assert [assembler.push(0), assembler.push(1)] == [False, True]
    assembler.finish()
    assert assembler.stopped
    assert assembler.take() == "a"
    assert assembler.take() == ""


def test_a_stop_string_made_of_a_flushed_half_character_still_ends_the_text(tiny_tokenizer: Any) -> None:
    tokens = encode(tiny_tokenizer, "a😀")[:2]
    assembler = Detokenizer(tiny_tokenizer, ["\ufffd"])
    assert "".join(pieces(assembler, tokens)) == assembler.text == "a"


words = st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=12)
stops = st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3)


@given(words, stops)
def test_pieces_are_the_text_up_to_the_first_stop_string(words: list[str], stop: list[str]) -> None:
    assembler = Detokenizer(Words(*words), stop)
    so_far, handed_out = "", ""
    for token, word in enumerate(words):
        so_far += word
        found = [so_far.find(s) for s in stop if s in so_far]
        assert assembler.push(token) == bool(found)
        handed_out += assembler.take()
        if found:
            assert handed_out == assembler.text == so_far[: min(found)]
            return
        assert so_far.startswith(handed_out)
        # As much as is certain: what is held back is the start of a stop string.
        held = so_far[len(handed_out) :]
        assert not held or any(s.startswith(held) and s != held for s in stop)
    assembler.finish()
    assert handed_out + assembler.take() == assembler.text == "".join(words)


@given(words, stops, st.lists(st.integers(1, 4), max_size=12))
def test_the_text_does_not_depend_on_how_many_tokens_a_step_emits(
    words: list[str], stop: list[str], steps: list[int]
) -> None:
    one_by_one = Detokenizer(Words(*words), stop)
    expected = "".join(pieces(one_by_one, range(len(words))))

    in_steps, handed_out, tokens = Detokenizer(Words(*words), stop), "", list(range(len(words)))
    for step in [*steps, *[1] * len(words)]:
        for token in tokens[:step]:
            if in_steps.push(token):
                break
        tokens = tokens[step:]
        handed_out += in_steps.take()
        if in_steps.stopped:
            break
    in_steps.finish()
    assert handed_out + in_steps.take() == expected
    assert in_steps.ends == one_by_one.ends


@pytest.mark.parametrize("text", ["naïve café 日本語 👩‍👩‍👧 the end", "\r\n\t a  b "])
def test_streamed_pieces_never_contain_a_broken_character(tiny_tokenizer: Any, text: str) -> None:
    handed_out = pieces(Detokenizer(tiny_tokenizer), encode(tiny_tokenizer, text))
    assert "".join(handed_out) == text
    assert not any("\ufffd" in piece for piece in handed_out)
