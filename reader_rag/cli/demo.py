"""The demonstration: real documents, a real model, one question, and plain decoding beside ours."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from reader_rag.cli.ask import ask
from reader_rag.cli.display.show import show_ingest
from reader_rag.cli.display.terminal import clean, ingest_progress, status
from reader_rag.cli.loading import ModelOptions
from reader_rag.errors import IngestError
from reader_rag.model.registry import ALIASES, get_model
from reader_rag.model.weights_cache import cache_folder

QUESTION = "How do dictionary displays work?"
"""A question whose answer the default model takes from the documents."""

TOP_K = 2
_TOPICS = "python-topics"
_STORE = "store"


def default_workdir() -> Path:
    """Where the demonstration keeps documents and store; one folder per Python version, as the texts differ."""
    return cache_folder() / f"demo-python{sys.version_info.major}.{sys.version_info.minor}"


def write_topics(folder: Path) -> int:
    """Write Python's own language reference, which every Python brings along, as one text file per topic.

    Files that are there already with the same text are left alone.

    Args:
        folder: Where to; made if need be.

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
        console: Where everything is shown.
        models: Which models; "auto" as `dtype` means float32.
        workdir: Folder for documents and store; None takes `default_workdir()`.
        store_dir: Folder of the store, if it is to lie elsewhere.
        question: What to ask.
        max_tokens: Most tokens of the answer.
        tenant: Whose documents these are to be in the store.

    Returns:
        False if the tokens differ where they must not: in float32, or decoded strictly.

    Raises:
        ReaderError: Models, documents or store cannot be used.
    """
    from reader_rag.rag.ingest import ingest

    workdir = workdir or default_workdir()
    store_dir = store_dir or workdir / _STORE
    if models.dtype == "auto":
        models = replace(models, dtype="float32")
    _get_models(models)

    folder = workdir / _TOPICS
    count = write_topics(folder)
    _say(console, f"Documents: {count} topics of Python's language reference, in {folder}")
    embed_model = models.load_embedding()
    if not store_dir.exists():
        _say(console, "Splitting and embedding them (the first time, for a minute or so) ...")
    with ingest_progress() as progress:
        report = ingest([folder], store_dir, embed_model=embed_model, progress=progress, tenant=tenant)
    show_ingest(console, report, store_dir)

    console.print(Text.assemble("\n", ("Question: ", "bold"), clean(question), "\n"), soft_wrap=True)
    asked = ask(
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
    exact = models.dtype == "float32" or models.exactness == "strict"
    return asked.comparison is None or asked.comparison.identical or not exact


def _get_models(models: ModelOptions) -> None:
    """Bring the models that are named by an alias; what else is named, its library finds."""
    for name in (models.named_model, models.embed_model):
        if name in ALIASES:
            with status(f"looking for {name}") as say:
                get_model(name, say)


def _say(console: Console, text: str) -> None:
    console.print(Text(clean(text)), soft_wrap=True)
