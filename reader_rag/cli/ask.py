"""`reader-rag ask`: one answer from a document store."""

from __future__ import annotations

from typing import Annotated

import typer

from reader_rag.bench.option_groups import Without, with_option_groups
from reader_rag.bench.options import Json
from reader_rag.bench.output import json_bytes
from reader_rag.cli.display.terminal import output
from reader_rag.cli.loading import ModelOptions, require_store
from reader_rag.cli.options import QuestionOptions, StoreOptions
from reader_rag.errors import ConfigError, PromptError


@with_option_groups
def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    documents: StoreOptions = StoreOptions(),
    answering: QuestionOptions = QuestionOptions(),
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Answer with plain decoding too, and compare; in float32 unless --dtype is given."
        ),
    ] = False,
    as_json: Json = False,
    models: Annotated[ModelOptions, Without("profile")] = ModelOptions(profile="off"),
) -> None:
    """Answer a question from a document store.

    Shows the answer, the retrieved passages, what was copied from which file, and statistics.
    """
    if not question.strip():
        raise PromptError("the question is empty; write a question")
    if compare and models.engine is not None:
        raise ConfigError("--compare needs a model on this machine, not a server: leave out --engine")
    place = documents.place
    require_store(place)
    models.require_datastore()
    from reader_rag.cli.answering.answers import ask_store

    result = ask_store(question, place, models, answering, compare=compare, console=None if as_json else output())
    if as_json:
        typer.echo(json_bytes(result.to_dict()))
