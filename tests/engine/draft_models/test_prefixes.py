"""What a draft model computed of a prefix is kept with it: it does not read a cached prompt again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_model_tools import CHAIN, LAYERS, answer, draft_model, prompt_of, random_assistant
from heads import make_head
from tiny_models import VOCABULARY, make_model

from reader_rag.config import SamplingParams
from reader_rag.draft.source import Budget, Proposal, RequestState, Verified
from reader_rag.engine.draft_models.assistant import AssistantModel
from reader_rag.engine.draft_models.eagle3_head import Eagle3Head
from reader_rag.engine.draft_models.source import DraftRequest, ModelSource
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import Prompt
from reader_rag.kv_cache.layer_states import LayerStates
from reader_rag.kv_cache.tree_cache import TreeCache
from reader_rag.model.target import Target


class TestPrefixes:
    """What a draft model computed of a prefix is kept with it."""

    @pytest.fixture
    def computed(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Positions that each pass of a draft model computed."""
        counts: list[int] = []
        forward, prefill, verify = Eagle3Head.forward, Target.prefill_chunks, AssistantModel._passed

        def of_head(self: Eagle3Head, tokens: torch.Tensor, *rest: Any) -> Any:
            counts.append(len(tokens))
            return forward(self, tokens, *rest)

        def of_passes(self: AssistantModel, parts: Any) -> Any:
            counts.extend(len(new) for _, new in parts.values())
            return verify(self, parts)

        def of_prefill(self: Target, token_ids: Sequence[int], cache: TreeCache, *rest: Any) -> Any:
            if not rest:  # the target's hidden states are noted
                counts.append(len(token_ids))
            return prefill(self, token_ids, cache, *rest)

        monkeypatch.setattr(Eagle3Head, "forward", of_head)
        monkeypatch.setattr(AssistantModel, "_passed", of_passes)
        monkeypatch.setattr(Target, "prefill_chunks", of_prefill)
        return counts

    @pytest.mark.parametrize("kind", ["random", "head"])
    def test_a_cached_prompt_is_not_read_again(
        self,
        make_engine: Callable[..., Engine],
        tmp_path: Path,
        computed: list[int],
        proposals: list[tuple[int, list[int]]],
        kind: str,
    ) -> None:
        model = make_model("Llama", LAYERS)
        engine = make_engine(model, CHAIN, **draft_model(kind, model, tmp_path))
        prompt, other = prompt_of(140), Prompt((*prompt_of(140).token_ids[:70], *prompt_of(50, seed=9).token_ids))
        computed.clear()
        first = answer(engine, prompt)
        drafted, read = list(proposals), list(computed)
        # The head's first row is that of position 0 and the token behind it.
        assert read[0] == (140 if kind == "head" else 141)
        for asked, reused in ((prompt, 128), (other, 64)):
            proposals.clear()
            computed.clear()
            again = answer(engine, asked)
            assert again.stats.reused_tokens == reused
            # The row of the prefix's last position needs the token behind it too.
            assert computed[0] == read[0] - 140 + len(asked.token_ids) - reused + (kind == "head")
            if asked is prompt:
                assert again.token_ids == first.token_ids
                assert proposals == drafted
        assert answer(engine, other, speculate=False).token_ids == again.token_ids

    @pytest.mark.parametrize("kind", ["random", "head"])
    def test_a_prompt_that_is_still_answered_is_kept_already(
        self, make_engine: Callable[..., Engine], tmp_path: Path, kind: str
    ) -> None:
        model = make_model("Llama", LAYERS)
        engine = make_engine(model, CHAIN, **draft_model(kind, model, tmp_path))
        assert engine.draft_model is not None
        assert engine.draft_model.prefixes is not None
        with engine.submit(prompt_of(140), SamplingParams(max_tokens=60, ignore_eos=True)) as stream:
            next(stream)
            next(stream)
            assert len(engine.draft_model.prefixes) >= 2

    def test_a_head_has_its_part_of_the_bytes_and_keeps_tenants_apart(
        self, make_engine: Callable[..., Engine], tmp_path: Path
    ) -> None:
        model = make_model("Llama", LAYERS)
        engine = make_engine(model, prefix_bytes=1 << 20, **draft_model("head", model, tmp_path))
        assert engine.draft_model is not None
        prefixes, target = engine.draft_model.prefixes, engine.context.prefix_cache
        assert prefixes is not None
        assert target is not None
        assert prefixes.max_bytes + target.max_bytes == 1 << 20
        answer(engine, prompt_of(140))
        assert len(prefixes) == 2
        # Keys and values of 127 rows, two heads, eight wide, and a hidden state of 32 numbers a block.
        assert prefixes.nbytes == 127 * 2 * 2 * 8 * 4 + 2 * 32 * 4
        assert prefixes._path("u", prefixes._keys(prompt_of(140).token_ids)) == []
        engine.forget("t")
        assert (len(prefixes), prefixes.nbytes) == (0, 0)

    def test_a_head_is_as_if_it_had_computed_the_prefix(
        self, make_engine: Callable[..., Engine], tmp_path: Path
    ) -> None:
        """Whatever part of the prefix the target has: less than the head, as much, or more."""
        model = make_model("Llama", LAYERS)
        engine = make_engine(model, draft_model=make_head(tmp_path / "head", model.config, scale=0.2))
        assert engine.draft_model is not None
        tokens = np.array(prompt_of(150).token_ids, np.int32)
        rows = torch.randn(149, 3, 32, generator=torch.Generator().manual_seed(0))
        request = DraftRequest(170, "t", VOCABULARY, VOCABULARY, tokens=4, branches=2)

        def proposal(first: int) -> Proposal:
            """The draft behind all tokens, where the target hands out states from a position on."""
            source = ModelSource(engine.draft_model.open(request))  # type: ignore[union-attr]
            source.observe(Verified((0,), 0, hidden_states=LayerStates((2, 4, 5), first, rows[first:])))
            found = source.propose(RequestState(tokens, 140), Budget(16, 4))
            source.forget()
            return found

        whole = proposal(0)
        assert engine.draft_model.prefixes is not None
        assert len(engine.draft_model.prefixes) == 2
        for first in (0, 40, 128, 64):
            again = proposal(first)
            assert list(again.tokens) == list(whole.tokens)
            np.testing.assert_allclose(again.logprobs, whole.logprobs, atol=1e-4)
        behind = proposal(140)  # twelve positions are missing
        assert len(behind.tokens) == 8
        assert not np.allclose(behind.logprobs, whole.logprobs, atol=1e-4)

    def test_prefixes_of_an_assistant_are_reused_within_a_tenant_alone(
        self, make_engine: Callable[..., Engine]
    ) -> None:
        engine = make_engine(assistant=random_assistant(), prefix_bytes=1 << 22)
        model = engine.draft_model
        assert isinstance(model, AssistantModel)
        assert model.prefixes is not None
        assert engine.context.prefix_cache is not None
        assert model.prefixes.max_bytes + engine.context.prefix_cache.max_bytes == 1 << 22
        first = answer(engine, prompt_of(140))
        assert len(model.prefixes) == 2
        assert answer(engine, prompt_of(140)).token_ids == first.token_ids
        cache = model.target.new_cache(200, 1)
        assert model.prefixes.restore("t", prompt_of(140).token_ids, cache) == 128
        assert model.prefixes.restore("u", prompt_of(140).token_ids, model.target.new_cache(200, 1)) == 0
        engine.forget("t")
        assert len(model.prefixes) == 0
