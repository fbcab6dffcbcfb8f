"""Documents over HTTP."""

from __future__ import annotations

import errno
import io
import itertools
import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from llama_index.core.schema import TextNode
from made_files import pdf
from waiting import wait_until
from waiting_jobs import upload, upload_files, wait_for
from word_embedding import WordEmbedding

from reader_rag.rag.stores.sqlite_file import StoreFile
from reader_rag.server.documents.library import safe_name
from reader_rag.server.documents.text import citation_url, document_text
from reader_rag.server.service import Service

MakeClient = Any

HERON = "The heron stands in the shallow water and waits for fish. " * 12
OWL = "Größe 🦉 é: the owl hunts at night.\n\nIts ears are uneven.\n" * 8


def _documents(client: TestClient) -> list[dict[str, Any]]:
    return client.get("/api/documents").json()["documents"]  # type: ignore[no-any-return]


def test_an_upload_is_ingested_listed_and_shown(client: TestClient) -> None:
    job = upload(client, heron=HERON, owl=OWL)
    assert (job["state"], job["skipped"], job["error"]) == ("done", [], None)
    assert sorted(each["name"] for each in job["added"]) == ["heron.txt", "owl.txt"]
    heron, owl = _documents(client)
    assert (heron["name"], heron["type"], heron["size"], heron["original"]) == ("heron.txt", "txt", len(HERON), True)
    content = client.get(f"/api/documents/{owl['id']}").json()
    assert content["text"].split() == OWL.split()
    assert len(content["text"]) == len(OWL.strip())
    assert content["version"] == owl["version"]
    assert content["pages"] == [{"number": 1, "label": "", "start": 0, "end": len(OWL.strip())}]


def test_the_list_comes_in_parts(client: TestClient) -> None:
    upload(client, a="one", b="two", c="three")
    first = client.get("/api/documents?limit=2").json()
    second = client.get("/api/documents", params={"limit": 2, "after": first["next"]}).json()
    names = [each["name"] for each in (*first["documents"], *second["documents"])]
    assert (names, first["total"], second["next"]) == (["a.txt", "b.txt", "c.txt"], 3, None)


