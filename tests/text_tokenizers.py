"""Tokenizers of different kinds for the same texts."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tiny_models import COMMON, make_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<bos>", "<eos>")
CHARACTERS = [*string.ascii_letters, *string.digits, *" \n.,()=+?:"]
"""All that the tests of `TextTokenizer` and their prompts need."""


def _made(tokenizer: Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    names = {"pad_token": SPECIAL[0], "bos_token": SPECIAL[1], "eos_token": SPECIAL[2]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names, **options)


def bytes_tokenizer(merges: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer, as GPT-2's."""
    pairs = [(first, second) for first, second in (merge.split() for merge in merges)]
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(first + second for first, second in pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(dict.fromkeys(words))}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _made(tokenizer)


def spaced_tokenizer(merges: Sequence[str]) -> PreTrainedTokenizerFast:
    """One that puts a space before every text, as Llama 2's; it knows `CHARACTERS` alone."""
    pairs = [(first, second) for first, second in (merge.split() for merge in merges)]
    words = [*SPECIAL, "▁", *(c for c in CHARACTERS if c != " "), *(first + second for first, second in pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return _made(tokenizer)


def characters_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """One whose tokens are single characters, numbered in a random order."""
    order = np.random.default_rng(seed).permutation(len(CHARACTERS)).tolist()
    words = [*SPECIAL, *(CHARACTERS[n] for n in order)]
    tokenizer = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return _made(tokenizer)


def lower_case_tokenizer() -> PreTrainedTokenizerFast:
    """One that does not give texts back."""
    words = [*SPECIAL, "<unk>", "the", "answer", "is"]
    vocabulary = {word: n for n, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _made(tokenizer)


def model_of(tokenizer: PreTrainedTokenizerFast, **settings: Any) -> Any:
    """A tiny model with an embedding for its tokens."""
    return make_model("Llama", COMMON | {"vocab_size": len(tokenizer), "max_position_embeddings": 512} | settings)


@torch.no_grad()
def renumbered(model: Any, tokenizer: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast) -> Any:
    """The same model for the same tokens with other numbers."""
    copy = make_model("Llama", model.config.to_dict())
    copy.load_state_dict(model.state_dict())
    theirs = other.get_vocab()
    order = torch.tensor([theirs[token] for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda kv: kv[1])])
    for old, new in ((model.model.embed_tokens, copy.model.embed_tokens), (model.lm_head, copy.lm_head)):
        new.weight[order] = old.weight.clone()
    return copy
