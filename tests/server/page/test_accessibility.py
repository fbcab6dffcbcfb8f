"""Every view, light and dark, on large and small screens: axe-core finds nothing serious, nothing sticks out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from asking import ask, wide
from axe_playwright_python.sync_playwright import Axe
from fake_app import Copy, Script
from playwright.sync_api import Page, expect
from test_race_view import result

pytestmark = pytest.mark.browser

PHONE = {"width": 390, "height": 844}


def check(page: Page) -> None:
    """Fail where axe-core finds a serious or critical violation, or the page scrolls sideways."""
    found = Axe().run(page).response["violations"]
    wrong = [
        f"{rule['id']}: {node['html'][:160]} {node['failureSummary']}"
        for rule in found
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]
    assert not wrong
    assert wide(page) == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("phone", [False, True])
def test_every_view(theme: str, phone: bool, new_page: Callable[..., Page], script: Script) -> None:
    script.answer = [
        "# Two birds\n\n- ",
        Copy("heron.txt", "stands still in shallow water"),
        "\n- ",
        Copy("owl.md", "hunts at night"),
        "\n\n```\ncode\n```\nand averyveryverylongword" + "x" * 90,
    ]
    script.race, script.skipped = result(agree=True), {"x.bin": "not a type that is read"}
    page = new_page(color_scheme=theme, **({"viewport": PHONE, "has_touch": True} if phone else {}))
    expect(page.locator("#documents-count")).to_have_text("2")
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    check(page)
    answer = ask(page, "How do they hunt?")
    check(page)
    if phone:
        page.get_by_role("button", name="Sources", exact=True).click()
        expect(page.locator(".quotes a").first).to_be_visible()
        check(page)
        page.get_by_role("button", name="Close the sources").click()
        expect(page.locator(".quotes a").first).to_be_hidden()
    answer.locator("a.copied").first.click()
    expect(page.locator("mark")).to_be_in_viewport()
    check(page)
    page.keyboard.press("Escape")
    answer.get_by_role("button", name="Race").click()
    expect(page.locator(".lane.plain .text")).to_have_text("The owl hunts.")
    check(page)
    page.keyboard.press("Escape")
    if phone:
        page.get_by_role("button", name="Conversations and documents").click()
        check(page)
    page.get_by_role("link", name="Documents").click()
    page.locator("#documents input[type=file]").set_input_files(
        [{"name": "x.bin", "mimeType": "text/plain", "buffer": b"x"}]
    )
    expect(page.locator(".upload")).to_contain_text("1 file skipped")
    check(page)
    script.texts.clear()
    page.reload()
    page.evaluate("location.hash = '#/'")
    expect(page.get_by_role("heading", name="Add documents, then ask about them.")).to_be_visible()
    check(page)
    script.key = "key"
    page.reload()
    expect(page.get_by_role("dialog", name="This server asks for a key")).to_be_visible()
    check(page)


def test_the_theme_is_chosen_and_kept(new_page: Callable[..., Page]) -> None:
    page = new_page(color_scheme="light")
    page.get_by_role("button", name="Switch to the dark theme").click()
    assert page.evaluate("getComputedStyle(document.body).colorScheme") == "dark"
    page.reload()
    expect(page.get_by_role("button", name="Switch to the light theme")).to_be_visible()
