"""Small checks, run when an engine is made, that this model on this device decodes rightly."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from reader_rag.draft.tree import DraftTree
from reader_rag.model.interface import TargetModel, prefill
from reader_rag.model.quantization.modules import is_int8

_PROMPT = 11
_TEXTS = 3
"""Texts that a model is tried on until it is right on one. In 16-bit types a near tie between two experts falls either
way and changes all that follows; a position or a mask that is wrong is wrong on every text."""
_CHAINS = (1, 2, 3, 4, 7, 8, 16, 40)
"""Lengths of chains whose bits are compared: passes of 2 to 41 rows, those of 5 and 9 among them, which products that
work on blocks of 4 or 8 rows compute by two kernels."""
_LENGTHS = (_PROMPT, 3 * _PROMPT, 300)
"""Lengths of the texts before trees whose bits are compared; behind the last, attention has a part without a mask."""
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}
"""Relative error of logits that rounding explains; a position or a mask that is wrong gives 0.5 and more."""
_INT8_TOLERANCE = 0.4
"""The same in int8, where a difference in the last bit may become a step of 1/127 of a row's greatest value: changing
the embeddings of SmolLM2-135M by a millionth changes logits behind random tokens by 0.1, at some positions by 0.4."""


def _tokens(target: TargetModel, count: int, text: int = 0) -> list[int]:
    """Token ids spread over the vocabulary, the same every time."""
    return [int(t) for t in np.random.default_rng(text).integers(0, target.config.vocab_size, count)]


def _forest(tokens: list[int]) -> DraftTree:
    """Two interleaved branches of three tokens: neighbours in memory that must not see each other."""
    parents = [-1, -1, 0, 1, 2, 3]
    depths = [1, 1, 2, 2, 3, 3]
    return DraftTree.of(tokens, parents, depths, np.full(6, 0.5))


def verifies_trees(target: TargetModel) -> bool:
    """Whether a tree's logits are those of plain text along each of its paths, and the commit keeps the right keys.

    Catches models that ignore position ids or a tree mask, whatever their class.
    """
    if target.cpu is not None and is_int8(target.model) and not keeps_bits(target):
        return False  # there they tell what the tolerance may hide
    # The second branch is the harder one to keep: its positions do not lie in a row.
    return any(_verifies(target, text, _forest, [[0, 1, 3, 5], [0, 2, 4, 6]]) for text in range(_TEXTS))


def verifies_chains(target: TargetModel) -> bool:
    """As `verifies_trees`, for a chain of which a part is accepted: what is not must leave no trace."""
    return any(_verifies(target, text, DraftTree.from_chain, [[*range(7)], [0, 1, 2, 3]]) for text in range(_TEXTS))


@torch.inference_mode()
def _verifies(
    target: TargetModel, text: int, tree_of: Callable[[list[int]], DraftTree], paths: Sequence[Sequence[int]]
) -> bool:
    """Verify a tree of six tokens, keep the last of `paths`, and compare all with the model's own pass over text."""
    tokens = _tokens(target, _PROMPT + 8, text)
    prompt, root, last, tree = tokens[:_PROMPT], tokens[_PROMPT], tokens[-1], tree_of(tokens[_PROMPT + 1 : -1])
    cache = target.new_cache(_PROMPT + 5, len(tree))
    prefill(target, prompt, cache)
    rows = target.verify(root, tree, cache)
    cache.commit(list(paths[-1]))
    after = target.verify(last, DraftTree.empty(), cache)
    cache.release()

    got, expected = [], []
    for path in paths:
        whole = _logits(target, [*prompt, root, *(int(tree.tokens[row - 1]) for row in path[1:]), last])
        got.append(rows[list(path)].float())
        expected.append(whole[:-1])
    got.append(after.float())
    expected.append(whole[-1:])
    return _same(target, got, expected)


@torch.inference_mode()
def decodes_plainly(target: TargetModel) -> bool:
    """Whether steps over one token give the logits of the model's own pass over the whole text.

    Another text is read in between: some models keep what they read in their own modules, where texts get mixed up.
    """
    return any(_decodes(target, text) for text in range(_TEXTS))


def _decodes(target: TargetModel, text: int) -> bool:
    tokens, others = _tokens(target, _PROMPT + 6, text), _tokens(target, _PROMPT + 6, _TEXTS + text)
    cache, another = target.new_cache(len(tokens), 0), target.new_cache(len(tokens), 0)
    got = [prefill(target, tokens[:_PROMPT], cache).float()]
    prefill(target, others[:_PROMPT], another)
    for token, other in zip(tokens[_PROMPT:], others[_PROMPT:], strict=True):
        got.append(target.verify(token, DraftTree.empty(), cache).float())
        cache.commit([0])
        target.verify(other, DraftTree.empty(), another)
        another.commit([0])
    return _same(target, got, [_logits(target, tokens, first=_PROMPT - 1)])


@torch.inference_mode()
def restores(target: TargetModel) -> bool:
    """Whether a text goes on from copies of its first keys and values as from those that were read."""
    return any(_restores(target, text) for text in range(_TEXTS))


