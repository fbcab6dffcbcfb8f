"""Every family of models is decoded token for token as its own `generate` does it, in the way that it allows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from costs_stub import EverythingPays
from numba import config as numba_config
from products import place_changes_bits
from tiny_models import (
    CHAINS,
    EAGER_ONLY,
    MIXED_UP,
    MODELS,
    PLAIN,
    TREES,
    VOCABULARY,
    WINDOW,
    Noise,
    generated,
    long_rope,
    make_model,
)
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from reader_rag.bench.generate.random_weights import NoText
from reader_rag.config import DraftConfig, SamplingParams
from reader_rag.draft import DraftTree
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import Generation, Prompt
from reader_rag.errors import ReaderWarning, UnsupportedModelError
from reader_rag.model import select_target as select_target
from reader_rag.model.interface import Step, prefill
from reader_rag.model.plain_target import PlainTarget
from reader_rag.model.profile import successors as profiling
from reader_rag.model.self_test import decodes_plainly, keeps_bits, verifies_chains
from reader_rag.model.target import Target

MODE = dict.fromkeys(TREES, "tree") | dict.fromkeys(CHAINS, "chain") | dict.fromkeys(PLAIN, "none")
EAGER_TOO = ("Llama", "Mistral", "Gemma3Text", "Mixtral", "Llama4Text", "GPT2", "DeepseekV3", "Falcon-alibi")
COMPILED = ("Llama", "Qwen2", "Qwen3", "Mistral", "Ministral", "Gemma", "Gemma2", "Gemma3Text", "Phi3", "Olmo2")
COMPILED += ("Olmo3", "Granite", "SmolLM3")
"""Models that run in compiled loops."""
CASES = [pytest.param(name, None, id=name) for name in MODELS]
CASES += [pytest.param(name, "eager", id=f"{name}-eager", marks=pytest.mark.slow) for name in EAGER_TOO]
TOKENS = 48


def made(model: PreTrainedModel, **options: Any) -> tuple[Engine, list[str]]:
    """An engine that verifies all that it drafts, and what it reported."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = Engine(model, NoText(), draft=DraftConfig(max_nodes=16), **options)  # type: ignore[arg-type]
    engine.context.costs.current = EverythingPays()  # type: ignore[assignment]
    return engine, [str(note.message) for note in caught if issubclass(note.category, ReaderWarning)]


def answer(engine: Engine, prompt: list[int], tokens: int = TOKENS, **options: Any) -> Generation:
    return engine.generate(Prompt(prompt), SamplingParams(max_tokens=tokens, **options))


