"""Data (JSON, JSON lines, XML): a line for each value, with its path or name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

from reader_rag.rag.reading.formats.html import html_text
from reader_rag.rag.reading.section import LabelledLines, Section
from reader_rag.rag.reading.text import decode
from reader_rag.util.one_line import one_line

_SHORT_LIST = 200  # characters: a list of texts and numbers that is no longer is one value


def read(data: bytes, suffix: str, encoding: str) -> Iterator[Section]:
    """The values of a file, in a line each: `birds[0].name: Heron` of JSON, `name: Heron` of XML.

    Labels name the part of the file: `items` the topmost key, the number in a list or the element below the root;
    `lines` the line of a file with a value in each line. Content that is not valid JSON is text itself, content that is
    not well-formed XML loses its tags. Entities of other files are not read.

    Args:
        data: Content of the file.
        suffix: Suffix of its name.
        encoding: Encoding of text without a byte order mark.
    """
    if suffix == ".xml":
        yield _of_xml(data, encoding)
        return
    text = decode(data, encoding)
    try:
        yield _of_lines(text) if suffix != ".json" else _of_value(json.loads(text))
    except ValueError:  # comments, or a file that was cut off
        yield Section(text)


def _of_value(value: Any) -> Section:
    lines = LabelledLines("items")
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else [("", value)]
    for key, part in parts:
        label = f"[{key}]" if isinstance(value, list) else str(key)
        for line in _lines(part, label):
            lines.add(label, line)
    return lines.section()


def _of_lines(text: str) -> Section:
    lines = LabelledLines("lines")
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            lines.add(str(number), "; ".join(" ".join(entry.split()) for entry in _lines(json.loads(line), "")))
    return lines.section()


def _lines(value: Any, path: str) -> Iterator[str]:
    """`path: value` of each value that holds no others; null and empty ones are left out."""
    waiting = [(path, value)]
    while waiting:  # not by recursion: values may be nested deeper than Python's stack
        path, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(f"{path}.{key}" if path else str(key), part) for key, part in value.items()][::-1]
        elif isinstance(value, list):
            flat = all(isinstance(part, (str, int, float)) for part in value)
            joined = ", ".join(_text(part) for part in value) if flat else ""
            if flat and len(joined) <= _SHORT_LIST:
                waiting.append((path, joined))
            else:
                waiting += [(f"{path}[{number}]", part) for number, part in enumerate(value)][::-1]
        elif value is not None and value != "":
            yield f"{path}: {_text(value)}" if path else _text(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _of_xml(data: bytes, encoding: str) -> Section:
    try:
        root = ElementTree.fromstring(data)
    except ElementTree.ParseError:
        return Section(html_text(data, encoding))
    lines = LabelledLines("items")
    counts: dict[str, int] = {}
    for line in _own_lines(root):
        lines.add(_name(root.tag), line)
    for part in root if not _is_mixed(root) else ():
        name = _name(part.tag)
        counts[name] = counts.get(name, 0) + 1
        for line in _element_lines(part):
            lines.add(f"{name}[{counts[name]}]", line)
    return lines.section()


def _element_lines(element: ElementTree.Element) -> Iterator[str]:
    waiting = [element]
    while waiting:  # not by recursion: elements may be nested deeper than Python's stack
        element = waiting.pop()
        yield from _own_lines(element)
        if not _is_mixed(element):
            waiting += list(element)[::-1]


def _own_lines(element: ElementTree.Element) -> Iterator[str]:
    name = _name(element.tag)
    for key, value in element.attrib.items():
        if value.strip():
            yield f"{name} {_name(key)}: {one_line(value)}"
    text = "".join(element.itertext()) if _is_mixed(element) else element.text or ""
    if text.strip():
        yield f"{name}: {one_line(text)}"


def _is_mixed(element: ElementTree.Element) -> bool:
    """Whether an element has elements within its text."""
    if not len(element):
        return False
    return bool((element.text or "").strip()) or any((part.tail or "").strip() for part in element)


def _name(tag: object) -> str:
    return str(tag).rpartition("}")[2]
