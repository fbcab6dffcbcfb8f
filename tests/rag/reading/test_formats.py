"""Every format that is read: a real file of each, where in it a sentence is, and the reasons of those that fail."""

from __future__ import annotations

import importlib
import io
import json
import re
import zipfile
from pathlib import Path

import made_files
import pytest
from made_files import FILES, HERON, MadeFile, mail, pdf, saved
from word_embedding import WordEmbedding

from reader_rag.config import ReadLimits
from reader_rag.rag import FaissStore, make_retriever
from reader_rag.rag.files import FileDocument, UnusableFileError, parse, whole_text
from reader_rag.rag.ingest import ingest
from reader_rag.rag.reading.formats import FORMATS
from reader_rag.rag.reading.formats.data import read as read_data
from reader_rag.rag.reading.formats.markup import read as read_markup
from reader_rag.rag.reading.process import ReadingProcess
from reader_rag.rag.reading.section import Section, table_text
from reader_rag.util.source_title import source_title

EXTRA = {format_.package for format_ in FORMATS if format_.package}


@pytest.fixture(scope="module")
def reading() -> ReadingProcess:
    """One process for all files."""
    with ReadingProcess() as process:
        yield process  # type: ignore[misc]


def parsed(reading: ReadingProcess, name: str, data: bytes) -> list[FileDocument]:
    """The documents of a file; skips where a package of the extra "files" is missing."""
    format_ = next((format_ for format_ in FORMATS if Path(name).suffix in format_.suffixes), None)
    if format_ is not None and format_.package:
        pytest.importorskip(format_.package, reason="needs the extra 'files'")
    return parse(Path("/docs") / name, data, reading)


def test_every_format_has_a_file_here() -> None:
    tested = {Path(file.name).suffix for file in FILES}
    same_parser = {".pptm", ".xlsm", ".xhtml", ".htm", ".markdown", ".ndjson"}
    untested = {suffix for format_ in FORMATS for suffix in format_.suffixes} - tested - same_parser
    assert untested == set()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_is_in_a_file_is_found_with_its_place(file: MadeFile, tmp_path: Path) -> None:
    for package in file.packages:
        pytest.importorskip(package, reason="needs the extra 'files'")
    path = tmp_path / "docs" / file.name
    path.parent.mkdir()
    path.write_bytes(file.make())
    embedding = WordEmbedding(model_name="words", embedded=[], limit=256)
    report = ingest(path, tmp_path / "store", embed_model=embedding)
    assert report.ok
    with FaissStore.open(tmp_path / "store", embed_model=embedding) as store:
        (best,) = make_retriever(store, embedding, top_k=1).retrieve("a heron stands in shallow water and spears fish")
    assert HERON in best.node.get_content()
    assert file.place.items() <= best.node.metadata.items()
    assert source_title(best.node.metadata) == file.title
    whole = parse(path, path.read_bytes())
    start, end = best.node.start_char_idx, best.node.end_char_idx  # type: ignore[attr-defined]
    texts = [whole_text(whole), *(document.text for document in whole)]
    assert best.node.get_content() in [text[start:end] for text in texts]


def test_text_formats_are_their_own_text_divided_at_headings(reading: ReadingProcess) -> None:
    for name, text in (("birds.md", made_files.MARKDOWN), ("birds.rst", made_files.RST)):
        documents = parsed(reading, name, text.encode())
        assert whole_text(documents) == text
        assert [text[document.start :].startswith(document.text) for document in documents] == [True] * len(documents)


@pytest.mark.parametrize(
    ("text", "sections"),
    [
        ("no heading", [""]),
        ("before\n# A\nx\n## B\ny\n# C\nz", ["", "A", "A > B", "C"]),
        ("# A\n\n## B\ntext", ["A > B"]),
        ("### C\nx\n# A\ny", ["C", "A"]),
        ("A\n===\nx\n\nB\n---\ny", ["A", "A > B"]),
        ("# A\n```\n# B\n```\n    # C\n> # D\n", ["A"]),
        ("# [A](http://x) *b* `c_d`\ntext", ["A b c_d"]),
        ("---\na: b\n---\ntext\n# A\nx", ["", "A"]),
        ("# A", ["A"]),
        ("#\ntext", [""]),
    ],
)
def test_headings_of_markdown(text: str, sections: list[str]) -> None:
    found = list(read_markup(text.encode(), ".md", "utf-8"))
    assert [section.metadata.get("section", "") for section in found] == sections
    assert "".join(section.text for section in found) == text


