"""A model's best next tokens after each single token of its vocabulary, computed once; see `draft.profile`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from transformers import PreTrainedTokenizerBase

from reader_rag.draft.profile import Profile, fingerprint
from reader_rag.draft.successor_table import BEST
from reader_rag.draft.tree import DraftTree
from reader_rag.errors import UnsupportedModelError
from reader_rag.model.interface import TargetModel
from reader_rag.model.select_target import Drafting
from reader_rag.sampling.topk import top_tokens

_AT_ONCE = 128
"""Tokens of a forward pass: all of them children of one root, so that a pass is a draft tree of depth 1."""


def make_profile(
    target: TargetModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    drafting: Drafting,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Profile:
    """Compute the best next tokens after each token at the beginning of a text.

    Args:
        target: The model.
        tokenizer: Its tokenizer.
        name: What the profile and messages call the model.
        drafting: What the target verifies.
        progress: Called after each forward pass with the number of tokens done and of all tokens.

    Returns:
        The profile, which `Profile.save` writes.

    Raises:
        UnsupportedModelError: The model verifies no trees, so that a pass would compute one token only.
    """
    if drafting != "tree":
        raise UnsupportedModelError(f"{name} verifies no trees, so no profile of it can be made")
    vocabulary = tokenizer.get_vocab()
    size = min(max(vocabulary.values()) + 1, int(target.config.vocab_size))
    best = np.zeros((size, BEST), np.int32)
    cache = target.new_cache(1, _AT_ONCE)
    for start in range(0, size, _AT_ONCE):
        tokens = np.arange(start, min(start + _AT_ONCE, size), dtype=np.int32)
        logits = target.verify(_first_token(tokenizer), _children(tokens), cache)
        best[tokens] = top_tokens(logits[1:, :size].contiguous())  # some models have logits for no token
        progress(start + len(tokens), size)
    return Profile(name, fingerprint(vocabulary), best)


def _first_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token before a text: in training, the end-of-text token stands between documents."""
    for name in ("<|endoftext|>", tokenizer.bos_token, tokenizer.eos_token):
        number = tokenizer.get_vocab().get(name) if name else None
        if number is not None:
            return int(number)
    return 0


def _children(tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> DraftTree:
    n = len(tokens)
    return DraftTree.of(tokens, -1, 1, np.full(n, 1.0 / n))
