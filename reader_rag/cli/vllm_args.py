"""`reader-rag vllm-args`."""

from __future__ import annotations

from typing import Annotated

import typer

from reader_rag.bench.options import DatastoreToDraftFrom, MaxDrafted, Model, StepCosts
from reader_rag.connectors.vllm_args import DEFAULT_DRAFT_TOKENS, serve_command
from reader_rag.model.registry import DEFAULT_MODEL


def vllm_args(
    model: Model = DEFAULT_MODEL,
    drafted: MaxDrafted = DEFAULT_DRAFT_TOKENS,
    datastore: DatastoreToDraftFrom = None,
    costs: StepCosts = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            "--namespace",
            help="Namespace of the datastore to search besides the shared ones. May be repeated.",
            show_default=False,
        ),
    ] = None,
    keep_answers: Annotated[
        bool, typer.Option("--keep-answers", help="Draft from answers to earlier requests of all users.")
    ] = False,
) -> None:
    """Print a command that starts vLLM.

    The server drafts with reader-rag. vLLM need not be installed where the command is printed.
    """
    typer.echo(serve_command(model, drafted, datastore, costs, namespace or (), keep_answers))
