"""`reader-rag keys`: the API keys of `reader-rag serve`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reader_rag.bench.options import Json
from reader_rag.cli.options import ApiKeys

if TYPE_CHECKING:
    from reader_rag.server.keys import KeyFile

app = typer.Typer(
    help="Manage the API keys of `reader-rag serve`.",
    epilog="Example: reader-rag keys add alice --api-keys keys.json",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(help="Name of the key.", show_default=False)]


@app.command(epilog="Example: reader-rag keys add alice --api-keys keys.json")
def add(
    name: Name,
    api_keys: ApiKeys,
    tenant: Annotated[
        str | None,
        typer.Option("--tenant", help="Tenant whose documents it opens.", show_default="a tenant of the key's name"),
    ] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="It may read /metrics, which count all tenants.")
    ] = False,
) -> None:
    """Make a key and print it.

    It is shown only once: the file has its hash. A running service accepts it within a second.
    """
    typer.echo(_file(api_keys).add(name, tenant, operator=operator))


@app.command("list", epilog="Example: reader-rag keys list --api-keys keys.json")
def list_keys(api_keys: ApiKeys, as_json: Json = False) -> None:
    """List the keys' names and tenants."""
    keys = _file(api_keys).read()
    if as_json:
        shown = [{"name": key.name, "tenant": key.tenant, "operator": key.operator} for key in keys]
        typer.echo(json.dumps({"keys": shown}))
        return
    for key in keys:
        typer.echo(f"{key.name}: tenant {key.tenant or '(no name)'}{', operator' if key.operator else ''}")


@app.command(epilog="Example: reader-rag keys remove alice --api-keys keys.json")
def remove(name: Name, api_keys: ApiKeys) -> None:
    """Remove a key.

    A running service refuses it within a second. The tenant's documents stay.
    """
    _file(api_keys).remove(name)


def _file(path: Path) -> KeyFile:
    from reader_rag.server.keys import KeyFile

    return KeyFile(path)
