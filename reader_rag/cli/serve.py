"""`reader-rag serve`: an OpenAI-compatible API over a document store, and a web page."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reader_rag.bench.option_groups import Only, with_option_groups
from reader_rag.bench.options import MaxTokens
from reader_rag.cli.display.terminal import messages
from reader_rag.cli.loading import ModelOptions
from reader_rag.cli.options import StoreOptions, Tenant
from reader_rag.config import SamplingParams, ServerConfig
from reader_rag.errors import MissingDependencyError, StoreNotFoundError

if TYPE_CHECKING:
    from socket import socket

    from reader_rag.server.keys import KeyRing
    from reader_rag.server.service import Service

_PACKAGES = ("fastapi", "uvicorn", "sse_starlette", "python_multipart", "prometheus_client")


@with_option_groups
def serve(
    documents: StoreOptions = StoreOptions(),
    create: Annotated[
        bool, typer.Option("--create", help="Begin with an empty store if there is none; upload documents to it.")
    ] = False,
    config: Annotated[
        ServerConfig, Only("host", "port", "upload_bytes", "file_bytes", "originals_bytes", "grace")
    ] = ServerConfig(),
    api_keys: Annotated[
        Path | None,
        typer.Option(
            "--api-keys",
            metavar="FILE",
            help="Let in only callers with a key of this file, which `reader-rag keys add` makes.",
            show_default="everyone on this machine",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host", help="A further host name under which clients reach the service; may be repeated."
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option("--cors-origin", help="A site whose pages may call the API; may be repeated."),
    ] = None,
    markdown_footer: Annotated[
        bool,
        typer.Option(
            "--markdown-footer", help="Write the sources under answers, too, for clients that drop annotations."
        ),
    ] = ServerConfig.markdown_footer,
    max_tokens: MaxTokens = SamplingParams.max_tokens,
    tenant: Tenant = "",
    models: ModelOptions = ModelOptions(),
) -> None:
    """Serve an API and a web page over documents.

    The API is OpenAI-compatible; answers come from a document store. Listens on this machine only unless --host names
    another address, which needs --api-keys. SIGTERM and Ctrl+C end it when the running requests have finished, at the
    latest after --grace seconds.
    """
    place = documents.place
    config = replace(
        config,
        allowed_hosts=tuple(allowed_host or ()),
        cors_origins=tuple(cors_origin or ()),
        markdown_footer=markdown_footer,
    )
    _require_packages()
    from reader_rag.server.running import check_address, listen, open_service

    check_address(config, has_keys=api_keys is not None)
    keys = None if api_keys is None else _keys(api_keys)
    with contextlib.closing(listen(config)) as taken:
        open_with = partial(open_service, config=config, keys=keys, tenant=tenant)
        _serve(place, create, models, max_tokens, open_with, taken)


def _serve(
    place: Path | str,
    create: bool,
    models: ModelOptions,
    max_tokens: int,
    open_with: Callable[..., Service],
    taken: socket,
) -> None:
    """Load store and models, and serve until a signal comes.

    Args:
        place: The store's folder or URL.
        create: Whether an empty store is made if there is none.
        models: The models.
        max_tokens: Most tokens of an answer by default.
        open_with: Makes the service of its LLM, model and store.
        taken: The socket.
    """
    from reader_rag.rag.stores.location import lock_folder, open_store
    from reader_rag.server.running import run, url_of

    try:
        open_store(place).close()  # before the models, which take long to load
    except StoreNotFoundError as error:
        if not create:
            raise StoreNotFoundError(f"{error}, or begin with an empty one: add --create") from error
    models.require_datastore()
    embedding = models.load_embedding()
    with open_store(place, embed_model=embedding, must_exist=False) as store:
        llm = models.load_llm(max_tokens)
        name = models.named_model or str(llm.metadata.model_name)
        name = Path(name).resolve().name if Path(name).exists() else name
        service = open_with(llm, name, store=store, embedding=embedding, folder=lock_folder(place))
        try:
            run(service, taken, lambda: messages().print(f"serving {url_of(taken)} (API at {url_of(taken)}/v1)"))
        finally:
            if service.engine is not None:
                service.engine.close()


def _keys(path: Path) -> KeyRing:
    from reader_rag.server.keys import KeyFile, KeyRing

    return KeyRing(KeyFile(path))


def _require_packages() -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(f"serving needs {', '.join(missing)}: pip install 'reader-rag[serve]'")
