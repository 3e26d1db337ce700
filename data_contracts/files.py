"""Reads one file of a table as it is: CSV (cells as text) or Parquet. Owns flaws of the file, not of its values.

A flaw is a ``FileFlaw``, never an exception: the gate reports all of them. CSV may have a BOM, leading comment
lines (#), a spreadsheet's ``sep=`` line, comma, semicolon, tab or bar as separator, quoted separators and quoted
newlines. Columns that stand in the folder names (``model=phi-4-14b/``, as in the template library) count as columns.
"""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import BinaryIO, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

SEPARATORS: Final = (",", ";", "\t", "|")
PARQUET_MAGIC: Final = b"PAR1"
PACKED: Final = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "ZIP or an Excel workbook",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
}
FOREIGN: Final = {
    b"ARROW1": "an Arrow (Feather) file",
    b"ORC": "an ORC file",
    b"Obj\x01": "an Avro file",
    b"SQLite format 3": "an SQLite database",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook",
    b"PARE": "an encrypted Parquet file",
    b"{": "JSON",
    b"[": "JSON",
    b"<": "a web page or XML",
}
MAX_BYTES: Final = 1 << 30
MAX_CSV_BYTES: Final = 1 << 28
MAX_CSV_CELLS: Final = 25_000_000
MAX_UNPACKED_BYTES: Final = 1 << 32
MAX_TEXT_BYTES: Final = 1 << 30
MAX_PARQUET_ROWS: Final = 20_000_000
"""Larger files are refused unread: they are not a table of this pipeline, and would take the machine's memory.

A small file may say that it repeats one long text, or one number, many times: what counts is what it would take here.
``MAX_TEXT_BYTES``: all texts of a Parquet file, each counted as often as it is there.
"""

_END_OF_LINE: Final = re.compile(r"\r\n|\r|\n")
_SEP_LINE: Final = re.compile(r"sep=(.)$", re.IGNORECASE)
_PART: Final = re.compile(r"([a-z_]+)=([^/]+)")
NOT_TEXT: Final = "neither Parquet nor UTF-8 text"
CUT_OFF: Final = "the last line has no line end: the file may be cut off"
MAX_CELL_BYTES: Final = 1_000_000
_NUMBER_BYTES: Final = 8


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


