"""A real headless Chromium, and pages of a scripted server in it. Skipped where there is no Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from asking import HERON, OWL
from fake_app import Script, fake_app
from playwright.sync_api import Browser, Page, expect, sync_playwright
from serving import serving

if TYPE_CHECKING:
    from collections.abc import Callable

expect.set_options(timeout=60_000)  # a limit for what hangs, not a measure of speed

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str | None:
    """The path of a Chromium: `READER_RAG_CHROMIUM`, or the one that is installed."""
    named = os.environ.get("READER_RAG_CHROMIUM")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium."""
    path = chromium()
    if path is None:
        pytest.skip("there is no Chromium: apt-get install chromium, or name one in READER_RAG_CHROMIUM")
    with sync_playwright() as playwright:
        # Chromium's own sandbox does not run as root, which containers often are.
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def script() -> Script:
    """What the scripted server says: two documents, and an answer that copies from both."""
    return Script(texts={"heron.txt": HERON, "owl.md": OWL})


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    """Where the scripted server is."""
    with serving(fake_app(script)) as found:
        yield found


def watched(page: Page, address: str, wrong: list[str]) -> None:
    """Note whatever a page must never do: errors of its scripts, refusals of its policy, requests to other hosts.

    Args:
        page: The page.
        address: Where its server is.
        wrong: Notes are appended here.
    """
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("console", lambda message: wrong.append(message.text) if _is_wrong(message.type, message.text) else None)
    own = (address, f"blob:{address}", "data:", "chrome")  # "chrome": the browser's own viewer of PDF
    page.on("request", lambda request: None if request.url.startswith(own) else wrong.append(f"asked {request.url}"))


def _is_wrong(kind: str, text: str) -> bool:
    # A request that a test has refused is logged by the browser too.
    return kind == "error" and "Failed to load resource" not in text and "ERR_INCOMPLETE_CHUNKED" not in text


@pytest.fixture
def new_page(browser: Browser, address: str) -> Iterator[Callable[..., Page]]:
    """Makes pages: `new_page(path, **options of a browser context)`."""
    contexts, wrong = [], list[str]()

    def make(path: str = "", **options: object) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1360, "height": 860}, **options})  # type: ignore[arg-type]
        context.set_default_timeout(60_000)
        contexts.append(context)
        page = context.new_page()
        watched(page, address, wrong)
        page.goto(address + path)
        return page

    yield make
    for context in contexts:
        context.close()
    assert not wrong


@pytest.fixture
def page(new_page: Callable[..., Page]) -> Page:
    """A page on a desktop's screen."""
    return new_page()
