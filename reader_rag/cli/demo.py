"""`reader-rag demo`: a question about real documents, answered by a real model with and without drafts."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from reader_rag.bench.options import (
    Device,
    DraftModel,
    DraftQuantization,
    Dtype,
    Exactness,
    MaxTokens,
    Model,
    Quantization,
    TrustRemoteCode,
)
from reader_rag.cli.display.show import show_ingest
from reader_rag.cli.display.terminal import clean, ingest_progress, output, status
from reader_rag.cli.loading import ModelOptions
from reader_rag.cli.options import EmbedModel, Tenant
from reader_rag.config import EngineConfig, LoadConfig, SamplingParams
from reader_rag.errors import IngestError
from reader_rag.model.registry import ALIASES, DEFAULT_EMBED_MODEL, DEFAULT_MODEL, get_model
from reader_rag.model.weights_cache import cache_folder

QUESTION = "How do dictionary displays work?"
"""A question that the default model answers from the documents."""

TOP_K = 2
_TOPICS = "python-topics"
_STORE = "store"


def demo(
    question: Annotated[
        str, typer.Option("--question", help="The question, about Python's language reference.")
    ] = QUESTION,
    max_tokens: MaxTokens = SamplingParams.max_tokens,
    workdir: Annotated[
        Path | None,
        typer.Option("--workdir", help="Folder for documents and store.", show_default="a folder in the user's cache"),
    ] = None,
    store: Annotated[
        Path | None, typer.Option("--store", help="Folder of the document store.", show_default="in --workdir")
    ] = None,
    tenant: Tenant = "",
    model: Model = DEFAULT_MODEL,
    embed_model: EmbedModel = DEFAULT_EMBED_MODEL,
    device: Device = LoadConfig.device,
    dtype: Dtype = LoadConfig.dtype,
    quantization: Quantization = LoadConfig.quantization,
    exactness: Exactness = EngineConfig.exactness,
    draft_model: DraftModel = None,
    draft_quantization: DraftQuantization = EngineConfig.draft_quantization,
    trust_remote_code: TrustRemoteCode = LoadConfig.trust_remote_code,
) -> None:
    """Show an answer with and without drafts.

    Installs missing models, ingests Python's language reference, answers a question about it, and compares with plain
    decoding. The model is in float32 unless --dtype or --quantization is given. Exit status: 1 if the tokens differ
    although they must not (in float32, or with --exactness strict).
    """
    passed = run_demo(
        output(),
        ModelOptions(
            model,
            embed_model,
            device,
            dtype,
            quantization,
            exactness,
            draft_model,
            draft_quantization,
            profile="off",
            trust_remote_code=trust_remote_code,
        ),
        workdir=workdir,
        store_dir=store,
        question=question,
        max_tokens=max_tokens,
        tenant=tenant,
    )
    if not passed:
        raise typer.Exit(1)


def default_workdir() -> Path:
    """The folder for documents and store; one for each Python version, as the documents differ."""
    return cache_folder() / f"demo-python{sys.version_info.major}.{sys.version_info.minor}"


def write_topics(folder: Path) -> int:
    """Write Python's language reference, which every Python contains, as one text file for each topic.

    Files that have the same text already are not written again.

    Args:
        folder: Folder of the files; made if it is missing.

    Returns:
        The number of topics.

    Raises:
        IngestError: The folder cannot be written.
    """
    from pydoc_data.topics import topics

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in topics.items():
            path = folder / f"{name}.txt"
            content = text.encode()
            if not path.is_file() or path.read_bytes() != content:
                path.write_bytes(content)
    except OSError as error:
        raise IngestError(
            f"cannot write documents to {folder} ({error.strerror or error}); choose another folder with --workdir"
        ) from error
    return len(topics)


def run_demo(
    console: Console,
    models: ModelOptions,
    *,
    workdir: Path | None,
    store_dir: Path | None,
    question: str,
    max_tokens: int,
    tenant: str = "",
) -> bool:
    """Ingest, ask, compare.

    Args:
        console: Shows everything.
        models: The models; "auto" as `dtype` means float32 unless the LLM is quantised.
        workdir: Folder for documents and store; None: `default_workdir()`.
        store_dir: Folder of the store; None: in `workdir`.
        question: The question.
        max_tokens: Most tokens of the answer.
        tenant: The documents are ingested for this tenant.

    Returns:
        False if the tokens differ although they must not: in float32, or with strict exactness.

    Raises:
        ReaderError: Models, documents or store cannot be used.
    """
    from reader_rag.cli.answering.answers import ask_store
    from reader_rag.rag.ingest import ingest

    workdir = workdir or default_workdir()
    store_dir = store_dir or workdir / _STORE
    models = models.exact()
    _get_models(models)

    folder = workdir / _TOPICS
    count = write_topics(folder)
    _say(console, f"Documents: {count} topics of Python's language reference, in {folder}")
    embed_model = models.load_embedding()
    if not store_dir.exists():
        _say(console, "Splitting and embedding them (this takes about a minute the first time) ...")
    with ingest_progress() as progress:
        report = ingest([folder], store_dir, embed_model=embed_model, progress=progress, tenant=tenant)
    show_ingest(console, report, store_dir)

    console.print(Text.assemble("\n", ("Question: ", "bold"), clean(question), "\n"), soft_wrap=True)
    result = ask_store(
        question,
        store_dir,
        models,
        top_k=TOP_K,
        cutoff=None,
        max_tokens=max_tokens,
        compare=True,
        tenant=tenant,
        console=console,
        embed_model=embed_model,
    )
    named = f" --tenant {shlex.quote(tenant)}" if tenant else ""
    _say(console, f'\nAsk your own: reader-rag ask "..." --store {store_dir}{named}')
    exact = (models.dtype == "float32" and models.quantization == "none") or models.exactness == "strict"
    return result.comparison is None or result.comparison.identical or not exact


def _get_models(models: ModelOptions) -> None:
    """Install the models that are named by an alias; others are found when they are loaded."""
    for name in (models.named_model, models.embed_model):
        if name in ALIASES:
            with status(f"looking for {name}") as say:
                get_model(name, say)


def _say(console: Console, text: str) -> None:
    console.print(Text(clean(text)), soft_wrap=True)
