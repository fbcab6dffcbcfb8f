"""Real files of many formats about birds, made by libraries; each says where in it the heron's sentence is."""

from __future__ import annotations

import datetime
import email.message
import io
import json
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field

OWL = "An owl hunts at night and finds mice by sound."
HERON = "A heron stands still in shallow water and spears fish."


@dataclass(frozen=True)
class MadeFile:
    """A file that has the owl in its first part and the heron in its second.

    Attributes:
        name: Name of the file.
        make: Makes its content.
        place: Metadata of the chunk with the heron that says where it is in the file.
        title: The same in words, as sources are shown.
        packages: Packages that make or read it.
    """

    name: str
    make: Callable[[], bytes]
    place: dict[str, str] = field(default_factory=dict)
    title: str = ""
    packages: tuple[str, ...] = ()


def saved(document: object) -> bytes:
    """What an object with `save` writes."""
    buffer = io.BytesIO()
    document.save(buffer)  # type: ignore[attr-defined]
    return buffer.getvalue()


def pdf(*pages: str) -> bytes:
    """A PDF with a page for each text, in lines of 80 characters; ASCII without brackets and backslashes."""
    kids = b" ".join(b"%d 0 R" % (4 + 2 * number) for number in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, len(pages)),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, page in enumerate(pages):
        lines = [page[at : at + 80].encode("ascii") for at in range(0, len(page), 80)]
        stream = b"BT /F1 11 Tf 14 TL 60 780 Td %s ET" % b" T* ".join(b"(%s) Tj" % line for line in lines)
        objects += [
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents %d 0 R"
            b" /Resources << /Font << /F1 3 0 R >> >> >>" % (5 + 2 * number),
            b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        ]
    body, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    trailer = b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, len(body))
    return body + b"xref\n0 %d\n0000000000 65535 f \n%s%s" % (len(objects) + 1, table, trailer)


def docx() -> bytes:
    """Word: headings of two levels, a table and a merged cell."""
    import docx

    document = docx.Document()
    document.add_heading("Birds", 0)
    document.add_heading("Owls", 1)
    document.add_paragraph(OWL)
    document.add_heading("Wading birds", 1)
    document.add_heading("Herons", 2)
    document.add_paragraph(HERON)
    table = document.add_table(rows=2, cols=2)
    for cell, text in zip((*table.rows[0].cells, *table.rows[1].cells), ("Bird", "Egg", "Heron", "blue"), strict=True):
        cell.text = text
    return saved(document)


def pptx() -> bytes:
    """PowerPoint: two slides; a text box, a group and notes on the second."""
    import pptx
    from pptx.util import Inches

    deck = pptx.Presentation()
    for title, text in (("Owls", OWL), ("Herons", HERON)):
        slide = deck.slides.add_slide(deck.slide_layouts[5])
        slide.shapes.title.text = title
        group = slide.shapes.add_group_shape()
        group.shapes.add_textbox(Inches(1), Inches(1), Inches(4), Inches(1)).text_frame.text = text
    slide.notes_slide.notes_text_frame.text = "Speak slowly."
    return saved(deck)


ROWS = (("Bird", "Says", "Eggs"), ("Owl", OWL, 3), ("Heron", HERON, 4))


def xlsx() -> bytes:
    """Excel: a sheet with a date, and one with a header, a number and a blank row."""
    import openpyxl

    workbook = openpyxl.Workbook()
    first = workbook.active
    first.title = "Diary"
    first.append([datetime.datetime(2024, 5, 1), "Saw nothing.", 1.0, True])
    second = workbook.create_sheet("Birds")
    for row in (ROWS[0], ROWS[1], (), ROWS[2]):
        second.append(row)
    return saved(workbook)


def xls() -> bytes:
    """Excel 97: two sheets."""
    import xlwt

    workbook = xlwt.Workbook()
    workbook.add_sheet("Diary").write(0, 0, "Saw nothing.")
    sheet = workbook.add_sheet("Birds")
    for number, row in enumerate(ROWS):
        for column, value in enumerate(row):
            sheet.write(number, column, value)
    return saved(workbook)


