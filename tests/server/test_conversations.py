"""Conversations and embeddings."""

from __future__ import annotations

import base64
import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from reader_rag.errors import StoreCorruptError
from reader_rag.server.conversations.store import FILE_NAME, Conversations, Owner

CITED = {
    "role": "assistant",
    "content": "The heron waits.",
    "annotations": [
        {
            "type": "url_citation",
            "url_citation": {"start_index": 0, "end_index": 9, "title": "a [b]\n.txt", "url": "http://x/#/documents/1"},
        }
    ],
    "reader": {"tokens_per_step": 2.5},
}
ASKED = {"role": "user", "content": "What does the Heron do?"}


def _made(client: TestClient, title: str, *messages: dict[str, Any]) -> str:
    answer = client.post("/api/conversations", json={"title": title, "messages": list(messages)})
    assert answer.status_code == 201
    return str(answer.json()["id"])


def test_a_conversation_is_kept_changed_and_removed(client: TestClient) -> None:
    id_ = _made(client, "Birds", ASKED)
    body = {"title": "Herons", "messages": [ASKED, CITED]}
    assert client.put(f"/api/conversations/{id_}", json=body).json()["title"] == "Herons"
    kept = client.get(f"/api/conversations/{id_}").json()
    assert kept["messages"][1]["annotations"] == CITED["annotations"]
    assert kept["messages"][1]["reader"] == CITED["reader"]
    assert client.delete(f"/api/conversations/{id_}").json() == {"id": id_}
    for answer in (client.get(f"/api/conversations/{id_}"), client.put(f"/api/conversations/{id_}", json=body)):
        assert answer.json()["error"]["code"] == "conversation_not_found"


def test_the_list_has_the_last_changed_first_and_is_searched_by_words(client: TestClient) -> None:
    birds, cats = _made(client, "Birds", ASKED), _made(client, "Cats", {"role": "user", "content": "Ärger 100%"})
    client.put(f"/api/conversations/{birds}", json={"title": "Birds", "messages": [ASKED]})

    def found(q: str) -> list[str]:
        return [each["id"] for each in client.get("/api/conversations", params={"q": q}).json()["conversations"]]

    assert found("") == [birds, cats]
    assert found("HERON birds") == [birds]
    assert found("ärger") == [cats]
    assert found("100%") == [cats]
    assert found("_") == []


def test_the_export_names_the_sources(client: TestClient) -> None:
    id_ = _made(client, "About\n# herons", ASKED, CITED)
    answer = client.get(f"/api/conversations/{id_}/export")
    assert answer.headers["content-type"].startswith("text/markdown")
    assert answer.text == (
        "# About # herons\n\n## Question\n\nWhat does the Heron do?\n\n## Answer\n\nThe heron waits.\n\n"
        "- [a \\[b\\] .txt](<http://x/#/documents/1>)\n"
    )


def test_the_oldest_go_when_a_key_has_too_many(tmp_path: Path) -> None:
    conversations = Conversations(tmp_path, most=2)
    one, other = Owner("t", "k"), Owner("t", "other key")
    kept = conversations.add(other, "theirs", ())
    for title in ("first", "second", "third"):
        conversations.add(one, title, ())
    assert [each.title for each in conversations.list(one, "", 10, 0)] == ["third", "second"]
    assert [each.id for each in conversations.list(other, "", 10, 0)] == [kept.id]
    conversations.close()


def test_conversations_are_there_after_a_restart(tmp_path: Path) -> None:
    first = Conversations(tmp_path, most=9)
    id_ = first.add(Owner("", ""), "Birds", (ASKED,)).id
    first.close()
    second = Conversations(tmp_path, most=9)
    found = second.get(Owner("", ""), id_)
    assert found is not None
    assert found.messages == (ASKED,)
    second.close()


def test_a_file_of_another_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreCorruptError, match="conversations"):
        Conversations(tmp_path, most=9)


