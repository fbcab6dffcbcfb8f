"""Embedding models that run on this machine and report how many tokens of a text they read."""

from __future__ import annotations

import asyncio
import threading
import warnings
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from llama_index.core.base.embeddings.base import BaseEmbedding, Embedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.utils import get_tokenizer

from reader_rag.errors import ModelError, ModelNotFoundError, ReaderError, ReaderWarning
from reader_rag.util.encodable import encodable
from reader_rag.util.fork import check_not_forked, note_threads
from reader_rag.util.one_line import first_line
from reader_rag.util.quiet import quiet_loading

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

# Limit for models whose tokenizer reports none (a very large number).
_LONGEST_SEQUENCE = 8192
_ASSUMED_TOKENS = 256
_TRIAL = "A text."


class SizedEmbedding(BaseEmbedding):
    """An embedding that reports how many tokens it reads, so that no chunk is truncated silently.

    Ingestion works with any subclass; `LocalEmbedding` is the one of this package.
    """

    @property
    @abstractmethod
    def max_text_tokens(self) -> int:
        """Most tokens of a text that the model reads; it ignores the rest."""

    @abstractmethod
    def count_tokens(self, text: str) -> int:
        """Number of tokens of a text by the model's own tokenizer, without special tokens."""


class TextSizes(Protocol):
    """How many tokens an embedding reads, and how many a text has; every `SizedEmbedding` is one."""

    @property
    def max_text_tokens(self) -> int:
        """Most tokens of a text that the embedding reads."""

    def count_tokens(self, text: str) -> int:
        """Number of tokens of a text."""


@dataclass(frozen=True)
class _AssumedSizes:
    """Sizes of an embedding that does not report them: tokens are counted by LlamaIndex's default tokenizer."""

    max_text_tokens: int

    def count_tokens(self, text: str) -> int:
        return len(get_tokenizer()(text))


def sizes_of(embed_model: BaseEmbedding, chunk_tokens: int | None, *, stacklevel: int = 3) -> TextSizes:
    """The sizes of an embedding; of one that does not report them the size of chunks, with a warning if none is given.

    Args:
        embed_model: Any LlamaIndex embedding.
        chunk_tokens: Most tokens of a chunk; None: not given.
        stacklevel: Whose line the warning names, as for `warnings.warn`.
    """
    if isinstance(embed_model, SizedEmbedding):
        return embed_model
    if chunk_tokens is None:
        warnings.warn(
            f"{type(embed_model).__name__} does not say how many tokens of a text it reads: chunks have at most "
            f"{_ASSUMED_TOKENS}; pass chunk_tokens, or derive it from SizedEmbedding",
            ReaderWarning,
            stacklevel=stacklevel,
        )
    return _AssumedSizes(chunk_tokens or _ASSUMED_TOKENS)


