"""Draft models change how many steps an answer takes, and never the answer."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_model_tools import CHAIN, LAYERS, SAMPLED, TOKENS, answer, draft_model, prompt_of, random_assistant
from heads import make_head
from tiny_models import COMMON, PLAIN, VOCABULARY, make_model
from waiting import wait_until

from reader_rag.config import BatchConfig, DraftConfig, SamplingParams
from reader_rag.draft.source import Budget, RequestState, Verified
from reader_rag.engine.draft_models.assistant import AssistantModel
from reader_rag.engine.draft_models.source import DraftRequest, ModelSource
from reader_rag.engine.engine import Engine
from reader_rag.errors import ConfigError, ModelError, UnsupportedModelError
from reader_rag.kv_cache.layer_states import LayerStates
from reader_rag.kv_cache.tree_cache import TreeCache
from reader_rag.model.interface import Step
from reader_rag.model.quantization.loader import quantise_in_memory
from reader_rag.model.target import Target


@pytest.mark.parametrize("forward", ["auto", "torch"])
@pytest.mark.parametrize("kind", ["perfect", "random", "head"])
def test_answers_are_those_of_plain_decoding(
    make_engine: Callable[..., Engine], tmp_path: Path, kind: str, forward: Any
) -> None:
    model = make_model("Llama", LAYERS)
    engine = make_engine(model, forward=forward, **draft_model(kind, model, tmp_path))
    for prompt in (prompt_of(5), prompt_of(70, seed=1)):
        for sampled in ({}, SAMPLED):
            plain = answer(engine, prompt, speculate=False, **sampled)
            drafted = answer(engine, prompt, **sampled)
            assert drafted.token_ids == plain.token_ids
            assert plain.stats.steps == TOKENS - 1
            if kind == "perfect":
                assert drafted.stats.steps <= 8  # 22 tokens after the first, 5 a step but where copies take the nodes
            assert drafted.stats.drafted > 0


@pytest.mark.parametrize("sampled", [{}, SAMPLED])
def test_a_perfect_assistant_drafts_only_what_is_accepted(
    make_engine: Callable[..., Engine], proposals: list[tuple[int, list[int]]], sampled: dict[str, Any]
) -> None:
    model = make_model("Llama", LAYERS)
    engine, prompt = make_engine(model, CHAIN, assistant=model), prompt_of(20)
    result = answer(engine, prompt, **sampled)
    tokens = [*prompt.token_ids, *result.token_ids]
    assert len(proposals) == result.stats.steps
    for length, drafted in proposals[:-1]:
        assert len(drafted) == 4
        assert drafted == tokens[length : length + 4]
    length, drafted = proposals[-1]
    assert drafted[: len(tokens) - length] == tokens[length:][: len(drafted)]


def test_an_assistant_that_never_pays_is_asked_for_nothing_after_a_while(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelSource, "proposal_seconds", 10.0, raising=False)
    model = make_model("Llama", LAYERS)
    engine, prompt = make_engine(model, replace(CHAIN, gated=True), assistant=model), prompt_of(20)
    expected = answer(engine, prompt, speculate=False).token_ids
    asked = []
    for _ in range(3):
        result = answer(engine, prompt)
        assert result.token_ids == expected
        (counts,) = result.stats.draft_sources.values()
        asked.append(counts.asked)
    assert asked[1:] == [0, 0]


def test_a_draw_without_a_seed_is_drafted_by_the_same_draw(
    make_engine: Callable[..., Engine], proposals: list[tuple[int, list[int]]]
) -> None:
    model = make_model("Llama", LAYERS)
    engine, prompt = make_engine(model, CHAIN, assistant=model), prompt_of(20)
    result = answer(engine, prompt, temperature=1.5)
    tokens = [*prompt.token_ids, *result.token_ids]
    assert all(drafted == tokens[length : length + len(drafted)] for length, drafted in proposals[:-1])
    assert result.stats.steps == 5


@pytest.mark.parametrize("kind", ["perfect", "random", "head"])
@pytest.mark.parametrize("forward", ["auto", "torch"])
def test_a_batch_of_requests(make_engine: Callable[..., Engine], tmp_path: Path, kind: str, forward: Any) -> None:
    model = make_model("Llama", LAYERS)
    engine = make_engine(model, forward=forward, **draft_model(kind, model, tmp_path))
    prompts = [prompt_of(length, seed=length) for length in (4, 30, 9)]
    each = [SamplingParams(max_tokens=length, ignore_eos=True) for length in (9, 20, 30)]
    answers = engine.generate(prompts, each)
    for prompt, params, result in zip(prompts, each, answers, strict=True):
        plain = SamplingParams(max_tokens=params.max_tokens, ignore_eos=True, speculate=False)
        assert result.token_ids == engine.generate(prompt, plain).token_ids


@pytest.mark.parametrize("forward", ["auto", "torch"])
@pytest.mark.parametrize("batch", [1, 3])
def test_requests_of_a_batch_share_the_passes_of_an_assistant(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, batch: int, forward: Any
) -> None:
    model = make_model("Llama", LAYERS)
    engine = make_engine(model, CHAIN, assistant=model, forward=forward)
    engine.scheduler.limits = BatchConfig(max_rows=batch)
    assistant = engine.draft_model
    assert isinstance(assistant, AssistantModel)
    if forward == "torch":  # as on a GPU
        assistant.target = Target(model, forward="torch")
    passes: list[int] = []
    verify_batch = assistant.target.verify_batch

    def counted(steps: Sequence[Step], *more: Any) -> list[torch.Tensor]:
        passes.append(len(steps))
        return verify_batch(steps, *more)

    monkeypatch.setattr(assistant.target, "verify_batch", counted)
    prompts = [prompt_of(length, seed=length) for length in (20, 34, 27)]
    params = SamplingParams(max_tokens=16, ignore_eos=True)  # 15 tokens in three steps of five
    answers = engine.generate(prompts, params)
    assert [answer.stats.steps for answer in answers] == [3, 3, 3]
    # A step asks for four tokens; all of the first one but its last token was prefilled.
    assert sum(passes) == 3 * (3 * 4 - 1)
    assert len(passes) == sum(passes) if batch == 1 else len(passes) < 2 * sum(passes) / 3
    assert [a.token_ids for a in answers] == [
        engine.generate(prompt, replace(params, speculate=False)).token_ids for prompt in prompts
    ]


def test_an_assistant_with_a_short_window_drafts_within_it(
    make_engine: Callable[..., Engine], proposals: list[tuple[int, list[int]]]
) -> None:
    assistant = make_model("Llama", LAYERS | {"max_position_embeddings": 32})
    engine = make_engine(assistant=assistant, draft=CHAIN)
    prompt = prompt_of(20)
    assert answer(engine, prompt).token_ids == answer(engine, prompt, speculate=False).token_ids
    assert any(drafted for _, drafted in proposals)
    assert all(length + len(drafted) <= 32 for length, drafted in proposals if drafted)
    assert not proposals[-1][1]


def test_nothing_is_drafted_for_plain_requests(
    make_engine: Callable[..., Engine], proposals: list[tuple[int, list[int]]]
) -> None:
    engine = make_engine(assistant=random_assistant())
    answer(engine, prompt_of(8), speculate=False)
    engine.generate(prompt_of(8), SamplingParams(max_tokens=4), draft=DraftConfig(max_nodes=0))
    assert proposals == []


class TestMemory:
    @pytest.mark.parametrize("kind", ["random", "head"])
    def test_it_is_reserved(self, make_engine: Callable[..., Engine], tmp_path: Path, kind: str) -> None:
        model = make_model("Llama", LAYERS)
        engine = make_engine(model, prefix_bytes=0, **draft_model(kind, model, tmp_path))
        request = engine.requests.build(prompt_of(50), SamplingParams(max_tokens=10, ignore_eos=True))
        (source,) = request.draft_sources
        assert isinstance(source, ModelSource)
        states = 50 * 3 * 32 * 4 if kind == "head" else 0
        assert source.nbytes > 0
        needed = engine.target.cache_bytes(60, 16) + source.nbytes + states
        engine.scheduler.limits = BatchConfig(max_cache_bytes=needed - 1)
        with pytest.raises(ConfigError, match="prompt and answer need"):
            engine.generate(prompt_of(50), SamplingParams(max_tokens=10, ignore_eos=True))
        engine.scheduler.limits = BatchConfig(max_cache_bytes=needed)
        assert len(engine.generate(prompt_of(50), SamplingParams(max_tokens=10, ignore_eos=True)).token_ids) == 10

    @pytest.mark.parametrize("ending", ["complete", "closed"])
    def test_it_is_freed_with_the_request(
        self, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, ending: str
    ) -> None:
        caches: list[weakref.ref[TreeCache]] = []
        begin = TreeCache.__init__

        def noted(self: TreeCache, *arguments: Any) -> None:
            begin(self, *arguments)
            caches.append(weakref.ref(self))

        engine = make_engine(assistant=random_assistant(), prefix_bytes=0)
        monkeypatch.setattr(TreeCache, "__init__", noted)
        stream = engine.submit(prompt_of(30), SamplingParams(max_tokens=60, ignore_eos=True))
        next(stream)
        if ending == "complete":
            stream.finish()
        else:
            stream.close()
        wait_until(lambda: engine.busy.running == 0, "the request has ended")
        gc.collect()
        assert caches
        assert sum(cache.nbytes for cache in (reference() for reference in caches) if cache is not None) == 0


class TestHead:
    @pytest.mark.parametrize("own_embedding", [True, False])
    @pytest.mark.parametrize("draft_vocabulary", [None, 40])
    @pytest.mark.parametrize("speculators", [True, False])
    def test_kinds_of_heads_draft(
        self,
        make_engine: Callable[..., Engine],
        tmp_path: Path,
        proposals: list[tuple[int, list[int]]],
        speculators: bool,
        draft_vocabulary: int | None,
        own_embedding: bool,
    ) -> None:
        model = make_model("Llama", LAYERS)
        options = {"speculators": speculators, "draft_vocabulary": draft_vocabulary, "own_embedding": own_embedding}
        head = make_head(tmp_path / "head", model.config, scale=0.2, layer_ids=(1, 3), **options)  # type: ignore[arg-type]
        engine, prompt = make_engine(model, draft_model=head), prompt_of(12)
        assert answer(engine, prompt).token_ids == answer(engine, prompt, speculate=False).token_ids
        drafted = {token for _, tokens in proposals for token in tokens}
        assert all(len(tokens) == 16 for _, tokens in proposals[:-4])
        if draft_vocabulary is not None:
            assert drafted <= set(np.linspace(0, VOCABULARY - 1, 40).astype(int).tolist())

    def test_an_int8_model_shares_its_embedding_and_its_output_head(
        self, make_engine: Callable[..., Engine], tmp_path: Path, proposals: list[tuple[int, list[int]]]
    ) -> None:
        model = quantise_in_memory(make_model("Llama", LAYERS), torch.bfloat16)
        head = make_head(tmp_path / "head", model.config, scale=0.2, own_embedding=False, own_output=False)
        engine, prompt = make_engine(model, draft_model=head), prompt_of(12)
        assert answer(engine, prompt).token_ids == answer(engine, prompt, speculate=False).token_ids
        assert any(drafted for _, drafted in proposals)

    def test_drafts_do_not_depend_on_how_the_states_came(
        self, make_engine: Callable[..., Engine], tmp_path: Path
    ) -> None:
        model = make_model("Llama", LAYERS)
        engine = make_engine(model, draft_model=make_head(tmp_path / "head", model.config, scale=0.2))
        assert engine.draft_model is not None
        tokens = np.array(prompt_of(30).token_ids, np.int32)
        rows = torch.randn(29, 3, 32, generator=torch.Generator().manual_seed(0))
        request = DraftRequest(60, "", VOCABULARY, VOCABULARY, tokens=4, branches=2)

        def source_of(*parts: int) -> ModelSource:
            """A source that got the states in parts, and drafted in between."""
            source = ModelSource(engine.draft_model.open(request))  # type: ignore[union-attr]
            start = 0
            for stop in parts:
                source.observe(Verified((0,), 0, hidden_states=LayerStates((2, 4, 5), start, rows[start:stop])))
                source.propose(RequestState(tokens[: stop + 1], 10), Budget(16, 4))
                start = stop
            source.observe(Verified((0,), 0, hidden_states=LayerStates((2, 4, 5), start, rows[start:])))
            return source

        state = RequestState(tokens, 10)
        whole = source_of().propose(state, Budget(16, 4))
        assert len(whole.tokens) == 8
        for parts in ((10,), (10, 13, 14), (28,)):
            again = source_of(*parts).propose(state, Budget(16, 4))
            assert list(again.tokens) == list(whole.tokens)
            np.testing.assert_allclose(again.logprobs, whole.logprobs, atol=1e-4)

    def test_where_nothing_is_kept_of_a_head_it_drafts_from_the_rest_of_a_cached_prompt(
        self, make_engine: Callable[..., Engine], tmp_path: Path, proposals: list[tuple[int, list[int]]]
    ) -> None:
        model = make_model("Llama", LAYERS)
        head = make_head(tmp_path / "head", model.config, scale=0.2)
        engine, prompt = make_engine(model, draft_model=head), prompt_of(140)
        assert engine.draft_model is not None
        first = answer(engine, prompt)
        engine.draft_model.prefixes = None
        proposals.clear()
        again = answer(engine, prompt)
        assert again.stats.reused_tokens == 128
        assert again.token_ids == first.token_ids
        assert proposals[0][1]


class TestRefused:
    def test_an_assistant_with_fewer_tokens(self, make_engine: Callable[..., Engine]) -> None:
        small = make_model("Llama", COMMON | {"vocab_size": 90})
        with pytest.raises(ConfigError, match="LlamaForCausalLM has 90 token ids and .* has 96: an assistant that is"):
            make_engine(assistant=small)

    def test_an_assistant_that_keeps_a_state(self, make_engine: Callable[..., Engine]) -> None:
        with pytest.raises(ConfigError, match="keeps a state that cannot be rolled back, so it cannot draft"):
            make_engine(assistant=make_model("Mamba", PLAIN["Mamba"]))

    def test_a_target_that_verifies_nothing(self, make_engine: Callable[..., Engine]) -> None:
        with pytest.raises(ConfigError, match="is decoded without drafts, so it cannot have a draft model"):
            make_engine(make_model("Mamba", PLAIN["Mamba"]), assistant=random_assistant())

    @pytest.mark.parametrize(
        ("change", "error", "reason"),
        [
            (
                {"speculators_model_type": "dflash"},
                UnsupportedModelError,
                "of the type 'dflash', and only 'eagle3'",
            ),
            ({"target_hidden_size": 64}, ConfigError, "hidden states of 64 numbers, and .* has 32"),
            ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, ConfigError, r"layers \(1, 2, 9\), and .* those of 8"),
            ({"fc_norm": True}, ModelError, "lacks fc_norm.0.weight: it is damaged"),
            ({"draft_vocab_size": 50}, ModelError, "weights of other shapes than its config.json says"),
        ],
    )
    def test_a_head_that_does_not_fit(
        self,
        make_engine: Callable[..., Engine],
        tmp_path: Path,
        change: dict[str, Any],
        error: type[Exception],
        reason: str,
    ) -> None:
        model = make_model("Llama", LAYERS)
        head = make_head(tmp_path / "head", model.config)
        config = json.loads((head / "config.json").read_text(encoding="utf-8"))
        (head / "config.json").write_text(json.dumps(config | change), encoding="utf-8")
        with pytest.raises(error, match=reason):
            make_engine(model, draft_model=head)

    def test_a_head_of_more_tokens_than_the_model_has(self, make_engine: Callable[..., Engine], tmp_path: Path) -> None:
        model = make_model("Llama", LAYERS)
        head = make_head(tmp_path / "head", model.config, layer={"vocab_size": 90})
        with pytest.raises(ConfigError, match="reads 90 token ids and .* has 96"):
            make_engine(model, draft_model=head)
        more = make_head(tmp_path / "more", model.config, layer={"vocab_size": 120})
        with pytest.raises(ConfigError, match=r"drafts the token ids 0\.\.119, and .* has 0\.\.95"):
            make_engine(model, draft_model=more)

    def test_a_shared_embedding_of_another_size(self, make_engine: Callable[..., Engine], tmp_path: Path) -> None:
        model = make_model("Llama", LAYERS)
        head = make_head(tmp_path / "head", model.config, layer={"vocab_size": 120}, own_embedding=False)
        with pytest.raises(ModelError, match="has no embed_tokens.weight, and the model's does not fit"):
            make_engine(model, draft_model=head)

    def test_two_draft_models(self, make_engine: Callable[..., Engine], tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="give one of them"):
            make_engine(assistant=random_assistant(), draft_model=tmp_path)

    def test_a_folder_without_a_model(self, make_engine: Callable[..., Engine], tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=str(tmp_path)):
            make_engine(draft_model=tmp_path)
