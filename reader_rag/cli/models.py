"""`reader-rag models`: which models are known and installed, installing one, and profiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from reader_rag.bench.option_groups import with_option_groups
from reader_rag.cli.display.terminal import output, status
from reader_rag.config import LoadConfig

app = typer.Typer(
    help="List, install and profile models.", epilog="Example: reader-rag models list", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(help="Alias, local folder or hub id.")]


@app.command("list", epilog="Example: reader-rag models list")
def list_models() -> None:
    """List models, and which are installed."""
    from reader_rag.cli.display.show import show_models
    from reader_rag.model.registry import list_models as statuses

    show_models(output(), statuses())


@app.command("get", epilog="Example: reader-rag models get smollm2-135m")
def get_model(name: Name) -> None:
    """Install a model and print its folder.

    After that it is used without a network.
    """
    from reader_rag.model.registry import get_model as get

    with status(f"looking for {name}") as say:
        folder = get(name, say)
    typer.echo(folder)


@app.command("profile", epilog="Example: reader-rag models profile Qwen/Qwen3-0.6B --dtype bfloat16")
@with_option_groups
def profile_model(
    name: Name,
    out: Annotated[
        Path | None, typer.Option(help="File to write.", show_default="in the cache folder, where it is found")
    ] = None,
    load: LoadConfig = LoadConfig(),
) -> None:
    """Record a model's next tokens for drafts.

    A profile holds the most probable tokens after each token of the vocabulary, so that the first drafts of an answer
    are good too. The default model has one, and others make one by themselves while their engine is idle; this command
    makes it at once. It takes minutes for a small model on a CPU.
    """
    from reader_rag.draft.profile import profile_path
    from reader_rag.engine.engine import Engine
    from reader_rag.model.fingerprint import model_fingerprint
    from reader_rag.model.profile.successors import make_profile
    from reader_rag.model.weights_cache import cache_folder

    with status(f"loading {name}"):
        engine = Engine.load(name, **vars(load), profile="off")
    with status("profiling") as say:
        profile = make_profile(
            engine.target,
            engine.tokenizer,
            name=engine.name,
            drafting=engine.drafting,
            progress=lambda done, of: say(f"profiled {done} of {of} tokens"),
        )
    if out is None:  # the engine's own file; one that is named may be used for other models of the vocabulary
        profile = replace(profile, model=model_fingerprint(engine.model))
    path = out or profile_path(cache_folder() / "profiles", profile.model)
    path.parent.mkdir(parents=True, exist_ok=True)
    profile.save(path)
    typer.echo(path)
