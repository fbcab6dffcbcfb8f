"""Draft sources from outside change how many steps an answer takes, and never the answer."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from costs_stub import EverythingPays

from reader_rag.config import DraftConfig, SamplingParams
from reader_rag.draft.external.sources import SourceCounts
from reader_rag.draft.source import Budget, Proposal, RequestState, Verified, make_sources
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import Generation
from reader_rag.engine.sequence import DecodeSequence
from reader_rag.errors import ConfigError, ReaderWarning

PROMPT = "a b c d e f g h"
TOKENS = 24
DOCS = Path(__file__).parents[2] / "docs"
ALONE = DraftConfig(max_nodes=8, max_successors=0, calibrates=False, gated=False)
"""Without the model's own next tokens; a prompt that repeats nothing has no copies either. Sources are asked always."""


@pytest.fixture(scope="module")
def engine(tiny_engine: Engine) -> Engine:
    """An engine that verifies everything it drafts."""
    made = Engine(tiny_engine.model, tiny_engine.tokenizer, draft=ALONE)
    made.context.costs.current = EverythingPays()  # type: ignore[assignment]
    return made


class Scripted:
    """Proposes the next four tokens of a script, or what `wrong` makes of them; notes every call."""

    needs_hidden_states = False

    def __init__(self, script: Sequence[int]) -> None:
        self.script = list(script)
        self.states: list[tuple[list[int], int, str]] = []
        self.verified: list[Verified] = []
        self.forgotten = 0

    def propose(self, state: RequestState, budget: Budget) -> Proposal:
        self.states.append((state.tokens.tolist(), state.prompt_length, state.tenant))
        emitted = len(state.tokens) - state.prompt_length
        return self.proposal(self.script[emitted : emitted + min(4, budget.max_depth)], budget)

    def proposal(self, tokens: list[int], budget: Budget) -> Proposal:
        return Proposal.chain(tokens, probability=0.9)

    def observe(self, verified: Verified) -> None:
        self.verified.append(verified)

    def forget(self) -> None:
        self.forgotten += 1


class NeedsStates(Scripted):
    needs_hidden_states = True
    hidden_layers: tuple[int, ...] = ()


def generate(engine: Engine, *sources: Any, prompt: str = PROMPT, **options: Any) -> Generation:
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **options)
    makers = [lambda source=source: source for source in sources]
    return engine.generate(engine.encode(prompt), params, draft=ALONE, draft_sources=makers, tenant="t")


@pytest.fixture(scope="module")
def plain(engine: Engine) -> Generation:
    return generate(engine, speculate=False)


class TestAnswers:
    def test_a_source_that_is_right_makes_fewer_steps(self, engine: Engine, plain: Generation) -> None:
        result = generate(engine, Scripted(plain.token_ids))
        assert result.token_ids == plain.token_ids
        # The first token is the prefill's; each step emits four drafted tokens and one more: 23 in five steps.
        assert result.stats.steps == 5
        assert result.stats.accepted_by_source == {"external": 18}
        assert plain.stats.steps == TOKENS - 1

    def test_a_source_that_is_wrong_changes_nothing(self, engine: Engine, plain: Generation) -> None:
        wrong = [(token + 1) % 50 for token in plain.token_ids]
        result = generate(engine, Scripted(wrong))
        assert result.token_ids == plain.token_ids
        assert result.stats.steps == TOKENS - 1

    def test_a_sampled_answer_is_the_same_too(self, engine: Engine) -> None:
        sampled = {"temperature": 1.0, "seed": 7}
        expected = generate(engine, speculate=False, **sampled)
        result = generate(engine, Scripted(expected.token_ids), **sampled)
        assert result.token_ids == expected.token_ids
        assert result.stats.steps == 5

    def test_two_sources_are_merged(self, engine: Engine, plain: Generation) -> None:
        wrong = [(token + 1) % 50 for token in plain.token_ids]
        result = generate(engine, Scripted(wrong), Scripted(plain.token_ids))
        assert result.token_ids == plain.token_ids
        assert result.stats.steps == 5

    def test_nothing_is_asked_of_them_without_drafts(self, engine: Engine, plain: Generation) -> None:
        source = Scripted(plain.token_ids)
        assert generate(engine, source, speculate=False).token_ids == plain.token_ids
        assert source.states == []


