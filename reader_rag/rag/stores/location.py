"""Where a store is: a folder, or the URL of a collection in a vector database."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from llama_index.core.base.embeddings.base import BaseEmbedding

from reader_rag.errors import ConfigError, StoreNotFoundError
from reader_rag.model.weights_cache import cache_folder
from reader_rag.rag.stores.contract import DocumentStore
from reader_rag.rag.stores.faiss_store import FaissStore

# The connectors stand beside this package: their names are known here, and one is loaded when its URL is named.
_CONNECTORS = {
    "milvus": ("reader_rag.connectors.milvus", "MilvusStore"),
    "qdrant": ("reader_rag.connectors.qdrant", "QdrantStore"),
}
_TLS = "+tls"
_LOCAL_HOSTS = {"", ".", "..", "~"}


@dataclass(frozen=True)
class DatabaseUrl:
    """The URL of a collection.

    Attributes:
        scheme: Which database: "qdrant" or "milvus".
        collection: Name of the collection.
        host: The server; None where the database runs in this process.
        port: Its port, if it is named.
        tls: The connection is encrypted.
        path: Where the database is on this machine; None on a server.
    """

    scheme: str
    collection: str
    host: str | None = None
    port: int | None = None
    tls: bool = False
    path: Path | None = None

    @classmethod
    def parse(cls, text: str) -> DatabaseUrl:
        """Read `SCHEME://HOST:PORT/COLLECTION`, `SCHEME+tls://...` or `SCHEME:///PATH/COLLECTION`.

        Raises:
            ConfigError: It is none of these, or its scheme is unknown.
        """
        kind, separator, _ = text.partition("://")
        scheme = kind.removesuffix(_TLS)
        if not separator or scheme not in _CONNECTORS:
            known = ", ".join(f"{name}://" for name in sorted(_CONNECTORS))
            raise ConfigError(f"{text!r} is no URL of a vector store: they begin with one of {known}")
        shape = (
            f"{scheme}://HOST:PORT/COLLECTION for a server, {scheme}:///PATH/COLLECTION for a folder of this machine"
        )
        parts = urlsplit(text)
        if parts.query or parts.fragment or "@" in parts.netloc:
            raise ConfigError(f"the URL of a vector store has no user, key, ? or #: write {shape}")
        *folders, collection = [unquote(part) for part in parts.path.split("/")]
        if not collection:
            raise ConfigError(f"{text!r} names no collection: write {shape}")
        if parts.netloc in _LOCAL_HOSTS:
            path = Path(parts.netloc or "/", *folders).expanduser()
            if path == Path("/") or kind != scheme:
                raise ConfigError(f"{text!r} names no folder to keep the collection in: write {shape}")
            return cls(scheme, collection, path=path.resolve())
        if any(folders):
            raise ConfigError(f"{text!r} names more than a collection behind the server: write {shape}")
        try:
            return cls(scheme, collection, parts.hostname, parts.port, kind != scheme)
        except ValueError as error:
            raise ConfigError(f"{text!r} has no usable port ({error}): write {shape}") from error

    def __str__(self) -> str:
        if self.path is not None:
            return f"{self.scheme}://{self.path}/{self.collection}"
        host = f"[{self.host}]" if self.host is not None and ":" in self.host else self.host
        port = "" if self.port is None else f":{self.port}"
        return f"{self.scheme}{_TLS if self.tls else ''}://{host}{port}/{self.collection}"


def database_url(place: str | Path) -> DatabaseUrl | None:
    """The URL that a place is; None for a folder.

    Raises:
        ConfigError: A URL that cannot be one of a store.
    """
    return DatabaseUrl.parse(place) if isinstance(place, str) and "://" in place else None


def open_place(
    place: str | Path, *, embed_model: BaseEmbedding | None = None, tenant: str = "", must_exist: bool = True
) -> DocumentStore:
    """Open the store at a place.

    Args:
        place: A folder, or the URL of a collection.
        embed_model: The model whose vectors it holds.
        tenant: Whose documents are to be seen.
        must_exist: Refuse a place where there is none; else one is made there.

    Raises:
        ConfigError: A URL that cannot be one of a store, or a name that no tenant can have.
        MissingDependencyError: The package of that database is not installed; the message names the command.
        StoreError: There is no store, it cannot be used, or it is for another embedding model.
    """
    url = database_url(place)
    if url is None:
        return FaissStore(place, embed_model=embed_model, must_exist=must_exist, tenant=tenant)
    if must_exist and url.path is not None and not url.path.exists():
        raise StoreNotFoundError(
            f"there is no store at {url}; make one with `reader-rag ingest PATH --vector-store {url}`"
        )
    module, name = _CONNECTORS[url.scheme]
    store: Any = getattr(import_module(module), name)
    opened: DocumentStore = store(url, embed_model=embed_model, must_exist=must_exist, tenant=tenant)
    return opened


def local_folder(place: str | Path) -> Path | None:
    """The folder of this machine that holds a store; None on a server."""
    url = database_url(place)
    return Path(place) if url is None else url.path


def lock_folder(place: str | Path) -> Path:
    """A folder for the locks of a store: its own, or for a database one in the cache, by its URL."""
    url = database_url(place)
    if url is None:
        return Path(place)
    return cache_folder() / "locks" / hashlib.sha256(str(url).encode()).hexdigest()[:32]