@pytest.mark.parametrize(
    ("text", "sections"),
    [
        ("A\n=\nx", [""]),
        ("One\n===\nx\n\nTwo\n---\ny\n\nThree\n=====\nz", ["One", "One > Two", "Three"]),
        ("=====\n Top\n=====\n\nSub\n===\nx", ["Top > Sub"]),
        ("text\n\n----\n\nmore", [""]),
        ("Long title\n===\nx", [""]),
        ("  indented\n==========\nx", [""]),
        ("=== ===\nA   B\n=== ===\n1   2\n=== ===", [""]),
    ],
)
def test_headings_of_restructuredtext(text: str, sections: list[str]) -> None:
    found = list(read_markup(text.encode(), ".rst", "utf-8"))
    assert [section.metadata.get("section", "") for section in found] == sections
    assert "".join(section.text for section in found) == text


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        ([["Bird", "Food"], ["Heron", "fish"], ["Owl", ""]], ["Bird | Food", "Bird: Heron; Food: fish", "Bird: Owl"]),
        ([["Bird", "2024"], ["Heron", "3"]], ["Bird | 2024", "Heron | 3"]),
        ([["Bird", ""], ["Heron", "3"]], ["Bird", "Heron | 3"]),
        ([["a", "a"], ["b", "c"]], ["a | a", "b | c"]),
        ([["Bird", "Food"], ["Heron", "fish", "more"]], ["Bird | Food", "Bird: Heron; Food: fish; more"]),
        ([["", ""], ["one\nline", " x "]], ["one line | x"]),
        ([], []),
    ],
)
def test_rows_of_tables_name_their_columns(rows: list[list[str]], lines: list[str]) -> None:
    assert [line for _, line in table_text(enumerate(rows))] == lines


@pytest.mark.parametrize(
    ("data", "suffix", "lines", "labels"),
    [
        ('{"a": {"b": [1, "x"]}, "c": null}', ".json", ["a.b: 1, x"], ("a",)),
        ('[{"a": true}, 2.5, "t\\nu"]', ".json", ["[0].a: true", "[1]: 2.5", "[2]: t", "u"],
         ("[0]", "[1]", "[2]", "[2]")),
        ('"one"', ".json", ["one"], ("",)),
        ('{"a": 1}\n\n{"a": 2, "b": "x\\ny"}\n', ".jsonl", ["a: 1", "a: 2; b: x y"], ("1", "3")),
        ('// a comment\n{"a": 1}', ".json", ["// a comment", '{"a": 1}'], ()),
        ("<a><b>x</b><b k='v'>y</b></a>", ".xml", ["b: x", "b k: v", "b: y"], ("b[1]", "b[2]", "b[2]")),
        ("<a>one <i>two</i> three</a>", ".xml", ["a: one two three"], ("a",)),
        ("<x:a xmlns:x='u'><x:b>t</x:b></x:a>", ".xml", ["b: t"], ("b[1]",)),
        ("<a>never closed &nbsp; text", ".xml", ["never closed text"], ()),
    ],
)  # fmt: skip
def test_values_of_data_have_their_path(data: str, suffix: str, lines: list[str], labels: tuple[str, ...]) -> None:
    (section,) = read_data(data.encode(), suffix, "utf-8")
    assert section.text.split("\n") == lines
    assert section.line_labels == labels


def test_files_are_read_in_the_encoding_that_is_given(reading: ReadingProcess) -> None:
    for name, text in (("a.csv", "Vogel;Ort\nKäuzchen;Höhle"), ("a.md", "# Käuzchen\nx"), ("a.html", "<p>Käuzchen")):
        with pytest.raises(UnusableFileError, match="not utf-8 text"):
            parse(Path(name), text.encode("latin-1"), reading)
        (document,) = parse(Path(name), text.encode("latin-1"), reading, encoding="latin-1")
        assert "Käuzchen" in document.text
    (document,) = parse(Path("a.html"), "<meta charset=utf-8><p>Käuzchen".encode(), reading, encoding="latin-1")
    assert document.text == "Käuzchen"


