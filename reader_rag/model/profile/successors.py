"""A model's best next tokens after each single token of its vocabulary, computed once; see `draft.profile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
"""Most tokens of a forward pass: all of them children of one root, so that a pass is a draft tree of depth 1."""


class ProfileBuilder:
    """Computes a model's best next tokens after each token as the first of a sequence, a few tokens at a time.

    Tokens are computed in the order of their ids. Byte-pair vocabularies number tokens in the order of their merges,
    the most frequent pairs first, so where computing ends early the most frequent tokens are done; how frequent tokens
    are in other vocabularies is not known here, and their order is not changed either.

    Args:
        target: The model; it verifies trees.
        tokenizer: Its tokenizer.

    Attributes:
        vocabulary: `fingerprint` of the vocabulary.
        tokens: int32 [vocabulary, 8], the best next tokens of those that are done, the best first. The rows behind them
            are the caller's, -1 at first.
        done: Leading tokens that are done; a caller that knows rows writes them and raises it.
    """

    def __init__(self, target: TargetModel, tokenizer: PreTrainedTokenizerBase) -> None:
        vocabulary = tokenizer.get_vocab()
        self.vocabulary = fingerprint(vocabulary)
        self.tokens = np.full((min(max(vocabulary.values()) + 1, int(target.config.vocab_size)), BEST), -1, np.int32)
        self.done = 0
        self._target = target
        self._first = _first_token(tokenizer)
        self._cache: Any = None

    @property
    def complete(self) -> bool:
        """Whether all tokens are done."""
        return self.done >= len(self.tokens)

    def advance(self, count: int) -> None:
        """Compute the next tokens in one forward pass, on the thread that computes the target.

        Args:
            count: How many tokens, 1 to 128; fewer where fewer are left.
        """
        if self._cache is None:
            self._cache = self._target.new_cache(1, _AT_ONCE)
        size = len(self.tokens)
        tokens = np.arange(self.done, min(self.done + count, size), dtype=np.int32)
        logits = self._target.verify(self._first, _children(tokens), self._cache)
        self.tokens[tokens] = top_tokens(logits[1:, :size].contiguous())  # some models have logits for no token
        self.done += len(tokens)
        if self.complete:
            self.release()

    def release(self) -> None:
        """Free the memory of passes; another pass allocates it again."""
        self._cache = None


def make_profile(
    target: TargetModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    drafting: Drafting,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Profile:
    """Compute the best next tokens after each token as the first of a sequence.

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
    builder = ProfileBuilder(target, tokenizer)
    while not builder.complete:
        builder.advance(_AT_ONCE)
        progress(builder.done, len(builder.tokens))
    return Profile(name, builder.vocabulary, builder.tokens)


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