def odt() -> bytes:
    """OpenDocument text: headings of two levels."""
    import odfdo

    document = odfdo.Document("text")
    document.body.clear()
    for element in (
        odfdo.Header(1, "Owls"),
        odfdo.Paragraph(OWL),
        odfdo.Header(1, "Wading birds"),
        odfdo.Header(2, "Herons"),
        odfdo.Paragraph(HERON),
    ):
        document.body.append(element)
    return saved(document)


def ods() -> bytes:
    """OpenDocument spreadsheet: two sheets; the second ends with a million blank rows, as programs write them."""
    import odfdo

    document = odfdo.Document("spreadsheet")
    document.body.clear()
    document.body.append(odfdo.Table("Diary", width=1, height=1))
    table = odfdo.Table("Birds")
    for number, values in enumerate(ROWS):
        row = odfdo.Row()
        row.set_values(list(values))
        table.set_row(number, row)
    rest = odfdo.Row(width=3)
    rest.set_attribute("table:number-rows-repeated", "1048573")
    table.append(rest)
    document.body.append(table)
    return saved(document)


def odp() -> bytes:
    """OpenDocument presentation: two slides."""
    import odfdo

    document = odfdo.Document("presentation")
    document.body.clear()
    for name, text in (("Owls", OWL), ("Herons", HERON)):
        page = odfdo.DrawPage(name, name=name)
        page.append(odfdo.Frame.text_frame(text, size=("7cm", "5cm"), position=("1cm", "1cm")))
        document.body.append(page)
    return saved(document)


def epub() -> bytes:
    """EPUB: two chapters; the order is that of the package, not of the archive."""
    page = "<html xmlns='http://www.w3.org/1999/xhtml'><title>Birds</title><body><h2>{}</h2><p>{}</p></body></html>"
    container = """<?xml version="1.0"?>
      <container xmlns="urn:oasis:names:tc:opendocument:xmlns:container" version="1.0"><rootfiles>
      <rootfile full-path="OPS/book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>"""
    package = """<package xmlns="http://www.idpf.org/2007/opf" version="3.0"><manifest>
      <item id="b" href="text/b%20two.xhtml" media-type="application/xhtml+xml"/>
      <item id="a" href="text/a.xhtml" media-type="application/xhtml+xml"/>
      <item id="css" href="style.css" media-type="text/css"/></manifest>
      <spine><itemref idref="a"/><itemref idref="b"/></spine></package>"""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("mimetype", "application/epub+zip")
        archive.writestr("OPS/text/b two.xhtml", page.format("The heron", HERON))
        archive.writestr("META-INF/container.xml", container)
        archive.writestr("OPS/book.opf", package)
        archive.writestr("OPS/text/a.xhtml", page.format("The owl", OWL))
        archive.writestr("OPS/style.css", "p { color: red }")
    return buffer.getvalue()


def mail(subject: str, text: str) -> email.message.EmailMessage:
    """A message with an HTML alternative and an attachment."""
    message = email.message.EmailMessage()
    message["Subject"], message["From"], message["To"] = subject, "Ann <ann@example.org>", "bob@example.org"
    message["Date"] = "Wed, 01 May 2024 08:30:00 +0200"
    message.set_content(text)
    message.add_alternative(f"<p>{text}</p>", subtype="html")
    message.add_attachment(b"\x89PNG", maintype="image", subtype="png", filename="bird.png")
    return message


def mbox() -> bytes:
    """A mailbox of two messages."""
    parts = (mail("Owls", OWL), mail("Hérons", HERON))
    return b"".join(b"From ann@example.org Wed May  1 08:30:00 2024\n" + bytes(part) + b"\n" for part in parts)


