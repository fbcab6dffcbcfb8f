"""Keys and values of the beginnings of texts, kept for texts that begin the same.

A system prompt, the turns of a chat so far, the same passages in the same order: what was read of them once need not be
read again. Texts are cut into blocks of a fixed number of tokens, and a block hangs below the block that it follows, so
that what texts share is held once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from reader_rag.kv_cache.tree_cache import States
from reader_rag.util.out_of_memory import is_out_of_memory


class Restorable(Protocol):
    """A cache whose first positions can be copied out of it and into another."""

    def states(self, start: int, stop: int) -> States:
        """See `TreeCache.states`."""

    def restore(self, blocks: Sequence[States]) -> None:
        """See `TreeCache.restore`."""


class _Block:
    """Some tokens behind the tokens of the blocks above.

    Attributes:
        tenant: Whose text it is.
        key: Its tokens as bytes.
        siblings: All blocks, by key, that follow the same text; it is one of them.
        states: Its keys and values.
        nbytes: Bytes of them.
        children: The blocks that follow it, by key.
    """

    __slots__ = ("children", "key", "nbytes", "siblings", "states", "tenant")

    def __init__(self, tenant: str, key: bytes, siblings: dict[bytes, _Block], states: States) -> None:
        self.tenant = tenant
        self.key = key
        self.siblings = siblings
        self.states = states
        self.nbytes = sum(int(part.nbytes) for pair in states if pair is not None for part in pair)
        self.children: dict[bytes, _Block] = {}


class PrefixCache:
    """The beginnings of texts, by tenant. Not for several threads at once.

    A block is found by its tenant and by all tokens up to its end, each compared with those stored, never by a hash
    alone: a block is either that of the very same text or not found. Nothing that one tenant asked is found for
    another, so that how fast an answer comes says nothing of others' texts.

    What was used longest ago is dropped first, a block always before the one that it follows.

    Args:
        max_bytes: Most bytes of keys and values held; with less than a block takes, nothing is.
        block: Tokens of a block.

    Attributes:
        nbytes: Bytes of keys and values held.
        asked_tokens: Tokens of all prompts asked for.
        reused_tokens: Those of them that were found.

    Example:
        With blocks of two tokens, [1, 2, 3, 4, 5] is kept as [1, 2] and [3, 4] below it. For [1, 2, 3, 9, 9] the first
        is found; for [3, 4, 5] nothing, since other tokens come before; for [1, 2, 3, 4] only [1, 2], since a token
        must be left to read: its logits say how the text goes on.
    """

    def __init__(self, max_bytes: int, block: int) -> None:
        self.max_bytes = max_bytes
        self.block = block
        self.nbytes = 0
        self.asked_tokens = 0
        self.reused_tokens = 0
        self._first: dict[str, dict[bytes, _Block]] = {}
        # Used longest ago first. A path is always used as a whole, its end before its beginning, so that every block
        # stands behind all blocks that follow it, and the first of all has none.
        self._order: OrderedDict[_Block, None] = OrderedDict()

    def __len__(self) -> int:
        """Blocks held."""
        return len(self._order)

    def restore(self, tenant: str, token_ids: Sequence[int] | NDArray[np.integer], cache: Restorable) -> int:
        """Begin a cache with the longest beginning of a prompt that is held.

        Args:
            tenant: Whose prompt it is.
            token_ids: All of the prompt; its last token is never restored.
            cache: An empty one.

        Returns:
            Positions restored; the next token to read is the one there.
        """
        path = self._path(tenant, self._keys(token_ids[:-1]))
        if path:
            cache.restore([block.states for block in path])
            self._use(path)
        self.asked_tokens += len(token_ids)
        self.reused_tokens += len(path) * self.block
        return len(path) * self.block

    def insert(self, tenant: str, token_ids: Sequence[int] | NDArray[np.integer], cache: Restorable) -> None:
        """Copy out of a cache what is not held yet, as far as there is room for a beginning.

        Args:
            tenant: Whose text it is.
            token_ids: The text; tokens behind its last whole block are left out.
            cache: Its committed positions are at least those of the text.
        """
        keys = self._keys(token_ids)
        path = self._path(tenant, keys)
        self._use(path)
        held = len(path)
        try:
            for at in range(held * self.block, len(keys) * self.block, self.block):
                siblings = path[-1].children if path else self._first.get(tenant, {})
                block = _Block(tenant, keys[len(path)], siblings, cache.states(at, at + self.block))
                if not self._make_room(block.nbytes, len(path)):
                    break
                self._add(block)
                path.append(block)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            # The answer itself has all the memory that it needs; only the next one would have begun sooner.
            for block in reversed(path[held:]):
                self._drop(block)
            del path[held:]
        finally:
            self._use(path)  # whatever happened: no block may stand before one that follows it

    def forget(self, tenant: str) -> None:
        """Drop all that is held of a tenant's texts."""
        for block in [block for block in self._order if block.tenant == tenant]:
            self._drop(block)

    def clear(self) -> None:
        """Drop all that is held; for a model whose weights were changed."""
        self._first.clear()
        self._order.clear()
        self.nbytes = 0

    def _keys(self, token_ids: Sequence[int] | NDArray[np.integer]) -> list[bytes]:
        """The tokens of each whole block."""
        tokens = np.asarray(token_ids, np.int64)
        whole = len(tokens) // self.block * self.block
        return [tokens[at : at + self.block].tobytes() for at in range(0, whole, self.block)]

    def _path(self, tenant: str, keys: Sequence[bytes]) -> list[_Block]:
        """The blocks held of a text, from its first on."""
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
        """Drop others until so many bytes fit; whether they do while the last `used` blocks of the order stay."""
        if nbytes > self.max_bytes:
            return False
        while self.nbytes + nbytes > self.max_bytes:
            if len(self._order) <= used:
                return False
            self._drop(next(islice(self._order, 1)))
        return True

    def _add(self, block: _Block) -> None:
        block.siblings[block.key] = block
        self._first.setdefault(block.tenant, block.siblings)  # the siblings of a text's first block, or there already
        self._order[block] = None
        self.nbytes += block.nbytes

    def _drop(self, block: _Block) -> None:
        del block.siblings[block.key]
        del self._order[block]
        self.nbytes -= block.nbytes
        if not self._first[block.tenant]:
            del self._first[block.tenant]
