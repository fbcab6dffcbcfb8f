"""URLs of stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from reader_rag.errors import ConfigError
from reader_rag.rag.stores.location import DatabaseUrl, database_url, local_folder, lock_folder


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("qdrant://db:6333/birds", DatabaseUrl("qdrant", "birds", "db", 6333)),
        ("milvus://db/birds", DatabaseUrl("milvus", "birds", "db")),
        ("qdrant+tls://db.example.org/birds", DatabaseUrl("qdrant", "birds", "db.example.org", tls=True)),
        ("qdrant://[::1]:6333/birds", DatabaseUrl("qdrant", "birds", "::1", 6333)),
        ("qdrant:///data/db/birds", DatabaseUrl("qdrant", "birds", path=Path("/data/db"))),
        ("qdrant:///data/my%20db/birds", DatabaseUrl("qdrant", "birds", path=Path("/data/my db"))),
        ("milvus://./lite.db/birds", DatabaseUrl("milvus", "birds", path=Path.cwd() / "lite.db")),
        ("qdrant://~/db/birds", DatabaseUrl("qdrant", "birds", path=Path.home() / "db")),
    ],
)
def test_a_url_names_a_server_or_a_folder_and_a_collection(text: str, url: DatabaseUrl) -> None:
    assert DatabaseUrl.parse(text) == url
    assert DatabaseUrl.parse(str(url).replace(" ", "%20")) == url


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chroma://db/birds", "begin with one of milvus://, qdrant://"),
        ("qdrant://db:6333", "names no collection"),
        ("qdrant://db:6333/", "names no collection"),
        ("qdrant://db/a/b", "more than a collection after the server"),
        ("qdrant://db:many/birds", "an invalid port"),
        ("qdrant://db:99999/birds", "an invalid port"),
        ("qdrant://key@db/birds", "no user, key"),
        ("qdrant://db/birds?key=1", "no user, key"),
        ("qdrant:///birds", "names no folder"),
        ("qdrant+tls:///data/birds", "names no folder"),
    ],
)
def test_a_url_that_names_no_store_says_how_to_write_one(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        DatabaseUrl.parse(text)
    assert "qdrant://" in str(raised.value)


def test_folders_are_no_urls() -> None:
    assert database_url("my/store") is None
    assert database_url(Path("qdrant://db/birds")) is None
    assert local_folder("my/store") == lock_folder("my/store") == Path("my/store")


def test_a_database_on_this_machine_has_a_folder_that_no_ingestion_reads() -> None:
    assert local_folder("qdrant:///data/db/birds") == Path("/data/db")
    assert local_folder("qdrant://db/birds") is None


def test_locks_of_a_database_lie_in_the_cache_one_folder_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("READER_RAG_CACHE", str(tmp_path))
    one, other = lock_folder("qdrant://db/birds"), lock_folder("qdrant://db/fish")
    assert one != other
    assert one.parent == other.parent == tmp_path / "locks"
