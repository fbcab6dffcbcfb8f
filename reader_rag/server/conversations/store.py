"""`Conversations`: kept in one SQLite file, each for one key of one tenant."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from reader_rag.errors import StoreCorruptError, StoreWriteError
from reader_rag.rag.stores.sqlite_file import check_side_files, store_error
from reader_rag.rag.stores.sqlite_schema import schema_entries

FILE_NAME = "conversations.sqlite"

_APPLICATION_ID = 0x52526163
_VERSION = 1
_SCHEMA = f"""
CREATE TABLE conversations (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    key TEXT NOT NULL,
    title TEXT NOT NULL,
    updated REAL NOT NULL,
    messages TEXT NOT NULL,  -- JSON
    words TEXT NOT NULL      -- title and messages in lower case, for the search
) WITHOUT ROWID;
CREATE INDEX conversations_by_owner ON conversations (tenant, key, updated);
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_VERSION};
"""


@dataclass(frozen=True)
class Owner:
    """Whose conversations they are.

    Attributes:
        tenant: The tenant.
        key: Name of the key; "" where no keys are asked for.
    """

    tenant: str
    key: str


@dataclass(frozen=True)
class Conversation:
    """A conversation.

    Attributes:
        id: Its id.
        title: Its title.
        updated: Unix time of the last change.
        messages: What was said, as the API has it; empty in lists.
    """

    id: str
    title: str
    updated: float
    messages: tuple[dict[str, Any], ...] = ()


class Conversations:
    """The conversations of all keys.

    Args:
        folder: The folder of the file, which is made if there is none.
        most: Most conversations of a key; the oldest go first.

    Raises:
        StoreCorruptError: The file is damaged, or of another program.
        StoreWriteError: The file cannot be written.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self._path = folder / FILE_NAME
        self._most = most
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreWriteError(f"the folder {folder} cannot be made ({error.strerror or error})") from error
        with self._errors():
            if self._path.exists() and not self._path.is_file():
                raise StoreCorruptError(f"{self._path} is no file; move it away")
            check_side_files(self._path)
            self._database = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
            try:
                self._open()
            except BaseException:
                self._database.close()
                raise

    def _open(self) -> None:
        """Check the file, or make its table. As of a document store, its schema is compared before it is trusted."""
        self._database.execute("PRAGMA trusted_schema = OFF")
        self._database.execute("PRAGMA cell_size_check = ON")
        identity = self._pragma("application_id"), self._pragma("user_version")
        if identity == (0, 0) and not self._pragma("schema_version"):
            self._database.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}COMMIT;")
        elif identity != (_APPLICATION_ID, _VERSION):
            raise StoreCorruptError(f"{self._path} is no file of conversations, or of another version; move it away")
        elif schema_entries(self._database) != _expected_entries():
            raise StoreCorruptError(f"{self._path} has other tables than a file of conversations; move it away")
        elif (found := self._database.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
            raise StoreCorruptError(f"{self._path} is damaged ({str(found).splitlines()[-1]}); move it away")

    def close(self) -> None:
        """Release the file."""
        with self._lock:
            self._database.close()

    def list(self, owner: Owner, search: str, limit: int, offset: int) -> list[Conversation]:
        """Conversations without their messages, the last changed first.

        Args:
            owner: Whose.
            search: Only those that have all of these words in title or messages; "": all.
            limit: Most of the answer.
            offset: How many to leave out before.
        """
        conditions, values = "tenant = ? AND key = ?", [owner.tenant, owner.key]
        for word in search.casefold().split():
            conditions += " AND instr(words, ?) > 0"
            values.append(word)
        with self._locked() as database:
            rows = database.execute(
                f"SELECT id, title, updated FROM conversations WHERE {conditions}"
                " ORDER BY updated DESC, id LIMIT ? OFFSET ?",
                (*values, limit, offset),
            ).fetchall()
        return [Conversation(*row) for row in rows]

    def get(self, owner: Owner, id_: str) -> Conversation | None:
        """A conversation; None if the owner has none of that id.

        Args:
            owner: Whose.
            id_: Its id.
        """
        with self._locked() as database:
            row = database.execute(
                "SELECT id, title, updated, messages FROM conversations WHERE id = ? AND tenant = ? AND key = ?",
                (id_, owner.tenant, owner.key),
            ).fetchone()
        if row is None:
            return None
        found, title, updated, messages = row
        try:
            return Conversation(found, title, updated, tuple(json.loads(messages)))
        except (ValueError, TypeError, RecursionError) as error:
            raise self.damaged() from error

    def add(self, owner: Owner, title: str, messages: tuple[dict[str, Any], ...]) -> Conversation:
        """Keep a new conversation.

        Args:
            owner: Whose.
            title: Its title.
            messages: What was said.
        """
        made = Conversation(uuid.uuid4().hex, title, time.time(), messages)
        with self._locked() as database:
            database.execute(
                "INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?, ?)",
                (made.id, owner.tenant, owner.key, title, made.updated, json.dumps(messages), _words(title, messages)),
            )
            database.execute(
                "DELETE FROM conversations WHERE id IN (SELECT id FROM conversations WHERE tenant = ? AND key = ?"
                " ORDER BY updated DESC, id LIMIT -1 OFFSET ?)",
                (owner.tenant, owner.key, self._most),
            )
        return made

    def change(self, owner: Owner, id_: str, title: str, messages: tuple[dict[str, Any], ...]) -> Conversation | None:
        """Replace a conversation; None if the owner has none of that id.

        Args:
            owner: Whose.
            id_: Its id.
            title: Its new title.
            messages: What was said.
        """
        changed = Conversation(id_, title, time.time(), messages)
        with self._locked() as database:
            cursor = database.execute(
                "UPDATE conversations SET title = ?, updated = ?, messages = ?, words = ?"
                " WHERE id = ? AND tenant = ? AND key = ?",
                (title, changed.updated, json.dumps(messages), _words(title, messages), id_, owner.tenant, owner.key),
            )
        return changed if cursor.rowcount else None

    def delete(self, owner: Owner, id_: str) -> bool:
        """Remove a conversation.

        Args:
            owner: Whose.
            id_: Its id.

        Returns:
            Whether there was one.
        """
        with self._locked() as database:
            cursor = database.execute(
                "DELETE FROM conversations WHERE id = ? AND tenant = ? AND key = ?", (id_, owner.tenant, owner.key)
            )
        return cursor.rowcount > 0

    def damaged(self) -> StoreCorruptError:
        """The error of a conversation whose row no service has written."""
        return StoreCorruptError(f"a conversation in {self._path} is damaged; delete it, or move the file away")

    def _pragma(self, name: str) -> int:
        return int(self._database.execute(f"PRAGMA {name}").fetchone()[0])

    @contextlib.contextmanager
    def _locked(self) -> Iterator[sqlite3.Connection]:
        """Yield the database; what the block does is one transaction."""
        with self._lock, self._errors():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except UnicodeDecodeError as error:
            raise self.damaged() from error
        except sqlite3.Error as error:
            if "Could not decode" in str(error):
                raise self.damaged() from error
            raise store_error(error, str(self._path), "move it away", writing=True) from error


@cache
def _expected_entries() -> frozenset[tuple[Any, Any]]:
    """What the file's schema has."""
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.executescript(_SCHEMA)
        return frozenset(schema_entries(database))


def _words(title: str, messages: tuple[dict[str, Any], ...]) -> str:
    return "\n".join([title, *(str(message.get("content") or "") for message in messages)]).casefold()


def as_markdown(conversation: Conversation) -> str:
    """A conversation as Markdown, with its sources under each answer.

    Args:
        conversation: The conversation.
    """
    parts = [f"# {_one_line(conversation.title) or 'Conversation'}"]
    names = {"user": "Question", "assistant": "Answer", "system": "System", "tool": "Tool"}
    for message in conversation.messages:
        parts.append(f"## {names.get(message['role'], message['role'])}")
        parts.append(str(message.get("content") or ""))
        sources: dict[str, str] = {}
        for annotation in message.get("annotations") or ():
            cited = annotation["url_citation"]
            sources.setdefault(cited["url"], _one_line(cited["title"]))
        if sources:
            parts.append("\n".join(f"- [{_escaped(title)}](<{_address(url)}>)" for url, title in sources.items()))
    return "\n\n".join(parts) + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]").replace("<", "\\<")


def _address(url: str) -> str:
    return "".join(url.split()).replace("<", "%3C").replace(">", "%3E")
