"""The identity of the embedding model that made a store, and the vectors as they are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from llama_index.core.base.embeddings.base import BaseEmbedding
from numpy.typing import NDArray

from reader_rag.errors import ConfigError, StoreMismatchError

# Two models that give this sentence the same vector are the same model, whatever name or folder they were loaded from.
_PROBE = "The quick brown fox jumps over the lazy dog."
_SAME_MODEL_COSINE = 0.995  # leaves room for 16-bit weights and other devices


def identity_of(embed_model: BaseEmbedding) -> dict[str, str]:
    """The identity of an embedding model, to be recorded in a store.

    Args:
        embed_model: The model; it embeds one probe sentence.

    Returns:
        `embed_model` (the name), `dimension` (length of the vectors) and `probe` (the probe's vector, float32, in hex).
    """
    probe = unit_vectors([embed_model.get_text_embedding(_PROBE)], None)[0]
    return {
        "embed_model": embed_model.model_name,
        "dimension": str(len(probe)),
        "probe": probe.astype("<f4").tobytes().hex(),
    }


def require_same_model(loaded: Mapping[str, str], stored: Mapping[str, str], alternative: str = "a new folder") -> None:
    """Refuse a store that another embedding model made.

    Args:
        loaded: Identity of the model in use, from `identity_of`.
        stored: Identity that the store recorded.
        alternative: Where else the documents could be ingested, for the message.

    Raises:
        StoreMismatchError: They are different models.
    """
    made_by = f"the store was made with the embedding model {stored.get('embed_model', 'unknown')!r}"
    remedy = f"use that model (embed_model=) or ingest into {alternative}"
    if loaded["dimension"] != stored["dimension"]:
        raise StoreMismatchError(
            f"{made_by} ({stored['dimension']} numbers per vector), not {loaded['embed_model']!r} "
            f"({loaded['dimension']}): {remedy}"
        )
    if "probe" in stored and _cosine(loaded["probe"], stored["probe"]) < _SAME_MODEL_COSINE:
        raise StoreMismatchError(f"{made_by}, and {loaded['embed_model']!r} gives other vectors: {remedy}")


def unit_vectors(
    embeddings: Sequence[Sequence[float]], dimension: int | None, alternative: str = "a new folder"
) -> NDArray[np.float32]:
    """Embeddings scaled to length 1; a zero vector stays as it is and has similarity 0 to all.

    Args:
        embeddings: n vectors.
        dimension: Their required length; None takes the first one's.
        alternative: Where else they could be stored, for the message.

    Returns:
        float32 [n, dimension].

    Raises:
        StoreMismatchError: A vector has another length.
        ConfigError: A vector holds NaN or infinity.
    """
    lengths = {len(embedding) for embedding in embeddings}
    wanted = dimension or next(iter(lengths), 0)
    if lengths - {wanted}:
        other = next(iter(lengths - {wanted}))
        raise StoreMismatchError(
            f"the store holds vectors of {wanted} numbers, not {other}: "
            f"use the embedding model that made it, or {alternative}"
        )
    vectors = np.asarray(embeddings, dtype=np.float64).reshape(len(embeddings), wanted)
    if not np.isfinite(vectors).all():
        raise ConfigError(
            "an embedding holds NaN or infinity: the embedding model failed on a text; use another model or dtype"
        )
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    units: NDArray[np.float64] = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
    return units.astype(np.float32)


def _cosine(one: str, other: str) -> float:
    a: NDArray[np.float32] = np.frombuffer(bytes.fromhex(one), dtype="<f4")
    b: NDArray[np.float32] = np.frombuffer(bytes.fromhex(other), dtype="<f4")
    return float(a @ b)
