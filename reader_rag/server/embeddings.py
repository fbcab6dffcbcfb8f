"""`/v1/embeddings`: vectors of the store's embedding model."""

from __future__ import annotations

import base64
from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter
from llama_index.core.base.embeddings.base import BaseEmbedding
from pydantic import BaseModel, Field, StrictInt, StrictStr

from reader_rag.rag.embedding import SizedEmbedding
from reader_rag.server.access import CallerDep, ServiceDep
from reader_rag.server.errors import ApiError

router = APIRouter(tags=["openai"])

Text = Annotated[StrictStr, Field(min_length=1)]
Tokens = Annotated[list[StrictInt], Field(min_length=1)]


class EmbeddingRequest(BaseModel):
    """Texts to embed."""

    input: Text | Annotated[list[Text], Field(min_length=1)] | Tokens | Annotated[list[Tokens], Field(min_length=1)] = (
        Field(description="A text or several. Lists of token ids are refused: clients cannot know the tokenizer.")
    )
    model: str = Field(description="Name of the embedding model, as the service was given it.")
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1, description="Must be the length of the model's vectors.")
    user: str | None = None


class Embedding(BaseModel):
    """The vector of one text."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str = Field(description="Numbers; with base64, little-endian float32.")


class EmbeddingUsage(BaseModel):
    """Number of tokens."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(BaseModel):
    """The vectors of all texts."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


@router.post("/v1/embeddings")
def embeddings(service: ServiceDep, caller: CallerDep, body: EmbeddingRequest) -> EmbeddingResponse:
    """Embed texts with the store's embedding model."""
    model = service.embedding
    if model is None:
        raise ApiError(404, "this service has no embedding model: it has no store", code="model_not_found")
    if body.model != model.model_name:
        message = f"there is no embedding model {body.model[:200]!r}; this service has {model.model_name!r}"
        raise ApiError(404, message, code="model_not_found", param="model")
    texts = [body.input] if isinstance(body.input, str) else body.input
    if len(texts) > service.config.embedding_inputs:
        raise ApiError(400, f"at most {service.config.embedding_inputs} texts in one request", param="input")
    strings = [text for text in texts if isinstance(text, str)]
    if len(strings) != len(texts):
        raise ApiError(400, "send texts, not token ids: they depend on a tokenizer that you cannot know", param="input")
    counts = _counts(model, strings)
    vectors = np.asarray(model.get_text_embedding_batch(strings), dtype="<f4")
    if body.dimensions not in (None, vectors.shape[1]):
        raise ApiError(400, f"this model's vectors have {vectors.shape[1]} numbers", param="dimensions")
    data = [
        Embedding(
            index=index,
            embedding=base64.b64encode(vector.tobytes()).decode("ascii")
            if body.encoding_format == "base64"
            else vector.tolist(),
        )
        for index, vector in enumerate(vectors)
    ]
    usage = EmbeddingUsage(prompt_tokens=sum(counts), total_tokens=sum(counts))
    return EmbeddingResponse(data=data, model=model.model_name, usage=usage)


def _counts(model: BaseEmbedding, texts: list[str]) -> list[int]:
    """Tokens of each text; 0 where the model does not count.

    Raises:
        ApiError: A text is longer than the model reads: it would be cut without a word.
    """
    if not isinstance(model, SizedEmbedding):
        return [0] * len(texts)
    counts = [model.count_tokens(text) for text in texts]
    for index, count in enumerate(counts):
        if count > model.max_text_tokens:
            raise ApiError(
                400,
                f"text {index} has {count} tokens; this model reads {model.max_text_tokens}",
                code="context_length_exceeded",
                param="input",
            )
    return counts
