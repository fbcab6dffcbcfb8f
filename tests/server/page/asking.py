"""What the tests of the page do again and again."""

from __future__ import annotations

from playwright.sync_api import Locator, Page, expect

HERON = "The grey heron stands still in shallow water and waits for fish. It nests in tall trees near lakes."
OWL = "The barn owl hunts at night. It finds mice by their sound alone, in complete darkness."


def ask(page: Page, question: str, *, wait: bool = True) -> Locator:
    """Ask a question; returns the last answer's element, complete unless `wait` is False."""
    page.get_by_label("Your question").fill(question)
    page.get_by_label("Your question").press("Enter")
    answer = page.locator(".answer").last
    if wait:
        expect(answer).to_have_attribute("data-state", "done")
    return answer


def wide(page: Page) -> int:
    """Pixels by which a page is wider than its window: 0 unless it scrolls sideways."""
    return int(page.evaluate("document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth"))