class LocalEmbedding(SizedEmbedding):
    """A sentence-transformers model as a LlamaIndex embedding. Vectors have length 1; calls are thread safe.

    Args:
        model_name: An alias ("minilm"), a hub id or a local folder.
        device: Device of the model ("cpu", "cuda:0", ...); None lets sentence-transformers choose.
        embed_batch_size: Texts per forward pass.
        trust_remote_code: Whether to run code that comes with the model. Enable it only for authors you trust.
        kwargs: Other fields of LlamaIndex's `BaseEmbedding`.

    Raises:
        ModelNotFoundError: There is no such model on this machine or on the hub.
        ModelError: The model cannot be loaded as an embedding model.
    """

    _model: SentenceTransformer = PrivateAttr()
    # Fast tokenizers keep truncation as mutable state and raise "Already borrowed" when threads share one.
    _lock: threading.Lock = PrivateAttr()
    _max_text_tokens: int = PrivateAttr()

    def __init__(
        self,
        model_name: str = "minilm",
        device: str | None = None,
        *,
        embed_batch_size: int = 32,
        trust_remote_code: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(model_name=model_name, embed_batch_size=embed_batch_size, **kwargs)
        self._model = _load(model_name, device, trust_remote_code)
        self._lock = threading.Lock()
        prompt_tokens = self.count_tokens(_document_prompt(self._model))
        special_tokens = int(self._model.tokenizer.num_special_tokens_to_add())
        self._max_text_tokens = self.max_tokens - special_tokens - prompt_tokens

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serialises this component."""
        return "LocalEmbedding"

    @property
    def max_tokens(self) -> int:
        """The model's sequence limit, with special tokens."""
        limit = self._model.max_seq_length or int(self._model.tokenizer.model_max_length)
        return min(int(limit), _LONGEST_SEQUENCE)

    @property
    def max_text_tokens(self) -> int:
        """`max_tokens` without the special tokens and the prompt that the model puts before a document."""
        return self._max_text_tokens

    @property
    def dimension(self) -> int:
        """Length of the vectors."""
        dimension = self._model.get_embedding_dimension()
        if dimension is None:
            raise ModelError(
                f"the embedding model {self.model_name!r} does not report the length of its vectors: use another"
            )
        return int(dimension)

    @property
    def device(self) -> str:
        """Device of the model."""
        return str(self._model.device)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens and truncation."""
        with self._lock:
            ids = self._model.tokenizer(encodable(text), add_special_tokens=False, truncation=False, verbose=False)[
                "input_ids"
            ]
        return [int(i) for i in ids]

    def count_tokens(self, text: str) -> int:
        """Number of tokens of a text by the model's own tokenizer, without special tokens."""
        return len(self.tokenize(text))

    def _get_query_embedding(self, query: str) -> Embedding:
        check_not_forked()
        with self._lock:
            vectors = self._model.encode_query([encodable(query)], normalize_embeddings=True, show_progress_bar=False)
        return [float(x) for x in vectors[0]]

    def _get_text_embedding(self, text: str) -> Embedding:
        return self._get_text_embeddings([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        check_not_forked()
        with self._lock:
            vectors = self._model.encode_document(
                [encodable(text) for text in texts],
                batch_size=self.embed_batch_size,
                normalize_embeddings=True,
                show_progress_bar=False,
            )
        return [[float(x) for x in vector] for vector in vectors]

    async def _aget_query_embedding(self, query: str) -> Embedding:
        return await asyncio.to_thread(self._get_query_embedding, query)

    async def _aget_text_embedding(self, text: str) -> Embedding:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)


def _load(model_name: str, device: str | None, trust_remote_code: bool) -> SentenceTransformer:
    from reader_rag.model.registry import resolve_embed_model

    note_threads()
    place = resolve_embed_model(model_name)
    try:
        with quiet_loading():
            from sentence_transformers import SentenceTransformer

            model = SentenceTransformer(place, device=device, trust_remote_code=trust_remote_code)
            vectors = model.encode_document(
                [_TRIAL], show_progress_bar=False
            )  # a damaged folder may load, and fail here
        if not np.isfinite(vectors).all():
            raise ModelError(f"{model_name!r} gives vectors that are not finite; its weights may be damaged")
        return model
    except ReaderError:
        raise
    except OSError as error:
        raise ModelNotFoundError(
            f"the embedding model {model_name!r} cannot be read; give an alias, a hub id or a folder that "
            f"sentence-transformers can load, or run `reader-rag models get`"
        ) from error
    except Exception as error:  # damaged files raise errors of many libraries, of pickle and safetensors for example
        raise ModelError(f"{model_name!r} cannot be loaded as an embedding model: {first_line(error)}") from error


def _document_prompt(model: SentenceTransformer) -> str:
    """The prompt that `encode_document` puts before a text; it counts towards the sequence limit."""
    for name in ("document", "passage", "corpus"):
        if name in model.prompts:
            return str(model.prompts[name] or "")
    return str(model.prompts.get(model.default_prompt_name or "", "") or "")
