"""A profile holds what the model itself says after each token of its vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from reader_rag.cli.main import app
from reader_rag.config import DraftConfig
from reader_rag.draft.profile import Profile, fingerprint, profile_path, profiles
from reader_rag.engine.engine import Engine
from reader_rag.model.fingerprint import model_fingerprint
from reader_rag.model.profile import successors as profiling
from reader_rag.model.profile.successors import make_profile


def asked(model: LlamaForCausalLM, first: int, vocabulary: int) -> torch.Tensor:
    """Logits [vocabulary, vocabulary] after each token behind `first`, by the model's own forward."""
    pairs = torch.stack([torch.full((vocabulary,), first), torch.arange(vocabulary)], dim=1)
    with torch.inference_mode():
        logits: torch.Tensor = model(pairs).logits
    return logits[:, -1].double()


def assert_best(profile: Profile, logits: torch.Tensor) -> None:
    """Each row lists the eight best; only tokens that rounding cannot tell apart may have changed places."""
    best = logits.topk(8, dim=-1)
    listed = torch.from_numpy(profile.tokens.astype(np.int64))
    assert torch.allclose(logits.gather(1, listed), best.values, rtol=0.0, atol=1e-4)
    assert all(len(set(row)) == 8 for row in profile.tokens.tolist())
    # On random weights such tokens are few.
    assert (listed == best.indices).float().mean() > 0.99


def profile_of(engine: Engine, **options: Any) -> Profile:
    return make_profile(engine.target, engine.tokenizer, name=engine.name, drafting=engine.drafting, **options)


@pytest.fixture(scope="module")
def profile(tiny_engine: Engine) -> Profile:
    return profile_of(tiny_engine)


def test_each_row_is_what_the_model_finds_likely_after_the_first_token_and_that_one(
    profile: Profile, tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    # The tiny tokenizer has no <|endoftext|>: a text begins with its <bos>, token 1. It has more than 256 tokens (256
    # bytes, merges, special ones), so that more than two passes of 128 tokens are made, the last one not full.
    vocabulary = len(tiny_tokenizer)
    assert tiny_tokenizer.bos_token_id == 1
    assert 2 * 128 < vocabulary < 3 * 128
    assert profile.tokens.dtype == np.int32
    assert profile.tokens.shape == (vocabulary, 8)
    assert_best(profile, asked(tiny_model, 1, vocabulary))


def test_the_number_of_tokens_asked_at_once_changes_nothing(
    profile: Profile, tiny_engine: Engine, tiny_model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "_AT_ONCE", 37)
    again = profile_of(tiny_engine)
    assert_best(again, asked(tiny_model, 1, len(profile.tokens)))


def test_a_profile_made_by_the_models_own_forward_is_the_same(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    engine = Engine(tiny_model, tiny_tokenizer, forward="torch")
    assert engine.target.cpu is None
    assert_best(profile_of(engine), asked(tiny_model, 1, len(tiny_tokenizer)))


def test_a_profile_names_its_model_and_vocabulary(profile: Profile, tiny_engine: Engine) -> None:
    assert profile.name == tiny_engine.name
    assert profile.vocabulary == fingerprint(tiny_engine.tokenizer.get_vocab())


def test_progress_is_told_after_each_pass_up_to_the_whole_vocabulary(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(tiny_engine.tokenizer)
    monkeypatch.setattr(profiling, "_AT_ONCE", 200)
    reported: list[tuple[int, int]] = []
    profile_of(tiny_engine, progress=lambda done, of: reported.append((done, of)))
    assert reported == [(200, size), (size, size)]


def test_a_saved_profile_is_loaded_as_it_was_and_fits_what_the_model_says_greedily(
    profile: Profile, tmp_path: Path
) -> None:
    profile.save(tmp_path / "p.npz")
    loaded = Profile.load(tmp_path / "p.npz")
    assert np.array_equal(loaded.tokens, profile.tokens)
    assert (loaded.name, loaded.vocabulary) == (profile.name, profile.vocabulary)
    # Each token's best next one, wherever the last one led: 240 next tokens, all of them listed.
    pairs = [(token, int(profile.tokens[token, 0])) for token in range(240)]
    assert loaded.fits(pairs)
    assert not loaded.fits([(token, int(profile.tokens[token + 1, 0])) for token in range(240)])


def test_the_command_writes_what_is_found_by_a_later_engine(
    tiny_model: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    profile: Profile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("READER_RAG_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tiny"
    tiny_model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    result = CliRunner().invoke(app, ["models", "profile", str(folder), "--dtype", "float32", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    # The file that an engine would write that computes its profile while it is idle.
    loaded = Engine.load(str(folder), dtype="float32", device="cpu")
    path = profile_path(tmp_path / "cache" / "profiles", model_fingerprint(loaded.model))
    assert result.stdout == f"{path}\n"
    written = Profile.load(path)
    assert written.name == str(folder)
    assert np.array_equal(written.tokens, profile.tokens)
    assert profiles(tmp_path / "cache" / "profiles")[-1].vocabulary == profile.vocabulary
    # An engine over this model drafts from it, one over another model of the vocabulary does not.
    prior = Engine.load(str(folder), dtype="float32", device="cpu").context.draft_states.of("", DraftConfig())
    assert np.array_equal(prior.successors.prior, profile.tokens)
    other = Engine(tiny_model, tiny_tokenizer).context.draft_states.of("", DraftConfig())
    assert len(other.successors.prior) == 0


def test_a_file_that_names_no_model_is_found_by_every_engine_of_its_vocabulary(
    tiny_model: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    profile: Profile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("READER_RAG_CACHE", str(tmp_path))
    (tmp_path / "profiles").mkdir()
    profile.save(tmp_path / "profiles" / "family.npz")
    states = Engine(tiny_model, tiny_tokenizer).context.draft_states
    assert np.array_equal(states.of("", DraftConfig()).successors.prior, profile.tokens)


def test_the_command_writes_where_it_is_told(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    folder = tmp_path / "tiny"
    tiny_model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    out = tmp_path / "deeper" / "p.npz"
    result = CliRunner().invoke(app, ["models", "profile", str(folder), "--out", str(out), "--device", "cpu"])
    assert (result.exit_code, result.stdout) == (0, f"{out}\n")
    assert len(Profile.load(out).tokens) == len(tiny_tokenizer)
