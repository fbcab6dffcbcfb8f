"""Takes the picture of the web page in docs/page.md: the real service, the default models, three pages of docs/.

    .venv/bin/python .ci/page_screenshot.py docs/page.png

It needs a Chromium (Debian: apt-get install chromium). The speed in the picture is this machine's.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import uvicorn
from playwright.sync_api import expect, sync_playwright

from reader_rag import FaissStore, ReaderLLM
from reader_rag.model.registry import DEFAULT_EMBED_MODEL, DEFAULT_MODEL
from reader_rag.rag.embedding import LocalEmbedding
from reader_rag.server.app import create_app
from reader_rag.server.running import open_service

DOCS = Path(__file__).resolve().parents[1] / "docs"
NAMES = ("prefixes.md", "exactness.md", "predicted-outputs.md")
QUESTION = "Repeat word for word what the text says about blocks of the prefix cache."
PATIENCE_MS = 240_000


def main(target: str) -> None:
    """Serve, upload, ask, and take the picture.

    Args:
        target: File name of the picture, a PNG.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "store"
        embedding = LocalEmbedding(DEFAULT_EMBED_MODEL)
        store = stack.enter_context(FaissStore(folder, embed_model=embedding))
        llm = ReaderLLM(model=DEFAULT_MODEL, max_tokens=120)
        service = open_service(llm, DEFAULT_MODEL, store=store, embedding=embedding, folder=folder)
        stack.callback(service.close)
        server = uvicorn.Server(uvicorn.Config(create_app(service), port=0, log_level="warning"))
        thread = threading.Thread(target=server.run)
        thread.start()
        stack.callback(thread.join)
        stack.callback(setattr, server, "should_exit", True)
        while not server.started:
            time.sleep(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        browser = stack.enter_context(sync_playwright()).chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        stack.callback(browser.close)
        page = browser.new_page(viewport={"width": 1240, "height": 720}, color_scheme="light")
        page.goto(f"http://127.0.0.1:{port}/")
        page.locator("#welcome input[type=file]").set_input_files([DOCS / name for name in NAMES], timeout=PATIENCE_MS)
        expect(page.locator("#documents-count")).to_have_text(str(len(NAMES)), timeout=PATIENCE_MS)
        page.get_by_label("Your question").fill(QUESTION)
        page.get_by_label("Your question").press("Enter")
        answer = page.locator(".answer").last
        expect(answer).to_have_attribute("data-state", "done", timeout=PATIENCE_MS)
        page.locator(".toast .icon").evaluate_all("buttons => buttons.forEach(button => button.click())")
        page.screenshot(path=target)
        print(f"{target}: {answer.locator('.stats').inner_text()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
