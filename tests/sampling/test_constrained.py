"""Grammars: which tokens may come next, against brute force over finite languages, and what becomes of drafts."""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Annotated, Any, Literal

import llguidance
import llguidance.hf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field
from random_trees import random_tree
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from reader_rag.config.grammar import Grammar
from reader_rag.draft.tree import SUCCESSOR, DraftTree
from reader_rag.errors import ConfigError, GrammarError, MissingDependencyError
from reader_rag.sampling.constrained import GrammarCompiler, GrammarState

PADDING = 23
"""Rows of the logits behind the tokenizer's last token."""

WORDS = ["the answer", "the and", "an ore", "an ore\u0301", "another", "the andes, in the east", "42"]
ANY_SPACE = {"whitespace_flexible": True, "item_separator": ",", "key_separator": ":"}
LANGUAGE = Grammar.regex("|".join(WORDS))


@pytest.fixture(scope="module")
def size(tiny_tokenizer: PreTrainedTokenizerFast) -> int:
    return len(tiny_tokenizer) + PADDING


@pytest.fixture(scope="module")
def eos(tiny_tokenizer: PreTrainedTokenizerFast) -> int:
    return int(tiny_tokenizer.convert_tokens_to_ids("<eos>"))


@pytest.fixture(scope="module")
def compiler(tiny_tokenizer: PreTrainedTokenizerFast, size: int, eos: int) -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer, size, {eos})


@pytest.fixture(scope="module")
def spellings(tiny_tokenizer: PreTrainedTokenizerFast) -> dict[int, bytes]:
    """The bytes of every token that is text."""
    from tokenizers import pre_tokenizers

    # A byte-level alphabet in its own order: printable bytes stand for themselves, the others for 256 and up.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + k): byte for k, byte in enumerate(others)}
    assert set(byte_of) == set(pre_tokenizers.ByteLevel.alphabet())
    special = set(tiny_tokenizer.all_special_ids)
    return {
        token: bytes(byte_of[character] for character in word)
        for word, token in tiny_tokenizer.get_vocab().items()
        if token not in special
    }


def allowed(state: GrammarState, size: int) -> set[int]:
    return set(torch.isfinite(state.mask(torch.zeros(size))).nonzero()[:, 0].tolist())


