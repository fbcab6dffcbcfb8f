"""The page on the real service, with real ingestion and decoding: from the upload to the highlighted characters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from asking import ask
from conftest import watched
from costs_stub import EverythingPays
from made_files import pdf
from playwright.sync_api import Browser, Page, expect
from saying import saying
from serving import serving

from reader_rag.engine.engine import Engine
from reader_rag.server.app import create_app
from reader_rag.server.service import Service

pytestmark = pytest.mark.browser

ON_NIGHT = "The barn owl hunts at night"
ON_SITES = "Grey herons nested at four sites"
SITES = "four sites"  # the end of a copy: its first words may be decoded before a draft finds it
TEXT = f"Birds 🦉 of prey, é and 𐍈. {ON_NIGHT}, and it finds mice by their sound alone. It nests in old towers.\n"
PDF = pdf(
    "Annual report of the wetland trust. The trust looks after nine sites in the valley.",
    f"Counts of birds rose. {ON_SITES} and two more on the coast.",
)
ANSWER = f"The notes 🦉 say: {ON_NIGHT}. The report adds: {ON_SITES}."
QUESTION = "When does the barn owl hunt, and where have grey herons nested?"


@pytest.fixture
def address(service: Service, tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where a real service is, over an empty store; its model is made to prefer the words of `ANSWER`."""
    # Every drafted token is verified, however slow the machine is just now: so what is copied is known to be.
    monkeypatch.setattr(tiny_engine.context.costs, "current", EverythingPays())
    made = replace(service, llm=saying(tiny_engine, ANSWER, max_tokens=160))
    with serving(create_app(made)) as found:
        yield found


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    """The page of the real service."""
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": 1360, "height": 860})
    context.set_default_timeout(60_000)
    made = context.new_page()
    watched(made, address, wrong)
    made.goto(address)
    yield made
    context.close()
    assert not wrong


def test_from_the_upload_to_the_highlighted_characters(page: Page) -> None:
    expect(page.get_by_role("heading", name="Add documents, then ask about them.")).to_be_visible()
    page.locator("#welcome input[type=file]").set_input_files(
        [
            {"name": "owls é.txt", "mimeType": "text/plain", "buffer": TEXT.encode()},
            {"name": "report.pdf", "mimeType": "application/pdf", "buffer": PDF},
            {"name": "photo.raw", "mimeType": "application/octet-stream", "buffer": bytes(range(256))},
        ]
    )
    expect(page.get_by_role("heading", name="Ask your documents.")).to_be_visible()
    expect(page.locator("#documents-count")).to_have_text("2")
    page.get_by_role("link", name="Documents").click()
    expect(page.locator(".skipped li")).to_have_text(re.compile("^photo.raw — "))
    expect(page.locator(".document-name")).to_have_text(["owls é.txt", "report.pdf"])

    page.get_by_role("link", name="New conversation").click()
    answer = ask(page, QUESTION, wait=False)
    expect(answer.locator(".answer-text p:not(.waiting)")).not_to_be_empty()
    expect(answer).to_have_attribute("data-state", "done")
    assert answer.locator(".answer-text").inner_text().startswith(ANSWER)
    expect(answer.locator(".stats")).to_have_text(
        re.compile(r"[\d.]+ tokens/s · [\d.]+ tokens per step · \d+ % copied")
    )

    for copied, name in (("at night", "owls é.txt"), (SITES, "report.pdf")):
        link = answer.locator("a.copied", has_text=copied)
        text = link.inner_text()
        link.click()
        expect(page.locator("mark")).to_have_text(text)
        expect(page.locator("mark")).to_be_in_viewport()
        expect(page.get_by_role("complementary", name="Document").locator("h2")).to_have_text(name)
    expect(page.locator(".document-page", has=page.locator("mark")).locator("h3")).to_have_text("Page 2")
    page.get_by_role("button", name="Original").click()
    expect(page.locator("iframe")).to_have_attribute("src", re.compile("^blob:.*#page=2$"))
    page.keyboard.press("Escape")

    answer.get_by_role("button", name="Race").click()
    expect(page.locator(".verdict")).to_contain_text("Both gave the same")
    page.get_by_role("button", name="Close the race").click()

    page.reload()
    expect(page.locator(".answer-text")).to_have_text(re.compile(re.escape(ANSWER)))
    page.get_by_role("link", name="New conversation").click()
    page.get_by_label("Search conversations").fill("herons")
    page.get_by_role("link", name=QUESTION).click()

    page.get_by_role("link", name="Documents").click()
    page.get_by_role("button", name="Delete report.pdf").click()
    expect(page.locator(".document-name")).to_have_text(["owls é.txt"])
    page.go_back()
    page.locator("a.copied", has_text=SITES).click()
    expect(page.get_by_role("heading", name="This document is gone")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    page.keyboard.press("Escape")
    page.locator("a.copied", has_text=SITES).click()
    expect(page.locator("mark")).to_contain_text(SITES)


def test_a_conversation_is_exported_and_deleted(page: Page) -> None:
    ask(page, "What is this?")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    assert "What is this?" in download.value.path().read_text(encoding="utf-8")
    page.get_by_role("button", name="Delete").click()
    expect(page.locator("#conversations a")).to_have_count(0)
