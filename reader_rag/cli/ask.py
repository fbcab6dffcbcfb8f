"""`reader-rag ask`: one answer from a document store."""

from __future__ import annotations

from typing import Annotated

import typer

from reader_rag.bench.options import Device, Dtype, Exactness, Json, MaxTokens, Quantization, TrustRemoteCode
from reader_rag.bench.output import json_bytes
from reader_rag.cli.display.terminal import output
from reader_rag.cli.loading import ENGINE_TIMEOUT_S, ModelOptions, require_store
from reader_rag.cli.options import (
    Alpha,
    AnsweringModel,
    Cutoff,
    DatastoreFolder,
    EmbedModel,
    EngineTimeout,
    EngineUrl,
    KeepAnswers,
    Passages,
    Store,
    Tenant,
    VectorStore,
    store_place,
)
from reader_rag.config import EngineConfig, LoadConfig, SamplingParams
from reader_rag.errors import ConfigError, PromptError
from reader_rag.model.registry import DEFAULT_EMBED_MODEL


def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    store: Store = None,
    vector_store: VectorStore = None,
    top_k: Passages = 4,
    cutoff: Cutoff = None,
    alpha: Alpha = None,
    max_tokens: MaxTokens = SamplingParams.max_tokens,
    tenant: Tenant = "",
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Answer with plain decoding too, and compare; in float32 unless --dtype is given."
        ),
    ] = False,
    as_json: Json = False,
    model: AnsweringModel = None,
    embed_model: EmbedModel = DEFAULT_EMBED_MODEL,
    device: Device = LoadConfig.device,
    dtype: Dtype = LoadConfig.dtype,
    quantization: Quantization = LoadConfig.quantization,
    exactness: Exactness = EngineConfig.exactness,
    datastore: DatastoreFolder = None,
    keep_answers: KeepAnswers = False,
    engine: EngineUrl = None,
    engine_timeout: EngineTimeout = ENGINE_TIMEOUT_S,
    trust_remote_code: TrustRemoteCode = LoadConfig.trust_remote_code,
) -> None:
    """Answer a question from a document store.

    Shows the answer, the retrieved passages, what was copied from which file, and statistics.
    """
    if not question.strip():
        raise PromptError("the question is empty; write a question")
    if compare and engine is not None:
        raise ConfigError("--compare needs a model on this machine, not a server: leave out --engine")
    place = store_place(store, vector_store)
    models = ModelOptions(
        model,
        embed_model,
        device,
        dtype,
        quantization,
        exactness,
        trust_remote_code,
        datastore,
        keep_answers,
        engine,
        engine_timeout,
    )
    require_store(place)
    models.require_datastore()
    from reader_rag.cli.answering.answers import ask_store

    result = ask_store(
        question,
        place,
        models,
        top_k=top_k,
        cutoff=cutoff,
        alpha=alpha,
        max_tokens=max_tokens,
        compare=compare,
        tenant=tenant,
        console=None if as_json else output(),
    )
    if as_json:
        typer.echo(json_bytes(result.to_dict()))
