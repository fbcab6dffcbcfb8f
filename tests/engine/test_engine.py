"""The engine decodes drafted what it decodes plainly: the same tokens, in fewer steps, whatever ends the answer."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from costs_stub import EverythingPays
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from reader_rag.config import DraftConfig, Forward, SamplingParams
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import Chunk, Generation, Passage, Prompt
from reader_rag.errors import ConfigError, PromptError
from reader_rag.sampling.sampler import Verified

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
END = 0
WINDOW = 128
COPIES = DraftConfig(max_nodes=16, max_successors=0, calibrates=False)
"""Drafts of copies alone: the model's own next tokens say nothing of a forced answer."""


@pytest.fixture(scope="module")
def letters() -> PreTrainedTokenizerFast:
    """One token per letter: every answer is a text that has the same tokens. Token 0 ends an answer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {"<end>": END} | {letter: k + 1 for k, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def make_model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(LETTERS) + 1,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=WINDOW,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=END,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return LlamaForCausalLM(config).eval().to(dtype)


@pytest.fixture(scope="module")
def engine(letters: PreTrainedTokenizerFast) -> Engine:
    """An engine over letters that verifies everything it drafts."""
    made = Engine(make_model(), letters, draft=DraftConfig(max_nodes=16))
    made.context.costs.current = EverythingPays()  # type: ignore[assignment]
    return made


def forced(prompt: Prompt, tokens: Sequence[int]) -> Callable[[Verified], Callable[[int], int]]:
    """A target that emits these tokens, whatever its logits say."""
    start = len(prompt.token_ids)
    return lambda verified: lambda row: tokens[verified.position(row) - start]


def generate(
    engine: Engine, prompt: Prompt | str, passages: Sequence[Passage] = (), max_nodes: int = 16, **options: Any
) -> Generation:
    prompt = engine.encode(prompt) if isinstance(prompt, str) else prompt
    return engine.generate(prompt, SamplingParams(**options), passages, draft=DraftConfig(max_nodes=max_nodes))


def spoken(engine: Engine, prompt: str, answer: str, passages: Sequence[Passage] = (), **options: Any) -> Generation:
    """An answer of these letters ("." ends it)."""
    encoded = engine.encode(prompt)
    tokens = [END if letter == "." else LETTERS.index(letter) + 1 for letter in answer]
    settings = SamplingParams(**{"max_tokens": len(tokens)} | options)
    return engine.generate(encoded, settings, passages, sampler=forced(encoded, tokens), draft=COPIES)


def hf_generate(model: Any, tokens: Sequence[int], max_tokens: int, **options: Any) -> tuple[int, ...]:
    ids = torch.tensor([list(tokens)])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
    return tuple(out[0, len(tokens) :].tolist())


def adds_up(result: Generation) -> bool:
    """Whether the counts fit together: a step emits what it accepts and one more, unless an accepted token ends it."""
    stats = result.stats
    surplus = stats.steps + stats.accepted - (stats.completion_tokens - 1)
    return (
        stats.completion_tokens == len(result.token_ids)
        and (surplus == 0 or (surplus == 1 and result.finish_reason == "stop"))
        and sum(stats.accepted_by_source.values()) == stats.accepted <= stats.drafted
    )


# Drafted equals plain


@pytest.mark.parametrize("prompt", ["a", "abcabcabc", "abcdefgh" * 6, "zzzzzzzz", "QuickBrownFoxQuickBrown"])
def test_drafted_and_plain_decoding_and_transformers_emit_the_same_tokens(engine: Engine, prompt: str) -> None:
    plain = generate(engine, prompt, max_tokens=60, speculate=False)
    drafted = generate(engine, prompt, max_tokens=60)
    assert drafted.token_ids == plain.token_ids
    assert plain.token_ids == hf_generate(engine.model, engine.encode(prompt).token_ids, 60)
    assert (drafted.text, drafted.finish_reason) == (plain.text, plain.finish_reason)
    assert adds_up(plain)
    assert adds_up(drafted)


@pytest.mark.parametrize("prompt", ["the cat and the dog and the cat and the", "in in in in", "a the of\n" * 30])
def test_the_same_on_a_tokenizer_of_bytes(tiny_engine: Engine, prompt: str) -> None:
    plain = generate(tiny_engine, prompt, max_tokens=40, speculate=False)
    drafted = generate(tiny_engine, prompt, max_tokens=40)
    assert drafted.token_ids == plain.token_ids
    assert plain.token_ids == hf_generate(tiny_engine.model, tiny_engine.encode(prompt).token_ids, 40)
    assert drafted.text == plain.text == tiny_engine.tokenizer.decode(plain.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("max_nodes", [1, 2, 5, 16, 64])
def test_an_answer_that_a_passage_contains_is_accepted_many_tokens_at_a_step(engine: Engine, max_nodes: int) -> None:
    plain = generate(engine, "abcdefg", max_tokens=40, speculate=False)
    assert plain.stats.steps == 39
    assert plain.stats.drafted == plain.stats.accepted == 0
    drafted = generate(engine, "abcdefg", [Passage("p", plain.text)], max_nodes=max_nodes, max_tokens=40)
    assert drafted.token_ids == plain.token_ids
    assert adds_up(drafted)
    assert drafted.stats.steps < 30
    assert drafted.stats.drafted <= max_nodes * drafted.stats.steps
    assert drafted.stats.accepted_by_source["passage"] > 0
    assert drafted.stats.tokens_per_step == 39 / drafted.stats.steps


@pytest.mark.parametrize("seed", range(10))
def test_sampled_answers_of_one_seed_are_the_same_drafted_and_plain(engine: Engine, seed: int) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": seed, "max_tokens": 40, "ignore_eos": True}
    plain = generate(engine, "abcabcab", speculate=False, **sampling)
    for max_nodes in (1, 4, 16):
        drafted = generate(engine, "abcabcab", [Passage("p", plain.text)], max_nodes=max_nodes, **sampling)
        assert drafted.token_ids == plain.token_ids
        assert adds_up(drafted)
    assert drafted.stats.accepted > 0


def test_another_seed_samples_another_answer(engine: Engine) -> None:
    answers = {generate(engine, "abc", temperature=1.5, seed=seed, max_tokens=20).token_ids for seed in range(10)}
    assert len(answers) == 10


@settings(max_examples=40)
@given(
    st.text("abc", min_size=1, max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=20), max_size=2),
    st.integers(0, 2**64 - 1),
    st.sampled_from([0.0, 0.7]),
    st.integers(0, 20),
)
def test_any_prompt_and_passages_give_the_plain_answer(
    engine: Engine, prompt: str, texts: list[str], seed: int, temperature: float, max_nodes: int
) -> None:
    options = {"max_tokens": 16, "temperature": temperature, "seed": seed}
    plain = generate(engine, prompt, speculate=False, **options)
    passages = [Passage(str(k), text) for k, text in enumerate([*texts, plain.text])]
    drafted = generate(engine, prompt, passages, max_nodes=max_nodes, **options)
    assert drafted.token_ids == plain.token_ids
    assert (drafted.text, drafted.finish_reason) == (plain.text, plain.finish_reason)
    assert adds_up(drafted)


def test_drafts_off_is_plain_decoding(engine: Engine) -> None:
    off = generate(engine, "abcabcabc", max_nodes=0, max_tokens=20)
    assert off.stats.drafted == 0
    assert off.stats.steps == off.stats.completion_tokens - 1
    assert off.stats.tokens_per_step == 1.0
    assert off.token_ids == generate(engine, "abcabcabc", max_tokens=20).token_ids


def test_nothing_is_drafted_beyond_the_last_token(engine: Engine) -> None:
    result = spoken(engine, "abcdefghij", "abcdef")
    # Step 1 may draft 4 tokens after "a": it accepts "bcde" and emits "f".
    assert (result.stats.steps, result.stats.drafted, result.stats.accepted) == (1, 4, 4)
    assert result.text == "abcdef"


def test_drafts_that_do_not_pay_are_not_verified(letters: PreTrainedTokenizerFast) -> None:
    class NothingPays(EverythingPays):
        def best_sizes(
            self, trees: Sequence[Sized], contexts: Sequence[int], acceptance_ratios: Sequence[float], *, padded: bool
        ) -> list[int]:
            return [0] * len(trees)

    made = Engine(make_model(), letters)
    made.context.costs.current = NothingPays()  # type: ignore[assignment]
    result = spoken(made, "abcdefghij", "abcdef")
    assert (result.stats.steps, result.stats.drafted, result.text) == (5, 0, "abcdef")


# What is learned


def repeated(engine: Engine, tenant: str, **options: Any) -> Generation:
    """An answer of a model that has nothing to copy from: its prompt is one letter."""
    return engine.generate(
        engine.encode("a"), SamplingParams(max_tokens=12), tenant=tenant, draft=DraftConfig(max_nodes=16, **options)
    )


def test_a_tenants_second_answer_is_drafted_from_what_the_model_said_in_the_first(engine: Engine) -> None:
    first, second = repeated(engine, "x"), repeated(engine, "x")
    assert second.token_ids == first.token_ids
    assert second.stats.steps < first.stats.steps
    assert second.stats.accepted_by_source["successor"] > 0


def test_nothing_learned_from_one_tenant_is_used_for_another(engine: Engine) -> None:
    first = repeated(engine, "y")
    repeated(engine, "y")
    assert repeated(engine, "z").stats.steps == first.stats.steps


def test_what_was_learned_of_a_tenant_can_be_forgotten(engine: Engine) -> None:
    first = repeated(engine, "w")
    engine.forget("w")
    assert repeated(engine, "w").stats.steps == first.stats.steps


def test_without_successors_nothing_is_learned(engine: Engine) -> None:
    for _ in range(2):
        assert "successor" not in repeated(engine, "v", max_successors=0).stats.accepted_by_source


def test_plain_decoding_learns_nothing(engine: Engine) -> None:
    first = repeated(engine, "u1")
    plain = SamplingParams(max_tokens=12, speculate=False)
    assert engine.generate(engine.encode("a"), plain, tenant="u2").token_ids == first.token_ids
    assert repeated(engine, "u2").stats.steps == first.stats.steps


# What ends an answer


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_an_answer_has_at_most_max_tokens(engine: Engine, max_tokens: int) -> None:
    result = spoken(engine, "abcdefghijabc", "defghijabcdef", max_tokens=max_tokens)
    assert result.text == "defghij"[:max_tokens]
    assert result.finish_reason == "length"
    assert adds_up(result)


def test_the_end_token_ends_an_answer_and_has_no_text(engine: Engine) -> None:
    result = spoken(engine, "abcdef", "abc.abc")
    assert result.text == "abc"
    assert result.token_ids[-1] == END
    assert result.finish_reason == "stop"


def test_an_end_token_inside_an_accepted_draft_ends_the_answer_there(engine: Engine) -> None:
    encoded = engine.encode("abc<end>defabc<end>def")
    tokens = [1, 2, 3, END, 4, 5, 6]
    result = engine.generate(encoded, SamplingParams(max_tokens=7), sampler=forced(encoded, tokens))
    assert result.token_ids == (1, 2, 3, END)
    assert result.finish_reason == "stop"
    assert result.stats.accepted == 3
    assert adds_up(result)


def test_the_end_token_can_be_ignored(engine: Engine) -> None:
    result = spoken(engine, "abcdef", "ab.cd", ignore_eos=True)
    assert result.text == "abcd"
    assert len(result.token_ids) == 5
    assert result.finish_reason == "length"


def test_every_end_token_of_the_model_and_the_tokenizer_counts(letters: PreTrainedTokenizerFast) -> None:
    model = make_model()
    model.generation_config.eos_token_id = [5, 7]
    made = Engine(model, letters)
    assert made.eos_ids == {END, 5, 7}
    assert spoken(made, "xyz", "abcdefgh").text == "abcd"
    assert spoken(made, "xyz", "abcghijk").text == "abc"


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        (("de",), "abc", 5),
        (("e", "c"), "ab", 3),
        (("zz", "abcdef"), "", 6),
        (("zz",), "abcdefgh", 8),
        (("gx",), "abcdefgh", 8),
    ],
)
def test_stop_strings_end_an_answer_before_them(engine: Engine, stop: tuple[str, ...], text: str, tokens: int) -> None:
    for speculate in (True, False):
        result = spoken(engine, "abcdefghabcdefgh", "abcdefgh", stop=stop, speculate=speculate)
        assert (result.text, len(result.token_ids)) == (text, tokens)
        assert result.finish_reason == ("stop" if tokens < 8 else "length")
        assert adds_up(result)


def test_chunks_add_up_to_the_answer_and_only_the_last_has_a_reason(engine: Engine) -> None:
    encoded = engine.encode("abcdefghabcd")
    tokens = engine.encode("efghabxefghabcz").token_ids
    stream = engine.submit(encoded, SamplingParams(max_tokens=50, stop=("cz",)), sampler=forced(encoded, tokens))
    chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == stream.result.text == "efghabxefghab"
    assert [token for chunk in chunks for token in chunk.token_ids] == list(tokens)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[0] == Chunk("e", (5,), None)
    assert max(len(chunk.token_ids) for chunk in chunks) > 3
    assert next(stream, None) is None


def test_half_a_character_is_held_back_until_it_is_whole(tiny_engine: Engine) -> None:
    encoded = tiny_engine.encode("say it")
    tokens = tiny_engine.encode(" é😀!").token_ids
    stream = tiny_engine.submit(
        encoded, SamplingParams(max_tokens=len(tokens), speculate=False), sampler=forced(encoded, tokens)
    )
    assert [chunk.text for chunk in stream] == [" ", "", "é", "", "", "", "😀", "!"]


# The prompt and the context window


def test_an_empty_prompt_is_refused(engine: Engine) -> None:
    with pytest.raises(PromptError, match="the prompt is empty"):
        engine.submit(Prompt(()))
    with pytest.raises(PromptError, match="the prompt is empty"):
        generate(engine, "")


@pytest.mark.parametrize("length", [WINDOW, WINDOW + 1, 4 * WINDOW])
def test_a_prompt_that_leaves_no_room_is_refused(engine: Engine, length: int) -> None:
    with pytest.raises(PromptError, match=f"has {length} tokens, and .* reads at most {WINDOW - 1}"):
        engine.submit(Prompt([1] * length))


@pytest.mark.parametrize(("length", "room"), [(WINDOW - 1, 1), (WINDOW - 2, 2), (WINDOW - 9, 9)])
def test_a_prompt_that_nearly_fills_the_window_is_answered_as_far_as_it_goes(
    engine: Engine, length: int, room: int
) -> None:
    prompt = Prompt(([1, 2, 3, 4, 5] * WINDOW)[:length])
    drafted = generate(engine, prompt, max_tokens=50, ignore_eos=True)
    assert len(drafted.token_ids) == room
    assert drafted.finish_reason == "length"
    assert drafted.token_ids == generate(engine, prompt, max_tokens=50, ignore_eos=True, speculate=False).token_ids


def test_a_model_with_fewer_positions_than_a_tree_has_nodes_can_be_used(letters: PreTrainedTokenizerFast) -> None:
    config = GPT2Config(
        vocab_size=len(LETTERS) + 1,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=48,
        initializer_range=0.3,
        eos_token_id=END,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = Engine(GPT2LMHeadModel(config).eval(), letters)
    plain = generate(made, "abcabcabc", max_tokens=100, speculate=False, ignore_eos=True)
    assert len(plain.token_ids) == 39
    drafted = generate(made, "abcabcabc", [Passage("p", plain.text)], 64, max_tokens=100, ignore_eos=True)
    assert drafted.token_ids == plain.token_ids


# Ending early, errors


@pytest.fixture
def caches(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Every cache that the engine makes."""
    made: list[weakref.ref[Any]] = []
    new_cache = engine.target.new_cache

    def recorded(positions: int, max_nodes: int) -> Any:
        cache = new_cache(positions, max_nodes)
        made.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(engine.target, "new_cache", recorded)
    return made


