"""Chat: streamed answers, copied spans, sources, markup, stop, errors, keys."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from asking import HERON, OWL, ask
from fake_app import Copy, Script
from playwright.sync_api import Page, expect
from waiting import wait_until

pytestmark = pytest.mark.browser

COPY = "stands still in shallow water and waits for fish"


def test_copied_spans_are_links_in_the_colour_of_their_source(page: Page, script: Script) -> None:
    script.answer = ["A heron ", Copy("heron.txt", COPY), ", and an owl ", Copy("owl.md", "hunts at night"), "."]
    answer = ask(page, "How do they hunt?")
    links = answer.locator("a.copied")
    assert links.all_text_contents() == [COPY, "hunts at night"]
    assert answer.locator(".answer-text").inner_text() == f"A heron {COPY}, and an owl hunts at night."
    colours = {link.evaluate("node => getComputedStyle(node).textDecorationColor") for link in links.all()}
    assert len(colours) == 2
    assert "143 tokens/s · 3.2 tokens per step · " in answer.locator(".stats").inner_text()
    panel = page.get_by_role("complementary", name="Sources")
    assert panel.locator(".quotes a").all_text_contents() == [COPY, "hunts at night"]


def test_the_question_goes_out_with_the_conversation_before_it(page: Page, script: Script) -> None:
    script.answer = ["First."]
    ask(page, "One?")
    ask(page, "Two?")
    assert script.requests[-1]["model"] == "m+docs"
    assert [message["content"] for message in script.requests[-1]["messages"]] == ["One?", "First.", "Two?"]


def test_text_is_shown_while_the_answer_is_written(page: Page, script: Script) -> None:
    script.answer, script.pause_s = ["The first words ", "and the last."], 3.0
    answer = ask(page, "Well?", wait=False)
    expect(answer.locator(".answer-text")).to_have_text("The first words ")
    assert answer.get_attribute("data-state") == "streaming"


def test_stop_ends_the_request_and_keeps_what_was_written(page: Page, script: Script) -> None:
    script.answer, script.pause_s = ["The first words", " and the last."], 30.0
    answer = ask(page, "Well?", wait=False)
    expect(answer.locator(".answer-text")).to_have_text("The first words")
    page.get_by_role("button", name="Stop").click()
    expect(answer).to_contain_text("Stopped before it was complete.")
    wait_until(lambda: script.closed == 1, "the end of the stream")
    expect(page.get_by_role("button", name="Ask")).to_be_visible()


@pytest.mark.parametrize("before", ["", "🦉🦉 é 𐍈 ", "é̂ 👩‍👩‍👧 "])
def test_positions_are_code_points(before: str, page: Page, script: Script) -> None:
    script.texts = {"owl.md": f"🦉 Öwls {before}hunt 🐁 mice 𐍈 by sound. {OWL}"}
    copied = f"{before}hunt 🐁 mice 𐍈 by"
    script.answer = [f"{before}They ", Copy("owl.md", copied), " ear 🎉, ", Copy("owl.md", "barn owl hunts"), "."]
    answer = ask(page, "How?")
    assert answer.locator("a.copied").all_text_contents() == [copied, "barn owl hunts"]
    answer.locator("a.copied").first.click()
    expect(page.locator("mark")).to_have_text(copied)


def test_passages_that_were_not_copied_are_listed_apart(page: Page, script: Script) -> None:
    script.answer, script.passages = [Copy("heron.txt", COPY)], ["owl.md"]
    ask(page, "How?")
    groups = page.locator(".sources-group")
    expect(groups.nth(0)).to_contain_text("heron.txt")
    expect(groups.nth(1)).to_contain_text("Retrieved, not copied")
    expect(groups.nth(1)).to_contain_text("owl.md")
    expect(groups.nth(1)).not_to_contain_text("heron.txt")


def test_markdown_is_drawn_and_spans_keep_their_places_in_it(page: Page, script: Script) -> None:
    script.texts["list.md"] = "be **very still** now"
    script.answer = [
        "# Advice\n\n- first, ",
        Copy("list.md", "be **very still** now"),
        "\n- `x < 1`\n\n```\n**raw**\n```",
    ]
    answer = ask(page, "How?")
    assert answer.locator("h3").all_text_contents() == ["Advice"]
    assert answer.locator("li").all_text_contents() == ["first, be very still now", "x < 1"]
    assert answer.locator("strong a.copied").all_text_contents() == ["very still"]
    assert answer.locator("a.copied").all_text_contents() == ["be ", "very still", " now"]
    assert answer.locator("a.copied:not([tabindex='-1'])").count() == 1
    assert answer.locator("pre").all_text_contents() == ["**raw**"]


def test_markup_is_text_wherever_it_comes_from(page: Page, script: Script) -> None:
    evil = "<img src=x onerror=\"document.body.dataset.hacked='1'\"><script>document.body.dataset.hacked='2'</script>"
    script.texts = {f"{evil[:30]}.txt": evil + " and more"}
    name = next(iter(script.texts))
    script.answer = ["[click](javascript:alert(1)) ", Copy(name, evil), " <b>bold</b>"]
    answer = ask(page, evil)
    assert answer.locator(".answer-text").inner_text() == f"[click](javascript:alert(1)) {evil} <b>bold</b>"
    assert answer.locator("img, script, b").count() == 0
    assert page.locator(".question").inner_text() == evil
    answer.locator("a.copied").click()
    expect(page.locator("mark")).to_have_text(evil)
    page.goto(f"{page.url.split('#')[0]}#/documents")
    expect(page.locator(".document-name")).to_have_text(name)
    assert page.locator("main img, main script, aside img").count() == 0
    assert page.evaluate("document.body.dataset.hacked") is None


def test_an_annotation_that_is_no_place_in_a_document_is_no_link(page: Page, script: Script) -> None:
    script.url = lambda *place: "javascript:alert(1)#/elsewhere"  # type: ignore[method-assign]
    script.answer = [Copy("heron.txt", COPY)]
    answer = ask(page, "How?")
    assert answer.locator("a").count() == 0
    assert answer.locator(".answer-text").inner_text() == COPY


def test_a_refused_question_is_told_in_a_sentence_and_can_be_sent_again(page: Page, script: Script) -> None:
    script.fail = (429, "the queue is full")
    page.get_by_label("Your question").fill("How?")
    page.get_by_label("Your question").press("Enter")
    expect(page.get_by_role("alert")).to_have_text("The queue is full; try again in 3 s.✕")
    expect(page.get_by_label("Your question")).to_have_value("How?")
    assert page.locator(".question").count() == 0
    script.answer = ["So."]
    page.get_by_role("button", name="Ask").click()
    expect(page.locator(".answer-text")).to_have_text("So.")


def test_a_stream_that_breaks_off_keeps_what_came_and_says_so(page: Page, script: Script) -> None:
    script.answer, script.break_after = ["The first words", " and the last."], 1
    answer = ask(page, "How?")
    expect(answer.get_by_role("alert")).to_have_text("The connection broke before the answer was complete.")
    expect(answer.locator(".answer-text")).to_have_text("The first words")


def test_a_key_is_asked_for_and_kept_in_the_tab(new_page: Callable[..., Page], script: Script) -> None:
    script.key = "right"
    page = new_page()
    dialog = page.get_by_role("dialog", name="This server asks for a key")
    dialog.get_by_label("Key").fill("wrong")
    dialog.get_by_role("button", name="Go on").click()
    expect(dialog.get_by_role("alert")).to_have_text("The server does not know this key, or it was withdrawn.")
    dialog.get_by_label("Key").fill("right")
    dialog.get_by_role("button", name="Go on").click()
    expect(dialog).to_be_hidden()
    ask(page, "How?")
    page.reload()
    expect(page.locator("#documents-count")).to_have_text("2")
    assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]


def test_the_keyboard_reaches_a_span_and_comes_back(page: Page, script: Script) -> None:
    script.answer = [Copy("heron.txt", COPY)]
    answer = ask(page, "How?")
    answer.locator("a.copied").focus()
    page.keyboard.press("Enter")
    expect(page.locator("mark")).to_be_focused()
    assert HERON[HERON.index(COPY) :].startswith(page.locator("mark").inner_text())
    page.keyboard.press("Escape")
    expect(page.locator("mark")).to_have_count(0)
    expect(answer.locator("a.copied")).to_be_focused()
