"""The text of HTML pages."""

from __future__ import annotations

import pytest

from reader_rag.rag.reading.formats.html import html_text
from reader_rag.rag.reading.text import UnusableFileError

PAGES = [
    ("<p>one<p>two", "one\n\ntwo"),
    ("a<br>b", "a\nb"),
    ("<b>bo</b>ld and <a href='x'>li</a>nk", "bold and link"),
    ("<ul><li>one</li><li>two</li></ul>", "one\ntwo"),
    ("<table><tr><td>a</td><td>b</td></tr></table>", "a b"),
    ("<pre>def f():\n    return 1\n\n\n\nx</pre>", "def f():\n    return 1\n\nx"),
    ("<title>T</title><body>&lt;tag&gt; &amp; &auml;&#228;</body>", "T\n\n<tag> & ää"),
    ("x<!-- a comment <p>no</p> -->y", "xy"),
    ("x<script>alert('</p>')</script>y", "xy"),
    ("x<SCRIPT src=a>alert(1)</ScRiPt >y", "xy"),
    ("x<script/>alert(1)</script>y", "xy"),
    ("x<script>never closed", "x"),
    ("x<style>p { color: red }</style>y", "xy"),
    ("<body>x<noscript><p>enable it</p></body>y", "xy"),
    ("x<svg><text>label</text><svg><g/></svg></svg>y", "xy"),
    ("x<template><div>t</div></template>y", "xy"),
    ("x<p hidden onclick='alert(1)'>y", "x\n\ny"),
    ('<?xml version="1.0"?><html><script src="a.js"/><body>text</body></html>', "text"),
    ("<![CDATA[x]]>y &#xD800; &#0;", "y \N{REPLACEMENT CHARACTER} \N{REPLACEMENT CHARACTER}"),
    ("", ""),
]


@pytest.mark.parametrize(("page", "text"), PAGES)
def test_pages_lose_their_tags_and_scripts(page: str, text: str) -> None:
    assert html_text(page.encode()) == text


@pytest.mark.parametrize(
    ("head", "encoding"),
    [
        ("", "utf-8"),
        ("", "utf-8-sig"),
        ("", "utf-16"),
        ('<meta charset="windows-1251">', "cp1251"),
        ("<meta http-equiv=Content-Type content='text/html; charset=iso-8859-2'>", "iso8859-2"),
        ("<meta charset=unicode_escape>", "utf-8"),
        ("<meta charset=idna>", "utf-8"),
        ("<meta charset=hex>", "utf-8"),
        ("<meta charset=nonsense>", "utf-8"),
    ],
)
def test_pages_are_decoded_as_they_declare(head: str, encoding: str) -> None:
    word = "Жук" if encoding == "cp1251" else "Ősz" if encoding == "iso8859-2" else "näive"
    assert html_text(f"{head}<p>{word} \\n".encode(encoding)) == f"{word} \\n"


def test_binary_pages_and_other_encodings_raise() -> None:
    with pytest.raises(UnusableFileError, match="binary"):
        html_text(b"<p>\0</p>")
    with pytest.raises(UnusableFileError, match="not utf-8 text .byte 4."):
        html_text(b"<p>n\xe4ive")