def held(caches: list[weakref.ref[Any]]) -> int:
    gc.collect()
    return sum(cache() is not None for cache in caches)


def settled(engine: Engine) -> None:
    """Wait until the thread that decodes has freed what was closed or dropped."""
    engine.between_steps(lambda: None)


def test_a_finished_stream_holds_no_cache(engine: Engine, caches: list[weakref.ref[Any]]) -> None:
    stream = engine.submit(engine.encode("abcabc"), SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(list(stream)) > 0
    assert len(caches) == 1
    assert held(caches) == 0
    assert stream.result.stats.cache_bytes == 2 * (2 * 8 + 2 * 8) * (6 + 5 + 16 + 1) * 4


def test_a_closed_stream_holds_no_cache_and_keeps_what_it_has(engine: Engine, caches: list[weakref.ref[Any]]) -> None:
    settings = SamplingParams(max_tokens=2000, ignore_eos=True, speculate=False)
    with engine.submit(engine.encode("abcabc"), settings) as stream:
        for _ in range(3):
            next(stream)
    settled(engine)
    assert held(caches) == 0
    assert next(stream, None) is None
    count = len(stream.result.token_ids)
    assert 3 <= count < 2000
    assert stream.result.token_ids == generate(engine, "abcabc", max_tokens=count, ignore_eos=True).token_ids


def test_a_stream_closed_before_it_began_emits_nothing(engine: Engine) -> None:
    running = threading.Event()

    def block() -> None:
        assert running.wait(timeout=20)

    with ThreadPoolExecutor(1) as other:  # the thread that decodes is busy until the stream is closed
        blocked = other.submit(engine.between_steps, block)
        stream = engine.submit(engine.encode("abc"))
        stream.close()
        stream.close()
        running.set()
        blocked.result(timeout=20)
    settled(engine)
    assert list(stream) == []
    assert stream.result.token_ids == ()


def test_a_dropped_stream_holds_no_cache(engine: Engine, caches: list[weakref.ref[Any]]) -> None:
    stream = engine.submit(engine.encode("abc"), SamplingParams(max_tokens=2000, ignore_eos=True))
    next(stream)
    del stream
    settled(engine)
    assert held(caches) == 0


def test_a_stream_closed_by_another_thread_during_a_step_ends_after_it(
    engine: Engine, caches: list[weakref.ref[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = engine.target.verify_batch

    def closed_meanwhile(*args: Any) -> list[torch.Tensor]:
        stream.close()
        return verify(*args)

    monkeypatch.setattr(engine.target, "verify_batch", closed_meanwhile)
    stream = engine.submit(engine.encode("abcabc"), SamplingParams(max_tokens=50, ignore_eos=True))
    list(stream)
    settled(engine)
    assert len(stream.result.token_ids) < 50
    assert held(caches) == 0


def test_an_error_in_a_step_reaches_the_caller_frees_the_cache_and_leaves_the_engine_usable(
    engine: Engine, caches: list[weakref.ref[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> torch.Tensor:
        raise RuntimeError("device lost")

    expected = generate(engine, "abc", max_tokens=10, ignore_eos=True).token_ids
    with monkeypatch.context() as patch:
        patch.setattr(engine.target, "verify_batch", failing)
        stream = engine.submit(engine.encode("abc"), SamplingParams(max_tokens=10, ignore_eos=True))
        message = ""
        try:
            list(stream)
        except RuntimeError as error:
            message = str(error)
    assert message == "device lost"
    assert held(caches) == 0
    assert list(stream) == []
    assert generate(engine, "abc", max_tokens=10, ignore_eos=True).token_ids == expected


def test_the_old_name_of_submit_warns(engine: Engine) -> None:
    with pytest.warns(DeprecationWarning, match="Engine.stream is now Engine.submit"):
        stream = engine.stream(engine.encode("abc"), SamplingParams(max_tokens=3))
    assert stream.finish().token_ids == generate(engine, "abc", max_tokens=3).token_ids


@pytest.mark.parametrize("how", ["submit", "generate"])
def test_an_argument_that_there_is_not_is_refused(engine: Engine, how: str) -> None:
    with pytest.raises(ConfigError, match="unknown argument 'tennant'; did you mean 'tenant'"):
        getattr(engine, how)(engine.encode("abc"), tennant="x")


def test_an_unknown_exactness_is_refused(letters: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match="exactness must be 'fast' or 'strict', not 'exact'"):
        Engine(make_model(), letters, exactness="exact")  # type: ignore[arg-type]


def test_an_unknown_forward_is_refused(letters: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match="forward must be 'auto' or 'torch', not 'onnx'"):
        Engine(make_model(), letters, forward="onnx")  # type: ignore[arg-type]


# Many streams


def test_streams_read_in_turn_give_what_each_gives_alone(engine: Engine) -> None:
    prompts = ["abcabc", "xyzxyzxyz", "hello", "QQQQ"]
    settings = SamplingParams(max_tokens=30)
    alone = [generate(engine, prompt, max_tokens=30).token_ids for prompt in prompts]
    streams = [engine.submit(engine.encode(prompt), settings, draft=DraftConfig(max_nodes=16)) for prompt in prompts]
    running: list[Iterator[Chunk]] = list(streams)
    while running:
        running = [stream for stream in running if next(stream, None) is not None]
    assert [stream.result.token_ids for stream in streams] == alone


def test_sixteen_threads_get_the_answers_they_get_alone(engine: Engine) -> None:
    prompts = [LETTERS[k : k + 5] * 3 for k in range(32)]

    def answer(prompt: str) -> tuple[tuple[int, ...], str]:
        passage = Passage("p", prompt[::-1])
        result = generate(engine, prompt, [passage], max_tokens=20)
        return result.token_ids, result.text

    alone = [answer(prompt) for prompt in prompts]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(answer, prompts)) == alone


def test_one_stream_may_be_read_by_several_threads(engine: Engine) -> None:
    settings = SamplingParams(max_tokens=40, ignore_eos=True)
    stream = engine.submit(engine.encode("abc"), settings)
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda _: list(stream), range(4)))
    assert sum(len(chunk.token_ids) for part in parts for chunk in part) == 40
    assert stream.result.token_ids == generate(engine, "abc", max_tokens=40, ignore_eos=True).token_ids


# Strict


@pytest.mark.parametrize("forward", ["auto", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strict_answers_are_equal_to_the_last_bit(
    letters: PreTrainedTokenizerFast, dtype: torch.dtype, forward: Forward
) -> None:
    model = make_model(dtype)
    model.config.max_position_embeddings = 1024
    strict = Engine(model, letters, exactness="strict", forward=forward)
    prompt = strict.encode("abcdefgh" * 29)  # decoding crosses the end of the first 256 positions
    plain = generate(strict, prompt, max_tokens=60, speculate=False, record_margins=True, ignore_eos=True)
    drafted = generate(strict, prompt, [Passage("p", plain.text)], max_tokens=60, record_margins=True, ignore_eos=True)
    assert drafted.token_ids == plain.token_ids
    assert drafted.margins == plain.margins
    assert len(drafted.margins) == 60
    assert drafted.stats.accepted > 20
    assert adds_up(drafted)


def test_margins_are_the_best_logit_less_the_second_best(engine: Engine) -> None:
    result = generate(engine, "abcabcabc", max_tokens=12, record_margins=True, ignore_eos=True)
    prompt = list(engine.encode("abcabcabc").token_ids)
    with torch.inference_mode():
        logits = engine.model(torch.tensor([[*prompt, *result.token_ids]])).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2).values
    assert result.margins == pytest.approx((best[:, 0] - best[:, 1]).tolist(), abs=1e-4)
    assert generate(engine, "abc", max_tokens=3).margins == ()


def test_margins_end_with_the_answer(engine: Engine) -> None:
    result = spoken(engine, "abcdefghabcd", "efghabcd", stop=("gh",), record_margins=True)
    assert len(result.margins) == len(result.token_ids) == 4


# The real model


@pytest.mark.slow
def test_real_answers_are_those_recorded(real_engine: Engine, shared_data: Path) -> None:
    with (shared_data / "smollm2_traces.jsonl").open(encoding="utf-8") as lines:
        traces = [trace for trace in map(json.loads, lines) if trace["category"] == "rag"]
    shortest = sorted(traces, key=lambda trace: len(trace["prompt"]))[:3]
    for trace in shortest:
        prompt = Prompt(trace["prompt"])
        drafted = generate(real_engine, prompt, max_tokens=48)
        assert list(drafted.token_ids) == trace["output"][:48]
        assert drafted.text == real_engine.tokenizer.decode(drafted.token_ids, skip_special_tokens=True)
        assert adds_up(drafted)
    plain = generate(real_engine, prompt, max_tokens=48, speculate=False)
    assert (plain.token_ids, plain.text) == (drafted.token_ids, drafted.text)


def test_noise_does_not_depend_on_what_was_decoded_before(real_engine: Engine) -> None:
    prompt = real_engine.encode("The cat sat on the mat. The cat sat on")
    first, again = (generate(real_engine, prompt, temperature=1.0, seed=9, max_tokens=8) for _ in range(2))
    plain = generate(real_engine, prompt, temperature=1.0, seed=9, max_tokens=8, speculate=False)
    assert first.token_ids == again.token_ids == plain.token_ids
    assert np.array(first.token_ids).max() < real_engine.target.config.vocab_size
