"""`reader-rag demo`: a question about real documents, answered by a real model with and without drafts."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from reader_rag.bench.option_groups import Only, Without, with_option_groups
from reader_rag.bench.options import Model
from reader_rag.cli.display.show import show_ingest
from reader_rag.cli.display.terminal import clean, ingest_progress, output, status
from reader_rag.cli.loading import ModelOptions
from reader_rag.cli.options import QuestionOptions
from reader_rag.errors import IngestError
from reader_rag.model.registry import ALIASES, DEFAULT_MODEL, get_model
from reader_rag.model.weights_cache import cache_folder

QUESTION = "How do dictionary displays work?"
"""A question that the default model answers from the documents."""

_TOPICS = "python-topics"
_STORE = "store"


@with_option_groups
def demo(
    question: Annotated[
        str, typer.Option("--question", help="The question, about Python's language reference.")
    ] = QUESTION,
    workdir: Annotated[
        Path | None,
        typer.Option("--workdir", help="Folder for documents and store.", show_default="a folder in the user's cache"),
    ] = None,
    store: Annotated[
        Path | None, typer.Option("--store", help="Folder of the document store.", show_default="in --workdir")
    ] = None,
    answering: Annotated[QuestionOptions, Only("max_tokens", "tenant")] = QuestionOptions(top_k=2),
    model: Model = DEFAULT_MODEL,
    models: Annotated[
        ModelOptions, Without("model", "datastore", "keep_answers", "profile", "engine", "engine_timeout")
    ] = ModelOptions(profile="off"),
) -> None:
    """Show an answer with and without drafts.

    Installs missing models, ingests Python's language reference, answers a question about it, and compares with plain
    decoding. The model is in float32 unless --dtype or --quantization is given. Exit status: 1 if the tokens differ
    although they must not (in float32, or with --exactness strict).
    """
    from reader_rag.cli.answering.answers import ask_store
    from reader_rag.rag.ingest import ingest

    console = output()
    workdir = workdir or default_workdir()
    store = store or workdir / _STORE
    models = replace(models, model=model).exact()
    _get_models(models)

    folder = workdir / _TOPICS
    count = write_topics(folder)
    _say(console, f"Documents: {count} topics of Python's language reference, in {folder}")
    embed_model = models.load_embedding()
    if not store.exists():
        _say(console, "Splitting and embedding them (this takes about a minute the first time) ...")
    with ingest_progress() as progress:
        report = ingest([folder], store, embed_model=embed_model, progress=progress, tenant=answering.tenant)
    show_ingest(console, report, store)

    console.print(Text.assemble("\n", ("Question: ", "bold"), clean(question), "\n"), soft_wrap=True)
    result = ask_store(question, store, models, answering, compare=True, console=console, embed_model=embed_model)
    named = f" --tenant {shlex.quote(answering.tenant)}" if answering.tenant else ""
    _say(console, f'\nAsk your own: reader-rag ask "..." --store {store}{named}')
    must_agree = (models.dtype, models.quantization) == ("float32", "none") or models.exactness == "strict"
    if must_agree and result.comparison is not None and not result.comparison.identical:
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


def _get_models(models: ModelOptions) -> None:
    """Install the models that are named by an alias; others are found when they are loaded."""
    for name in (models.named_model, models.embed_model):
        if name in ALIASES:
            with status(f"looking for {name}") as say:
                get_model(name, say)


def _say(console: Console, text: str) -> None:
    console.print(Text(clean(text)), soft_wrap=True)
