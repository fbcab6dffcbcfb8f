"""Asks a model what follows each token of its vocabulary; see `draft.profile`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from reader_rag.draft.profile import Profile, fingerprint
from reader_rag.draft.successor_table import BEST
from reader_rag.draft.tree import DraftTree
from reader_rag.engine.engine import Engine
from reader_rag.errors import UnsupportedModelError
from reader_rag.sampling.topk import top_tokens

_AT_ONCE = 128
"""Tokens of a forward pass: all of them children of one root, so that a pass is a very flat draft tree."""


def make_profile(engine: Engine, progress: Callable[[int, int], None] = lambda done, of: None) -> Profile:
    """Ask for the next tokens after each token, at the beginning of a text.

    Args:
        engine: The model.
        progress: Told after each pass how many tokens are done, and of how many.

    Returns:
        The profile, which `Profile.save` writes.

    Raises:
        UnsupportedModelError: The model verifies no trees, so that it could be asked about one token at a time only.
    """
    if engine.drafting != "tree":
        raise UnsupportedModelError(f"{engine.name} verifies no trees, so no profile of it can be made")
    vocabulary = engine.tokenizer.get_vocab()
    size = min(max(vocabulary.values()) + 1, int(engine.target.config.vocab_size))
    best = np.zeros((size, BEST), np.int32)
    cache = engine.target.new_cache(1, _AT_ONCE)
    for start in range(0, size, _AT_ONCE):
        tokens = np.arange(start, min(start + _AT_ONCE, size), dtype=np.int32)
        logits = engine.target.verify(_first_token(engine), _children(tokens), cache)
        best[tokens] = top_tokens(logits[1:, :size].contiguous())  # some models have logits for no token
        progress(start + len(tokens), size)
    return Profile(engine.name, fingerprint(vocabulary), best)


def _first_token(engine: Engine) -> int:
    """The token that stands before a text: between documents models are trained with their end-of-text token."""
    for name in ("<|endoftext|>", engine.tokenizer.bos_token, engine.tokenizer.eos_token):
        number = engine.tokenizer.get_vocab().get(name) if name else None
        if number is not None:
            return int(number)
    return 0


def _children(tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> DraftTree:
    n = len(tokens)
    return DraftTree.of(tokens, -1, 1, np.full(n, 1.0 / n))
