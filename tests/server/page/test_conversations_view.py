"""Conversations on the page: kept, found again, searched, exported, deleted."""

from __future__ import annotations

from pathlib import Path

import pytest
from asking import ask
from fake_app import Copy, Script
from playwright.sync_api import Page, expect
from waiting import wait_until

pytestmark = pytest.mark.browser


def test_a_conversation_is_found_again_after_a_reload(page: Page, script: Script) -> None:
    script.answer, script.passages = ["It ", Copy("owl.md", "hunts at night"), "."], ["heron.txt"]
    ask(page, "How does the owl hunt?")
    expect(page.get_by_role("link", name="How does the owl hunt?")).to_have_attribute("aria-current", "page")
    wait_until(lambda: [len(kept["messages"]) for kept in script.conversations.values()] == [2], "keeping the answer")
    page.reload()
    expect(page.locator(".answer a.copied")).to_have_text("hunts at night")
    expect(page.locator(".sources-group")).to_have_count(2)
    page.get_by_role("link", name="New conversation").click()
    expect(page.locator(".answer")).to_have_count(0)
    expect(page.get_by_label("Your question")).to_be_focused()
    page.get_by_role("link", name="How does the owl hunt?").click()
    page.locator(".answer a.copied").click()
    expect(page.locator("mark")).to_have_text("hunts at night")


def test_a_conversation_goes_on_where_it_was(page: Page, script: Script) -> None:
    ask(page, "One?")
    wait_until(lambda: [len(kept["messages"]) for kept in script.conversations.values()] == [2], "keeping the answer")
    page.reload()
    ask(page, "Two?")
    assert [message["content"] for message in script.requests[-1]["messages"]] == ["One?", "Nothing.", "Two?"]
    wait_until(lambda: [len(kept["messages"]) for kept in script.conversations.values()] == [4], "keeping the answer")


def test_conversations_are_searched(page: Page) -> None:
    ask(page, "About herons?")
    page.get_by_role("link", name="New conversation").click()
    ask(page, "About owls?")
    entries = page.locator("#conversations a")
    expect(entries).to_have_text(["About owls?", "About herons?"])
    page.get_by_label("Search conversations").fill("herons")
    expect(entries).to_have_text(["About herons?"])
    page.get_by_label("Search conversations").fill("geese")
    expect(page.get_by_text("Nothing found for “geese”.")).to_be_visible()


def test_a_conversation_is_exported(page: Page) -> None:
    ask(page, "How/where: do owls hunt?")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    assert download.value.suggested_filename == "Howwhere do owls hunt.md"
    assert Path(download.value.path()).read_text() == "# How/where: do owls hunt?\n"


def test_a_deleted_conversation_can_be_restored(page: Page, script: Script) -> None:
    ask(page, "How?")
    page.get_by_role("button", name="Delete").click()
    expect(page.locator("#conversations a")).to_have_count(0)
    expect(page.locator(".answer")).to_have_count(0)
    assert not script.conversations
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".answer-text")).to_have_text("Nothing.")
    assert [kept["title"] for kept in script.conversations.values()] == ["How?"]