def shown_path(path: Path) -> str:
    """The path as text that can be printed: names of files may hold line ends, and bytes that are no UTF-8."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return text if text.isprintable() else repr(text)[1:-1]


class NotReadable(Exception):
    """A file that is not there, is no plain file, is being written or is too large; the message says which."""


class PlainFile(NamedTuple):
    """Bytes of a file and the time of its last change, in seconds since 1970."""

    data: bytes
    modified_s: float


def read_plain(path: Path, max_bytes: int = MAX_BYTES, *, appended: bool = False) -> PlainFile:
    """All bytes of a plain file that nobody is writing. Raises NotReadable; never waits for a pipe or device.

    ``appended``: a log that only grows. It may have a writer, and what it held when it was opened is read.
    """
    try:
        # a pipe without a writer would be waited for
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            return _whole(file, max_bytes, appended=appended)
    except (OSError, ValueError) as error:
        message = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise NotReadable(message) from error


def _whole(file: BinaryIO, max_bytes: int, *, appended: bool) -> PlainFile:
    before = os.fstat(file.fileno())
    if not (S_ISREG(before.st_mode) or S_ISDIR(before.st_mode)):
        message = "is no plain file: a pipe or device may never end"
        raise NotReadable(message)
    if not appended and _is_open_for_writing(file.fileno()):
        message = "is being written: another program has it open for writing"
        raise NotReadable(message)
    if before.st_size > max_bytes:
        message = f"is larger than {max_bytes} bytes"
        raise NotReadable(message)
    data = file.read(before.st_size if appended else max_bytes + 1)
    after = os.fstat(file.fileno())
    if appended:
        if len(data) < before.st_size:
            message = "became shorter while it was read"
            raise NotReadable(message)
        return PlainFile(data, after.st_mtime)
    if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
        message = "is being written: it changed while it was read"
        raise NotReadable(message)
    return PlainFile(data, after.st_mtime)


def _is_open_for_writing(handle: int) -> bool:
    """Whether some program on this machine has the file open for writing; False where the system cannot tell.

    Linux refuses a read lease while there is a writer. The lease ends at once; a writer who comes in between waits
    that long, and the signal that tells us so is one that is ignored by default.
    """
    try:
        fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        # other reasons: somebody else's file, a file system without leases
        return error.errno == errno.EAGAIN
    fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def read_file(path: Path) -> RawTable:
    """Read a CSV or Parquet file, told apart by content. Never raises for what the file holds or lacks."""
    try:
        data = read_plain(path).data
    except NotReadable as error:
        return _unreadable(shown_path(path), str(error))
    return _with_parts(read_bytes(data, shown_path(path)), path)


def _with_parts(raw: RawTable, path: Path) -> RawTable:
    """Columns that the names of the folders state, where the file itself has none of that name."""
    table = raw.table
    if table is None:
        return raw
    for part in path.absolute().parent.parts:
        found = _PART.fullmatch(part)
        if found and found[1] not in table.column_names:
            table = table.append_column(found[1], pa.array([found[2]] * table.num_rows, pa.string()))
    return raw._replace(table=table)


def read_bytes(data: bytes, source: str) -> RawTable:
    """Read the bytes of a CSV or Parquet file."""
    if not data.strip():
        return _unreadable(source, "the file is empty")
    if len(data) > MAX_BYTES:
        return _unreadable(source, f"the file is larger than {MAX_BYTES} bytes")
    packed = [name for magic, name in PACKED.items() if data.startswith(magic)]
    if packed:
        return _unreadable(source, f"the file is packed ({packed[0]}): CSV or Parquet itself is needed")
    start = data.removeprefix(b"\xef\xbb\xbf").lstrip()[:16]
    foreign = [name for magic, name in FOREIGN.items() if start.startswith(magic)]
    if foreign:
        return _unreadable(source, f"the file is {foreign[0]}: CSV or Parquet is needed", _first_line(data))
    if data.startswith(PARQUET_MAGIC) or source.lower().endswith((".parquet", ".pq")):
        return _read_parquet(data, source)
    return _read_csv(data, source)


def _first_line(data: bytes) -> str:
    text = data[:200].decode("utf-8", "replace").lstrip().split("\n", 1)[0][:80]
    return text if text.isprintable() else ""


def _unreadable(source: str, text: str, value: str = "") -> RawTable:
    return RawTable(table=None, flaws=(FileFlaw(row=0, value=value, text=text),), source=source)


def _read_parquet(data: bytes, source: str) -> RawTable:
    try:
        about = pq.read_metadata(pa.BufferReader(data))
        found = _too_much(about)
        if found is not None:
            return RawTable(table=None, flaws=(found,), source=source)
        found = _too_long(data, [one.path for one in _leaves(about) if one.physical_type == "BYTE_ARRAY"])
        if found is not None:
            return RawTable(table=None, flaws=(found,), source=source)
        table = pq.read_table(pa.BufferReader(data))
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, NotImplementedError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return _unreadable(source, "not a whole Parquet file (truncated or corrupt)", first_line)
    return RawTable(table=table, flaws=(), source=source)


def _leaves(about: pq.FileMetaData) -> list[pq.ColumnSchema]:
    return [about.schema.column(number) for number in range(about.num_columns)]


def _too_much(about: pq.FileMetaData) -> FileFlaw | None:
    """What the file's own description says is more than may be; nothing was unpacked yet."""
    if about.num_rows > MAX_PARQUET_ROWS:
        return FileFlaw(0, str(about.num_rows), f"the file states more than {MAX_PARQUET_ROWS} rows")
    groups = [about.row_group(number) for number in range(about.num_row_groups)]
    stated = sum(group.total_byte_size for group in groups)
    numbers = texts = 0
    for number, leaf in enumerate(_leaves(about)):
        parts = [group.column(number) for group in groups]
        numbers += sum(part.num_values for part in parts) * max(leaf.length or 0, _NUMBER_BYTES)
        is_text = leaf.physical_type == "BYTE_ARRAY"
        texts += sum(part.total_uncompressed_size for part in parts) if is_text else 0
    if (most := max(stated, numbers)) > MAX_UNPACKED_BYTES:
        return FileFlaw(0, str(most), f"the file holds more than {MAX_UNPACKED_BYTES} bytes unpacked")
    if texts > MAX_TEXT_BYTES:
        return FileFlaw(0, str(texts), f"the file holds more than {MAX_TEXT_BYTES} bytes of text")
    return None


