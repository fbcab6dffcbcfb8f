"""Token ids are stored in as few bytes as the vocabulary needs, and never truncated."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datastore_tools import (
    continuations,
    open_store,
    search,
)
from hypothesis import given
from hypothesis import strategies as st

from reader_rag.datastore import Datastore
from reader_rag.datastore.kernels.layout import token_at
from reader_rag.datastore.token_codec import TokenCodec


@pytest.fixture(params=[60, 70_000, 1 << 24], ids=["16 bits", "24 bits", "32 bits"])
def vocabulary(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with open_store(tmp_path / "s") as opened:
        yield opened


def test_a_vocabulary_that_needs_the_separators_value_is_stored_wider() -> None:
    assert TokenCodec.for_vocabulary(65_535).bytes == 2
    assert TokenCodec.for_vocabulary(65_536).bytes == 3
    assert TokenCodec.for_vocabulary(2**24 - 1).bytes == 3
    assert TokenCodec.for_vocabulary(2**24).bytes == 4
    with pytest.raises(ValueError, match="a vocabulary has 1 to 2147483647 tokens, not 0"):
        TokenCodec.for_vocabulary(0)


@given(st.lists(st.integers(0, 2**31 - 2), max_size=20), st.sampled_from([2, 3, 4]))
def test_decoded_tokens_are_the_encoded_ones(tokens: list[int], size: int) -> None:
    codec = TokenCodec(size)
    array = np.array(tokens, np.int64) % codec.separator
    stored = codec.encode(array)
    assert stored.nbytes == size * len(tokens)
    assert codec.decode(stored).tolist() == array.tolist()
    assert [token_at(stored, i) for i in range(len(tokens))] == array.tolist()


def test_the_largest_tokens_of_a_vocabulary_are_stored_whole(tmp_path: Path, vocabulary: int) -> None:
    top = vocabulary - 1
    with open_store(tmp_path / "s", vocabulary) as store:
        store.add("a", [top, 5, top, top - 1])
        store.commit()
        store.compact(full=True)
        assert sorted(continuations(search(store.searcher([""]), [top]))) == [[5, top, top - 1], [top - 1]]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, -1], "token ids must lie from 0 to 59: -1"),
        ([1, 60], "token ids must lie from 0 to 59: 60"),
        ([1.0], "token ids must be integers, not float64"),
        ([[1]], "token ids must be a flat list, not of shape (1, 1)"),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(store: Datastore, tokens: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        store.add("a", tokens)
    with pytest.raises(ValueError, match=re.escape(message)):
        store.add_many([("a", tokens)])
    assert store.documents() == []
