"""Locations of stores: a folder, or the URL of a collection in a vector database. `open_store` opens either.

LlamaIndex, FAISS and databases are imported when a store is opened, so that `require_store` can tell at once that there
is none.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from reader_rag.errors import ConfigError, StoreNotFoundError
from reader_rag.model.weights_cache import cache_folder
from reader_rag.rag.stores.sqlite_file import FILE_NAME

if TYPE_CHECKING:
    from llama_index.core.base.embeddings.base import BaseEmbedding

    from reader_rag.rag.stores.contract import DocumentStore

# Module and class of each connector, by URL scheme; a connector is imported when a URL of its scheme is opened.
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
        scheme: The database: "qdrant" or "milvus".
        collection: Name of the collection.
        host: Host name of the server; None where the database runs in this process.
        port: Port of the server; None: the database's default.
        tls: Whether the connection is encrypted.
        path: Absolute path of an embedded database's files; None on a server.
    """

    scheme: str
    collection: str
    host: str | None = None
    port: int | None = None
    tls: bool = False
    path: Path | None = None

    @classmethod
    def parse(cls, text: str) -> DatabaseUrl:
        """Parse `SCHEME://HOST:PORT/COLLECTION`, `SCHEME+tls://...` or `SCHEME:///PATH/COLLECTION`.

        Args:
            text: The URL.

        Raises:
            ConfigError: The URL has another form, or its scheme is unknown.
        """
        kind, separator, _ = text.partition("://")
        scheme = kind.removesuffix(_TLS)
        if not separator or scheme not in _CONNECTORS:
            known = ", ".join(f"{name}://" for name in sorted(_CONNECTORS))
            raise ConfigError(f"{text!r} is not the URL of a vector store: those begin with one of {known}")
        shape = (
            f"{scheme}://HOST:PORT/COLLECTION for a server, {scheme}:///PATH/COLLECTION for a folder on this machine"
        )
        parts = urlsplit(text)
        if parts.query or parts.fragment or "@" in parts.netloc:
            raise ConfigError(f"the URL of a vector store has no user, key, ? or #: write {shape}")
        *folders, collection = [unquote(part) for part in parts.path.split("/")]
        if not collection:
            raise ConfigError(f"{text!r} names no collection: write {shape}")
        if parts.netloc in _LOCAL_HOSTS:
            path = Path(local_path(parts.netloc, folders)).expanduser()
            if path == Path("/") or kind != scheme:
                raise ConfigError(f"{text!r} names no folder for the collection: write {shape}")
            return cls(scheme, collection, path=path.resolve())
        if any(folders):
            raise ConfigError(f"{text!r} has more than a collection after the server: write {shape}")
        try:
            return cls(scheme, collection, parts.hostname, parts.port, kind != scheme)
        except ValueError as error:
            raise ConfigError(f"{text!r} has an invalid port ({error}): write {shape}") from error

    def __str__(self) -> str:
        if self.path is not None:
            path = self.path.as_posix()
            return f"{self.scheme}://{'' if path.startswith('/') else '/'}{path}/{self.collection}"
        host = f"[{self.host}]" if self.host is not None and ":" in self.host else self.host
        port = "" if self.port is None else f":{self.port}"
        return f"{self.scheme}{_TLS if self.tls else ''}://{host}{port}/{self.collection}"


def local_path(start: str, folders: list[str], kind: type[PurePath] = Path) -> PurePath:
    """The path of an embedded database.

    Args:
        start: "", ".", ".." or "~".
        folders: The parts of the URL's path, of which the first is empty.
        kind: The class of the path.
    """
    if kind("C:/").drive and folders[1:] and kind(folders[1]).drive:  # qdrant:///C:/FOLDER/COLLECTION on Windows
        return kind(f"{folders[1]}/", *folders[2:])
    return kind(start or "/", *folders)


def database_url(location: str | Path) -> DatabaseUrl | None:
    """Parse a location.

    Args:
        location: A folder, or the URL of a collection.

    Returns:
        The URL; None for a folder.

    Raises:
        ConfigError: The URL is invalid, or the location is neither text nor a path.
    """
    if not isinstance(location, (str, os.PathLike)):
        raise ConfigError(f"a store is named by its folder or its URL: pass that, not a {type(location).__name__}")
    return DatabaseUrl.parse(location) if isinstance(location, str) and "://" in location else None


def open_store(
    store: str | Path, embed_model: BaseEmbedding | None = None, tenant: str = "", *, must_exist: bool = True
) -> DocumentStore:
    """Open a store that `ingest` made.

    Args:
        store: Its folder, or the URL of its collection in a vector database (`qdrant://...`, `milvus://...`).
        embed_model: The embedding model of its vectors; it is compared with the one that made the store.
        tenant: The tenant whose documents the store reads and changes.
        must_exist: Raise if there is no store instead of making one.

    Raises:
        ConfigError: The URL or the tenant's name is invalid.
        MissingDependencyError: The package of that database is not installed; the message names the command.
        StoreNotFoundError: There is no store.
        StoreConnectionError: The database does not answer, or refuses the connection.
        StoreMismatchError: The store was made with another embedding model or by another version.
        StoreCorruptError: Its file is damaged or not a store.
    """
    url = database_url(store)
    if must_exist:
        _require_local_files(store)
    if url is None:
        from reader_rag.rag.stores.faiss_store import FaissStore

        return FaissStore(store, embed_model=embed_model, must_exist=must_exist, tenant=tenant)
    module, name = _CONNECTORS[url.scheme]
    connector: Any = getattr(import_module(module), name)
    opened: DocumentStore = connector(url, embed_model=embed_model, must_exist=must_exist, tenant=tenant)
    return opened


def require_store(store: str | Path) -> None:
    """Check that there is a store, before models are loaded for it.

    Args:
        store: Its folder, or the URL of its collection in a vector database, which is asked.

    Raises:
        ConfigError: The URL is invalid.
        MissingDependencyError: The package of that database is not installed.
        StoreNotFoundError: There is no store.
        StoreConnectionError: The database does not answer, or refuses the connection.
    """
    _require_local_files(store)
    if database_url(store) is not None:
        open_store(store).close()


def _require_local_files(store: str | Path) -> None:
    url = database_url(store)
    if url is None and not (Path(store) / FILE_NAME).exists():
        raise StoreNotFoundError.at(store)
    if url is not None and url.path is not None and not url.path.exists():
        raise StoreNotFoundError.at(url)


def local_folder(location: str | Path) -> Path | None:
    """The folder on this machine that holds a store.

    Args:
        location: A folder, or the URL of a collection.

    Returns:
        The folder; None for a store on a server.
    """
    url = database_url(location)
    return Path(location) if url is None else url.path


def lock_folder(location: str | Path) -> Path:
    """The folder for the lock files of a store.

    Args:
        location: A folder, or the URL of a collection.

    Returns:
        The store's folder; for a database a folder in the cache, named by the hash of the URL.
    """
    url = database_url(location)
    if url is None:
        return Path(location)
    return cache_folder() / "locks" / hashlib.sha256(str(url).encode()).hexdigest()[:32]
