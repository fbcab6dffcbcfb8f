"""Small checks, run when an engine is made, that this model on this device decodes drafts rightly."""

from __future__ import annotations

import numpy as np
import torch

from reader_rag.decode.step import Target
from reader_rag.draft.tree import DraftTree

_PROMPT = 11
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}
"""Relative error of logits that rounding explains; a position or a mask that is wrong gives 0.5 and more."""


def _tokens(target: Target, count: int) -> list[int]:
    """Token ids spread over the vocabulary, the same every time."""
    return [int(t) for t in np.random.default_rng(0).integers(0, target.config.vocab_size, count)]


def _forest(tokens: list[int]) -> DraftTree:
    """Two interleaved branches of three tokens: neighbours in memory that must not see each other."""
    parents = [-1, -1, 0, 1, 2, 3]
    depths = [1, 1, 2, 2, 3, 3]
    return DraftTree.of(tokens, parents, depths, np.full(6, 0.5))


@torch.inference_mode()
def verifies_trees(target: Target) -> bool:
    """Whether a tree's logits are those of plain text along each of its paths, and the commit keeps the right keys.

    Catches models that ignore position ids or a tree mask, whatever their class.
    """
    tokens = _tokens(target, _PROMPT + 8)
    prompt, root, last, tree = tokens[:_PROMPT], tokens[_PROMPT], tokens[-1], _forest(tokens[_PROMPT + 1 : -1])
    cache = target.new_cache(_PROMPT + 5, len(tree))
    target.prefill(prompt, cache)
    rows = target.verify(root, tree, cache)
    # The second branch is the harder one to keep: its positions do not lie in a row.
    cache.keep([0, 2, 4, 6])
    after = target.verify(last, DraftTree.empty(), cache)

    got, expected = [], []
    for path in ([0, 1, 3, 5], [0, 2, 4, 6]):
        text = [*prompt, root, *(int(tree.tokens[row - 1]) for row in path[1:]), last]
        whole = target.model(torch.tensor([text], device=target.device), use_cache=False).logits[0, _PROMPT:].float()
        got.append(rows[path].float())
        expected.append(whole[:-1])
    got.append(after.float())
    expected.append(whole[-1:])
    error = (torch.cat(got) - torch.cat(expected)).norm() / torch.cat(expected).norm()
    return bool(error <= _TOLERANCE.get(target.model.dtype, 0.1))


def keeps_bits(target: Target) -> bool:
    """Whether a draft's logits are bit for bit those of plain decoding.

    Some kernels compute a row differently depending on its neighbours; with those, `strict` cannot be kept. In fixed
    shapes a chain is tried, since no tree is ever verified in them; without, a tree.
    """
    tokens = _tokens(target, _PROMPT + 9)
    prompt, root, draft = tokens[:_PROMPT], tokens[_PROMPT], tokens[_PROMPT + 1 :]
    if target.fixed is None:
        tree, paths = _forest(draft[:6]), [[0, 1, 3, 5], [0, 2, 4, 6]]
    else:
        draft = draft[: target.fixed.width - 1]
        tree, paths = DraftTree.from_chain(draft), [list(range(len(draft) + 1))]
    drafted = target.new_cache(len(tokens), len(tree))
    target.prefill(prompt, drafted)
    got = target.verify(root, tree, drafted)
    for path in paths:
        plain = target.new_cache(len(tokens), 0)
        target.prefill(prompt, plain)
        for row in path:
            token = root if row == 0 else int(tree.tokens[row - 1])
            if not torch.equal(target.verify(token, DraftTree.empty(), plain)[0], got[row]):
                return False
            plain.keep([0])
    return True
