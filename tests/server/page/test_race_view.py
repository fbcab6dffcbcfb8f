"""The race on the page."""

from __future__ import annotations

from typing import Any

import pytest
from asking import ask
from fake_app import Script
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser


def result(*, agree: bool, **more: Any) -> dict[str, Any]:
    """A race that the drafted answer wins in 0.2 s against 0.6 s."""
    reader = {"events": [[0.1, "The owl "], [0.2, "hunts."]], "tokens": 12, "tokens_per_second": 60.0}
    plain = {"events": [[0.3, "The owl "], [0.6, "hunts."]], "tokens": 12, "tokens_per_second": 20.0}
    return {"reader": reader, "plain": plain, "agree": agree, **more}


def test_both_time_lines_are_played_and_the_verdict_is_said(page: Page, script: Script) -> None:
    script.race = result(agree=True)
    ask(page, "How?").get_by_role("button", name="Race").click()
    dialog = page.get_by_role("dialog", name="Race against plain decoding")
    expect(dialog.locator(".lane.reader .text")).to_have_text("The owl hunts.")
    expect(dialog.locator(".lane.plain .text")).to_have_text("The owl hunts.")
    expect(dialog.locator(".lane .figures")).to_have_text(["0.2 s · 60 tokens/s", "0.6 s · 20 tokens/s"])
    expect(dialog.locator(".verdict")).to_have_text("3.0 times as fast. Both gave the same 12 tokens.")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_answers_that_differ_are_said_to(page: Page, script: Script) -> None:
    script.race = result(agree=False, first_difference=6)
    ask(page, "How?").get_by_role("button", name="Race").click()
    expect(page.locator(".verdict")).to_contain_text("The tokens differ from token 7 on")


def test_a_busy_server_runs_no_race(page: Page, script: Script) -> None:
    script.race = {"status": 409, "message": "other requests are running; race when they are done"}
    ask(page, "How?").get_by_role("button", name="Race").click()
    said = "Other requests are running; race when they are done."
    expect(page.get_by_role("dialog").get_by_role("status")).to_have_text(said)
