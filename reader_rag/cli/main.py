"""`reader-rag`: documents in, answers with their sources out.

Heavy packages are imported inside the commands: help is printed at once, and `reader-rag bench` runs where LlamaIndex
and FAISS are not installed.
"""

from __future__ import annotations

from typing import Annotated

import typer

from reader_rag import __version__
from reader_rag.bench.commands import app as bench_app
from reader_rag.cli.ask import ask
from reader_rag.cli.chat import chat
from reader_rag.cli.datastore import app as datastore_app
from reader_rag.cli.demo import demo
from reader_rag.cli.display.errors import OneLineErrors
from reader_rag.cli.display.terminal import quiet_libraries
from reader_rag.cli.ingest import ingest
from reader_rag.cli.keys import app as keys_app
from reader_rag.cli.models import app as models_app
from reader_rag.cli.serve import serve
from reader_rag.cli.verify import verify
from reader_rag.cli.vllm_args import vllm_args
from reader_rag.config.threads import configure_threads

app = typer.Typer(
    cls=OneLineErrors,
    epilog="Example: reader-rag demo",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # markup would take square brackets of the help for its own
)

for _command, _example in (
    (ingest, "ingest ~/papers notes.md --store ~/papers-store"),
    (ask, 'ask "Who wrote the report?" --store ~/papers-store --compare'),
    (chat, "chat --store ~/papers-store"),
    (demo, "demo --max-tokens 64"),
    (serve, "serve --store ~/papers-store"),
    (verify, "verify --dtype bfloat16 --exactness strict"),
):
    app.command(epilog=f"Example: reader-rag {_example}")(_command)
app.command("vllm-args", epilog='Example: eval "$(reader-rag vllm-args --model Qwen/Qwen3-8B) --port 8000"')(vllm_args)
app.add_typer(models_app, name="models")
app.add_typer(datastore_app, name="datastore")
app.add_typer(keys_app, name="keys")
app.add_typer(bench_app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"reader-rag {__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show tracebacks and the libraries' warnings. May stand anywhere in the command."),
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Answer questions from your documents with a local LLM, and show what it copied from where."""
    if not debug:
        quiet_libraries()


def main() -> None:
    """Entry point of `reader-rag`."""
    configure_threads()
    app(prog_name="reader-rag")


if __name__ == "__main__":
    main()
