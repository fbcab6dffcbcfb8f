"""`reader-rag ask`: one answer from a document store."""

from __future__ import annotations

from typing import Annotated

import typer

from reader_rag.bench.options import Json, MaxTokens
from reader_rag.bench.output import json_bytes
from reader_rag.cli.display.terminal import output
from reader_rag.cli.loading import ModelOptions, require_store, takes_models
from reader_rag.cli.options import Alpha, Cutoff, Passages, Store, Tenant, VectorStore, store_place
from reader_rag.config import SamplingParams
from reader_rag.errors import ConfigError, PromptError


@takes_models(profile="off")
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
    *,
    models: ModelOptions,
) -> None:
    """Answer a question from a document store.

    Shows the answer, the retrieved passages, what was copied from which file, and statistics.
    """
    if not question.strip():
        raise PromptError("the question is empty; write a question")
    if compare and models.engine is not None:
        raise ConfigError("--compare needs a model on this machine, not a server: leave out --engine")
    place = store_place(store, vector_store)
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
