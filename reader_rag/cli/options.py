"""Options that several programs have, besides those of `reader_rag.bench.options`: documents, answers, servers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from reader_rag.bench.option_groups import OptionGroup
from reader_rag.bench.options import MaxTokens, setting_option
from reader_rag.config import DatastoreConfig, EngineConfig, ProfileMode, SamplingParams, checked_tenant
from reader_rag.errors import ConfigError
from reader_rag.model.registry import DEFAULT_MODEL


def _tenant(name: str) -> str:
    try:
        return checked_tenant(name)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


# Documents

Store = Annotated[Path | None, typer.Option("--store", help="Folder of the document store.", show_default=False)]
VectorStore = Annotated[
    str | None,
    typer.Option(
        "--vector-store",
        metavar="URL",
        help="Vector database instead of --store: qdrant://HOST:PORT/NAME or milvus://HOST:PORT/NAME, or embedded "
        "qdrant:///FOLDER/NAME or milvus:///FILE.db/NAME.",
        show_default=False,
    ),
]
Tenant = Annotated[
    str,
    typer.Option(
        "--tenant",
        callback=_tenant,
        help="Name of the tenant. Each tenant has documents, texts and answers of its own, which no other sees.",
        show_default="no name",
    ),
]
EmbedModel = Annotated[str, typer.Option("--embed-model", help="Embedding model: alias, local folder or hub id.")]


@dataclass(frozen=True)
class StoreOptions(OptionGroup):
    """Where the documents are.

    Attributes:
        store: Folder of the document store, or None.
        vector_store: URL of a collection in a vector database, or None.
    """

    store: Store = None
    vector_store: VectorStore = None

    @property
    def place(self) -> Path | str:
        """The folder or URL of the document store.

        Raises:
            BadParameter: Both are given, or neither, or a URL as a folder.
        """
        if (self.store is None) == (self.vector_store is None):
            raise typer.BadParameter("name one store: --store FOLDER or --vector-store URL")
        if self.store is not None and re.match(r"(?:qdrant|milvus)(?:\+tls)?:", str(self.store)):
            raise typer.BadParameter("--store takes a folder: name the URL of a vector database by --vector-store")
        return self.store or self.vector_store or ""


# Answers

AnsweringModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="LLM: alias, local folder or hub id; with --engine, its name on the server.",
        show_default=f"{DEFAULT_MODEL}, or the server's only model",
    ),
]
EngineUrl = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="URL",
        help="Let an OpenAI-compatible server answer, such as http://localhost:8000/v1. If it needs an API key, set "
        "READER_RAG_ENGINE_KEY.",
        show_default="none",
    ),
]
EngineTimeout = Annotated[
    float,
    typer.Option(
        "--engine-timeout",
        metavar="SECONDS",
        min=0.1,
        help="A call fails after this time without data from --engine.",
    ),
]
Passages = Annotated[int, typer.Option("--top-k", min=1, help="Most passages to retrieve.")]
Cutoff = Annotated[
    float | None, typer.Option("--cutoff", help="Least similarity of a passage, -1 to 1.", show_default="none")
]
Alpha = Annotated[
    float | None,
    typer.Option(
        "--alpha",
        min=0.0,
        max=1.0,
        help="Retrieve by vectors and by words (BM25): the weight of the vectors, 0 to 1.",
        show_default="by vectors only",
    ),
]


@dataclass(frozen=True)
class QuestionOptions(OptionGroup):
    """How questions are answered from documents.

    Attributes:
        top_k: Most passages to retrieve.
        cutoff: Least cosine similarity of a passage, -1 to 1; None: no limit.
        alpha: Weight of the vectors in hybrid retrieval, 0 to 1; None: by vectors only.
        max_tokens: Most tokens of an answer.
        tenant: Only this tenant's documents are searched.
    """

    top_k: Passages = 4
    cutoff: Cutoff = None
    alpha: Alpha = None
    max_tokens: MaxTokens = SamplingParams.max_tokens
    tenant: Tenant = ""


DatastoreFolder = Annotated[
    Path | None,
    setting_option(EngineConfig, "datastore", text="Folder of a datastore: texts and earlier answers to draft from."),
]
KeepAnswers = Annotated[
    bool,
    setting_option(
        DatastoreConfig,
        "keeps_answers",
        flag="--keep-answers",
        text="Keep the answers in --datastore, for later drafts.",
    ),
]
Profile = Annotated[
    ProfileMode,
    setting_option(
        EngineConfig,
        "profile",
        text="off: do not compute, while no answer is decoded, the model's likely next tokens for later drafts.",
    ),
]

# The service

ApiKeys = Annotated[
    Path, typer.Option("--api-keys", metavar="FILE", help="File of API keys, as hashes.", show_default=False)
]
