"""The identity of embedding models, and vectors of length 1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from word_embedding import WordEmbedding

from reader_rag.errors import ConfigError, StoreMismatchError
from reader_rag.rag.stores.identity import identity_of, require_same_model, unit_vectors


def test_vectors_are_scaled_to_length_one_and_zero_vectors_stay() -> None:
    units = unit_vectors([[3.0, 4.0], [0.0, 0.0]], None)
    np.testing.assert_allclose(units, [[0.6, 0.8], [0.0, 0.0]], rtol=1e-6)
    assert units.dtype == np.float32


def test_no_vectors_have_the_shape_of_the_store() -> None:
    assert unit_vectors([], 3).shape == (0, 3)


@pytest.mark.parametrize(("embeddings", "dimension"), [([[1.0, 0.0, 0.0]], 2), ([[1.0, 0.0], [1.0, 0.0, 0.0]], None)])
def test_vectors_of_another_length_raise(embeddings: Sequence[Sequence[float]], dimension: int | None) -> None:
    with pytest.raises(StoreMismatchError, match="vectors of [23] numbers, not [23]: .* or another collection"):
        unit_vectors(embeddings, dimension, "another collection")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_vectors_that_are_not_finite_raise(value: float) -> None:
    with pytest.raises(ConfigError, match="NaN or infinity"):
        unit_vectors([[1.0, value]], 2)


def test_a_model_is_recognised_by_its_vectors_not_by_its_name() -> None:
    stored = identity_of(WordEmbedding(model_name="words"))
    assert (stored["embed_model"], stored["dimension"]) == ("words", "64")
    require_same_model(identity_of(WordEmbedding(model_name="some/folder")), stored)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (WordEmbedding(model_name="wide", buckets=128), r"'words' \(64 numbers per vector\), not 'wide' \(128\)"),
        (WordEmbedding(model_name="other", salt="x"), "'words', and 'other' gives other vectors"),
    ],
    ids=["length", "values"],
)
def test_another_model_raises(model: WordEmbedding, message: str) -> None:
    with pytest.raises(StoreMismatchError, match=message):
        require_same_model(identity_of(model), identity_of(WordEmbedding(model_name="words")))
