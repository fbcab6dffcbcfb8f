"""Which embedding model a store is for, and its vectors as they are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from llama_index.core.base.embeddings.base import BaseEmbedding
from numpy.typing import NDArray

from reader_rag.errors import ConfigError, StoreMismatchError

# Two models that place this sentence at the same spot are the same model, whatever name or folder it was loaded from.
_PROBE = "The quick brown fox jumps over the lazy dog."
_SAME_MODEL_COSINE = 0.995  # leaves room for 16-bit weights and other devices


def identity_of(embed_model: BaseEmbedding) -> dict[str, str]:
    """What a store remembers of the model that made it: name, vector length and a probe vector (hex, float32)."""
    probe = unit_vectors([embed_model.get_text_embedding(_PROBE)], None)[0]
    return {
        "embed_model": embed_model.model_name,
        "dimension": str(len(probe)),
        "probe": probe.astype("<f4").tobytes().hex(),
    }


def require_same_model(ours: Mapping[str, str], theirs: Mapping[str, str], elsewhere: str = "a new folder") -> None:
    """Refuse a store that another embedding model made.

    Args:
        ours: What `identity_of` says of the model at hand.
        theirs: What the store remembers.
        elsewhere: Where else documents could be ingested, for the message.

    Raises:
        StoreMismatchError: They are two models.
    """
    made_by = f"the store was made with the embedding model {theirs.get('embed_model', 'unknown')!r}"
    remedy = f"use that model (--embed-model) or ingest into {elsewhere}"
    if ours["dimension"] != theirs["dimension"]:
        raise StoreMismatchError(
            f"{made_by} ({theirs['dimension']} numbers per vector), not {ours['embed_model']!r} "
            f"({ours['dimension']}): {remedy}"
        )
    if "probe" in theirs and _cosine(ours["probe"], theirs["probe"]) < _SAME_MODEL_COSINE:
        raise StoreMismatchError(f"{made_by}, and {ours['embed_model']!r} gives other vectors: {remedy}")


def unit_vectors(
    embeddings: Sequence[Sequence[float]], dimension: int | None, elsewhere: str = "a new folder"
) -> NDArray[np.float32]:
    """Embeddings scaled to length 1; one of zeros stays as it is and is near to nothing.

    Args:
        embeddings: One row each.
        dimension: Length that they must have; None takes the first one's.
        elsewhere: Where else they could be stored, for the message.

    Returns:
        float32 [n, dimension].

    Raises:
        StoreMismatchError: One has another length.
        ConfigError: One holds NaN or infinity.
    """
    lengths = {len(embedding) for embedding in embeddings}
    wanted = dimension or next(iter(lengths), 0)
    if lengths - {wanted}:
        other = next(iter(lengths - {wanted}))
        raise StoreMismatchError(
            f"the store holds vectors of {wanted} numbers, not {other}: "
            f"use the embedding model that made it, or {elsewhere}"
        )
    vectors = np.asarray(embeddings, dtype=np.float64).reshape(len(embeddings), wanted)
    if not np.isfinite(vectors).all():
        raise ConfigError("an embedding holds NaN or infinity: the embedding model failed on a text")
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    units: NDArray[np.float64] = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
    return units.astype(np.float32)


def _cosine(ours: str, theirs: str) -> float:
    a: NDArray[np.float32] = np.frombuffer(bytes.fromhex(ours), dtype="<f4")
    b: NDArray[np.float32] = np.frombuffer(bytes.fromhex(theirs), dtype="<f4")
    return float(a @ b)
