"""Makes a service, and runs it with uvicorn until a signal ends it."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.llms.llm import LLM
from sse_starlette.sse import AppStatus

from reader_rag.config import ServerConfig
from reader_rag.errors import ConfigError, ServeError
from reader_rag.rag.stores.contract import DocumentStore
from reader_rag.server.access import is_loopback
from reader_rag.server.app import create_app
from reader_rag.server.conversations.store import Conversations
from reader_rag.server.documents.jobs import Jobs
from reader_rag.server.documents.library import Library
from reader_rag.server.keys import KeyRing
from reader_rag.server.limits import slow_header_protocol
from reader_rag.server.service import Service

_JOBS_GRACE_S = 1.0  # besides what the requests have used of the grace


def open_service(
    llm: LLM,
    model: str,
    *,
    store: DocumentStore | None = None,
    embedding: BaseEmbedding | None = None,
    folder: Path | None = None,
    config: ServerConfig | None = None,
    keys: KeyRing | None = None,
    tenant: str = "",
) -> Service:
    """Make a service.

    Args:
        llm: A `ReaderLLM`, or a `ServerLLM` where another server decodes.
        model: The model's name in the API.
        store: The document store; it stays the caller's to close.
        embedding: The embedding model of the store.
        folder: Where uploads and conversations are kept; with a store it is needed.
        config: Addresses and limits; None: the defaults.
        keys: The API keys; None: every caller is let in, as `tenant`.
        tenant: The tenant of callers without a key.

    Raises:
        ConfigError: The address can be reached from other machines, and there are no keys.
        StoreError: The folder cannot be used.
    """
    config = config or ServerConfig()
    check_address(config, has_keys=keys is not None)
    if store is None or embedding is None or folder is None:
        return Service(llm, model, config, keys=keys, tenant=tenant)
    conversations = Conversations(folder, config.conversations_per_key)
    try:
        library = Library(store, embedding, folder, config)
    except BaseException:
        conversations.close()
        raise
    jobs = Jobs(library, config)
    return Service(llm, model, config, store, embedding, keys, tenant, library, jobs, conversations)


def check_address(config: ServerConfig, *, has_keys: bool) -> None:
    """Refuse an address that other machines reach, where no keys protect what is served.

    Args:
        config: The address.
        has_keys: Whether there are API keys.

    Raises:
        ConfigError: Other machines reach the address, and there are no keys.
    """
    if not has_keys and not is_loopback(config.host):
        raise ConfigError(
            f"other machines can reach {config.host}, so API keys are needed: make one with "
            "`reader-rag keys add NAME --api-keys FILE` and start with --api-keys FILE"
        )


def listen(config: ServerConfig) -> socket.socket:
    """Take the port, before anything is loaded.

    Args:
        config: Address and port.

    Returns:
        The socket, which is not yet listening.

    Raises:
        ServeError: The address or the port cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        taken = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ServeError(f"there is no address {config.host} on this machine ({error.strerror or error})") from error
    try:
        if os.name == "posix":
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        elif hasattr(socket, "SO_EXCLUSIVEADDRUSE"):  # on Windows SO_REUSEADDR would share a port that is taken
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        taken.bind(address)
    except OSError as error:
        taken.close()
        if error.errno == errno.EADDRINUSE:
            raise ServeError(
                f"port {config.port} of {config.host} is taken: end the program that has it, or choose another --port"
            ) from error
        raise ServeError(
            f"cannot listen at {config.host} port {config.port} ({error.strerror or error}); "
            "choose another --host or --port"
        ) from error
    return taken


def url_of(taken: socket.socket) -> str:
    """The address of the page.

    Args:
        taken: What `listen` returned.
    """
    host, port = taken.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """Tells when it listens.

    Args:
        config: uvicorn's settings.
        on_started: Called once when requests are taken.
    """

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()


def make_server(service: Service, on_started: Callable[[], None] = lambda: None) -> uvicorn.Server:
    """The service in uvicorn, with its limits.

    Args:
        service: The service.
        on_started: Called once when requests are taken.
    """
    config = service.config
    # Streams would else be cut off at the signal.
    AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]
    settings = uvicorn.Config(
        create_app(service),
        http=slow_header_protocol(config.header_seconds),
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,  # addresses hold what conversations are searched for
        server_header=False,
        proxy_headers=False,
        limit_concurrency=config.most_connections,
        timeout_graceful_shutdown=math.ceil(config.grace),
    )
    return _Server(settings, on_started)


def run(service: Service, taken: socket.socket, on_started: Callable[[], None] = lambda: None) -> None:
    """Serve until SIGTERM or SIGINT; then take nothing new and finish what runs, within `config.grace` seconds.

    Args:
        service: The service; it is closed at the end.
        taken: What `listen` returned; it is closed at the end.
        on_started: Called once when requests are taken.
    """
    server = make_server(service, on_started)
    try:
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again when all is done
            server.run([taken])
    finally:
        taken.close()
        service.close(_JOBS_GRACE_S)