def _too_long(data: bytes, paths: Sequence[str]) -> FileFlaw | None:
    """A text that is longer than a cell may be, or texts that are more than may be once each row has its own."""
    total = 0
    for path in paths:
        for array in _text_parts(data, path):
            # a damaged file may point outside its dictionary
            array.validate(full=True)
            longest, num_bytes = _sizes(array)
            total += num_bytes
            if longest > MAX_CELL_BYTES:
                text = f"a text in column {path.partition('.')[0]} is longer than {MAX_CELL_BYTES} bytes"
                return FileFlaw(0, str(longest), text)
            if total > MAX_TEXT_BYTES:
                return FileFlaw(0, str(total), f"the file holds more than {MAX_TEXT_BYTES} bytes of text")
    return None


def _text_parts(data: bytes, path: str) -> Iterator[pa.Array]:
    """A column of texts as dictionaries, so that one long text for many rows is there once.

    One row group at a time: Arrow cannot join the dictionaries of lists.
    """
    file = pq.ParquetFile(pa.BufferReader(data), read_dictionary=[path])
    for number in range(file.num_row_groups):
        yield from file.read_row_group(number, columns=[path]).columns[0].chunks


def _sizes(array: pa.Array) -> tuple[int, int]:
    """Bytes of the longest text at any depth, and of all texts if each stood by itself."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        inner = [array.storage]
    elif pa.types.is_map(kind):
        inner = [array.keys, array.items]
    elif pa.types.is_struct(kind):
        inner = array.flatten()
    elif pa.types.is_nested(kind):
        inner = [array.flatten()]
    else:
        return _value_sizes(array)
    found = [_sizes(one) for one in inner]
    return max((longest for longest, _ in found), default=0), sum(num_bytes for _, num_bytes in found)


def _value_sizes(array: pa.Array) -> tuple[int, int]:
    values = array.dictionary if pa.types.is_dictionary(array.type) else array
    try:
        sizes = pc.fill_null(pc.binary_length(values), 0).to_numpy(zero_copy_only=False)
    except pa.ArrowNotImplementedError:
        # numbers beside the texts: how many there may be is bounded already
        return 0, 0
    if values is not array:
        sizes = sizes[array.indices.drop_null().to_numpy()]
    return int(sizes.max(initial=0)), int(sizes.sum(dtype="int64"))


def _read_csv(data: bytes, source: str) -> RawTable:
    if len(data) > MAX_CSV_BYTES:
        return _unreadable(source, f"the CSV is larger than {MAX_CSV_BYTES} bytes: use Parquet", str(len(data)))
    text, flaw = _decode(data)
    if flaw is not None:
        return RawTable(table=None, flaws=(flaw,), source=source)
    body = _without_comments(text)
    if not body.strip():
        return _unreadable(source, "the file has no header and no rows")
    body, separator = _separated(body)
    # a cell takes a hundred bytes or more, however short it is
    num_cells = body.count(separator) + body.count("\n") + body.count("\r")
    if num_cells > MAX_CSV_CELLS:
        return _unreadable(source, f"the CSV has more than {MAX_CSV_CELLS} cells: use Parquet", str(num_cells))
    try:
        rows = _rows(body, separator)
    except csv.Error as error:
        return _unreadable(source, "not well-formed CSV (an open quote?)", str(error))
    return _table_of(rows, source, ends_whole=body.endswith(("\n", "\r")))


def _decode(data: bytes) -> tuple[str, FileFlaw | None]:
    """Text of UTF-8, or of UTF-16 with its mark; else where the first byte stands that is none of it."""
    encoding = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        place = error.start
        shown = f"byte 0x{data[place]:02x} in line {data.count(b'\n', 0, place) + 1}" if place < len(data) else ""
        return "", FileFlaw(0, shown, NOT_TEXT)
    if "\0" in text:
        return "", FileFlaw(0, f"a NUL in line {text.count(chr(10), 0, text.index(chr(0))) + 1}", NOT_TEXT)
    return text, None


def _without_comments(text: str) -> str:
    while text.startswith("#"):
        text = _END_OF_LINE.split(text, maxsplit=1)[1] if _END_OF_LINE.search(text) else ""
    return text


def _separated(body: str) -> tuple[str, str]:
    """The text without a spreadsheet's ``sep=`` line, and what separates its cells."""
    header, *rest = _END_OF_LINE.split(body.lstrip("\r\n"), maxsplit=1)
    stated = _SEP_LINE.match(header)
    if stated and rest:
        return rest[0], stated[1]
    return body, max(SEPARATORS, key=lambda one: (header.count(one), -SEPARATORS.index(one)))