def test_no_reader_opens_a_connection_or_another_file(reading: ReadingProcess, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("password")
    entity = f'<!DOCTYPE a [<!ENTITY e SYSTEM "{secret.as_uri()}">]><a>&e;</a>'
    for name in ("a.xml", "a.html"):
        assert "password" not in "".join(document.text for document in parse(Path(name), entity.encode(), reading))
    included = f".. include:: {secret}\n\nTitle\n=====\n\ntext"
    assert "password" not in whole_text(parse(Path("a.rst"), included.encode(), reading))
    bomb = "<!DOCTYPE a [" + "".join(f'<!ENTITY e{i + 1} "{f"&e{i};" * 20}">' for i in range(9))
    bomb = bomb.replace("&e0;", "lol") + "]><a>&e9;</a>"
    with ReadingProcess(ReadLimits(read_seconds=20, memory_bytes=64 << 20)) as bounded:
        try:
            text = whole_text(parse(Path("bomb.xml"), bomb.encode(), bounded))
        except UnusableFileError as error:
            assert re.search("memory|holds more", str(error))  # noqa: PT017
        else:
            assert len(text) < 10_000


def encrypted_pdf(password: str) -> bytes:
    """A PDF that can be read without a password if it is empty."""
    pypdf = pytest.importorskip("pypdf", reason="needs the extra 'files'")
    pytest.importorskip("cryptography", reason="needs the extra 'files'")
    writer = pypdf.PdfWriter(io.BytesIO(pdf(HERON)))
    writer.encrypt(password, "owner", algorithm="AES-256")
    buffer = io.BytesIO()
    writer.write(buffer)
    return buffer.getvalue()


def test_a_pdf_is_encrypted_or_protected_from_changes_only(reading: ReadingProcess) -> None:
    (page,) = parsed(reading, "a.pdf", encrypted_pdf(""))
    assert page.text == HERON
    with pytest.raises(UnusableFileError, match="^encrypted: save it without its password$"):
        parsed(reading, "a.pdf", encrypted_pdf("secret"))


def test_a_workbook_with_macros_is_read_as_one_without(reading: ReadingProcess) -> None:
    pytest.importorskip("openpyxl", reason="needs the extra 'files'")
    data = made_files.xlsx()
    assert [d.text for d in parsed(reading, "a.xlsm", data)] == [d.text for d in parsed(reading, "a.xlsx", data)]


def test_footnotes_of_word_are_read(reading: ReadingProcess) -> None:
    docx = pytest.importorskip("docx", reason="needs the extra 'files'")
    from docx.opc.packuri import PackURI
    from docx.opc.part import Part

    document = docx.Document()
    document.add_paragraph("Herons wade.")
    name = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    note = "<w:footnote><w:p><w:r><w:t>See Audubon.</w:t></w:r></w:p></w:footnote>"
    notes = f'<w:footnotes xmlns:w="{name}">{note}</w:footnotes>'
    kind = "application/vnd.openxmlformats-officedocument.wordprocessingml.footnotes+xml"
    part = Part(PackURI("/word/footnotes.xml"), kind, notes.encode(), document.part.package)
    document.part.relate_to(part, "http://schemas.openxmlformats.org/officeDocument/2006/relationships/footnotes")
    assert whole_text(parsed(reading, "a.docx", saved(document))) == "Herons wade.\n\nSee Audubon."


def test_mail_without_a_plain_body_and_with_broken_headers(reading: ReadingProcess) -> None:
    html = b"Subject: =?utf-8?q?H=C3=A9rons?=\nContent-Type: text/html; charset=latin-1\n\n<p>Caf\xe9<script>x</script>"
    (message,) = parse(Path("a.eml"), html, reading)
    assert message.text == "Subject: Hérons\n\nCafé"
    broken = b"From: <<>\nSubject: x\nContent-Type: text/plain; charset=nonsense\n\nbody \xff"
    (message,) = parse(Path("a.eml"), broken, reading)
    assert message.text.endswith("body \N{REPLACEMENT CHARACTER}")
    assert message.metadata["subject"] == "x"


def test_a_body_of_mail_keeps_its_lines(reading: ReadingProcess) -> None:
    (message,) = parse(Path("a.eml"), bytes(mail("Herons", "one\n\n  two\n")), reading)
    assert message.text.endswith("\n\none\n\n  two")


def test_messages_of_outlook_are_read(reading: ReadingProcess) -> None:
    (message,) = parsed(reading, "a.msg", made_files.msg())
    assert message.text == (
        'Subject: Hérons\nFrom: "Ann" <ann@example.org>\nDate: Wed, 01 May 2024 06:30:00 +0000\n\n' + HERON + "\n\nAnn"
    )


def test_notebooks_of_the_old_format_are_read(reading: ReadingProcess) -> None:
    cells = [{"cell_type": "markdown", "source": "# Herons"}, {"cell_type": "code", "input": ["x = 1\n", "y"]}]
    old = {"nbformat": 3, "worksheets": [{"cells": cells}]}
    (section,) = parse(Path("a.ipynb"), json.dumps(old).encode(), reading)
    assert (section.text, section.metadata["cells"]) == ("# Herons\n\nx = 1\ny", "1-2")


REASONS = {
    "a.pdf": (b"%PDF-1.4 and then nonsense", r"^not a readable \.pdf file: \w+"),
    "empty.pdf": (pdf(""), r"^its 1 pages hold no text \(scanned\?\); run text recognition on it$"),
    "a.docx": (b"no archive", "^not a readable Word file: damaged, or of another format$"),
    "other.docx": (made_files.epub(), "^not a readable .docx file: (damaged, or of another format|.*)$"),
    "old.docx": (bytes.fromhex("d0cf11e0a1b11ae1") + b"\0" * 100, "^encrypted, or of an old version: save it as .docx"),
    "a.doc": (bytes.fromhex("d0cf11e0a1b11ae1") + b"\0" * 100, "^.doc files cannot be read: save it as .docx$"),
    "a.ppt": (bytes.fromhex("d0cf11e0a1b11ae1") + b"\0" * 100, "^.ppt files cannot be read: save it as .pptx$"),
    "a.epub": (b"PK\x05\x06" + bytes(18), "^not a readable .epub file: it names no book$"),
    "a.rtf": (b"no rtf", "^not a readable .rtf file: it does not begin with"),
    "a.eml": (b"\n\njust text", "^not a readable mail: it has no subject, sender and date$"),
    "a.mbox": (b"just text", "^not a readable .mbox file: no line begins a message with 'From '$"),
    "a.ipynb": (b"[1, 2]", "^not a readable .ipynb file: it has no cells$"),
    "b.ipynb": (b"{", "^not a readable .ipynb file: Expecting property name"),
    "a.xls": (b"no workbook", "^not a readable .xls file: Unsupported format"),
    "a.html": (b"<p>\0", "^binary$"),
    "a.csv": (b"a,b\n\xff,1", r"^not utf-8 text \(byte 4\); convert it to UTF-8"),
}


@pytest.mark.parametrize("name", REASONS)
def test_reasons_are_words(name: str, reading: ReadingProcess) -> None:
    data, reason = REASONS[name]
    with pytest.raises(UnusableFileError, match=reason) as caught:
        parsed(reading, name, data)
    assert not re.search(r"Error|object at|\[<|NoneType", str(caught.value))


def test_deep_data_is_read_or_named(reading: ReadingProcess) -> None:
    deep = b"[" * 200_000 + b"]" * 200_000
    with pytest.raises(UnusableFileError, match="^not a readable .json file: nested too deep$"):
        parse(Path("a.json"), deep, reading)
    xml = b"<a>" * 50_000 + b"text" + b"</a>" * 50_000
    assert parse(Path("a.xml"), xml, reading)[0].text == "a: text"


def test_without_the_extra_its_formats_name_the_command_and_the_others_are_read(
    monkeypatch: pytest.MonkeyPatch, reading: ReadingProcess
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in EXTRA else found(name))
    for file in FILES:
        if not file.packages:
            assert parse(Path(file.name), file.make(), reading)
    for format_ in FORMATS:
        if format_.package:
            with pytest.raises(UnusableFileError, match=r"pip install 'reader-rag\[files\]'"):
                parse(Path(f"a{format_.suffixes[0]}"), b"x", reading)


def test_chunks_of_a_long_table_have_their_own_rows(tmp_path: Path) -> None:
    path = tmp_path / "birds.csv"
    path.write_text("Bird,Number\n" + "".join(f"Bird {i},{i}\n" for i in range(200)))
    embedding = WordEmbedding(model_name="words", embedded=[], limit=48)
    ingest(path, tmp_path / "store", embed_model=embedding, chunk_overlap=0)
    with FaissStore.open(tmp_path / "store") as store:
        nodes = store.get_nodes()
    ranges = [node.metadata["rows"].split("-") for node in nodes]
    assert len(nodes) > 10
    assert [int(first) for first, _ in ranges] == [1, *(int(last) + 1 for _, last in ranges[:-1])]
    assert ranges[-1][1] == "201"
    for node, (first, last) in zip(nodes, ranges, strict=True):
        numbers = [int(number) for number in re.findall(r"Number: (\d+)", node.get_content())]
        assert numbers == [row - 2 for row in range(int(first), int(last) + 1) if row > 1]


def test_sheets_of_an_archive_are_read_in_order_and_blank_ones_left_out(reading: ReadingProcess) -> None:
    openpyxl = pytest.importorskip("openpyxl", reason="needs the extra 'files'")
    workbook = openpyxl.Workbook()
    workbook.create_sheet("Blank")
    workbook.create_sheet("Second").append(["b"])
    workbook.active.append(["a"])
    documents = parsed(reading, "a.xlsx", saved(workbook))
    assert [(document.metadata["sheet"], document.text) for document in documents] == [("Sheet", "a"), ("Second", "b")]


def test_an_archive_that_is_no_document_is_named(reading: ReadingProcess) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.txt", "text")
    for suffix in (".docx", ".pptx", ".xlsx", ".odt", ".epub"):
        with pytest.raises(UnusableFileError, match="^not a readable"):
            parsed(reading, f"a{suffix}", buffer.getvalue())


def test_sections_are_sent_whole() -> None:
    with ReadingProcess() as process:
        assert process.read(b"a,b\n1,2", ".csv") == [Section("a | b\na: 1; b: 2", {}, 0, "rows", ("1", "2"))]
