"""Tables (CSV, TSV) and workbooks (Excel): a line for each row, a section for each sheet."""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from reader_rag.rag.reading.section import LabelledLines, Section, table_text
from reader_rag.rag.reading.text import decode

_SAMPLE = 1 << 14  # characters by which the delimiter is found
_MOST_FIELD = 1 << 26  # characters of a cell


def read(data: bytes, suffix: str, encoding: str) -> Iterator[Section]:
    """The rows of a table or of each sheet, with their numbers as `rows`, and the sheet's name as `sheet`.

    Formulas are their last computed values.

    Args:
        data: Content of the file.
        suffix: Suffix of its name, which selects the parser.
        encoding: Encoding of text without a byte order mark.
    """
    if suffix not in (".csv", ".tsv"):
        for name, rows in _old_sheets(data) if suffix == ".xls" else _sheets(data):
            numbered = ((number, [_text(value) for value in row]) for number, row in enumerate(rows, start=1))
            yield table_section(numbered, {"sheet": name})
        return
    text = decode(data, encoding)
    delimiter = "\t" if suffix == ".tsv" else _delimiter(text[:_SAMPLE])
    csv.field_size_limit(_MOST_FIELD)
    yield table_section(enumerate(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), start=1))


def table_section(rows: Iterable[tuple[int, Sequence[str]]], metadata: dict[str, str] | None = None) -> Section:
    """A table as a section; see `table_text`.

    Args:
        rows: Number and cells of each row.
        metadata: Where the table is in the file.
    """
    lines = LabelledLines("rows")
    for number, line in table_text(rows):
        lines.add(str(number), line)
    return lines.section(metadata)


def _delimiter(sample: str) -> str:
    try:
        return csv.Sniffer().sniff(sample, delimiters=",;\t|").delimiter
    except csv.Error:
        return ","


def _sheets(data: bytes) -> Iterator[tuple[str, Iterable[Iterable[Any]]]]:
    import openpyxl

    workbook = openpyxl.load_workbook(io.BytesIO(data), read_only=True, data_only=True)
    for sheet in workbook.worksheets:
        sheet.reset_dimensions()  # some programs write wrong ones
        yield sheet.title, sheet.iter_rows(values_only=True)


def _old_sheets(data: bytes) -> Iterator[tuple[str, Iterable[Iterable[Any]]]]:
    import xlrd

    with xlrd.open_workbook(file_contents=data, logfile=io.StringIO()) as book:
        for sheet in book.sheets():
            yield sheet.name, ([_old_value(cell, book.datemode) for cell in row] for row in sheet.get_rows())


def _old_value(cell: Any, datemode: int) -> Any:
    import xlrd

    if cell.ctype == xlrd.XL_CELL_DATE:
        try:
            return xlrd.xldate_as_datetime(cell.value, datemode)
        except (ValueError, OverflowError):
            return cell.value
    if cell.ctype == xlrd.XL_CELL_BOOLEAN:
        return bool(cell.value)
    return None if cell.ctype == xlrd.XL_CELL_ERROR else cell.value


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, datetime.datetime):
        return value.isoformat(" ").removesuffix(" 00:00:00")
    return str(value)
