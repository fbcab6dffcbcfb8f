"""API keys: a file of hashed keys, each bound to a tenant."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from reader_rag.config import checked_tenant
from reader_rag.errors import ConfigError, ReaderError, ServeError
from reader_rag.util.files import atomic_path, read_regular

_log = logging.getLogger("reader_rag.server")

PREFIX = "rr-"
"""Prefix of every key, by which scanners recognise a leaked one, in a repository for example."""

_FORMAT = 1
_HASH = re.compile("[0-9a-f]{64}")
_KEY_BYTES = 32
_LOCK_S = 10.0
_CHECK_S = 1.0  # least seconds between two looks at the file


@dataclass(frozen=True)
class ApiKey:
    """A key as the file has it.

    Attributes:
        name: Name of the key, unique in the file.
        tenant: The tenant whose documents, conversations and drafts its holder uses.
        hash: SHA-256 of the key in hexadecimal. Keys are 256 random bits: a slow hash would protect them no better.
        operator: Whether its holder may read `/metrics`, which count the requests of all tenants.
    """

    name: str
    tenant: str
    hash: str
    operator: bool = False


def hash_of(key: str) -> str:
    """The hash by which a key is stored.

    Args:
        key: The key.
    """
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


class KeyFile:
    """A file of keys, changed by `reader-rag keys`.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[ApiKey]:
        """The keys, by name.

        Raises:
            ServeError: The file cannot be read, or is not one of keys.
        """
        try:
            content = json.loads(read_regular(self.path))
            if content["format"] != _FORMAT:
                raise ValueError(f"format {content['format']}")
            keys = [_checked(ApiKey(**entry)) for entry in content["keys"]]
        except OSError as error:
            raise ServeError(
                f"the file of API keys {self.path} cannot be read ({error.strerror or error}); "
                f"make one with `reader-rag keys add NAME --api-keys {self.path}`"
            ) from error
        except (ValueError, TypeError, KeyError, ReaderError, RecursionError) as error:
            raise ServeError(
                f"{self.path} is not a file of API keys; make a new one with `reader-rag keys add`"
            ) from error
        return sorted(keys, key=lambda key: key.name)

    def add(self, name: str, tenant: str | None = None, *, operator: bool = False) -> str:
        """Make a key.

        Args:
            name: Name of the key, which the file does not have yet.
            tenant: Its tenant; None: a tenant of the same name.
            operator: Whether its holder may read `/metrics`.

        Returns:
            The key. It is nowhere else: the file has its hash.

        Raises:
            ConfigError: The name is empty, too long or taken.
            ServeError: The file cannot be written, or is not one of keys.
        """
        key = PREFIX + secrets.token_urlsafe(_KEY_BYTES)
        entry = _checked(ApiKey(name, name if tenant is None else tenant, hash_of(key), operator))
        with self._changing() as keys:
            if name in keys:
                raise ConfigError(f"there is a key named {name!r}: choose another name, or remove that one first")
            keys[name] = entry
        return key

    def remove(self, name: str) -> None:
        """Remove a key; a running service refuses it within a second.

        Args:
            name: Name of the key.

        Raises:
            ConfigError: There is no such key.
            ServeError: The file cannot be read or written.
        """
        with self._changing() as keys:
            if name not in keys:
                raise ConfigError(f"there is no key named {name!r}; known: {', '.join(sorted(keys)) or 'none'}")
            del keys[name]

    @contextmanager
    def _changing(self) -> Iterator[dict[str, ApiKey]]:
        """Yield the keys by name; what they are when the block ends is written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=_LOCK_S):
                keys = {key.name: key for key in self.read()} if self.path.exists() else {}
                yield keys
                content = {"format": _FORMAT, "keys": [asdict(key) for key in keys.values()]}
                with atomic_path(self.path) as partial:
                    partial.touch(mode=stat.S_IRUSR | stat.S_IWUSR)
                    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        except Timeout as error:
            raise ServeError(f"another program is changing {self.path}; try again") from error
        except OSError as error:
            raise ServeError(
                f"the file of API keys {self.path} cannot be written ({error.strerror or error})"
            ) from error


class KeyRing:
    """The keys of a running service: those of a file, read again when it changes.

    Args:
        file: The file.

    Raises:
        ServeError: The file cannot be read, is not one of keys, or has none.
    """

    def __init__(self, file: KeyFile) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._checked_at = time.monotonic()
        self._stamp = _file_stamp(file.path)
        self._keys = file.read()
        if not self._keys:
            raise ServeError(f"{file.path} has no key; make one with `reader-rag keys add NAME --api-keys {file.path}`")

    def find(self, key: str) -> ApiKey | None:
        """The entry of a key; None if there is none. Every entry is compared, each in constant time.

        Args:
            key: The key as a client sent it.
        """
        hashed, found = hash_of(key), None
        for entry in self._current():
            if hmac.compare_digest(entry.hash, hashed):
                found = entry
        return found

    def _current(self) -> list[ApiKey]:
        with self._lock:
            now = time.monotonic()
            if now - self._checked_at >= _CHECK_S:
                self._checked_at = now
                stamp = _file_stamp(self._file.path)
                if stamp != self._stamp:
                    self._stamp = stamp
                    try:
                        self._keys = self._file.read()
                    except ServeError as error:
                        self._keys = []
                        _log.error("nobody is let in any more: %s", error)
            return self._keys


def _file_stamp(path: Path) -> tuple[int, int, int] | None:
    """A value that changes when the file is replaced or written; None: it cannot be read."""
    try:
        status = os.stat(path)  # noqa: PTH116 - one call for all of it
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _checked(entry: ApiKey) -> ApiKey:
    values: tuple[Any, ...] = (entry.name, entry.tenant, entry.hash)
    if not all(isinstance(value, str) for value in values) or not isinstance(entry.operator, bool):
        raise ConfigError("an entry has a value of another type")
    if not entry.name or not _HASH.fullmatch(entry.hash):
        raise ConfigError("a key needs a name that is not empty, and a hash of 64 hexadecimal digits")
    return replace(entry, name=checked_tenant(entry.name), tenant=checked_tenant(entry.tenant))
