"""A cached prefix is not prefilled again: it is found by its tokens, for its own tenant, within a bound of bytes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from costs_stub import EverythingPays
from hypothesis import given
from hypothesis import strategies as st
from products import place_changes_bits
from tiny_models import COMMON, VOCABULARY, long_rope, make_model
from transformers import PreTrainedModel

from reader_rag.bench.generate.random_weights import NoText
from reader_rag.config import DraftConfig, SamplingParams
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import Generation, Prompt
from reader_rag.engine.sequence import DecodeSequence
from reader_rag.errors import ConfigError, ReaderWarning, UnsupportedModelError
from reader_rag.kv_cache.prefix_cache import PrefixCache
from reader_rag.kv_cache.tree_cache import States, TreeCache
from reader_rag.model import fixed_shape
from reader_rag.model import target as step
from reader_rag.model.compiled import forward as cpu_forward
from reader_rag.model.interface import Reuse
from reader_rag.sampling.sampler import Verified

POSITION = 16
"""Bytes of a position of `Written`."""


class Written:
    """A cache whose keys and values are the tokens themselves, int64 [1, 1, positions, 1]."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = list(tokens)

    def states(self, start: int, stop: int) -> States:
        block = np.array(self.tokens[start:stop], np.int64)[None, None, :, None]
        return [(block, block.copy())]

    def restore(self, blocks: Sequence[States]) -> None:
        assert not self.tokens
        for pair in (pair for block in blocks for pair in block):
            assert pair is not None
            assert np.array_equal(*pair)
            self.tokens += pair[0][0, 0, :, 0].tolist()


def keep(store: PrefixCache, tokens: Sequence[int], tenant: str = "") -> None:
    store.insert(tenant, tokens, Written(tokens))


def found(store: PrefixCache, tokens: Sequence[int], tenant: str = "") -> int:
    """How many tokens of a prompt the store gives back, each of them the right one."""
    cache = Written()
    count = store.restore(tenant, tokens, cache)
    assert cache.tokens == list(tokens[:count])
    return count


# The store


def test_a_shared_prefix_is_found_in_whole_blocks_and_never_the_last_token() -> None:
    store = PrefixCache(1000, block=2)
    keep(store, [1, 2, 3, 4, 5])
    assert found(store, [1, 2, 3, 4, 5]) == 4
    assert found(store, [1, 2, 3, 4]) == 2
    assert found(store, [1, 2, 3, 9, 9]) == 2
    assert found(store, [1, 2]) == 0
    assert found(store, [3, 4, 5]) == 0
    assert found(store, [9, 2, 3, 4, 5]) == 0
    assert found(store, [1]) == found(store, []) == 0


def test_a_shared_prefix_is_stored_once() -> None:
    store = PrefixCache(1000, block=2)
    keep(store, [1, 2, 3, 4])
    keep(store, [1, 2, 3, 4, 5])
    assert (len(store), store.nbytes) == (2, 4 * POSITION)
    keep(store, [1, 2, 5, 6])
    assert (len(store), store.nbytes) == (3, 6 * POSITION)
    assert found(store, [1, 2, 3, 4, 0]) == found(store, [1, 2, 5, 6, 0]) == 4


def test_only_what_is_not_held_yet_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    states = Written.states

    def noted(self: Written, start: int, stop: int) -> States:
        copied.append((start, stop))
        return states(self, start, stop)

    monkeypatch.setattr(Written, "states", noted)
    store = PrefixCache(1000, block=2)
    keep(store, [1, 2, 3])
    keep(store, [1, 2, 3, 4, 5, 6])
    assert copied == [(0, 2), (2, 4), (4, 6)]


def test_no_tenant_finds_anothers_prefixes() -> None:
    store = PrefixCache(1000, block=2)
    keep(store, [1, 2, 3, 4], "a")
    assert found(store, [1, 2, 3, 4, 5], "b") == found(store, [1, 2, 3, 4, 5]) == 0
    keep(store, [1, 2], "b")
    assert (found(store, [1, 2, 3, 4, 5], "a"), found(store, [1, 2, 3, 4, 5], "b")) == (4, 2)
    store.forget("a")
    assert (found(store, [1, 2, 3, 4, 5], "a"), found(store, [1, 2, 3, 4, 5], "b")) == (0, 2)
    assert store.nbytes == 2 * POSITION
    store.forget("a")
    store.clear()
    assert (found(store, [1, 2, 3], "b"), len(store), store.nbytes) == (0, 0, 0)