def test_progress_comes_as_events_until_the_job_ends(client: TestClient) -> None:
    job = client.post("/api/documents", files=[("files", ("heron.txt", HERON.encode()))]).json()["job"]
    answer = client.get(f"/api/jobs/{job}/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    states = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert states[-1]["state"] == "done"
    assert all(state["id"] == job for state in states)


def test_files_that_cannot_be_read_are_listed_with_reasons(client: TestClient) -> None:
    job = upload_files(client, {"ok.txt": "A line.", "binary.txt": b"\x00\x01\x02", "empty.txt": b""})
    assert job["state"] == "done"
    assert {each["name"]: each["reason"] for each in job["skipped"]} == {"binary.txt": "binary", "empty.txt": "empty"}
    assert [each["name"] for each in _documents(client)] == ["ok.txt"]


def test_an_upload_without_a_readable_file_fails_and_leaves_nothing(client: TestClient, service: Service) -> None:
    job = upload_files(client, {"binary.txt": b"\x00\x01\x02", "empty.txt": b""})
    assert (job["state"], job["error"]) == ("failed", "none of the files can be ingested")
    assert {each["name"]: each["reason"] for each in job["skipped"]} == {"binary.txt": "binary", "empty.txt": "empty"}
    assert service.library is not None
    assert [path for path in service.library.folder.glob("originals/*/*/*") if path.is_file()] == []


def test_a_file_of_the_same_name_replaces_the_document(client: TestClient) -> None:
    upload(client, bird="The heron waits.")
    (old,) = _documents(client)
    upload(client, bird="The owl hunts.")
    (new,) = _documents(client)
    assert new["id"] == old["id"]
    assert new["version"] != old["version"]
    gone = client.get(f"/api/documents/{old['id']}", params={"v": old["version"]})
    assert (gone.status_code, gone.json()["error"]["code"]) == (410, "version_gone")
    assert client.get(f"/api/documents/{new['id']}", params={"v": new["version"]}).json()["text"] == "The owl hunts."


def test_a_bad_file_of_the_same_name_leaves_the_document(client: TestClient) -> None:
    upload(client, bird="The heron waits.")
    (old,) = _documents(client)
    assert upload_files(client, {"bird.txt": b"\x00"})["state"] == "failed"
    assert _documents(client) == [old]
    assert client.get(f"/api/documents/{old['id']}/original").content == b"The heron waits."


def test_a_deleted_document_can_be_restored_with_its_original(client: TestClient) -> None:
    upload(client, heron=HERON)
    (before,) = _documents(client)
    deletion = client.delete(f"/api/documents/{before['id']}").json()
    assert _documents(client) == []
    assert client.get(f"/api/documents/{before['id']}").status_code == 404
    assert client.post("/api/documents/undo", json={"undo": deletion["undo"]}).json() == {"id": before["id"]}
    assert _documents(client) == [before]
    assert client.get(f"/api/documents/{before['id']}/original").content == HERON.encode()
    again = client.post("/api/documents/undo", json={"undo": deletion["undo"]})
    assert (again.status_code, again.json()["error"]["code"]) == (404, "undo_gone")


def test_a_new_document_of_that_name_is_not_overwritten_by_undo(client: TestClient) -> None:
    upload(client, bird="The heron waits.")
    deletion = client.delete(f"/api/documents/{_documents(client)[0]['id']}").json()
    upload(client, bird="The owl hunts.")
    assert client.post("/api/documents/undo", json={"undo": deletion["undo"]}).status_code == 409
    (document,) = _documents(client)
    assert client.get(f"/api/documents/{document['id']}").json()["text"] == "The owl hunts."


@contextmanager
def _disk_full(owner: Any, name: str, after: int) -> Iterator[None]:
    """One call of a function fails, as on a full disk.

    Args:
        owner: The module or class of the function.
        name: Its name.
        after: How many calls succeed before.
    """
    real, calls = getattr(owner, name), itertools.count()

    def call(*arguments: Any, **options: Any) -> Any:
        if next(calls) == after:
            full: Exception = OSError(errno.ENOSPC, "the disk is full")
            raise sqlite3.OperationalError("the disk is full") if owner is StoreFile else full
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield


_STEPS = [
    *((Path, name, after) for name in ("mkdir", "replace") for after in range(4)),
    *((shutil, "copyfileobj", after) for after in range(2)),
    (StoreFile, "_commit", 0),
    (WordEmbedding, "_get_text_embedding", 0),
]


def _is_whole(client: TestClient, service: Service, text: str) -> None:
    """The store has one document, the text and the original are the same, and nothing is left over."""
    assert service.library is not None
    [document] = [each for each in _documents(client) if each["name"] == "heron.txt"]
    assert client.get(f"/api/documents/{document['id']}").json()["text"] == text
    assert client.get(f"/api/documents/{document['id']}/original").text == text
    assert not [*service.library.folder.rglob(".previous-*"), *(service.library.folder / "incoming").iterdir()]


@pytest.mark.parametrize("step", _STEPS, ids=lambda step: f"{step[1]} {step[2]}")
def test_a_full_disk_leaves_every_document_whole(
    client: TestClient, service: Service, step: tuple[Any, str, int]
) -> None:
    old, new = "The heron waits.", "The heron flies."
    assert upload(client, heron=old)["state"] == "done"
    with _disk_full(*step):
        answer = client.post(
            "/api/documents", files=[("files", ("a.txt", b"x")), ("files", ("heron.txt", new.encode()))]
        )
        states = [wait_for(client, answer.json()["job"])["state"]] if answer.status_code == 202 else []
    if answer.status_code != 202:
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "not_written")
    _is_whole(client, service, new if states == ["done"] else old)
    assert upload(client, heron=old)["state"] == "done"
    _is_whole(client, service, old)
    id_ = next(each["id"] for each in _documents(client) if each["name"] == "heron.txt")
    with _disk_full(*step):
        answer = client.delete(f"/api/documents/{id_}")
    if answer.status_code == 200:
        undo = {"undo": answer.json()["undo"]}
        with _disk_full(*step):
            answer = client.post("/api/documents/undo", json=undo)
        if answer.status_code != 200:
            assert client.post("/api/documents/undo", json=undo).status_code == 200
    else:
        assert "the disk is full" in answer.json()["error"]["message"]
    _is_whole(client, service, old)


