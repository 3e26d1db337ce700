"""Reads one file of a table as it is: CSV (cells as text) or Parquet. Owns flaws of the file, not of its values.

A flaw is a ``FileFlaw``, never an exception: the gate reports all of them. CSV may have a BOM, leading comment
lines (#), comma, semicolon, tab or bar as separator, quoted separators and quoted newlines.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

SEPARATORS: Final = (",", ";", "\t", "|")
PARQUET_MAGIC: Final = b"PAR1"
PACKED: Final = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "ZIP or an Excel workbook",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"BZh": "bzip2",
}
CUT_OFF: Final = "the last line has no line end: the file may be cut off"
_MAX_CELL: Final = 1_000_000


class FileFlaw(NamedTuple):
    """What is wrong with a file. ``row``: data row from 1, 0 for the file as a whole."""

    row: int
    value: str
    text: str
    warning: bool = False


class RawTable(NamedTuple):
    """A file's content before any contract: ``table`` is None if nothing could be read."""

    table: pa.Table | None
    flaws: tuple[FileFlaw, ...]
    source: str


def read_file(path: Path) -> RawTable:
    """Read a CSV or Parquet file, told apart by content. Never raises for what the file holds or lacks."""
    try:
        data = path.read_bytes()
    except OSError as error:
        return _unreadable(str(path), f"cannot be read: {error.strerror or error}")
    return read_bytes(data, str(path))


def read_bytes(data: bytes, source: str) -> RawTable:
    """Read the bytes of a CSV or Parquet file."""
    if not data.strip():
        return _unreadable(source, "the file is empty")
    packed = [name for magic, name in PACKED.items() if data.startswith(magic)]
    if packed:
        return _unreadable(source, f"the file is packed ({packed[0]}): CSV or Parquet itself is needed")
    if data.startswith(PARQUET_MAGIC) or source.lower().endswith((".parquet", ".pq")):
        return _read_parquet(data, source)
    return _read_csv(data, source)


def _unreadable(source: str, text: str, value: str = "") -> RawTable:
    return RawTable(table=None, flaws=(FileFlaw(row=0, value=value, text=text),), source=source)


def _read_parquet(data: bytes, source: str) -> RawTable:
    try:
        table = pq.read_table(pa.BufferReader(data))
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, NotImplementedError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return _unreadable(source, "not a whole Parquet file (truncated or corrupt)", first_line)
    return RawTable(table=table, flaws=(), source=source)


def _read_csv(data: bytes, source: str) -> RawTable:
    text = _decode(data)
    if text is None:
        return _unreadable(source, "neither Parquet nor UTF-8 text")
    body = _without_comments(text)
    if not body.strip():
        return _unreadable(source, "the file has no header and no rows")
    try:
        rows = _rows(body)
    except csv.Error as error:
        return _unreadable(source, "not well-formed CSV (an open quote?)", str(error))
    return _table_of(rows, source, ends_whole=body.endswith(("\n", "\r")))


def _decode(data: bytes) -> str | None:
    encoding = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _without_comments(text: str) -> str:
    while text.startswith("#"):
        _, _, text = text.partition("\n")
    return text


def _rows(body: str) -> list[list[str]]:
    csv.field_size_limit(_MAX_CELL)
    header = body.lstrip("\r\n").split("\n", 1)[0]
    separator = max(SEPARATORS, key=lambda mark: (header.count(mark), -SEPARATORS.index(mark)))
    reader = csv.reader(io.StringIO(body, newline=""), delimiter=separator, strict=True)
    return [row for row in reader if row]


def _table_of(rows: list[list[str]], source: str, *, ends_whole: bool) -> RawTable:
    header = [name.strip() for name in rows[0]]
    flaws = [FileFlaw(0, name, "column is named twice") for name, count in Counter(header).items() if count > 1]
    width = len(header)
    for number, row in enumerate(rows[1:], start=1):
        if len(row) != width:
            text = f"row has {len(row)} fields, the header has {width}"
            flaws.append(FileFlaw(number, ",".join(row)[:200], text))
    if flaws:
        return RawTable(table=None, flaws=tuple(flaws), source=source)
    if not ends_whole:
        flaws.append(FileFlaw(0, "", CUT_OFF, warning=True))
    cells = list(zip(*rows[1:], strict=True)) if len(rows) > 1 else [() for _ in header]
    columns = {name: [cell.strip() or None for cell in column] for name, column in zip(header, cells, strict=True)}
    table = pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})
    return RawTable(table=table, flaws=tuple(flaws), source=source)
