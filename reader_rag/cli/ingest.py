"""`reader-rag ingest`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reader_rag.bench.option_groups import Only, with_option_groups
from reader_rag.cli.display.errors import in_flags
from reader_rag.cli.display.terminal import ingest_progress, output
from reader_rag.cli.loading import ModelOptions
from reader_rag.cli.options import StoreOptions, Tenant
from reader_rag.config import ReadLimits
from reader_rag.model.registry import DEFAULT_MODEL


@with_option_groups
def ingest(
    paths: Annotated[
        list[Path], typer.Argument(help="Folders and files. PDF, office and Outlook files need the extra 'files'.")
    ],
    documents: StoreOptions = StoreOptions(),
    chunk_tokens: Annotated[
        int | None,
        typer.Option(
            "--chunk-tokens",
            help="Most tokens of a passage, by the embedding model's tokenizer.",
            show_default="at most 256",
        ),
    ] = None,
    chunk_overlap: Annotated[
        int, typer.Option("--chunk-overlap", help="Tokens that a passage shares with the next one.")
    ] = 32,
    encoding: Annotated[
        str, typer.Option("--encoding", help="Encoding of text in files that declare none, e.g. latin-1.")
    ] = "utf-8",
    tenant: Tenant = "",
    models: Annotated[ModelOptions, Only("embed_model", "device", "trust_remote_code")] = ModelOptions(),
    follow_links: Annotated[
        bool,
        typer.Option("--follow-links", help="Read links in a folder to files outside of it, or to hidden files."),
    ] = False,
    read_seconds: Annotated[
        float, typer.Option("--read-seconds", help="Most seconds to turn one file into text; others are skipped.")
    ] = ReadLimits.read_seconds,
    datastore: Annotated[
        Path | None,
        typer.Option("--datastore", help="Datastore to put the passages into too, for drafts.", show_default="none"),
    ] = None,
    model: Annotated[str, typer.Option("--model", help="LLM that uses the datastore.")] = DEFAULT_MODEL,
) -> None:
    """Update a document store from files.

    New and changed files are added, files that were removed from a named folder are removed. Other files and other
    tenants' documents stay. Exit status: 0 if every file was readable, 2 if some were skipped (they are listed with
    reasons), 1 if nothing was changed.
    """
    place = documents.place
    limits = ReadLimits(read_seconds=read_seconds)
    from reader_rag.cli.display.show import show_ingest
    from reader_rag.rag.ingest import ingest as ingest_files

    embedding = models.load_embedding()
    with ingest_progress() as progress:
        report = ingest_files(
            paths,
            place,
            embed_model=embedding,
            chunk_tokens=chunk_tokens,
            chunk_overlap=chunk_overlap,
            encoding=encoding,
            progress=progress,
            tenant=tenant,
            follow_links=follow_links,
            limits=limits,
        )
    show_ingest(output(), report, place, lambda text: in_flags(text, {"follow_links": "--follow-links"}))
    if datastore is not None:
        from reader_rag.cli.datastore import sync_passages

        sync_passages(place, datastore, model, embedding, tenant, models.trust_remote_code)
    if not report.ok:
        raise typer.Exit(2)