@pytest.mark.parametrize("moved", ["the old one", "both", "both, and committed"])
def test_a_replacement_that_a_kill_interrupted_is_completed_at_the_next_start(
    make_client: MakeClient, service: Service, moved: str
) -> None:
    old, new = "The heron waits.", "The heron flies."
    assert service.library is not None
    client = make_client()
    assert upload(client, heron=new if moved.endswith("committed") else old)["state"] == "done"
    [original] = (service.library.folder / "originals").rglob("heron.txt")
    original.with_name(".previous-heron.txt").write_text(old)
    original.unlink() if moved == "the old one" else original.write_text(new)
    client = make_client(config={})  # starts anew over the same folder
    wait_until(lambda: not client.app.state.service.jobs._waiting, "the ingestion")  # type: ignore[attr-defined]
    _is_whole(client, service, old if moved == "the old one" else new)


def test_after_its_time_a_deleted_document_is_gone_from_the_disk(make_client: Any, service: Service) -> None:
    client = make_client({"undo_seconds": 0.0})
    upload(client, heron=HERON)
    deletion = client.delete(f"/api/documents/{_documents(client)[0]['id']}").json()
    assert client.post("/api/documents/undo", json={"undo": deletion["undo"]}).status_code == 404
    client.app.state.service.library.purge()
    assert service.library is not None
    files = [path for path in service.library.folder.rglob("*") if path.is_file()]
    assert [path.name for path in files if HERON.encode() in path.read_bytes()] == []


def test_an_original_is_for_saving_only(client: TestClient) -> None:
    upload_files(client, {"page.html": "<script>alert(1)</script><p>Text of a page.</p>"})
    (document,) = _documents(client)
    assert client.get(f"/api/documents/{document['id']}").json()["text"] == "Text of a page."
    answer = client.get(f"/api/documents/{document['id']}/original")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"].startswith("attachment")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("linked", ["file", "folder", "tenant"])
def test_no_link_among_the_originals_is_followed(
    client: TestClient, service: Service, tmp_path: Path, linked: str
) -> None:
    assert service.library is not None
    upload(client, heron=HERON)
    [document] = _documents(client)
    [original] = (service.library.folder / "originals").rglob("heron.txt")
    secret = tmp_path / "secret"
    place = {"file": original, "folder": original.parent, "tenant": original.parents[1]}[linked]
    inside = secret / ("heron.txt" if linked == "file" else original.relative_to(place))
    inside.parent.mkdir(parents=True, exist_ok=True)
    inside.write_text("password")
    shutil.rmtree(original.parents[1])
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(inside if linked == "file" else secret)
    answer = client.get(f"/api/documents/{document['id']}/original")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_original")


def test_originals_stay_within_their_bound_and_texts_stay(make_client: Any) -> None:
    client = make_client({"originals_bytes": 30})
    upload(client, first="Twenty bytes of text")
    upload(client, second="Twenty more of text.")
    assert [(each["name"], each["original"]) for each in _documents(client)] == [
        ("first.txt", False),
        ("second.txt", True),
    ]
    first = _documents(client)[0]["id"]
    assert client.get(f"/api/documents/{first}").json()["text"] == "Twenty bytes of text"
    assert client.get(f"/api/documents/{first}/original").json()["error"]["code"] == "no_original"


def test_uploads_are_found_where_the_store_was_moved_to(client: TestClient, service: Service, tmp_path: Path) -> None:
    upload(client, heron=HERON)
    assert service.library is not None
    (record,) = service.library.records("")
    moved = tmp_path / "elsewhere"
    shutil.copytree(service.library.folder, moved)
    service.library.folder = moved
    assert service.library.original("", record) == moved / Path(record.path).relative_to(service.store.path.resolve())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("files", "status"),
    [([], 400), ([("other", ("a.txt", b"x"))], 400), ([("files", (f"{i}.txt", b"x")) for i in range(4)], 400)],
)
def test_uploads_that_cannot_be_taken_are_refused(make_client: Any, files: list[Any], status: int) -> None:
    client = make_client({"files_per_request": 3})
    answer = client.post("/api/documents", files=files or {"nothing": ("", b"")})
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def test_a_file_that_is_too_large_is_skipped(make_client: Any) -> None:
    job = upload(make_client({"file_bytes": 10}), small="Small.", large="Larger than ten bytes.")
    assert [each["name"] for each in job["added"]] == ["small.txt"]
    assert job["skipped"] == [{"name": "large.txt", "reason": "larger than 10 bytes, the most that is taken"}]


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("../../etc/passwd", "passwd"),
        ("..\\..\\boot.ini", "boot.ini"),
        ("..", "unnamed"),
        (".hidden", "hidden"),
        ("", "unnamed"),
        ("a\x00b\n.txt", "a_b_.txt"),
        ("\u202etxt.exe", "_txt.exe"),
        ("x" * 500 + ".pdf", "x" * 176 + ".pdf"),
        ("é" * 300, "é" * 90),
        ("<img src=x onerror=alert(1)>.txt", "<img src=x onerror=alert(1)>.txt"),
    ],
)
def test_names_of_uploads_become_file_names(name: str, safe: str) -> None:
    assert safe_name(name) == safe


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("C:\\boot.ini", "boot.ini"),
        ("Why? A: because.md", "Why_ A_ because.md"),
        ("report.pdf:hidden.exe", "report.pdf_hidden.exe"),
        ("nul.txt", "_nul.txt"),
        (".nul", "_nul"),
        ("COM1", "_COM1"),
        ("console.txt", "console.txt"),
        ("ends with dots. . ", "ends with dots"),
        ("...", "unnamed"),
    ],
)
def test_names_of_uploads_become_names_of_windows_there(name: str, safe: str) -> None:
    assert safe_name(name, on_windows=True) == safe