def _rows(body: str, separator: str) -> list[list[str]]:
    csv.field_size_limit(MAX_CELL_BYTES)
    reader = csv.reader(io.StringIO(body, newline=""), delimiter=separator, strict=True)
    return [row for row in reader if row]


def _without_blanks(rows: list[list[str]]) -> tuple[list[list[str]], list[FileFlaw]]:
    """Rows without what a spreadsheet leaves at the edges: empty rows at the end, empty columns without a name."""
    last = len(rows)
    while last > 1 and not any(cell.strip() for cell in rows[last - 1]):
        last -= 1
    flaws = (
        [FileFlaw(0, str(len(rows) - last), "empty rows at the end; ignored", warning=True)] if last < len(rows) else []
    )
    rows = rows[:last]
    width = len(rows[0])
    while width > 1 and not any(cell.strip() for row in rows for cell in row[width - 1 : width]):
        width -= 1
    if width < len(rows[0]):
        flaws.append(FileFlaw(0, str(len(rows[0]) - width), "empty columns without a name; ignored", warning=True))
        rows = [row[:width] + row[len(rows[0]) :] for row in rows]
    return rows, flaws


def _table_of(rows: list[list[str]], source: str, *, ends_whole: bool) -> RawTable:
    rows, flaws = _without_blanks(rows)
    header = [name.strip() for name in rows[0]]
    flaws += [FileFlaw(0, "", "a column has values and no name") for name in header if not name][:1]
    flaws += [FileFlaw(0, name, "column is named twice") for name, count in Counter(header).items() if count > 1]
    width = len(header)
    for number, row in enumerate(rows[1:], start=1):
        if len(row) != width:
            text = f"row has {len(row)} fields, the header has {width}"
            flaws.append(FileFlaw(number, ",".join(row)[:200], text))
    if any(not flaw.warning for flaw in flaws):
        return RawTable(table=None, flaws=tuple(flaws), source=source)
    if not ends_whole:
        flaws.append(FileFlaw(0, "", CUT_OFF, warning=True))
    cells = list(zip(*rows[1:], strict=True)) if len(rows) > 1 else [() for _ in header]
    table = pa.table({name: _texts(column) for name, column in zip(header, cells, strict=True)})
    return RawTable(table=table, flaws=tuple(flaws), source=source)


def _texts(cells: Sequence[str]) -> pa.Array:
    """Cells without blanks at their ends; an empty one is null."""
    trimmed = pc.utf8_trim_whitespace(pa.array(cells, pa.string()))
    return pc.if_else(pc.equal(trimmed, ""), pa.scalar(None, pa.string()), trimmed)