def expected(text: bytes, spellings: dict[int, bytes], eos: int, words: list[str] = WORDS) -> set[int]:
    """The tokens that may follow `text` in a finite language."""
    language = [word.encode() for word in words]
    tokens = {token for token, more in spellings.items() if any(word.startswith(text + more) for word in language)}
    return tokens | ({eos} if text in language else set())


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens from the root to each node."""
    rows: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        rows.append((*(rows[parent] if parent >= 0 else ()), token))
    return rows


class TestGrammar:
    def test_equal_grammars_are_one(self) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        assert len({Grammar.json_schema(schema), Grammar.json_schema(json.dumps(schema, indent=2))}) == 1
        assert Grammar.regex("a") != Grammar.lark("a")

    def test_the_order_of_properties_counts(self) -> None:
        a, b = {"a": {"type": "null"}}, {"b": {"type": "null"}}
        assert Grammar.json_schema({"properties": a | b}) != Grammar.json_schema({"properties": b | a})

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: Grammar.json_schema("{oops"), "the schema is not JSON: Expecting property name"),
            (lambda: Grammar.json_schema("[1, 2]"), re.escape("a JSON schema is an object, not [1, 2]")),
            (lambda: Grammar.json_schema({"const": {1, 2}}), "the schema is not JSON"),
            (lambda: Grammar.json_schema({"const": float("nan")}), "the schema is not JSON"),
            (lambda: Grammar.json_schema(int), "int is not a Pydantic class"),  # type: ignore[arg-type]
            (lambda: Grammar.regex(""), "regex grammar must be a string that is not empty"),
            (lambda: Grammar.lark(" \n"), "lark grammar must be a string that is not empty"),
            (lambda: Grammar("gbnf", "root ::= x"), "kind must be one of json_schema, regex, lark, not 'gbnf'"),  # type: ignore[arg-type]
        ],
    )
    def test_what_is_no_grammar_is_refused(self, make: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            make()

    def test_a_class_without_a_schema_is_refused(self) -> None:
        class Odd(BaseModel):
            model_config = ConfigDict(arbitrary_types_allowed=True)
            value: torch.Tensor

        with pytest.raises(ConfigError, match="Odd has no JSON schema"):
            Grammar.json_schema(Odd)


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str = Field(alias="called")


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class House(BaseModel):
    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]]
    notes: Open | None = None


class Article(BaseModel):
    tags: set[str]
    price: Decimal = Field(max_digits=6, decimal_places=2)
    sizes: frozenset[int]


class TestCompile:
    def accepts(self, compiler: GrammarCompiler, grammar: Grammar, tokenizer: Any, text: str) -> bool:
        state = compiler.compile(grammar)
        try:
            state.follow([*tokenizer.encode(text), tokenizer.eos_token_id])
        except GrammarError:
            return False
        return True

    @pytest.mark.parametrize(
        ("text", "fits"),
        [
            ('{"pets": []}', True),
            ('{"pets": [{"kind": "cat", "lives": 9}, {"kind": "dog", "called": "Rex"}]}', True),
            ('{"pets": [], "notes": null}', True),
            ('{"pets": [], "notes": {"any": [1, {"thing": true}]}}', True),
            ('{"pets": [], "more": 1}', False),
            ('{"pets": [{"kind": "cat", "called": "Rex"}]}', False),
            ('{"pets": [{"kind": "dog", "called": "Rex", "age": 3}]}', False),
            ('{"pets":[]}', False),
            ('{"pets": []', False),
        ],
    )
    def test_a_class_takes_its_own_fields_in_one_style(
        self, compiler: GrammarCompiler, tiny_tokenizer: PreTrainedTokenizerFast, text: str, fits: bool
    ) -> None:
        assert self.accepts(compiler, Grammar.json_schema(House), tiny_tokenizer, text) is fits
        if fits:
            assert House.model_validate_json(text)

    @pytest.mark.parametrize(
        ("text", "fits"),
        [
            ('{"tags": ["a", "a", "b"], "price": 12.50, "sizes": [1, 2]}', True),
            ('{"tags": ["a"], "price": -3, "sizes": []}', True),
            ('{"tags": ["a"], "price": "1234.50", "sizes": []}', True),
            ('{"tags": ["a"], "price": "12345.5", "sizes": []}', False),
            ('{"tags": ["a"], "price": "1.555", "sizes": []}', False),
            ('{"tags": ["a"], "price": "much", "sizes": []}', False),
            ('{"tags": [1], "price": 1, "sizes": []}', False),
        ],
    )
    def test_a_class_may_have_sets_and_decimals(
        self, compiler: GrammarCompiler, tiny_tokenizer: PreTrainedTokenizerFast, text: str, fits: bool
    ) -> None:
        assert self.accepts(compiler, Grammar.json_schema(Article), tiny_tokenizer, text) is fits
        if fits:
            Article.model_validate_json(text)

    def test_a_schema_may_ask_for_any_white_space(
        self, compiler: GrammarCompiler, tiny_tokenizer: PreTrainedTokenizerFast
    ) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        for more, fits in (({}, False), ({"x-guidance": ANY_SPACE}, True)):
            assert self.accepts(compiler, Grammar.json_schema(schema | more), tiny_tokenizer, '{ "a" :1}') is fits

    def test_lark(self, compiler: GrammarCompiler, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
        balanced = Grammar.lark('start: "(" start ")" | "x"')
        assert self.accepts(compiler, balanced, tiny_tokenizer, "(((x)))")
        assert not self.accepts(compiler, balanced, tiny_tokenizer, "(((x))")

    @pytest.mark.parametrize(
        ("grammar", "message"),
        [
            (Grammar.regex("[0-9]{3}("), "this regex grammar cannot be followed: .*unclosed group"),
            (Grammar.lark("start: foo"), 'this lark grammar cannot be followed: .*unknown name: "foo"'),
            (Grammar.json_schema({"type": "foo"}), "this json_schema grammar cannot be followed: Invalid type: foo"),
            (Grammar.json_schema({"not": {"const": 1}}), 'cannot be followed: Unimplemented keys: ["not"]'),
        ],
    )
    def test_a_grammar_that_cannot_be_followed_is_refused_in_one_line(
        self, compiler: GrammarCompiler, grammar: Grammar, message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message.replace("[", r"\[")) as raised:
            compiler.compile(grammar)
        assert "\n" not in str(raised.value)

    def test_a_slow_tokenizer_is_refused(self) -> None:
        tokenizer = ByT5Tokenizer()
        with pytest.raises(ConfigError, match="need a fast tokenizer, and ByT5Tokenizer is a slow one"):
            GrammarCompiler(tokenizer, len(tokenizer), {1}).compile(LANGUAGE)

    def test_a_model_that_cannot_end_is_refused(self, tiny_tokenizer: PreTrainedTokenizerFast, size: int) -> None:
        with pytest.raises(ConfigError, match="need a model with an end-of-sequence token"):
            GrammarCompiler(tiny_tokenizer, size, ()).compile(LANGUAGE)

    def test_a_missing_package_is_named_with_its_remedy(
        self, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "llguidance", None)
        with pytest.raises(MissingDependencyError, match=re.escape("pip install 'reader-rag[grammar]'")):
            compiler.compile(LANGUAGE)

    def test_the_tokenizer_is_prepared_once_for_all_threads(
        self, tiny_tokenizer: PreTrainedTokenizerFast, size: int, eos: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prepare, prepared = llguidance.hf.from_tokenizer, []

        def counting(*arguments: Any, **settings: Any) -> Any:
            prepared.append(settings)
            return prepare(*arguments, **settings)

        monkeypatch.setattr(llguidance.hf, "from_tokenizer", counting)
        compiler = GrammarCompiler(tiny_tokenizer, size, {eos})
        assert prepared == []
        with ThreadPoolExecutor(8) as threads:
            states = list(threads.map(lambda _: compiler.compile(LANGUAGE), range(16)))
        assert prepared == [{"n_vocab": size, "eos_token": [eos]}]
        assert len({frozenset(allowed(state, size)) for state in states}) == 1


class TestMask:
    @given(choices=st.lists(st.integers(0, 10**6), max_size=24), seed=st.integers(0, 10**6))
    def test_exactly_the_tokens_that_can_go_on(
        self,
        compiler: GrammarCompiler,
        size: int,
        eos: int,
        spellings: dict[int, bytes],
        choices: list[int],
        seed: int,
    ) -> None:
        state, text, followed = compiler.compile(LANGUAGE), b"", []
        tree, words = random_tree(seed, 12, 60), [word.encode() for word in WORDS]
        for choice in [*choices, 0]:
            may = allowed(state, size)
            if may != expected(text, spellings, eos):
                # One text goes on here, and of its spellings only one is allowed.
                (only,) = may
                assert all(word.startswith(text + spellings[only]) for word in words if word.startswith(text))
            state.shape(tree, 16)  # leaves no trace
            assert allowed(state, size) == may
            once = compiler.compile(LANGUAGE)
            once.follow(followed)
            assert allowed(once, size) == may
            token = sorted(may)[choice % len(may)]
            state.follow([token])
            if token == eos:
                assert allowed(state, size) == {eos}
                break
            followed.append(token)
            text += spellings[token]

    def test_scores_of_allowed_tokens_are_kept_and_the_argument_is_too(
        self, compiler: GrammarCompiler, size: int
    ) -> None:
        scores = torch.randn(size, generator=torch.Generator().manual_seed(0))
        scores[7], scores[8] = torch.inf, -torch.inf
        before, state = scores.clone(), compiler.compile(LANGUAGE)
        masked, may = state.mask(scores), sorted(allowed(state, size))
        assert torch.equal(scores, before)
        assert masked.dtype == torch.float32
        assert torch.equal(masked[may], scores[may])
        assert int(torch.isfinite(masked).sum()) == len(may)

    def test_padding_rows_are_never_allowed(
        self, compiler: GrammarCompiler, tiny_tokenizer: PreTrainedTokenizerFast, size: int
    ) -> None:
        state = compiler.compile(Grammar.regex(r"(.|\n)*"))
        may = allowed(state, size)
        assert may.isdisjoint(range(len(tiny_tokenizer), size))
        assert may.isdisjoint(set(tiny_tokenizer.all_special_ids) - {tiny_tokenizer.eos_token_id})
        assert len(may) > 100

    def test_logits_may_be_narrower_than_the_tokenizer(self, tiny_tokenizer: PreTrainedTokenizerFast, eos: int) -> None:
        last = len(tiny_tokenizer) - 1
        letters = Grammar.regex("[a-z]+")
        wide = GrammarCompiler(tiny_tokenizer, last + 1, {eos}).compile(letters)
        narrow = GrammarCompiler(tiny_tokenizer, last, {eos})
        assert tiny_tokenizer.decode(last) == "he"
        assert allowed(wide, last + 1) - allowed(narrow.compile(letters), last) == {last}
        spelled = narrow.compile(Grammar.regex("he"))  # as the token that this model does not have
        assert len(spelled.shape(DraftTree.from_chain([last]), 8)) == 0
        with pytest.raises(GrammarError, match="no token of the model continues the answer"):
            spelled.mask(torch.zeros(last))

    def test_every_end_token_ends(self, tiny_tokenizer: PreTrainedTokenizerFast, size: int) -> None:
        ends = tiny_tokenizer.convert_tokens_to_ids(["<pad>", "<eos>"])
        compiler = GrammarCompiler(tiny_tokenizer, size, ends)
        for end in ends:
            state = compiler.compile(Grammar.regex("4+"))
            state.follow(tiny_tokenizer.encode("44"))
            assert allowed(state, size) == {*tiny_tokenizer.encode("4"), *ends}
            state.follow([end])
            assert allowed(state, size) == set(ends)

    def test_scores_of_another_width_are_refused(self, compiler: GrammarCompiler, size: int) -> None:
        with pytest.raises(ValueError, match=f"scores must be \\[{size}\\], not \\[{size - 1}\\]"):
            compiler.compile(LANGUAGE).mask(torch.zeros(size - 1))

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    def test_the_mask_is_made_where_the_scores_are(self, compiler: GrammarCompiler, size: int) -> None:
        state, scores = compiler.compile(LANGUAGE), torch.randn(size)
        masked = state.mask(scores.cuda())
        assert masked.is_cuda
        assert torch.equal(masked.cpu(), state.mask(scores))


class TestFollow:
    def test_a_forbidden_token_is_an_error(
        self, compiler: GrammarCompiler, tiny_tokenizer: PreTrainedTokenizerFast
    ) -> None:
        tokens = tiny_tokenizer.encode("the x")
        with pytest.raises(GrammarError, match=f"does not allow token {tokens[-1]} here"):
            compiler.compile(LANGUAGE).follow(tokens)

    def test_so_is_an_early_end(self, compiler: GrammarCompiler, tiny_tokenizer: Any, eos: int) -> None:
        with pytest.raises(GrammarError, match=f"does not allow token {eos} here"):
            compiler.compile(LANGUAGE).follow([*tiny_tokenizer.encode("the an"), eos])

    @pytest.mark.parametrize("word", ["4", "42"])
    def test_so_is_text_behind_the_end(
        self, compiler: GrammarCompiler, tiny_tokenizer: Any, size: int, eos: int, word: str
    ) -> None:
        state = compiler.compile(Grammar.regex("42?"))
        state.follow([*tiny_tokenizer.encode(word), eos])
        state.follow([eos, eos])  # which the mask allows
        assert allowed(state, size) == {eos}
        (two,) = tiny_tokenizer.encode("2")
        with pytest.raises(GrammarError, match=f"does not allow token {two} here"):
            state.follow([eos, two])

    def test_nothing_is_followed_to_nowhere(self, compiler: GrammarCompiler, size: int) -> None:
        state = compiler.compile(LANGUAGE)
        before = allowed(state, size)
        state.follow([])
        assert allowed(state, size) == before


class TestTooCostly:
    """llguidance's matcher answers as if the text had ended once it failed; none of that may get through."""

    @staticmethod
    def limited(rules: str, tokenizer: PreTrainedTokenizerFast, size: int, **limits: int) -> GrammarState:
        tokens = llguidance.hf.from_tokenizer(tokenizer, n_vocab=size, eos_token=[tokenizer.eos_token_id])
        matcher = llguidance.LLMatcher(tokens, rules, log_level=0, limits=llguidance.LLParserLimits(**limits))
        assert not matcher.is_error()
        end = int(tokenizer.eos_token_id)
        return GrammarState(matcher, tokens.vocab_size, size, frozenset({end}), end)

    def test_it_is_an_error_in_one_line(self, tiny_tokenizer: PreTrainedTokenizerFast, size: int) -> None:
        rules = llguidance.LLMatcher.grammar_from_regex(r"the [a-z]+ (of|on) [0-9]+\.[0-9]{5,9}!")
        state = self.limited(rules, tiny_tokenizer, size, max_lexer_states=12)

        def answer() -> None:
            for token in tiny_tokenizer.encode("the range of 12.123456"):
                state.mask(torch.zeros(size))
                state.follow([token])

        with pytest.raises(GrammarError, match="too costly to follow: lexer error: too many states.*simpler") as raised:
            answer()
        assert "\n" not in str(raised.value)
        for again in (lambda: state.mask(torch.zeros(size)), lambda: state.follow([5])):
            with pytest.raises(GrammarError, match="too costly"):
                again()

    def test_a_draft_is_cut_where_it_happens(self, tiny_tokenizer: PreTrainedTokenizerFast, size: int) -> None:
        rules = llguidance.LLMatcher.grammar_from_lark(
            'start: "a" start "b" start | "a" start | "c" | "a" "c" "b"? "b" "c" | ""'
        )
        state = self.limited(rules, tiny_tokenizer, size, max_items_in_row=20)
        chain = [int(tiny_tokenizer.convert_tokens_to_ids(letter)) for letter in "aaaacbbb"]
        may = allowed(state, size)
        assert state.shape(DraftTree.from_chain(chain), 64).tokens.tolist() == chain[:5]
        assert allowed(state, size) == may
        with pytest.raises(GrammarError, match="too costly to follow: Parser Error: Current row has 22 items"):
            state.follow(chain)