def prompt_of(length: int) -> list[int]:
    """Tokens that repeat after eleven, so that copies are drafted from the first step on."""
    return [3 + 7 * k % 11 for k in range(length)]


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_drafted_answers_are_those_of_generate(name: str, attention: str | None) -> None:
    model = make_model(name, attention=attention)
    engine, notes = made(model, forward="torch")
    assert engine.drafting == MODE[name]
    assert len(notes) == (engine.drafting != "tree")
    drafted = accepted = 0
    for length in (WINDOW - 6, 3 * WINDOW + 12):
        prompt = prompt_of(length)
        expected = generated(model, prompt, TOKENS)
        assert answer(engine, prompt, speculate=False).token_ids == expected
        result = answer(engine, prompt)
        assert result.token_ids == expected
        drafted, accepted = drafted + result.stats.drafted, accepted + result.stats.accepted
        sampled = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 7}
        warpers = [TemperatureLogitsWarper(0.9), TopKLogitsWarper(40), TopPLogitsWarper(0.95), Noise(7)]
        drawn = generated(model, prompt, TOKENS // 2, logits_processor=LogitsProcessorList(warpers))
        assert answer(engine, prompt, TOKENS // 2, **sampled).token_ids == drawn
    if engine.drafting == "none":
        assert drafted == 0
    else:
        assert 10 < accepted < drafted


@pytest.mark.skipif(bool(numba_config.DISABLE_JIT), reason="compiled loops need the compiler")
@pytest.mark.parametrize("name", COMPILED)
def test_answers_of_compiled_loops_are_those_of_generate(name: str) -> None:
    model = make_model(name)
    engine, notes = made(model)
    assert engine.drafting == "tree"
    assert engine.target.cpu is not None
    assert notes == []
    accepted = 0
    for length in (WINDOW - 6, 3 * WINDOW + 12):
        prompt = prompt_of(length)
        expected = generated(model, prompt, TOKENS)
        assert answer(engine, prompt, speculate=False).token_ids == expected
        result = answer(engine, prompt)
        assert result.token_ids == expected
        accepted += result.stats.accepted
    assert accepted > 10


@pytest.mark.parametrize(("length", "tokens"), [(8, 30), (50, 40), (90, 40)])
def test_rotations_that_depend_on_the_length(length: int, tokens: int) -> None:
    switch = 40
    model = long_rope(switch)
    engine, _ = made(model)
    prompt = prompt_of(length)
    expected = generated(model, prompt, tokens)
    assert answer(engine, prompt, tokens, speculate=False).token_ids == expected
    for _ in range(2):
        result = answer(engine, prompt, tokens)
        assert result.token_ids == expected
    assert 0 < result.stats.accepted < result.stats.drafted


@pytest.mark.parametrize("name", list(MIXED_UP))
def test_a_model_that_mixes_texts_up_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="mixes texts that are read in turn"):
        made(make_model(name, MIXED_UP[name]))


@pytest.mark.parametrize("name", ["Llama", "Bloom", "Mamba", "Jamba", "Rwkv", "MiniMax"])
def test_answers_read_in_turn_are_those_read_alone(name: str) -> None:
    engine, _ = made(make_model(name), forward="torch")
    prompts = [[5], prompt_of(9), prompt_of(30)]
    alone = [answer(engine, prompt, 12).token_ids for prompt in prompts]
    streams = [engine.submit(Prompt(prompt), SamplingParams(max_tokens=12)) for prompt in prompts]
    running = list(streams)
    while running:
        running = [stream for stream in running if next(stream, None) is not None]
    assert [stream.result.token_ids for stream in streams] == alone


# Chains


@pytest.mark.parametrize("name", list(CHAINS))
def test_models_whose_attention_goes_by_the_slot_draft_chains_and_say_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, notes = made(make_model(name))
    assert len(notes) == 1
    assert "drafts have no branches" in notes[0]
    verify, verified = engine.target.verify_batch, list[DraftTree]()

    def recorded(steps: Sequence[Step], *others: Any) -> list[torch.Tensor]:
        verified.extend(step.tree for step in steps)
        return verify(steps, *others)

    monkeypatch.setattr(engine.target, "verify_batch", recorded)
    answer(engine, prompt_of(40))
    assert max(len(tree) for tree in verified) > 4
    assert all(tree.parents.tolist() == list(range(-1, len(tree) - 1)) for tree in verified)


@pytest.mark.parametrize("name", list(CHAINS))
def test_strict_is_refused_where_chains_do_not_keep_the_bits(name: str) -> None:
    model = make_model(name)
    if not chains_keep_bits(model):
        with pytest.raises(UnsupportedModelError, match="drafts have no fixed shape .* exactness='strict' cannot be"):
            made(model, exactness="strict")
        return
    engine, _ = made(model, exactness="strict")
    prompt = prompt_of(40)
    drafted, plain = (answer(engine, prompt, record_margins=True, speculate=way) for way in (True, False))
    assert (drafted.token_ids, drafted.margins) == (plain.token_ids, plain.margins)


@torch.inference_mode()
def chains_keep_bits(model: PreTrainedModel) -> bool:
    """Whether `transformers` alone gives chains of up to eight tokens the bits of steps over one token."""
    for length in range(2, 10):
        prompt, chain = torch.tensor([prompt_of(20)]), torch.tensor([prompt_of(20 + length)[20:]])
        at_once, stepwise = DynamicCache(config=model.config), DynamicCache(config=model.config)
        for cache in (at_once, stepwise):
            model(prompt, past_key_values=cache)
        steps = [model(chain[:, n : n + 1], past_key_values=stepwise).logits[0, -1] for n in range(length)]
        if not torch.equal(model(chain, past_key_values=at_once).logits[0], torch.stack(steps)):
            return False
    return True


def test_bits_of_chains_are_compared_at_several_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(make_model("Bloom"), forward="torch", branches=False)
    verify = target.verify

    def mixes_long_ones(root: int, tree: DraftTree, cache: Any) -> torch.Tensor:
        logits = verify(root, tree, cache)
        return logits + (logits.mean(0) * 1e-3 if len(tree) > 16 else 0.0)

    one_row_at_a_time(target)
    assert keeps_bits(target, branches=False)
    monkeypatch.setattr(target, "verify", mixes_long_ones)
    assert not keeps_bits(target, branches=False)


def one_row_at_a_time(target: Target) -> None:
    """Verify a chain by as many passes over one token, which keeps the bits on any machine."""
    verify = target.verify

    def verified(root: int, tree: DraftTree, cache: Any) -> torch.Tensor:
        before, rows = cache.length, []
        for token in [root, *tree.tokens.tolist()]:
            rows.append(verify(token, DraftTree.empty(), cache))
            cache.commit([0])
        cache.set_committed(before)
        return torch.cat(rows)

    target.verify = verified  # type: ignore[method-assign]


def test_chains_that_leave_a_trace_fail_the_self_test() -> None:
    target = Target(make_model("Bloom"), forward="torch", branches=False)
    assert verifies_chains(target)
    forward = target.model.forward

    def forgets_nothing(*args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        output = forward(*args, past_key_values=past_key_values, **kwargs)
        if args[0].shape[1] == 7:  # the root and the chain: one is kept, accepted or not
            past_key_values.commit([0])
        return output

    target.model.forward = forgets_nothing  # type: ignore[method-assign]
    assert not verifies_chains(target)


def test_a_model_that_ignores_positions_or_masks_drafts_chains() -> None:
    for ignored in ("position_ids", "attention_mask"):
        model = make_model("Llama")
        forward = model.forward

        def ignoring(*args: Any, forward: Any = forward, ignored: str = ignored, **kwargs: Any) -> Any:
            return forward(*args, **(kwargs | {ignored: None}))

        model.forward = ignoring  # type: ignore[method-assign]
        engine, notes = made(model, forward="torch")
        assert engine.drafting == "chain"
        assert "ignores the tree mask or the positions" in notes[0]
        prompt = prompt_of(40)
        result = answer(engine, prompt)
        assert result.token_ids == generated(make_model("Llama"), prompt, TOKENS)
        assert result.stats.accepted > 10


# Attention backends


def own_causal(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **settings: Any
) -> tuple[torch.Tensor, None]:
    """Attention that is causal by itself and takes no mask, as flash attention is; queries stand at the end."""
    assert attention_mask is None
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * settings["scaling"]
    if settings.get("softcap"):
        scores = torch.tanh(scores / settings["softcap"]) * settings["softcap"]
    rows = torch.arange(key.shape[2] - query.shape[2], key.shape[2])[:, None]
    columns = torch.arange(key.shape[2])[None]
    hidden = columns > rows
    if settings.get("sliding_window"):
        hidden |= columns <= rows - settings["sliding_window"]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


@pytest.fixture
def own_attention() -> str:
    """The name of a backend that takes no tree mask."""
    AttentionInterface.register("own_causal", own_causal)
    AttentionMaskInterface.register("own_causal", lambda *args, **kwargs: None)
    return "own_causal"


def test_a_backend_without_a_tree_mask_becomes_sdpa_and_a_note_says_so(own_attention: str) -> None:
    model = make_model("Llama", attention=own_attention)
    engine, notes = made(model, forward="torch")
    assert engine.drafting == "tree"
    assert notes == [
        "LlamaForCausalLM: the attention backend 'own_causal' takes no tree mask; the model's attention is now 'sdpa'"
    ]
    assert model.config._attn_implementation == "sdpa"
    prompt = prompt_of(40)
    assert answer(engine, prompt).token_ids == generated(make_model("Llama"), prompt, TOKENS)


def test_a_backend_that_cannot_become_sdpa_becomes_eager(own_attention: str) -> None:
    engine, notes = made(make_model("Gemma2", attention=own_attention), forward="torch")
    assert engine.drafting == "tree"
    assert notes == [
        "Gemma2ForCausalLM: the attention backend 'own_causal' takes no tree mask; the model's attention is now 'eager'"
    ]
    prompt = prompt_of(40)
    assert answer(engine, prompt).token_ids == generated(make_model("Gemma2"), prompt, TOKENS)


def test_a_backend_that_cannot_be_changed_drafts_chains(own_attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("Gemma2", attention=own_attention)

    def refuses(backend: str) -> None:
        raise ValueError(f"no {backend} here")

    monkeypatch.setattr(model, "set_attn_implementation", refuses)
    engine, notes = made(model, forward="torch")
    assert engine.drafting == "chain"
    assert model.config._attn_implementation == own_attention
    assert "takes no tree mask, and 'sdpa' cannot be used: no sdpa here and 'eager' cannot be used" in notes[0]
    prompt = prompt_of(40)
    result = answer(engine, prompt)
    assert result.token_ids == generated(model, prompt, TOKENS) == generated(make_model("Gemma2"), prompt, TOKENS)
    assert result.stats.accepted > 10


@pytest.mark.parametrize("name", sorted(EAGER_ONLY & TREES.keys()))
def test_models_without_sdpa_verify_trees_all_the_same(name: str) -> None:
    with pytest.raises(ValueError, match="does not support an attention implementation through"):
        make_model(name, attention="sdpa")
    assert made(make_model(name))[0].drafting == "tree"


# Plain


@pytest.mark.parametrize("name", list(PLAIN))
def test_models_with_a_state_are_decoded_plainly_and_say_so(name: str) -> None:
    engine, notes = made(make_model(name), exactness="strict")
    assert len(notes) == 1
    assert "decoded without drafts, one token at a time" in notes[0]
    result = answer(engine, prompt_of(20), 6)
    assert (result.stats.steps, result.stats.drafted) == (5, 0)
    assert result.stats.cache_bytes > 0


def test_plain_steps_that_are_not_the_models_own_fail_the_self_test() -> None:
    target = PlainTarget(make_model("Mamba"))
    assert decodes_plainly(target)
    forward = target.model.forward

    def forgets(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if "cache_params" in output:
            output["cache_params"].reset()
        return output

    target.model.forward = forgets  # type: ignore[method-assign]
    assert not decodes_plainly(target)


def test_a_model_that_cannot_be_decoded_at_all_is_refused() -> None:
    model = make_model("Llama")
    forward = model.forward
    calls = [0]

    def noise(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        calls[0] += 1
        return output | {"logits": output.logits.roll(calls[0], -1)}

    model.forward = lambda *args, **kwargs: type(forward(*args, **kwargs))(**noise(*args, **kwargs))  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModelError, match="other logits than for a whole text"):
        made(model, forward="torch")

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such kernel")

    model.forward = broken  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModelError, match="neither with drafts .* nor without: no such kernel"):
        made(model, forward="torch")


def test_out_of_memory_is_not_taken_for_a_model_that_verifies_nothing() -> None:
    model = make_model("Llama")

    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    model.forward = full  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        made(model, forward="torch")


def test_a_state_takes_nothing_back() -> None:
    target = PlainTarget(make_model("Mamba"))
    cache = target.new_cache(20, 0)
    prefill(target, prompt_of(12), cache)
    assert cache.length == 12
    with pytest.raises(ValueError, match="2 drafted tokens for a model that cannot verify any"):
        target.verify(5, DraftTree.from_chain([6, 7]), cache)
    target.verify(5, DraftTree.empty(), cache)
    with pytest.raises(ValueError, match="a state cannot be rolled back"):
        cache.commit([])


def test_a_model_without_a_cache_reads_the_text_again() -> None:
    settings = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    model = make_model("OpenAIGPT", settings | {"initializer_range": 0.2})
    engine, _ = made(model)
    assert engine.drafting == "none"
    assert answer(engine, prompt_of(30), 20).token_ids == generated(model, prompt_of(30), 20)


def test_no_profile_is_made_of_a_model_that_verifies_no_trees() -> None:
    engine, _ = made(make_model("Bloom"))
    engine.tokenizer.get_vocab = lambda: {"a": 0}  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModelError, match="verifies no trees"):
        profiling.make_profile(engine.target, engine.tokenizer, name="bloom", drafting=engine.drafting)


# Experts


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss"])
def test_strict_changes_how_experts_are_multiplied_where_that_keeps_the_bits(name: str) -> None:
    model = make_model(name)
    assert model.config._experts_implementation == "grouped_mm"
    if place_changes_bits(torch.float32, 8):
        with pytest.raises(UnsupportedModelError, match="depending on its neighbours"):
            made(model, exactness="strict", forward="torch")
        assert model.config._experts_implementation == "grouped_mm"
        return
    engine, notes = made(model, exactness="strict", forward="torch")
    assert model.config._experts_implementation == "batched_mm"
    assert notes == [
        f"{name}ForCausalLM: for exactness='strict', the model's experts are now 'batched_mm' instead of 'grouped_mm'"
    ]
    accepted = 0
    for length in (10, 40):
        drafted, plain = (
            answer(engine, prompt_of(length), record_margins=True, speculate=way) for way in (True, False)
        )
        assert (drafted.token_ids, drafted.margins) == (plain.token_ids, plain.margins)
        accepted += drafted.stats.accepted
    assert accepted > 5


def test_experts_are_as_they_were_where_strict_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select_target, "keeps_bits", lambda target: False)
    model = make_model("Mixtral")
    with pytest.raises(UnsupportedModelError, match="depending on its neighbours"):
        made(model, exactness="strict", forward="torch")
    assert model.config._experts_implementation == "grouped_mm"