class TestCalls:
    def test_a_source_sees_the_request_and_what_was_emitted(self, engine: Engine, plain: Generation) -> None:
        source = Scripted(plain.token_ids)
        generate(engine, source)
        prompt = list(engine.encode(PROMPT).token_ids)
        assert source.states[0] == ([*prompt, plain.token_ids[0]], len(prompt), "t")
        assert source.states[1] == ([*prompt, *plain.token_ids[:6]], len(prompt), "t")
        assert [token for verified in source.verified for token in verified.tokens] == list(plain.token_ids)
        assert [verified.accepted for verified in source.verified] == [0, 4, 4, 4, 4, 2]
        assert source.forgotten == 1

    def test_it_learns_the_best_tokens_at_the_root_and_each_accepted_token(
        self, engine: Engine, plain: Generation
    ) -> None:
        source = Scripted(plain.token_ids)
        generate(engine, source)
        assert source.verified[0].best is None  # of the prefill
        for verified in source.verified[1:]:
            assert verified.best is not None
            assert verified.best.shape == (verified.accepted + 1, 8)
            assert tuple(verified.best[:, 0]) == verified.tokens  # greedy: the best is the emitted one
            assert verified.hidden_states is None

    def test_an_engine_asks_its_own_sources_for_every_request(self, tiny_engine: Engine, plain: Generation) -> None:
        made: list[Scripted] = []

        def make() -> Scripted:
            made.append(Scripted(plain.token_ids))
            return made[-1]

        engine = Engine(tiny_engine.model, tiny_engine.tokenizer, draft=ALONE, draft_sources=[make])
        engine.context.costs.current = EverythingPays()  # type: ignore[assignment]
        for _ in range(2):
            assert generate(engine).stats.steps == 5
        assert len(made) == 2
        assert all(len(source.states) == 5 for source in made)


class TestPayoff:
    def test_one_that_never_pays_is_asked_for_nothing_after_a_while(self, engine: Engine, plain: Generation) -> None:
        source = Scripted([(token + 1) % 50 for token in plain.token_ids])
        source.proposal_seconds = 10.0  # type: ignore[attr-defined]
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        for request in range(3):
            result = engine.generate(
                engine.encode(PROMPT),
                params,
                draft=replace(ALONE, gated=True),
                draft_sources=[lambda: source],
                tenant="never pays",
            )
            assert result.token_ids == plain.token_ids
            counts = result.stats.draft_sources["Scripted"]
            assert counts.asked + counts.skipped == TOKENS - 1 - 1  # the last step drafts nothing
            assert counts.asked == (0 if request else 1)
        assert len(source.verified) == 3 * TOKENS

    def test_what_it_proposed_and_what_was_accepted_is_counted(self, engine: Engine, plain: Generation) -> None:
        source = Scripted(plain.token_ids)
        source.name = "script"  # type: ignore[attr-defined]
        stats = generate(engine, source).stats
        assert stats.draft_sources == {"script": SourceCounts(asked=5, skipped=0, proposed=18, accepted=18)}
        assert stats.to_dict()["draft_sources"]["script"]["accepted"] == 18


class _Raises(Scripted):
    def proposal(self, tokens: list[int], budget: Budget) -> Proposal:
        raise RuntimeError("no proposal today")


class _ForeignTokens(Scripted):
    def proposal(self, tokens: list[int], budget: Budget) -> Proposal:
        return Proposal.chain([*tokens[:1], 10**6])


class _BadParents(Scripted):
    def proposal(self, tokens: list[int], budget: Budget) -> Proposal:
        return Proposal(tokens, range(len(tokens)), np.zeros(len(tokens)))


class _TooManyNodes(Scripted):
    def proposal(self, tokens: list[int], budget: Budget) -> Proposal:
        return Proposal.chain([1] * (budget.max_nodes + 1))


class _ObserveRaises(Scripted):
    def observe(self, verified: Verified) -> None:
        raise RuntimeError("cannot learn today")


class _Writes(Scripted):
    def propose(self, state: RequestState, budget: Budget) -> Proposal:
        state.tokens[-1] = 0
        return super().propose(state, budget)


class TestSwitchingOff:
    @pytest.mark.parametrize(
        ("source", "reason"),
        [
            (_Raises, "no proposal today"),
            (_ForeignTokens, "node 1: 1000000 is no token id"),
            (_BadParents, "node 0: 0 is no parent"),
            (_TooManyNodes, "9 nodes, and the budget is 8"),
            (_ObserveRaises, "cannot learn today"),
            (_Writes, "read-only"),
        ],
    )
    def test_a_source_that_fails_is_switched_off_with_a_warning_and_the_answer_is_the_same(
        self, engine: Engine, plain: Generation, source: type[Scripted], reason: str
    ) -> None:
        failing = source(plain.token_ids)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = generate(engine, failing)
        assert result.token_ids == plain.token_ids
        assert result.stats.steps == TOKENS - 1
        reported = [str(warning.message) for warning in caught if issubclass(warning.category, ReaderWarning)]
        assert len(reported) == 1
        assert re.search(rf"draft source {source.__name__} is switched off for this request: .*{reason}", reported[0])
        assert failing.forgotten == 1

    def test_it_is_asked_again_in_the_next_request(self, engine: Engine, plain: Generation) -> None:
        with pytest.warns(ReaderWarning, match="switched off"):
            generate(engine, _Raises(plain.token_ids))
        assert generate(engine, Scripted(plain.token_ids)).stats.steps == 5


