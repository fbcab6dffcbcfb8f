"""The prefix cache: keys and values of sequences, reused by later sequences with the same prefix.

Typical prefixes are a system prompt, the previous turns of a chat, and the same passages in the same order. A sequence
is stored as a path of blocks of a fixed number of tokens in a tree, so a shared prefix is stored once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from reader_rag.kv_cache.hidden_states import HiddenStates
from reader_rag.kv_cache.tree_cache import States
from reader_rag.util.out_of_memory import is_out_of_memory


class Restorable(Protocol):
    """A KV cache whose first positions can be copied to another one."""

    def states(self, start: int, stop: int) -> States:
        """Copies of the keys and values of positions `start` to `stop - 1`."""

    def restore(self, blocks: Sequence[States]) -> None:
        """Fill an empty cache with the states of consecutive blocks."""


class _Block:
    """A node of the tree: tokens that follow those of its ancestors.

    Attributes:
        tenant: Tenant of the sequence.
        key: Its tokens as bytes.
        siblings: The children of its parent by key, itself included.
        states: Its keys and values.
        hidden: Hidden states of its first positions, [n, width]; None: of none.
        nbytes: Bytes of its keys, values and hidden states.
        children: The blocks that follow it, by key.
    """

    __slots__ = ("children", "hidden", "key", "nbytes", "siblings", "states", "tenant")

    def __init__(
        self, tenant: str, key: bytes, siblings: dict[bytes, _Block], states: States, hidden: torch.Tensor | None
    ) -> None:
        self.tenant = tenant
        self.key = key
        self.siblings = siblings
        self.states = states
        self.hidden = hidden
        self.nbytes = sum(int(part.nbytes) for pair in states if pair is not None for part in pair)
        if hidden is not None:
            self.nbytes += hidden.nbytes
        self.children: dict[bytes, _Block] = {}


class PrefixCache:
    """Cached prefixes by tenant. Not thread-safe.

    A block is found by its tenant and by all tokens up to its end, which are compared with the stored ones, never by a
    hash alone. Blocks of one tenant are never found for another, so the time to the first token reveals nothing about
    other tenants' prompts.

    A block has the hidden states of the prompt positions in it too, if the sequence kept them: a sequence that restores
    it asks for what follows these positions as if it had computed them.

    The least recently used block is evicted first, and a block always before its parent.

    Args:
        max_bytes: Most bytes of keys, values and hidden states; with fewer than a block takes, nothing is stored.
        block: Tokens of a block.

    Attributes:
        nbytes: Bytes of keys, values and hidden states stored.

    Example:
        With blocks of two tokens, [1, 2, 3, 4, 5] is stored as [1, 2] with the child [3, 4]. For [1, 2, 3, 9, 9] the
        first is found; for [3, 4, 5] nothing, since other tokens come before; for [1, 2, 3, 4] only [1, 2], since at
        least one token is left for prefill, whose logits choose the next one.
    """

    def __init__(self, max_bytes: int, block: int) -> None:
        self.max_bytes = max_bytes
        self.block = block
        self.nbytes = 0
        self._first: dict[str, dict[bytes, _Block]] = {}
        # Least recently used first. A path is always used as a whole, its end first, so every block comes after its
        # descendants, and the first block of the order is a leaf.
        self._order: OrderedDict[_Block, None] = OrderedDict()

    def __len__(self) -> int:
        """Number of stored blocks."""
        return len(self._order)

    def restore(
        self,
        tenant: str,
        token_ids: Sequence[int] | NDArray[np.integer],
        cache: Restorable,
        states: HiddenStates | None = None,
    ) -> int:
        """Fill an empty KV cache with the longest cached prefix of a prompt.

        Args:
            tenant: Tenant of the prompt.
            token_ids: All of the prompt; its last token is never restored.
            cache: An empty one.
            states: Filled with the hidden states of the prefix; None: they are not wanted.

        Returns:
            Positions restored; prefill goes on with the token at that index.
        """
        path = self._path(tenant, self._keys(token_ids[:-1]))
        if path:
            cache.restore([block.states for block in path])
            if states is not None:
                for block in path:
                    states.append(block.hidden, self.block)
            self._use(path)
        return len(path) * self.block

    def insert(
        self,
        tenant: str,
        token_ids: Sequence[int] | NDArray[np.integer],
        cache: Restorable,
        states: HiddenStates | None = None,
    ) -> None:
        """Store the blocks of a sequence that are not stored yet, as many of the first ones as fit.

        Args:
            tenant: Tenant of the sequence.
            token_ids: The sequence; tokens after its last whole block are ignored.
            cache: KV cache of the sequence; at least so many positions are committed.
            states: Hidden states of its prompt; None: there are none.
        """
        keys = self._keys(token_ids)
        path = self._path(tenant, keys)
        self._use(path)
        held = len(path)
        try:
            for at in range(held * self.block, len(keys) * self.block, self.block):
                siblings = path[-1].children if path else self._first.get(tenant, {})
                hidden = None if states is None else states.copy(at, at + self.block)
                block = _Block(tenant, keys[len(path)], siblings, cache.states(at, at + self.block), hidden)
                if not self._make_room(block.nbytes, len(path)):
                    break
                self._add(block)
                path.append(block)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            # The running sequence has its memory; only a later prefill would have been shorter.
            for block in reversed(path[held:]):
                self._drop(block)
            del path[held:]
        finally:
            self._use(path)  # also after an error: no block may come before its descendants in the order

    def forget(self, tenant: str) -> None:
        """Drop all blocks of a tenant."""
        for block in [block for block in self._order if block.tenant == tenant]:
            self._drop(block)

    def clear(self) -> None:
        """Drop all blocks, for example after the model's weights changed."""
        self._first.clear()
        self._order.clear()
        self.nbytes = 0

    def _keys(self, token_ids: Sequence[int] | NDArray[np.integer]) -> list[bytes]:
        """The tokens of each whole block."""
        tokens = np.asarray(token_ids, np.int64)
        whole = len(tokens) // self.block * self.block
        return [tokens[at : at + self.block].tobytes() for at in range(0, whole, self.block)]

    def _path(self, tenant: str, keys: Sequence[bytes]) -> list[_Block]:
        """The stored blocks of a sequence, from its first on."""
        path: list[_Block] = []
        following = self._first.get(tenant, {})
        for key in keys:
            block = following.get(key)
            if block is None:
                break
            path.append(block)
            following = block.children
        return path

    def _use(self, path: Sequence[_Block]) -> None:
        for block in reversed(path):
            self._order.move_to_end(block)

    def _make_room(self, nbytes: int, used: int) -> bool:
        """Evict blocks until so many bytes fit; False if that needs one of the last `used` blocks of the order."""
        if nbytes > self.max_bytes:
            return False
        while self.nbytes + nbytes > self.max_bytes:
            if len(self._order) <= used:
                return False
            self._drop(next(islice(self._order, 1)))
        return True

    def _add(self, block: _Block) -> None:
        block.siblings[block.key] = block
        self._first.setdefault(block.tenant, block.siblings)  # a new dictionary of first blocks, or the one there
        self._order[block] = None
        self.nbytes += block.nbytes

    def _drop(self, block: _Block) -> None:
        del block.siblings[block.key]
        del self._order[block]
        self.nbytes -= block.nbytes
        if not self._first[block.tenant]:
            del self._first[block.tenant]
