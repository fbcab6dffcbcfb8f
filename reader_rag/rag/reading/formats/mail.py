"""Mail (.eml, .mbox, Outlook's .msg): a section for each message."""

from __future__ import annotations

import email.policy
import email.utils
import io
import mailbox
import tempfile
from collections.abc import Iterable, Iterator
from email.message import EmailMessage
from email.parser import BytesParser
from pathlib import Path
from typing import Any

from reader_rag.rag.reading.formats.html import html_text
from reader_rag.rag.reading.section import Section
from reader_rag.rag.reading.text import UnusableFileError

_PARSER: Any = BytesParser(policy=email.policy.default)


def read(data: bytes, suffix: str, encoding: str) -> Iterator[Section]:
    """The messages of a file, with subject, sender and date in their metadata; those of a mailbox have a number too.

    Attachments are named, not read.

    Args:
        data: Content of the file.
        suffix: Suffix of its name: one message, a mailbox, or a message of Outlook.
        encoding: Encoding of HTML bodies that declare none.

    Raises:
        UnusableFileError: The content is no mail.
    """
    if suffix == ".msg":
        yield _outlook(data, encoding)
        return
    if suffix == ".eml":
        yield _message(_PARSER.parsebytes(data), encoding)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mbox"
        path.write_bytes(data)
        box = mailbox.mbox(path, factory=lambda file: _PARSER.parse(file), create=False)
        number = 0
        for number, message in enumerate(box, start=1):
            yield _message(message, encoding, number)
        if not number:
            raise UnusableFileError("not a readable .mbox file: no line begins a message with 'From '")


def _message(message: EmailMessage | Any, encoding: str, number: int | None = None) -> Section:
    head = {name: _header(message, name) for name in ("Subject", "From", "To", "Cc", "Date")}
    if not any(head.values()):
        raise UnusableFileError("not a readable mail: it has no subject, sender and date")
    body = message.get_body(preferencelist=("plain", "html"))
    names = [str(part.get_filename()) for part in message.iter_attachments() if part.get_filename()]
    return _section(head, "" if body is None else _content(body, encoding), names, number)


def _header(message: EmailMessage, name: str) -> str:
    try:
        return str(message.get(name, ""))
    except (AttributeError, IndexError, ValueError):  # the parser of the standard library fails at some headers
        return ""


def _content(body: Any, encoding: str) -> str:
    data = body.get_payload(decode=True) or b""
    if body.get_content_subtype() == "html":
        return html_text(data, body.get_content_charset() or encoding)
    try:
        return str(body.get_content())
    except (LookupError, ValueError):  # an unknown encoding
        return str(data.decode("utf-8", "replace"))


def _outlook(data: bytes, encoding: str) -> Section:
    from oxmsg import Message

    message = Message.load(io.BytesIO(data))
    sent = message.sent_date
    head = {
        "Subject": message.subject or "",
        "From": message.sender or "",
        "To": ", ".join(f"{one.name} <{one.email_address}>".strip() for one in message.recipients),
        "Date": "" if sent is None else email.utils.format_datetime(sent),
    }
    body = message.body or html_text((message.html_body or "").encode(), encoding)
    return _section(head, body, [str(one.file_name) for one in message.attachments if one.file_name])


def _section(head: dict[str, str], body: str, attachments: Iterable[str] = (), number: int | None = None) -> Section:
    """A message as a section.

    Args:
        head: Its headers, by name; those without text are left out.
        body: Its text.
        attachments: Names of what is attached.
        number: Its number in a mailbox, from 1; None: it is the only one.
    """
    lines = [f"{name}: {text}" for name, text in head.items() if text]
    lines += [f"Attachment: {name}" for name in attachments]
    metadata = {"message": "" if number is None else str(number), "subject": head.get("Subject", "")}
    metadata |= {"sender": head.get("From", ""), "date": _date(head.get("Date", ""))}
    text = "\n".join(lines) + "\n\n" + body.replace("\r\n", "\n").replace("\r", "\n").strip("\n")
    return Section(text, {name: value for name, value in metadata.items() if value})


def _date(text: str) -> str:
    """A date as `2024-05-01 08:30:00+02:00`; what is no date as it is."""
    try:
        return email.utils.parsedate_to_datetime(text).isoformat(" ")
    except ValueError:
        return text