def _restores(target: TargetModel, text: int) -> bool:
    tokens = _tokens(target, _PROMPT + 1, text)
    read, restored = target.new_cache(_PROMPT, 0), target.new_cache(len(tokens), 0)
    prefill(target, tokens[: _PROMPT - 3], read)
    restored.restore([read.states(0, 4), read.states(4, _PROMPT - 3)])
    prefill(target, _tokens(target, _PROMPT, _TEXTS + text), target.new_cache(_PROMPT, 0))
    got = [prefill(target, tokens[_PROMPT - 3 : _PROMPT], restored).float()]
    got.append(target.verify(tokens[-1], DraftTree.empty(), restored).float())
    return _same(target, got, [_logits(target, tokens, first=_PROMPT - 1)])


def _logits(target: TargetModel, tokens: list[int], first: int = _PROMPT) -> torch.Tensor:
    """Logits of the model's own pass over a text, float32 [tokens from `first` on, vocabulary]."""
    ids = torch.tensor([tokens], device=target.device)
    logits: torch.Tensor = target.model(ids, use_cache=False).logits[0, first:]
    return logits.float()


def _same(target: TargetModel, got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    error = (torch.cat(got) - torch.cat(expected)).norm() / torch.cat(expected).norm()
    if is_int8(target.model):
        return bool(error <= _INT8_TOLERANCE)
    quantised = getattr(target.model, "is_quantized", False)  # its products may be 8-bit, whatever its type
    return bool(error <= (0.1 if quantised else _TOLERANCE.get(target.model.dtype, 0.1)))


def keeps_bits(target: TargetModel, *, branches: bool = True) -> bool:
    """Whether a draft's logits are bit for bit those of plain decoding.

    Some kernels compute a row differently depending on its neighbours; with those, `strict` cannot be kept. In fixed
    shapes a chain is tried, since no tree is ever verified in them; without, a tree, or chains of several lengths where
    the model verifies no others.

    Args:
        target: The model.
        branches: Whether trees are verified on it.
    """
    if target.cpu is not None:  # its rows know of no others: one text shows that it is set up rightly
        return _keeps_bits(target)
    chains = [target.fixed.width - 1] if target.fixed is not None else [0] if branches else list(_CHAINS)
    # Whether rows share an expert, or the end of a vector, depends on the text: one alone may agree by chance.
    return all(_keeps_bits(target, text, _PROMPT * (1 + 2 * text), chain) for text in range(_TEXTS) for chain in chains)


@torch.inference_mode()
def keeps_bits_of_trees(target: TargetModel, nodes: int) -> bool:
    """Whether nodes of a tree have the bits of plain decoding, behind short texts and behind a long one.

    Args:
        target: The model.
        nodes: Of the tree, three interleaved branches; one of them is compared behind each text.
    """
    lengths = [length for length in _LENGTHS if length + nodes + 1 <= (target.context_window or length + nodes + 1)]
    return all(_keeps_branch(target, text, length, nodes) for text, length in enumerate(lengths))


def _keeps_branch(target: TargetModel, text: int, length: int, nodes: int) -> bool:
    """Whether one of three interleaved branches has plain decoding's bits behind `length` tokens."""
    tokens = _tokens(target, length + 1 + nodes, text)
    prompt, root = tokens[:length], tokens[length]
    parents = [max(node - 3, -1) for node in range(nodes)]
    tree = DraftTree.of(tokens[length + 1 :], parents, [1 + node // 3 for node in range(nodes)], np.full(nodes, 0.5))
    drafted, plain = target.new_cache(length + 1 + nodes, nodes), target.new_cache(length + 1 + nodes, 0)
    for cache in (drafted, plain):
        prefill(target, prompt, cache)
    got = target.verify(root, tree, drafted)
    for row in (0, *range(1 + text % 3, nodes + 1, 3)):
        token = root if row == 0 else int(tree.tokens[row - 1])
        if not torch.equal(target.verify(token, DraftTree.empty(), plain)[0], got[row]):
            return False
        plain.commit([0])
    return True


def _keeps_bits(target: TargetModel, text: int = 0, length: int = _PROMPT, chain: int = 0) -> bool:
    """Whether a draft's bits are plain decoding's, behind `length` tokens; of a chain of so many, or of a forest."""
    tokens = _tokens(target, length + 1 + max(chain, 6), text)
    prompt, root, draft = tokens[:length], tokens[length], tokens[length + 1 :]
    tree = DraftTree.from_chain(draft[:chain]) if chain else _forest(draft)
    drafted = target.new_cache(len(prompt) + 1 + len(tree), len(tree))
    prefill(target, prompt, drafted)
    got = target.verify(root, tree, drafted)
    leaves = set(range(len(tree))) - set(tree.parents.tolist())
    for leaf in sorted(leaves):
        plain = target.new_cache(len(prompt) + 1 + len(tree), 0)
        prefill(target, prompt, plain)
        for row in tree.paths[leaf + 1, : tree.depths[leaf] + 1].tolist():
            token = root if row == 0 else int(tree.tokens[row - 1])
            if not torch.equal(target.verify(token, DraftTree.empty(), plain)[0], got[row]):
                return False
            plain.commit([0])
    return True