class TestRefused:
    def test_what_is_no_draft_source(self, engine: Engine) -> None:
        with pytest.raises(ConfigError, match="object is no draft source: it has no propose, observe, forget"):
            generate(engine, object())

    def test_hidden_states_of_layers_that_the_model_has_not(self, engine: Engine) -> None:
        source = NeedsStates([])
        source.hidden_layers = (1, 3)
        with pytest.raises(ConfigError, match=r"NeedsStates needs the layers \(1, 3\), and the model has 0..2"):
            generate(engine, source)

    def test_hidden_states_of_a_model_that_hands_out_none(self, engine: Engine) -> None:
        with pytest.raises(ConfigError, match="NeedsStates needs hidden states, and this model does not hand them out"):
            make_sources([lambda: NeedsStates([])])


def expected_states(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """float32 [layers + 1, positions, width], what `transformers` computes; the last is not normalised."""
    last: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _module, inputs: last.append(inputs[0]))
    with torch.inference_mode():
        output = model(torch.tensor([list(tokens)]), output_hidden_states=True)
    hook.remove()
    return torch.cat([*output.hidden_states[:-1], *last])


@pytest.mark.parametrize("forward", ["auto", "torch"])
class TestHiddenStates:
    @pytest.fixture
    def made(self, tiny_engine: Engine, forward: Any) -> Engine:
        engine = Engine(tiny_engine.model, tiny_engine.tokenizer, draft=ALONE, forward=forward, prefix_bytes=0)
        engine.context.costs.current = EverythingPays()  # type: ignore[assignment]
        return engine

    @pytest.mark.parametrize("layers", [(0, 1, 2), (2, 1), ()])
    def test_a_source_gets_those_of_prompt_and_accepted_tokens(
        self, made: Engine, plain: Generation, layers: tuple[int, ...]
    ) -> None:
        source = NeedsStates(plain.token_ids)
        source.hidden_layers = layers
        result = generate(made, source)
        assert result.token_ids == plain.token_ids
        assert result.stats.steps == 5
        prompt = made.encode(PROMPT).token_ids
        handles = [verified.hidden_states for verified in source.verified]
        states = torch.cat([handle.of(layers or (2,)) for handle in handles])
        assert [handle.first for handle in handles] == [0, *np.cumsum([len(prompt), 5, 5, 5, 5])]
        tokens = [*prompt, *plain.token_ids]
        expected = expected_states(made.model, tokens)[list(layers or (2,)), : len(states)]
        torch.testing.assert_close(states, expected.transpose(0, 1).flatten(1), atol=1e-4, rtol=1e-4)
        assert len(states) == len(tokens) - 1  # of the last token nothing is computed

    def test_rejected_tokens_have_none(self, made: Engine, plain: Generation) -> None:
        source = NeedsStates([(token + 1) % 50 for token in plain.token_ids])
        assert generate(made, source).token_ids == plain.token_ids
        assert [len(verified.hidden_states.rows) for verified in source.verified[1:]] == [1] * (TOKENS - 1)

    def test_sequences_of_a_batch_get_their_own(self, made: Engine) -> None:
        prompts = [made.encode(text) for text in (PROMPT, "the other prompt of this batch is longer", "x y")]
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        sources: list[NeedsStates] = []

        def make() -> NeedsStates:
            sources.append(NeedsStates([5] * TOKENS))
            return sources[-1]

        answers = made.generate(prompts, params, draft=ALONE, draft_sources=[make])
        for prompt, answer, source in zip(prompts, answers, sources, strict=True):
            states = torch.cat([verified.hidden_states.rows for verified in source.verified])
            tokens = [*prompt.token_ids, *answer.token_ids]
            expected = expected_states(made.model, tokens)[2, : len(states)]
            torch.testing.assert_close(states[:, 0], expected, atol=1e-4, rtol=1e-4)

    def test_they_are_reserved(self, made: Engine) -> None:
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        request = made.requests.build(made.encode(PROMPT), params, options={"draft_sources": [lambda: NeedsStates([])]})
        prompt = len(request.prompt.token_ids)
        kept = DecodeSequence(made.context, made.requests.build(made.encode(PROMPT), params)).state_bytes
        assert DecodeSequence(made.context, request).state_bytes == kept + prompt * 64 * 4


def test_the_example_of_the_docs_works(engine: Engine) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / "drafts.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    source = names["Bigrams"]()
    state = RequestState(np.array([1, 2, 3, 9, 1], np.int32), prompt_length=5)
    assert list(source.propose(state, Budget(8, 3)).tokens) == [2, 3, 9]
    prompt = "one two one two one"
    expected = generate(engine, prompt=prompt, speculate=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReaderWarning)
        assert generate(engine, source, prompt=prompt).token_ids == expected.token_ids
