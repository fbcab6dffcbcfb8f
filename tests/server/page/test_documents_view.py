"""Documents on the page: upload, skipped files, delete and undo, one document with its highlighted characters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from asking import ask
from fake_app import Copy, Script
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

PDF = b"""%PDF-1.4
1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj
2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj
3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 200]>>endobj
trailer<</Root 1 0 R>>
%%EOF
"""


def write(folder: Path, **texts: str) -> list[Path]:
    """Write text files; returns their paths."""
    paths = [folder / name.replace("_", ".") for name in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def test_an_empty_store_says_what_to_do(new_page: Callable[..., Page], script: Script, tmp_path: Path) -> None:
    script.texts = {}
    page = new_page()
    expect(page.get_by_role("heading", name="Add documents, then ask about them.")).to_be_visible()
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Choose files").click()
    chooser.value.set_files(write(tmp_path, a_txt="Some text."))
    expect(page.get_by_role("heading", name="Ask your documents.")).to_be_visible()
    assert script.texts == {"a.txt": "Some text."}


def test_an_upload_lists_what_was_skipped_and_why(page: Page, script: Script, tmp_path: Path) -> None:
    page.get_by_role("link", name="Documents").click()
    script.skipped = {"b.bin": "not a type that is read"}
    paths = write(tmp_path, a_txt="A", b_bin="B", c_txt="C", d_txt="D" * 5001)
    page.locator("#documents input[type=file]").set_input_files(paths)
    upload = page.locator(".upload")
    expect(upload).to_contain_text("Added 2 documents. 2 files skipped.")
    assert upload.locator("li").all_text_contents() == [
        "d.txt — larger than 5.0 kB",
        "b.bin — not a type that is read",
    ]
    assert script.uploads == [["a.txt", "b.bin"], ["c.txt"]]
    expect(page.locator(".document-name")).to_have_text(["heron.txt", "owl.md", "a.txt", "c.txt"])


def test_files_are_dropped_anywhere(page: Page, script: Script) -> None:
    data = page.evaluate_handle(
        "() => { const data = new DataTransfer(); data.items.add(new File(['Text'], 'dropped 🦉.txt')); return data; }"
    )
    page.dispatch_event("body", "dragenter", {"dataTransfer": data})
    expect(page.get_by_text("Drop files to add them")).to_be_visible()
    page.dispatch_event("body", "drop", {"dataTransfer": data})
    expect(page.get_by_text("Drop files to add them")).to_be_hidden()
    expect(page.locator(".upload")).to_contain_text("Added 1 document.")
    assert script.texts["dropped 🦉.txt"] == "Text"


def test_a_deleted_document_can_be_restored(page: Page, script: Script) -> None:
    page.get_by_role("link", name="Documents").click()
    page.get_by_role("button", name="Delete owl.md").click()
    expect(page.locator(".document-name")).to_have_text(["heron.txt"])
    assert list(script.texts) == ["heron.txt"]
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".document-name")).to_have_text(["heron.txt", "owl.md"])
    expect(page.locator("#documents-count")).to_have_text("2")


def test_a_changed_document_is_gone_and_shows_no_other_characters(page: Page, script: Script) -> None:
    script.answer = [Copy("owl.md", "hunts at night")]
    answer = ask(page, "How?")
    script.texts["owl.md"] = "Quite another text, in which these characters are others."
    answer.locator("a.copied").click()
    expect(page.get_by_role("heading", name="This version is gone")).to_be_visible()
    assert page.locator("mark").count() == 0


def test_a_link_from_elsewhere_opens_the_document_alone(new_page: Callable[..., Page], script: Script) -> None:
    page = new_page(script.url("owl.md", 4, 12).removeprefix("http://test/"))
    expect(page.locator("mark")).to_have_text("barn owl")
    expect(page.locator("#main")).to_be_hidden()
    page.get_by_role("button", name="Close the document").click()
    expect(page.get_by_label("Your question")).to_be_visible()


def test_a_long_document_is_whole_and_scrolls_to_its_characters(new_page: Callable[..., Page], script: Script) -> None:
    line = "🦉 a line of a long document, which says the same again and again\n"
    script.texts["long.txt"] = line * 4000 + "THE PLACE" + "🦉" * 30_000
    start = len(line) * 4000
    page = new_page(script.url("long.txt", start, start + 9).removeprefix("http://test/"))
    expect(page.locator("mark")).to_have_text("THE PLACE")
    expect(page.locator("mark")).to_be_in_viewport()
    assert page.locator(".document-page").count() > 10
    texts = page.locator(".document-page .text").all_text_contents()
    assert "".join(texts) == script.texts["long.txt"]
    assert all(text.encode("utf-16", "surrogatepass").decode("utf-16") for text in texts)


def test_a_pdf_is_shown_page_by_page_with_its_original_at_the_page(page: Page, script: Script) -> None:
    script.texts["report.pdf"] = "The first page.\nThe second page says more."
    script.pages["report.pdf"] = [{"number": 1, "start": 0, "end": 16}, {"number": 2, "start": 16, "end": 42}]
    script.originals["report.pdf"] = PDF
    script.answer = [Copy("report.pdf", "second page says")]
    ask(page, "What?").locator("a.copied").click()
    expect(page.locator("mark")).to_have_text("second page says")
    assert page.locator(".document-page h3").all_text_contents() == ["Page 1", "Page 2"]
    expect(page.locator(".document-page").nth(1).locator("mark")).to_be_visible()
    page.get_by_role("button", name="Original").click()
    frame = page.locator("iframe")
    source = frame.get_attribute("src") or ""
    assert source.startswith("blob:")
    assert source.endswith("#page=2")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()
    assert download.value.suggested_filename == "report.pdf"
    assert Path(download.value.path()).read_bytes() == PDF


def test_an_html_original_is_never_opened_as_a_page(page: Page, script: Script) -> None:
    script.texts["site.html"] = "Text of the page."
    script.originals["site.html"] = b"<script>parent.document.body.dataset.hacked = 1</script>"
    page.goto(page.url + script.url("site.html", 0, 4).removeprefix("http://test/"))
    expect(page.locator("mark")).to_have_text("Text")
    expect(page.get_by_role("button", name="Download")).to_be_visible()
    assert page.get_by_role("button", name="Original").count() == 0
