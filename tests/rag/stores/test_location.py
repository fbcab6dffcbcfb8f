"""Locations of stores: folders and URLs."""

from __future__ import annotations

from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath

import pytest
from llama_index.core.schema import TextNode

from reader_rag.errors import ConfigError, StoreNotFoundError
from reader_rag.rag import FaissStore, SizedEmbedding
from reader_rag.rag.stores.location import DatabaseUrl, database_url, local_folder, local_path, lock_folder, open_store


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
def test_invalid_urls_raise_with_an_example(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        DatabaseUrl.parse(text)
    assert "qdrant://" in str(raised.value)


def test_folders_are_not_urls() -> None:
    assert database_url("my/store") is None
    assert database_url(Path("qdrant://db/birds")) is None


def test_a_store_in_place_of_its_location_is_refused_in_one_line() -> None:
    with FaissStore() as store, pytest.raises(ConfigError, match="named by its folder or its URL.*not a FaissStore"):
        database_url(store)  # type: ignore[arg-type]
    assert local_folder("my/store") == lock_folder("my/store") == Path("my/store")


def test_an_embedded_database_has_a_local_folder() -> None:
    assert local_folder("qdrant:///data/db/birds") == Path("/data/db")
    assert local_folder("qdrant://db/birds") is None


def test_each_database_has_a_lock_folder_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("READER_RAG_CACHE", str(tmp_path))
    one, other = lock_folder("qdrant://db/birds"), lock_folder("qdrant://db/fish")
    assert one != other
    assert one.parent == other.parent == tmp_path / "locks"


def test_open_store_opens_the_store_of_a_folder_for_a_tenant(tmp_path: Path, embedding: SizedEmbedding) -> None:
    with open_store(tmp_path / "store", embedding, "a", must_exist=False) as store:
        store.add([TextNode(text="of a", embedding=embedding.get_text_embedding("of a"))])
    with open_store(tmp_path / "store", embedding, "a") as store:
        assert (store.tenant, [node.get_content() for node in store.get_nodes()]) == ("a", ["of a"])
    with open_store(tmp_path / "store", embedding) as store:
        assert (store.tenant, store.num_nodes) == ("", 0)


def test_open_store_raises_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        open_store(tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("start", "folders", "path"),
    [
        ("", ["", "C:", "Users", "me"], PureWindowsPath("C:/Users/me")),
        ("", ["", "data", "docs"], PureWindowsPath("/data/docs")),
        (".", ["", "data"], PureWindowsPath("data")),
        ("", ["", "C:", "data"], PurePosixPath("/C:/data")),
        ("..", ["", "data"], PurePosixPath("../data")),
    ],
)
def test_folders_of_embedded_databases_may_have_a_drive_on_windows(
    start: str, folders: list[str], path: PurePath
) -> None:
    assert local_path(start, folders, type(path)) == path
