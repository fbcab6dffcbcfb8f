"""Takes the pictures of the documentation, and writes the answer on its start page: `make pictures`.

The real service, the default models and `examples/documents` are asked two questions. This makes, in docs/:

    pictures/page.png     the whole web page
    pictures/answer.png   the first question and its answer, for the README
    index.md              the same answer as text, between the lines `<!-- answer -->` and `<!-- /answer -->`

It needs a Chromium (Debian: apt-get install chromium). The speeds in the pictures are this machine's.
"""

from __future__ import annotations

import html
import re
import shutil
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import uvicorn
from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

from reader_rag import configure_threads

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted((ROOT / "examples" / "documents").glob("*.md"))
QUESTIONS = ("What do I do if a tyre is flat?", "When are the stations open?")
PATIENCE_MS = 240_000
COLOURS = 128
"""Of the pictures: a palette makes them a third as large, and text looks the same."""


def main() -> None:
    """Serve, upload, ask, and take the pictures."""
    configure_threads()
    with ExitStack() as stack:
        address = _serve(stack)
        browser = stack.enter_context(sync_playwright()).chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        stack.callback(browser.close)
        page = browser.new_page(viewport={"width": 1240, "height": 720}, color_scheme="light", device_scale_factor=1.5)
        page.goto(address)
        page.locator("#welcome input[type=file]").set_input_files(DOCUMENTS, timeout=PATIENCE_MS)
        expect(page.locator("#documents-count")).to_have_text(str(len(DOCUMENTS)), timeout=PATIENCE_MS)
        for question in QUESTIONS:
            _ask(page, question)
        page.locator(".toast .icon").evaluate_all("buttons => buttons.forEach(button => button.click())")
        _save(page.screenshot(), "page.png")
        _save(page.screenshot(clip=_around_first(page)), "answer.png")
        _write_answer(page)
        print(page.locator(".stats").first.inner_text())


def _serve(stack: ExitStack) -> str:
    """The address of a service over an empty store, until the stack is closed."""
    from reader_rag import FaissStore, LocalEmbedding, ReaderLLM
    from reader_rag.model.registry import DEFAULT_EMBED_MODEL, DEFAULT_MODEL
    from reader_rag.server.app import create_app
    from reader_rag.server.running import open_service

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "store"
    embedding = LocalEmbedding(DEFAULT_EMBED_MODEL)
    store = stack.enter_context(FaissStore(folder, embed_model=embedding))
    llm = ReaderLLM(model=DEFAULT_MODEL, max_tokens=120, stop=["\n\n"])  # one paragraph: the model is small
    service = open_service(llm, DEFAULT_MODEL, store=store, embedding=embedding, folder=folder)
    stack.callback(service.close)
    server = uvicorn.Server(uvicorn.Config(create_app(service), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    stack.callback(thread.join)
    stack.callback(setattr, server, "should_exit", True)
    while not server.started:
        time.sleep(0.05)
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"


def _ask(page: Page, question: str) -> None:
    page.get_by_label("Your question").fill(question)
    page.get_by_label("Your question").press("Enter")
    expect(page.locator(".answer").last).to_have_attribute("data-state", "done", timeout=PATIENCE_MS)


def _around_first(page: Page) -> dict[str, float]:
    """The rectangle of the first question and its answer, without the line of figures below it."""
    question, answer = page.locator(".question").first.bounding_box(), page.locator(".answer-text").first.bounding_box()
    assert question is not None
    assert answer is not None
    left, top = min(question["x"], answer["x"]) - 16, question["y"] - 16
    right = max(question["x"] + question["width"], answer["x"] + answer["width"]) + 16
    return {"x": left, "y": top, "width": right - left, "height": answer["y"] + answer["height"] + 12 - top}


def _save(png: bytes, name: str) -> None:
    """Keep a picture with a palette of colours."""
    target = ROOT / "docs" / "pictures" / name
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(png)
    Image.open(target).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(target, optimize=True)
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size // 1000} kB")


def _write_answer(page: Page) -> None:
    """Write the first answer into the start page, each copied span linked to its document; without its speed."""
    stats = page.locator(".stats").first.inner_text().partition(" · ")[2]
    pieces = page.locator(".answer-text").first.evaluate(
        """text => [...text.querySelectorAll("p")].flatMap(p => [...p.childNodes])
            .map(node => [node.textContent, node.classList?.contains("copied") ? node.title : ""])"""
    )
    text = ""
    for piece, title in pieces:
        name = title.removeprefix("Copied from ").partition(",")[0]
        shown = html.escape(re.sub(r"\s+", " ", piece), quote=False)
        text += f"[<u>{shown.strip()}</u>](../examples/documents/{name})" if name else shown
    lines = [f"> **{QUESTIONS[0]}**", ">", f"> {text.strip()}", ">", f"> <small>{stats}</small>"]
    start = ROOT / "docs" / "index.md"
    old = start.read_text(encoding="utf-8")
    new = re.sub(
        r"(?<=<!-- answer -->\n).*?(?=<!-- /answer -->)", lambda _: "\n".join(lines) + "\n", old, flags=re.DOTALL
    )
    start.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
