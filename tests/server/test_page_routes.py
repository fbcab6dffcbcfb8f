"""The files of the page: types, caches, nothing else from the disk."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

import reader_rag.server

FOLDER = Path(reader_rag.server.__file__).parent / "page"


def test_the_page_and_its_files_have_their_types(client: TestClient) -> None:
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    types = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
    linked = re.findall(r'(?:href|src)="(page/[^"]+)"', page.text)
    assert len(linked) >= 8
    for path in linked:
        found = client.get(f"/{path}")
        assert found.status_code == 200
        assert found.headers["content-type"] == types[Path(path).suffix]
        assert found.headers["x-content-type-options"] == "nosniff"


def test_a_file_that_is_known_is_not_sent_again(client: TestClient) -> None:
    first = client.get("/page/js/main.js")
    assert first.headers["cache-control"] == "no-cache"
    again = client.get("/page/js/main.js", headers={"If-None-Match": f"W/{first.headers['etag']}"})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/page/js/main.js", headers={"If-None-Match": '"old"'}).status_code == 200
    assert client.head("/").headers["content-length"] == client.get("/").headers["content-length"]


@pytest.mark.parametrize("path", ["page_routes.py", "../page_routes.py", "%2e%2e/page_routes.py", "js", "/etc/passwd"])
def test_no_other_file_is_served(path: str, client: TestClient) -> None:
    assert client.get(f"/page/{path}").status_code == 404


def test_nothing_of_the_page_needs_what_the_policy_forbids() -> None:
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)|https?://", page)
    for path in FOLDER.rglob("*.js"):
        script = path.read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", script)
        assert "https://" not in script
    for path in FOLDER.rglob("*.css"):
        assert "url(" not in path.read_text(encoding="utf-8")