class TestShape:
    @given(seed=st.integers(0, 10**6), prefix=st.integers(0, len(WORDS) - 1), length=st.integers(0, 6))
    def test_keeps_what_is_allowed_and_adds_what_is_forced(
        self,
        compiler: GrammarCompiler,
        tiny_tokenizer: PreTrainedTokenizerFast,
        size: int,
        eos: int,
        spellings: dict[int, bytes],
        seed: int,
        prefix: int,
        length: int,
    ) -> None:
        state = compiler.compile(LANGUAGE)
        start = tiny_tokenizer.encode(WORDS[prefix])[:length]
        state.follow(start)
        tree = self.likely_tree(seed, spellings, eos, b"".join(spellings[token] for token in start))
        before = allowed(state, size)
        shaped = state.shape(tree, 10**4)
        shaped.check()
        assert allowed(state, size) == before

        def fits(path: tuple[int, ...]) -> bool:
            """Whether the mask allows each of its tokens."""
            fresh = compiler.compile(LANGUAGE)
            fresh.follow(start)
            for token in path:
                if eos in path[:-1] or token not in allowed(fresh, size):
                    return False
                fresh.follow([token])
            return True

        drafted, kept = paths(tree), paths(shaped)
        assert all(map(fits, kept))
        assert set(filter(fits, drafted)) <= set(kept)
        origins = zip(kept, shaped.sources.tolist(), shaped.positions.tolist(), strict=True)
        for path, source, position in origins:
            if path in drafted:
                assert (source, position) == (1, drafted.index(path))
            else:
                fresh = compiler.compile(LANGUAGE)
                fresh.follow([*start, *path[:-1]])
                assert allowed(fresh, size) == {path[-1]}  # forced
                assert (source, position) == (SUCCESSOR, -1)
        for few in (1, 2, 5, 9):
            best = state.shape(tree, few)
            assert len(best) <= few
            assert paths(best) == paths(shaped.head(few))
        shallow = state.shape(tree, 10**4, max_depth=2)
        assert set(paths(shallow)) == {path for path in kept if len(path) <= 2}

    @staticmethod
    def likely_tree(seed: int, spellings: dict[int, bytes], eos: int, text: bytes) -> DraftTree:
        """A tree most of whose nodes are allowed behind `text`, of a random shape, with distinct siblings."""
        random = np.random.default_rng(seed)
        texts, tokens, parents, depths, seen = [text], [], [], [], set()
        for _ in range(24):
            at = int(random.integers(0, len(texts)))
            likely = sorted(expected(texts[at], spellings, eos)) or [eos]
            token = int(random.choice(likely)) if random.random() < 0.8 else int(random.integers(0, 300))
            if (at, token) in seen:
                continue
            seen.add((at, token))
            parents.append(at - 1)
            depths.append(1 if at == 0 else depths[at - 1] + 1)
            tokens.append(token)
            texts.append(texts[at] + spellings.get(token, b"\xff"))
        return DraftTree.of(tokens, parents, depths, 0.9 ** np.arange(1, len(tokens) + 1), 1, np.arange(len(tokens)), 3)

    def test_forced_tokens_are_free(
        self, compiler: GrammarCompiler, tiny_tokenizer: PreTrainedTokenizerFast, eos: int
    ) -> None:
        class Trip(BaseModel):
            destination: str
            attendees: int

        state = compiler.compile(Grammar.json_schema(Trip))
        assert tiny_tokenizer.decode(state.shape(DraftTree.empty(), 64).tokens) == '{"destination": "'
        state.follow(tiny_tokenizer.encode('{"destination": "Rome"'))
        shaped = state.shape(DraftTree.empty(), 64)
        assert tiny_tokenizer.decode(shaped.tokens) == ', "attendees": '
        assert shaped.parents.tolist() == list(range(-1, len(shaped) - 1))
        assert shaped.probabilities.tolist() == [1.0] * len(shaped)
        state.follow(tiny_tokenizer.encode(', "attendees": 12}'))
        assert state.shape(DraftTree.empty(), 64).tokens.tolist() == [eos]
        state.follow([eos])
        assert len(state.shape(DraftTree.empty(), 64)) == 0

    def test_a_forced_token_that_was_drafted_keeps_its_origin_and_lifts_what_is_below(
        self, compiler: GrammarCompiler, tiny_tokenizer: PreTrainedTokenizerFast
    ) -> None:
        state = compiler.compile(Grammar.regex("ab(c|d).*"))
        a, b, c, d, x = (tiny_tokenizer.convert_tokens_to_ids(letter) for letter in "abcdx")
        # x is forbidden; a is forced, with b behind it; c goes on from what was forced.
        tree = DraftTree.of([x, a, b, c, d], [-1, -1, 1, 2, 2], [1, 1, 2, 3, 3], [0.5, 0.4, 0.2, 0.1, 0.05], 1, 70, 9)
        shaped = state.shape(tree, 8)
        assert shaped.tokens.tolist() == [a, b, c, d]
        assert shaped.parents.tolist() == [-1, 0, 1, 1]
        assert shaped.sources.tolist() == [1, 1, 1, 1]
        assert shaped.positions.tolist() == [70, 70, 70, 70]
        assert shaped.match_lengths.tolist() == [9, 9, 9, 9]
        assert shaped.probabilities.tolist() == pytest.approx([1.0, 1.0, 0.5, 0.25])

    def test_another_spelling_of_forced_text_goes(
        self, compiler: GrammarCompiler, tiny_tokenizer: PreTrainedTokenizerFast, size: int
    ) -> None:
        state = compiler.compile(Grammar.regex("there!"))
        usual = tiny_tokenizer.encode("there!")
        assert tiny_tokenizer.convert_ids_to_tokens(usual[0]) == "the"
        assert allowed(state, size) == {usual[0]}
        letters = [int(tiny_tokenizer.convert_tokens_to_ids(letter)) for letter in "there!"]
        assert paths(state.shape(DraftTree.from_chain(letters), 32))[len(usual) - 1] == tuple(usual)

    @pytest.mark.parametrize(("nodes", "depth"), [(0, None), (8, 0)])
    def test_no_room_is_no_draft(self, compiler: GrammarCompiler, nodes: int, depth: int | None) -> None:
        assert len(compiler.compile(Grammar.regex("42")).shape(DraftTree.from_chain([5]), nodes, depth)) == 0