def test_the_least_recently_used_block_is_evicted_first_and_the_end_of_a_prefix_before_its_start() -> None:
    store = PrefixCache(3 * 2 * POSITION, block=2)
    keep(store, [1, 1, 2, 2])
    keep(store, [3, 3])
    assert found(store, [1, 1, 9]) == 2  # used again, unlike [2, 2] behind it
    keep(store, [4, 4])
    assert [found(store, [*text, 0]) for text in ([4, 4], [1, 1, 2, 2], [3, 3])] == [2, 2, 2]
    keep(store, [5, 5])
    assert [found(store, [*text, 0]) for text in ([4, 4], [1, 1], [3, 3], [5, 5])] == [0, 2, 2, 2]


def test_of_a_sequence_longer_than_the_bound_the_prefix_is_kept() -> None:
    store = PrefixCache(3 * 2 * POSITION + 1, block=2)
    keep(store, [7, 7, 7, 7])
    keep(store, list(range(20)))
    assert found(store, list(range(20))) == 6
    assert found(store, [7, 7, 7]) == 0
    assert store.nbytes <= store.max_bytes


@pytest.mark.parametrize("max_bytes", [1, 2 * POSITION - 1])
def test_a_bound_below_one_block_holds_nothing(max_bytes: int) -> None:
    store = PrefixCache(max_bytes, block=2)
    keep(store, [1, 2, 3, 4])
    assert (len(store), store.nbytes, found(store, [1, 2, 3])) == (0, 0, 0)


class Full(Written):
    """A cache of which nothing behind the first two positions can be copied."""

    error: Exception

    def states(self, start: int, stop: int) -> States:
        if start >= 2:
            raise self.error
        return super().states(start, stop)


def no_memory_on_cpu() -> Exception:
    """PyTorch's own error."""
    try:
        torch.empty(1 << 50)
    except RuntimeError as error:
        return error
    raise AssertionError("a petabyte was had")


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("device"), no_memory_on_cpu()], ids=["numpy", "device", "cpu"]
)
def test_without_memory_nothing_is_kept_and_what_was_held_stays(error: Exception) -> None:
    store = PrefixCache(1000, block=2)
    keep(store, [8, 8])
    cache = Full([1, 2, 3, 4])
    cache.error = error
    store.insert("", cache.tokens, cache)
    assert (found(store, [1, 2, 3, 4, 5]), found(store, [8, 8, 8])) == (0, 2)
    keep(store, [1, 2])
    store.insert("", cache.tokens, cache)
    assert found(store, [1, 2, 3, 4, 5]) == 2
    assert store.nbytes == 4 * POSITION


def test_other_errors_are_not_hidden() -> None:
    cache = Full([1, 2, 3, 4])
    cache.error = RuntimeError("device lost")
    with pytest.raises(RuntimeError, match="device lost"):
        PrefixCache(1000, block=2).insert("", cache.tokens, cache)