def compound_file(streams: dict[str, bytes]) -> bytes:
    """A Compound File (the container of Outlook's files) of short streams, which no library here writes.

    All are in the stream of the root entry, in pieces of 64 bytes, as the format has it for those under 4,096 bytes.
    """
    none, end, fat_mark = 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFFD
    names = sorted(streams, key=lambda name: (len(name), name.upper()))
    mini, mini_fat, starts = b"", list[int](), dict[str, int]()
    for name in names:
        starts[name] = len(mini_fat)
        pieces = -(-len(streams[name]) // 64)
        mini_fat += [*range(len(mini_fat) + 1, len(mini_fat) + pieces), end]
        mini += streams[name].ljust(64 * pieces, b"\0")

    def entry(name: str, kind: int, right: int, child: int, start: int, size: int) -> bytes:
        encoded = name.encode("utf-16-le") + b"\0\0"
        links = struct.pack("<3I", none, right, child)
        return (
            encoded.ljust(64, b"\0")
            + struct.pack("<HBB", len(encoded), kind, 1)
            + links
            + bytes(36)
            + struct.pack("<IQ", start, size)
        )

    directory_sectors = -(-(len(names) + 1) // 4)
    mini_sectors, mini_fat_sectors = -(-len(mini) // 512), -(-len(mini_fat) // 128)
    sizes = (1, directory_sectors, mini_fat_sectors, mini_sectors)
    first_directory, first_mini_fat = 1, 1 + directory_sectors
    first_mini = first_mini_fat + mini_fat_sectors
    fat = [fat_mark]
    for count in sizes[1:]:
        fat += [*range(len(fat) + 1, len(fat) + count), end]
    directory = entry("Root Entry", 5, none, 1, first_mini, len(mini))
    for number, name in enumerate(names, start=1):
        right = number + 1 if number < len(names) else none
        directory += entry(name, 2, right, none, starts[name], len(streams[name]))
    header = bytes.fromhex("d0cf11e0a1b11ae1") + bytes(16) + struct.pack("<5H", 0x3E, 3, 0xFFFE, 9, 6) + bytes(10)
    header += struct.pack("<9I", 1, first_directory, 0, 4096, first_mini_fat, mini_fat_sectors, end, 0, 0)
    table = b"".join(struct.pack("<I", number) for number in fat).ljust(512, b"\xff")
    mini_table = b"".join(struct.pack("<I", number) for number in mini_fat).ljust(512 * mini_fat_sectors, b"\xff")
    content = directory.ljust(512 * directory_sectors, b"\0") + mini_table + mini.ljust(512 * mini_sectors, b"\0")
    return header.ljust(512, b"\xff") + table + content


def msg() -> bytes:
    """A message of Outlook."""
    texts = {
        0x0037: "Hérons",
        0x1000: f"{HERON}\r\n\r\nAnn",
        0x0C1A: "Ann",
        0x0C1F: "ann@example.org",
        0x001A: "IPM.Note",
    }
    streams = {f"__substg1.0_{tag:04X}001F": text.encode("utf-16-le") for tag, text in texts.items()}
    properties = bytes(32)  # of a message without recipients and attachments
    for tag, text in texts.items():
        properties += struct.pack("<HHIII", 0x001F, tag, 6, 2 * len(text) + 2, 0)
    sent = (datetime.datetime(2024, 5, 1, 6, 30) - datetime.datetime(1601, 1, 1)) // datetime.timedelta(microseconds=1)
    properties += struct.pack("<HHIQ", 0x0040, 0x0039, 6, sent * 10)
    return compound_file({**streams, "__properties_version1.0": properties})


def ipynb() -> bytes:
    """A notebook: two texts with a code cell each, the second with an output."""

    def cell(kind: str, source: str, outputs: list[object]) -> dict[str, object]:
        return {"cell_type": kind, "source": source.splitlines(keepends=True), "metadata": {}} | (
            {"outputs": outputs, "execution_count": 1} if kind == "code" else {}
        )

    printed = {"output_type": "stream", "name": "stdout", "text": [f"{HERON}\n"]}
    cells = [
        cell("markdown", "# Owls", []),
        cell("code", f"print('{OWL}')", []),
        cell("markdown", "# Herons\n\nThey wade.", []),
        cell("code", "describe('heron')", [printed]),
    ]
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}).encode()


HTML = f"<title>Birds</title><h1>Owls</h1><p>{OWL}</p><h1>Wading birds</h1><h2>Herons</h2><p>{HERON}</p>"
MARKDOWN = (
    f"---\ntitle: Birds\n---\n# Owls\n\n{OWL}\n\n```sh\n# no heading\n```\n\n"
    f"Wading birds\n===\n\n## *Herons*\n\n{HERON}\n"
)
RST = f"Owls\n====\n\n{OWL}\n\nWading birds\n============\n\nHerons\n------\n\n{HERON}\n\n----\n\nThe end.\n"
XML = (
    f"<birds><bird id='1'><name>Owl</name><says>{OWL}</says></bird>"
    f"<bird><says>{HERON[:8]}<b>{HERON[8:]}</b></says></bird></birds>"
)
RTF = rf"{{\rtf1\ansi\ansicpg1252{{\fonttbl{{\f0 Arial;}}}}\f0 {OWL}\par\par {HERON} Caf\'e9.\par}}"
RECORDS = [{"bird": "Owl", "says": OWL, "eggs": [3, 4]}, {"bird": "Heron", "says": HERON, "seen": {"year": 2024}}]
BELOW_HEADINGS = {"section": "Wading birds > Herons"}

FILES = (
    MadeFile("birds.txt", lambda: f"{OWL}\n\n{HERON}\n".encode(), {}, "birds.txt"),
    MadeFile("birds.pdf", lambda: pdf(OWL, HERON), {"page_label": "2"}, "birds.pdf, page 2", ("pypdf",)),
    MadeFile("birds.docx", docx, BELOW_HEADINGS, "birds.docx, section Wading birds > Herons", ("docx",)),
    MadeFile("birds.pptx", pptx, {"slide": "2"}, "birds.pptx, slide 2", ("pptx",)),
    MadeFile("birds.xlsx", xlsx, {"sheet": "Birds"}, "birds.xlsx, sheet Birds, rows 1-4", ("openpyxl",)),
    MadeFile("birds.xls", xls, {"sheet": "Birds"}, "birds.xls, sheet Birds, rows 1-3", ("xlrd", "xlwt")),
    MadeFile("birds.odt", odt, BELOW_HEADINGS, "birds.odt, section Wading birds > Herons", ("odfdo",)),
    MadeFile("birds.ods", ods, {"sheet": "Birds"}, "birds.ods, sheet Birds, rows 1-3", ("odfdo",)),
    MadeFile("birds.odp", odp, {"slide": "2"}, "birds.odp, slide 2", ("odfdo",)),
    MadeFile("birds.epub", epub, {"chapter": "The heron"}, "birds.epub, chapter The heron"),
    MadeFile("birds.rtf", RTF.encode, {}, "birds.rtf", ("striprtf",)),
    MadeFile("bird.eml", lambda: bytes(mail("Hérons", HERON)), {"subject": "Hérons"}, "bird.eml"),
    MadeFile("birds.mbox", mbox, {"message": "2", "subject": "Hérons"}, "birds.mbox, message 2"),
    MadeFile("bird.msg", msg, {"subject": "Hérons", "date": "2024-05-01 06:30:00+00:00"}, "bird.msg", ("oxmsg",)),
    MadeFile("birds.html", HTML.encode, BELOW_HEADINGS, "birds.html, section Wading birds > Herons"),
    MadeFile("birds.md", MARKDOWN.encode, BELOW_HEADINGS, "birds.md, section Wading birds > Herons"),
    MadeFile("birds.rst", RST.encode, BELOW_HEADINGS, "birds.rst, section Wading birds > Herons"),
    MadeFile("birds.ipynb", ipynb, {"cells": "3-4"}, "birds.ipynb, cells 3-4"),
    MadeFile("birds.csv", lambda: f"Bird;Says\nOwl;{OWL}\nHeron;{HERON}\n".encode(), {}, "birds.csv, rows 1-3"),
    MadeFile("birds.tsv", lambda: f"Bird\tSays\nOwl\t{OWL}\nHeron\t{HERON}\n".encode(), {}, "birds.tsv, rows 1-3"),
    MadeFile("birds.json", lambda: json.dumps(RECORDS).encode(), {}, "birds.json, items [0] to [1]"),
    MadeFile("birds.jsonl", lambda: "\n".join(map(json.dumps, RECORDS)).encode(), {}, "birds.jsonl, lines 1-2"),
    MadeFile("birds.xml", XML.encode, {}, "birds.xml, items bird[1] to bird[2]"),
)