def _node(id_: str, text: str, start: int | None, **metadata: Any) -> TextNode:
    end = None if start is None else start + len(text)
    return TextNode(id_=id_, text=text, start_char_idx=start, end_char_idx=end, metadata=metadata)


def test_the_text_is_put_together_from_nodes_that_overlap_or_leave_white_space_out() -> None:
    nodes = [
        _node("1", "One two three.", 0),
        _node("2", "three. Four.", 8),
        _node("3", "Five.", 21),
        _node("4", "Six", 28),
    ]
    text = document_text(nodes)
    assert text.text == "One two three. Four. Five.\n\nSix"
    for node in nodes:
        start, end = text.span(node.node_id, 0, len(node.text)) or (0, 0)
        assert text.text[start:end] == node.text
    assert text.span("unknown", 0, 1) is None


def test_pages_have_their_number_and_their_characters() -> None:
    nodes = [
        _node("1", "Preface.", 0, page_label="iv", page_number=4),
        _node("2", "Chapter one.", 2, page_label="1", page_number=5),
        _node("3", "It begins.", 15, page_label="1", page_number=5),
    ]
    text = document_text(nodes)
    pages = [(page.number, page.label, text.text[page.start : page.end]) for page in text.pages]
    assert pages == [(4, "iv", "Preface."), (5, "1", "Chapter one. It begins.")]


def test_slides_without_labels_are_pages_too() -> None:
    text = document_text([_node("1", "First slide.", 0), _node("2", "Second.", 0), _node("3", "Third.", 0)])
    assert text.text == "First slide.\n\nSecond.\n\nThird."
    assert [page.number for page in text.pages] == [1, 2, 3]


def test_the_version_is_of_the_text() -> None:
    one, same = document_text([_node("1", "A b", 0)]), document_text([_node("2", "A", 0), _node("3", "b", 2)])
    assert one.version == same.version
    assert one.version != document_text([_node("1", "A c", 0)]).version


def test_the_address_of_a_citation() -> None:
    url = citation_url("http://127.0.0.1:8000/", "d" * 24, "v" * 16, 3, 9)
    assert url == f"http://127.0.0.1:8000/#/documents/{'d' * 24}?v={'v' * 16}&start=3&end=9"


def test_a_pdf_has_the_numbers_that_viewers_go_by(client: TestClient) -> None:
    pypdf = pytest.importorskip("pypdf")
    writer = pypdf.PdfWriter(clone_from=io.BytesIO(pdf("The preface.", "The heron waits.")))
    writer.set_page_label(0, 0, style="/r")
    writer.set_page_label(1, 1, style="/D")
    file = io.BytesIO()
    writer.write(file)
    upload_files(client, {"birds.pdf": file.getvalue()})
    (document,) = _documents(client)
    content = client.get(f"/api/documents/{document['id']}").json()
    pages = [(page["number"], page["label"], content["text"][page["start"] : page["end"]]) for page in content["pages"]]
    assert pages == [(1, "i", "The preface."), (2, "1", "The heron waits.")]
    original = client.get(f"/api/documents/{document['id']}/original")
    assert original.headers["content-type"] == "application/pdf"