class Twin:
    """A reference prefix cache without a trie: every prefix, with the time of its last use."""

    def __init__(self, most: int, block: int) -> None:
        self.most = most
        self.block = block
        self.now = 0
        self.used: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}

    def prefixes(self, tenant: str, tokens: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
        ends = range(self.block, len(tokens) + 1, self.block)
        return [(tenant, tuple(tokens[:end])) for end in ends]

    def touch(self, path: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        self.now += 1
        self.used |= {prefix: (self.now, -len(prefix[1])) for prefix in path}

    def restore(self, tenant: str, tokens: Sequence[int]) -> int:
        path = [prefix for prefix in self.prefixes(tenant, tokens[:-1]) if prefix in self.used]
        self.touch(path)
        return len(path) * self.block

    def keep(self, tenant: str, tokens: Sequence[int]) -> None:
        path = []
        for prefix in self.prefixes(tenant, tokens):
            others = sorted(self.used.keys() - set(self.prefixes(tenant, tokens)), key=self.used.__getitem__)
            if prefix not in self.used and len(self.used) >= self.most:
                if not others:
                    break
                del self.used[others[0]]
            path.append(prefix)
            self.used.setdefault(prefix, (self.now, 0))
        self.touch(path)


@given(
    st.integers(0, 6),
    st.integers(1, 3),
    st.lists(
        st.tuples(st.booleans(), st.sampled_from("ab"), st.lists(st.integers(0, 1), max_size=9)),
        max_size=30,
    ),
)
def test_it_holds_what_the_longest_shared_prefixes_and_their_last_use_say(
    most: int, block: int, calls: list[tuple[bool, str, list[int]]]
) -> None:
    store, twin = PrefixCache(most * block * POSITION, block), Twin(most, block)
    for keeps, tenant, tokens in calls:
        if keeps:
            keep(store, tokens, tenant)
            twin.keep(tenant, tokens)
        else:
            assert found(store, tokens, tenant) == twin.restore(tenant, tokens)
        assert store.nbytes == len(twin.used) * block * POSITION <= store.max_bytes
        assert len(store) == len(twin.used)
    for tenant, tokens in list(twin.used):  # each is found, so none hangs below one that is gone
        assert found(store, [*tokens, 0], tenant) == len(tokens)


# Engines


class Watch:
    """A sampler that notes the logits before an answer's first token."""

    def __init__(self, engine: Engine, prompt: Prompt, settings: SamplingParams) -> None:
        self._sampler = engine.requests.sampler(prompt, settings)
        self.first: torch.Tensor | None = None

    def __call__(self, verified: Verified) -> Callable[[int], int]:
        if self.first is None:
            self.first = verified.logits[0].clone()
        return self._sampler(verified)


def made(model: PreTrainedModel, **options: Any) -> Engine:
    """An engine that verifies all that it drafts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReaderWarning)
        engine = Engine(model, NoText(), draft=DraftConfig(max_nodes=8), **options)  # type: ignore[arg-type]
    engine.context.costs.current = EverythingPays()  # type: ignore[assignment]
    return engine


def answer(
    engine: Engine, tokens: Sequence[int], tenant: str = "", length: int = 20, **options: Any
) -> tuple[Generation, torch.Tensor]:
    """An answer and the logits before its first token."""
    prompt, settings = Prompt(tokens), SamplingParams(max_tokens=length, ignore_eos=True, **options)
    watch = Watch(engine, prompt, settings)
    result = engine.generate(prompt, settings, tenant=tenant, sampler=watch)
    assert watch.first is not None
    return result, watch.first


def text_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist()


@pytest.fixture
def loops_read_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU on which prompts in 16 bits are read by the compiled loops."""
    for module in (cpu_forward, fixed_shape):
        monkeypatch.setattr(module, "slow_products", lambda: True)


def turns(cold: Engine, warm: Engine, block: int, *, bits: bool, answers: bool = True) -> None:
    """Ask a prompt twice, then one that shares its first half, then the next turn of its chat."""
    text = text_of(2 * block + 22)
    first, _ = answer(cold, text)
    half = [*text[: block + 5], *text_of(block, seed=1)]
    chat = [*text, *first.token_ids, *text_of(block, seed=2)]
    held = len(text) + (len(first.token_ids) - 1 if answers else 0)
    for tokens, reused in [
        (text, 0),
        (text, 2 * block),
        (text[: 2 * block], block),
        (half, block),
        (chat, held // block * block),
        (chat, (len(chat) - 1) // block * block),
    ]:
        expected, expected_logits = answer(cold, tokens, record_margins=True)
        result, logits = answer(warm, tokens, record_margins=True)
        assert (result.token_ids, result.stats.reused_tokens) == (expected.token_ids, reused)
        assert expected.stats.reused_tokens == 0
        if bits:
            assert torch.equal(logits, expected_logits)
            assert result.margins == expected.margins
        else:
            assert torch.allclose(logits, expected_logits, rtol=1e-3, atol=1e-3)
    assert warm.context.prefix_cache is not None
    assert warm.context.prefix_cache.block == block


@pytest.mark.parametrize(
    ("name", "forward"),
    [
        ("Llama", "auto"),
        *((name, "torch") for name in ("Llama", "Gemma3Text", "DeepseekV3", "Llama4Text", "GPT2", "Bloom", "GPTNeo")),
    ],
)
def test_answers_of_a_warm_engine_are_those_of_a_cold_one(name: str, forward: Any) -> None:
    model = make_model(name)
    cold, warm = made(model, forward=forward, prefix_bytes=0), made(model, forward=forward)
    assert cold.context.prefix_cache is None
    turns(cold, warm, 64, bits=False)


@pytest.mark.usefixtures("loops_read_prompts")
@pytest.mark.parametrize("exactness", ["fast", "strict"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_to_the_last_bit_where_the_loops_read_prompts(dtype: torch.dtype, exactness: Any) -> None:
    model = make_model("Llama").to(dtype)
    cold, warm = (made(model, exactness=exactness, prefix_bytes=most) for most in (0, None))
    assert warm.target.cpu is not None
    turns(cold, warm, 64, bits=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_to_the_last_bit_too_where_the_loops_decode_16_bits_that_pytorch_reads(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (cpu_forward, fixed_shape):
        monkeypatch.setattr(module, "slow_products", lambda: False)
    monkeypatch.setattr(step, "chunk_size", lambda _model: 32)
    model = make_model("Llama").to(dtype)
    cold, warm = made(model, prefix_bytes=0), made(model)
    assert warm.context.reuse == Reuse(32, answers=False)
    turns(cold, warm, 32, bits=True, answers=False)


@pytest.mark.parametrize(("name", "forward"), [("Llama", "torch"), ("Llama", "auto"), ("Gemma3Text", "torch")])
def test_strictly_whole_chunks_of_prompts_are_reused_to_the_last_bit(
    name: str, forward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "chunk_size", lambda _model: 32)
    model = make_model(name)
    cold, warm = (made(model, forward=forward, exactness="strict", prefix_bytes=most) for most in (0, None))
    assert warm.context.reuse == Reuse(32, answers=False)
    turns(cold, warm, 32, bits=True, answers=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strictly_to_the_last_bit_in_chunks_of_their_real_size(dtype: torch.dtype) -> None:
    model = make_model("Llama", COMMON | {"max_position_embeddings": 2048}).to(dtype)
    if place_changes_bits(dtype, 8):
        with pytest.raises(UnsupportedModelError, match="exactness='strict' cannot be kept"):
            made(model, forward="torch", exactness="strict")
        return
    cold, warm = (made(model, forward="torch", exactness="strict", prefix_bytes=most) for most in (0, None))
    turns(cold, warm, 512, bits=True, answers=False)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return make_model("Llama")


def test_what_a_tenant_asked_is_reused_for_no_other(llama: PreTrainedModel) -> None:
    engine, text = made(llama), text_of(100)
    reused = [answer(engine, text, tenant)[0].stats.reused_tokens for tenant in ("a", "b", "", "a", "b", "")]
    assert reused == [0, 0, 0, 64, 64, 64]


def test_a_tenant_is_forgotten_by_one_call(llama: PreTrainedModel) -> None:
    engine, text = made(llama), text_of(100)
    first = answer(engine, text, "a")[0].stats
    answer(engine, text, "b")
    engine.forget("a")
    assert answer(engine, text, "a")[0].stats.steps == first.steps
    assert engine.context.prefix_cache is not None
    engine.forget("a", learned=False)
    again = answer(engine, text, "a")[0].stats
    assert again.reused_tokens == 0
    assert again.steps < first.steps
    assert answer(engine, text, "b")[0].stats.reused_tokens == 64


def test_the_bound_holds_while_many_prompts_pass(llama: PreTrainedModel) -> None:
    position = 2 * 2 * (8 + 8) * 4
    engine = made(llama, prefix_bytes=5 * 64 * position + 100)
    assert engine.context.prefix_cache is not None
    for seed in range(8):
        text = text_of(130, seed % 5)
        cold = answer(engine, text, tenant=str(seed))[0]
        assert answer(engine, text, tenant=str(seed))[0].token_ids == cold.token_ids
        assert engine.context.prefix_cache.nbytes <= engine.context.prefix_cache.max_bytes
    assert engine.context.prefix_cache.nbytes == 5 * 64 * position
    assert answer(engine, text_of(130, 7 % 5), tenant="7")[0].stats.reused_tokens == 128


@pytest.mark.parametrize("ending", ["closed", "failed", "failed at the end", "finished"])
def test_only_an_answer_that_ended_is_kept(
    llama: PreTrainedModel, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, text = made(llama), text_of(120)
    settings = SamplingParams(max_tokens=21, ignore_eos=True, speculate=False)
    steps = 0

    def failing(*_: Any) -> Any:
        raise RuntimeError("device lost")

    def at_the_last_step(function: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            nonlocal steps
            steps += 1
            return then(*args) if steps == 20 else function(*args)

        return counted

    with monkeypatch.context() as patch:
        verify = engine.target.verify_batch
        if ending == "closed":
            closing = at_the_last_step(verify, lambda *args: (stream.close(), verify(*args))[1])
            patch.setattr(engine.target, "verify_batch", closing)
            steps = 1  # one before the last
        if ending == "failed":
            patch.setattr(engine.target, "verify_batch", at_the_last_step(verify, failing))
        if ending == "failed at the end":
            patch.setattr(DecodeSequence, "_record", at_the_last_step(DecodeSequence._record, failing))
            steps = -1  # the prefill records a token, too
        stream = engine.submit(Prompt(text), settings)
        if ending.startswith("failed"):
            with pytest.raises(RuntimeError, match="device lost"):
                list(stream)
        else:
            list(stream)
        engine.between_steps(lambda: None)
    whole, _ = answer(made(llama, prefix_bytes=0), text, length=21)
    chat = [*text, *whole.token_ids]
    result, _ = answer(engine, chat)
    assert result.stats.reused_tokens == (128 if ending == "finished" else 64)
    assert result.token_ids == answer(made(llama, prefix_bytes=0), chat)[0].token_ids


def test_a_prompt_that_is_not_read_to_its_end_is_not_kept(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "chunk_size", lambda _model: 64)
    engine = made(llama)
    monkeypatch.setattr(engine.target, "_forward", failing_at(engine.target._forward, 3))  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="device lost"):
        answer(engine, text_of(150))
    assert engine.context.prefix_cache is not None
    assert len(engine.context.prefix_cache) == 0


def failing_at(function: Callable[..., Any], call: int) -> Callable[..., Any]:
    calls = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError("device lost")
        return function(*args, **kwargs)

    return failing


def test_an_answer_does_not_fail_for_want_of_memory_to_keep_it(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, text = made(llama), text_of(100)

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("device")

    with monkeypatch.context() as patch:
        patch.setattr(TreeCache, "states", full)
        first, _ = answer(engine, text)
    again, _ = answer(engine, text)
    assert again.token_ids == first.token_ids
    assert again.stats.reused_tokens == 0


@pytest.mark.parametrize(("length", "reused"), [(80, 64), (100, 64), (101, 0), (140, 0)])
def test_no_prefix_is_reused_across_a_switch_of_rotations(length: int, reused: int) -> None:
    model = long_rope(switch=100)
    cold, warm = made(model, prefix_bytes=0), made(model)
    text = text_of(150)
    for tokens in (text[:90], text[:140]):  # the first answer crosses the switch, and so does the second prompt
        assert answer(warm, tokens, length=60)[0].token_ids == answer(cold, tokens, length=60)[0].token_ids
    expected, expected_logits = answer(cold, text[:length])
    result, logits = answer(warm, text[:length])
    assert (result.token_ids, result.stats.reused_tokens) == (expected.token_ids, reused)
    assert torch.allclose(logits, expected_logits, rtol=1e-3, atol=1e-3)


def test_how_much_of_a_sequence_may_be_reused() -> None:
    assert Reuse(64).positions(10, 30) == 30
    assert Reuse(64, answers=False).positions(10, 30) == 10
    rotates = Reuse(64, before=20)
    assert [rotates.positions(prompt, 30) for prompt in (10, 20, 21)] == [20, 20, 0]
    assert Reuse(64, answers=False, before=20).positions(10, 30) == 10


def test_models_with_a_state_reuse_nothing() -> None:
    engine = made(make_model("Mamba"))
    assert engine.drafting == "none"
    assert engine.context.prefix_cache is None
    engine.forget()
    assert [answer(engine, text_of(100))[0].stats.reused_tokens for _ in range(2)] == [0, 0]


def test_models_with_adapters_reuse_nothing_because_adapters_change() -> None:
    model: Any = make_model("Llama")
    model.model.layers[0].self_attn.q_proj.merged_adapters = []
    assert made(model).context.prefix_cache is None


def test_a_model_that_does_not_go_on_from_copies_reuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = TreeCache.restore

    def short(self: TreeCache, blocks: Sequence[States]) -> None:
        restore(self, blocks)
        self.set_committed(self.length - 1)

    monkeypatch.setattr(TreeCache, "restore", short)
    assert made(make_model("GPT2")).context.prefix_cache is None


def test_it_can_be_turned_off_and_its_bound_is_checked(llama: PreTrainedModel) -> None:
    off = made(llama, prefix_bytes=0)
    assert (off.context.prefix_cache, off.context.reuse, off.prefix_bytes) == (None, None, 0)
    assert made(llama).prefix_bytes == 256 << 20
    with pytest.raises(ConfigError, match="prefix_bytes must be at least 0 .* not -1"):
        made(llama, prefix_bytes=-1)


def test_statistics_tell_what_was_reused(llama: PreTrainedModel) -> None:
    engine = made(llama)
    for reused in (0, 64):
        assert answer(engine, text_of(70))[0].stats.to_dict()["reused_tokens"] == reused