@pytest.mark.parametrize(
    "change",
    [
        "CREATE TRIGGER t AFTER INSERT ON conversations BEGIN UPDATE conversations SET tenant = 'other'; END",
        "ALTER TABLE conversations RENAME TO kept; CREATE VIEW conversations AS SELECT * FROM kept",
        "CREATE TABLE other (a)",
        "ALTER TABLE conversations ADD COLUMN a",
        "DROP TABLE conversations",
        "PRAGMA user_version = 9",
    ],
)
def test_a_file_with_another_schema_is_refused(tmp_path: Path, change: str) -> None:
    Conversations(tmp_path, most=9).close()
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
        database.executescript(change)
    with pytest.raises(StoreCorruptError, match="conversations.sqlite"):
        Conversations(tmp_path, most=9)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE_NAME)
    with pytest.raises(StoreCorruptError, match="is no file"):
        Conversations(tmp_path, most=9)


@pytest.mark.parametrize(
    "change",
    [
        "messages = '{'",
        "messages = '[1, null]'",
        "messages = 5",
        "messages = x'ff'",
        "messages = printf('%.*c', 100000, '[')",
        """messages = '[{"role": "root", "content": "x"}]'""",
        """messages = '[{"role": "assistant", "annotations": [{"url": 1}]}]'""",
        "title = x'ff'",
        "title = CAST(x'ff' AS TEXT)",
        "updated = 'x'",
    ],
)
def test_a_damaged_conversation_is_one_clear_error(client: TestClient, change: str) -> None:
    id_ = _made(client, "Birds", ASKED)
    client.app.state.service.conversations._database.execute(f"UPDATE conversations SET {change}")  # type: ignore[attr-defined]
    for path in ("", "/export"):
        answer = client.get(f"/api/conversations/{id_}{path}")
        assert answer.status_code == 500
        assert "conversations.sqlite is damaged" in answer.json()["error"]["message"]
    assert client.get("/api/conversations").status_code in (200, 500)
    assert client.delete(f"/api/conversations/{id_}").status_code == 200
    assert _made(client, "Owls", ASKED)


@pytest.mark.parametrize("field", ["title", "content", "url"])
def test_texts_with_lone_surrogates_are_refused(client: TestClient, field: str) -> None:
    texts = {"title": "x", "content": "x", "url": "x"} | {field: "\\ud800"}
    cited = f'{{"url_citation": {{"start_index": 0, "end_index": 1, "title": "t", "url": "{texts["url"]}"}}}}'
    message = f'{{"role": "user", "content": "{texts["content"]}", "annotations": [{cited}]}}'
    body = f'{{"title": "{texts["title"]}", "messages": [{message}]}}'
    answer = client.post("/api/conversations", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400


@pytest.mark.parametrize("reader", ['{"a": NaN}', '{"a": "\\ud800"}'])
def test_figures_that_are_no_json_are_refused(client: TestClient, reader: str) -> None:
    body = f'{{"title": "x", "messages": [{{"role": "user", "content": "", "reader": {reader}}}]}}'
    answer = client.post("/api/conversations", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400


def test_embeddings_as_numbers_and_as_base64(client: TestClient) -> None:
    def ask(**fields: Any) -> Any:
        return client.post("/v1/embeddings", json={"model": "words", **fields}).json()

    numbers = ask(input=["the heron", "an owl"])
    assert [each["index"] for each in numbers["data"]] == [0, 1]
    assert numbers["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    packed = ask(input="the heron", encoding_format="base64")
    decoded = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), dtype="<f4")
    assert decoded.tolist() == numbers["data"][0]["embedding"]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"model": "other", "input": "x"}, 404),
        ({"input": ""}, 400),
        ({"input": []}, 400),
        ({"input": [1, 2]}, 400),
        ({"input": "x", "dimensions": 3}, 400),
        ({"input": "word " * 60}, 400),
        ({"input": ["x"] * 513}, 400),
    ],
)
def test_embeddings_that_cannot_be_made_are_refused(client: TestClient, fields: dict[str, Any], status: int) -> None:
    answer = client.post("/v1/embeddings", json={"model": "words"} | fields)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
