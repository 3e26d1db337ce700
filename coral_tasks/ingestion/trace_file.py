"""Reads request traces: one row for each request, with its time and its tokens (the form of the Azure traces).

Owns what counts as a row. Every row that does not is named, and none is guessed at or left out. A time with an offset
is that moment; a time without one is UTC, as in the published traces; one file must not mix the two. Columns of a
Parquet file count as the text that they would be in CSV. A log that still grows (``read_log``) may have a writer and an
open last line. A column ``model`` names each request's model.
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from coral_tasks.domain.errors import StorageFault, ValidationFailed, Violation
from data_contracts.files import (
    MAX_CSV_BYTES,
    PACKED,
    PARQUET_MAGIC,
    NotReadable,
    PlainFile,
    RawTable,
    read_bytes,
    read_plain,
    shown_path,
)

COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MODEL: Final = "model"
"""Column of a log that names each request's model, in any case."""

MAX_TOKENS: Final = 10_000_000
"""Tokens of one request; more is a number of another kind."""

MAX_TOLD: Final = 1000
"""Violations that a message holds; it says how many more there are."""

_GZIP: Final = b"\x1f\x8b"
_UNPACK_AT_ONCE: Final = 1 << 20
_LOCAL: Final = r"-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,9})?"
_ZONE: Final = r"(?P<zone>Z|[+-][0-9]{2}(?::?[0-9]{2})?)"
_TIME: Final = re.compile(f"[0-9]{{4}}{_LOCAL}{_ZONE}?")
_NEAR_YEAR: Final = "(?:19[789]|20[0-9]|21[0-9])[0-9]"
"""Years that fit nanoseconds in 64 bits."""

_SECONDS: Final = re.compile(r"[0-9]{1,10}(?:\.[0-9]{1,9})?")
_COUNT: Final = re.compile(r"[0-9]{1,12}")
_YEARS: Final = range(1970, 9999)
_RULE: Final = (
    f"needs a time from {_YEARS[0]} on and, in whole numbers from 0 to {MAX_TOKENS}, prompt and output tokens"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """Requests in time order: seconds since the first, prompt and output tokens, each of shape (N,).

    ``started_at``: moment of the first request, if known. ``models``: names as the trace states them, shape (N,); None
    if it has no such column.
    """

    name: str
    offset_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    started_at: datetime | None = None
    models: NDArray[np.object_] | None = None

    @property
    def duration_s(self) -> float:
        """Seconds from first to last request."""
        return float(self.offset_s[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLog:
    """Requests in the order of the file: seconds since 1970, prompt and output tokens, each of shape (N,).

    ``models``: names as the log states them, shape (N,); None if it has no such column. ``modified_s``: last change of
    the file, seconds since 1970. ``num_bytes``: of the file, unpacked. ``is_open``: the last line had no end and was
    left out. ``is_cut``: the packed file has no end, and this is what it holds so far.
    """

    name: str
    at_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    models: NDArray[np.object_] | None
    modified_s: float
    num_bytes: int
    is_open: bool
    is_cut: bool = False


def is_trace(path: Path) -> bool:
    """Whether the file's columns are a trace's. Raises StorageFault if it cannot be read."""
    data = _data(path).data
    if data.startswith(PARQUET_MAGIC):
        return set(COLUMNS) <= set(_parquet_names(data))
    start = data[:1000]
    encoding = "utf-16" if start.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8"
    first = (start.decode(encoding, "replace").lstrip("\ufeff \r\n").splitlines() or [""])[0]
    return set(COLUMNS) <= {name.strip(' "') for name in re.split(r"[,;\t|]", first)}


def _parquet_names(data: bytes) -> list[str]:
    try:
        return list(pq.read_schema(pa.BufferReader(data)).names)
    except (pa.ArrowException, OSError):
        return []


def read_trace(path: Path) -> RequestTrace:
    """Read a trace (CSV, maybe gzip, or Parquet): TIMESTAMP, ContextTokens, GeneratedTokens and, if there, model.

    Other columns are passed over. Raises StorageFault (not to be read, or packed data that is not whole) or
    ValidationFailed (every bad row).
    """
    name = _name(path)
    raw = read_bytes(_data(path).data, shown_path(path))
    return _trace(name, _as_rows(_columns(name, raw, _log_columns(name, raw))))


def read_log(path: Path, *, start: datetime | None = None, name: str = "", maybe_cut: bool = False) -> RequestLog:
    """Read a log to which requests are still added: a trace, with a column ``model`` or without; it may hold no row.

    ``start``: the moment from which its times count, where they are seconds; without it they must be moments.
    ``name``: of the log in messages. ``maybe_cut``: a packed file without an end is read as far as it goes. Raises what
    ``read_trace`` does.
    """
    name = name or _name(path)
    file, is_cut = _data_so_far(path, appended=True, maybe_cut=maybe_cut)
    data, is_open = _without_open_line(file.data)
    # a log that was begun a moment ago has no header yet
    columns = [pa.array([], pa.string())] * len(COLUMNS)
    if data.strip():
        raw = read_bytes(data, shown_path(path))
        columns = _columns(name, raw, _log_columns(name, raw))
    # rows one by one take ten times as long, and are needed only to say what is wrong
    values = _all_values(columns, start) or _row_values(name, columns, start)
    return RequestLog(
        name=name,
        at_s=values.at_s,
        prompt_tokens=values.prompt_tokens,
        output_tokens=values.output_tokens,
        models=_names_of(columns[-1]) if len(columns) > len(COLUMNS) else None,
        modified_s=file.modified_s,
        num_bytes=len(file.data),
        is_open=is_open,
        is_cut=is_cut,
    )


def _names_of(column: pa.ChunkedArray) -> NDArray[np.object_]:
    """Names of all rows; rows of one name share one text."""
    encoded = pc.dictionary_encode(column.combine_chunks())
    return np.asarray(np.array(encoded.dictionary.to_pylist(), dtype=object)[encoded.indices.to_numpy()])


def _name(path: Path) -> str:
    return shown_path(Path(path.name.removesuffix(".gz").removesuffix(".csv").removesuffix(".parquet")))


def _without_open_line(data: bytes) -> tuple[bytes, bool]:
    """``data`` up to its last line end, and whether there was more: a line that is still being written."""
    if data.startswith((PARQUET_MAGIC, *PACKED)):
        # no lines: such a file is read, or refused, as a whole
        return data, False
    wide = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    if wide:
        # half a character at the end belongs to the open line; what is broken before it stays broken
        data = data[: len(data) // 2 * 2].decode("utf-16", "surrogatepass").encode("utf-8", "surrogatepass")
    end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
    return data[:end], end < len(data)


def _log_columns(name: str, raw: RawTable) -> tuple[str, ...]:
    named = [] if raw.table is None else [one for one in raw.table.column_names if one.lower() == MODEL]
    if len(named) > 1:
        raise ValidationFailed([_violation(name, 0, ",".join(named)[:200], "two columns name the model")])
    return (*COLUMNS, *named)


def _as_rows(columns: Sequence[pa.ChunkedArray]) -> list[tuple[str | None, ...]]:
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


def _columns(name: str, raw: RawTable, columns: Sequence[str]) -> list[pa.ChunkedArray]:
    """Columns as text. Raises ValidationFailed for the file's flaws and for columns that are not there."""
    if raw.table is None:
        raise ValidationFailed(first_told(_violation(name, flaw.row, flaw.value, flaw.text) for flaw in raw.flaws))
    there = raw.table.column_names
    if not set(columns) <= set(there):
        rule = f"the header must name {', '.join(COLUMNS)}"
        raise ValidationFailed([_violation(name, 0, ",".join(there)[:200], rule)])
    return [_as_text(name, one, raw.table.column(one)) for one in columns]


def _as_text(name: str, title: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column as CSV would hold it, an empty text as none. Raises ValidationFailed for a type that has no text."""
    try:
        text = _plain_values(column).cast(pa.string())
    except (pa.ArrowException, NotImplementedError) as error:
        rule = f"column {title} has type {column.type}, which holds no times, counts or names"
        raise ValidationFailed([_violation(name, 0, str(error).split("\n", 1)[0][:200], rule)]) from error
    trimmed = pc.utf8_trim_whitespace(text)
    if title == COLUMNS[0]:
        # as BigQuery writes it
        trimmed = pc.replace_substring_regex(trimmed, " ?UTC$", "Z")
    return pc.if_else(pc.equal(trimmed, ""), pa.scalar(None, pa.string()), trimmed)


def _plain_values(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Dictionaries decoded, times in UTC, whole numbers of any type as integers."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _plain_values(column.cast(kind.value_type))
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return column.cast(pa.timestamp(kind.unit, "UTC"))
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        try:
            return column.cast(pa.int64())
        except pa.ArrowInvalid:
            # not all are whole: those that are not are told by their rows
            return column
    return column


class _Values(NamedTuple):
    """Seconds since 1970, prompt and output tokens, each of shape (N,)."""

    at_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]


def _row_values(name: str, columns: Sequence[pa.ChunkedArray], start: datetime | None) -> _Values:
    """Values of all rows. Raises ValidationFailed with every bad row."""
    rows = _as_rows(columns)
    _require_moments(name, [row[0] or "" for row in rows], start)
    found = _requests(name, rows, _moment if start is None else _seconds_after(start))
    return _Values(
        np.array([one.at for one in found], dtype=np.float64),
        np.array([one.prompt for one in found], dtype=np.int64),
        np.array([one.output for one in found], dtype=np.int64),
    )


def _all_values(columns: Sequence[pa.ChunkedArray], start: datetime | None) -> _Values | None:
    """The same, by columns; None if a cell is, or may be, not what it should be."""
    times, prompt, output = columns[: len(COLUMNS)]
    if any(column.null_count for column in columns):
        return None
    try:
        at_s = _all_moments(times) if start is None else _all_seconds(times, start)
        prompts, outputs = _all_counts(prompt), _all_counts(output)
    except pa.ArrowInvalid:
        return None
    if at_s is None or prompts is None or outputs is None:
        return None
    return _Values(at_s, prompts, outputs)


def _all_counts(column: pa.ChunkedArray) -> NDArray[np.int64] | None:
    if not _all_are(column, _COUNT.pattern):
        return None
    counts: NDArray[np.int64] = np.asarray(pc.cast(column, pa.int64()).to_numpy())
    return counts if counts.max(initial=0) <= MAX_TOKENS else None


def _all_are(column: pa.ChunkedArray, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(column, f"^(?:{pattern})$"), min_count=0).as_py())


def _all_moments(times: pa.ChunkedArray) -> NDArray[np.float64] | None:
    local = f"{_NEAR_YEAR}{_LOCAL}"
    zoned = _all_are(times, f"{local}{_ZONE}")
    if not zoned and not _all_are(times, local):
        return None
    nanoseconds = pc.cast(times, pa.timestamp("ns", "UTC" if zoned else None)).cast(pa.int64()).to_numpy()
    # Python's own reading of a time ends at microseconds too
    return np.asarray(nanoseconds // 1000 / 1e6)


def _all_seconds(times: pa.ChunkedArray, start: datetime) -> NDArray[np.float64] | None:
    if not _all_are(times, _SECONDS.pattern):
        return None
    return np.asarray(start.timestamp() + pc.cast(times, pa.float64()).to_numpy())


def _require_moments(name: str, times: Sequence[str], start: datetime | None) -> None:
    """Raise ValidationFailed, once, if all times are of the kind that ``start`` (or its absence) does not fit."""
    wrong = _SECONDS if start is None else _TIME
    if times and all(wrong.fullmatch(one) for one in times):
        rule = (
            "times are numbers, such as seconds from the trace's start, and no moments: a live source needs times such"
            " as 2026-11-30T12:00:00Z, or `start`, the moment from which these seconds count"
            if start is None
            else "times are moments: `start` belongs to a trace with seconds from its start"
        )
        raise ValidationFailed([_violation(name, 1, times[0], rule)])


def _data(path: Path) -> PlainFile:
    """The file's bytes, unpacked, and the time of its last change."""
    return _data_so_far(path, appended=False, maybe_cut=False)[0]


def _data_so_far(path: Path, *, appended: bool, maybe_cut: bool) -> tuple[PlainFile, bool]:
    """The same, and whether the packed file has no end; Parquet without one is never taken."""
    try:
        file = read_plain(path, appended=appended)
        data, is_cut = _unpacked(file.data, maybe_cut=maybe_cut) if file.data.startswith(_GZIP) else (file.data, False)
    except NotReadable as error:
        message = f"{shown_path(path)} {error}"
        raise StorageFault(message) from error
    except (OSError, EOFError, zlib.error) as error:
        message = f"{shown_path(path)} cannot be read: {error}"
        raise StorageFault(message) from error
    if len(data) > MAX_CSV_BYTES and data is not file.data:
        message = f"{shown_path(path)} holds more than {MAX_CSV_BYTES} bytes once unpacked"
        raise StorageFault(message)
    if appended and data.startswith(PARQUET_MAGIC) and not (data.endswith(PARQUET_MAGIC) and len(data) > 8):
        message = f"{shown_path(path)} is no whole Parquet file: it may still be written"
        raise StorageFault(message)
    return PlainFile(data, file.modified_s), is_cut


def _unpacked(data: bytes, *, maybe_cut: bool) -> tuple[bytes, bool]:
    """At most a little more than may be (a small file can hold terabytes), and whether the end is missing."""
    parts: list[bytes] = []
    left = MAX_CSV_BYTES + 1
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
            while left > 0 and (part := packed.read1(min(left, _UNPACK_AT_ONCE))):
                parts.append(part)
                left -= len(part)
    except EOFError:
        if not maybe_cut:
            raise
        return b"".join(parts), True
    return b"".join(parts), False


class _Moment(NamedTuple):
    """``at``: seconds since 1970. ``zoned``: whether the offset was stated."""

    at: float
    zoned: bool


class _Request(NamedTuple):
    """``at``: seconds since 1970."""

    at: float
    prompt: int
    output: int
    zoned: bool
    model: str


def _trace(name: str, rows: list[tuple[str | None, ...]]) -> RequestTrace:
    requests = sorted(_requests(name, rows, _moment))
    if len(requests) < 2 or requests[0].at == requests[-1].at:
        raise ValidationFailed([_violation(name, 0, str(len(requests)), "needs two requests at different times")])
    return RequestTrace(
        name=name,
        offset_s=np.array([one.at - requests[0].at for one in requests]),
        prompt_tokens=np.array([one.prompt for one in requests], dtype=np.int64),
        output_tokens=np.array([one.output for one in requests], dtype=np.int64),
        started_at=datetime.fromtimestamp(requests[0].at, UTC),
        models=np.array([one.model for one in requests], dtype=object) if len(rows[0]) > len(COLUMNS) else None,
    )


def _requests(
    name: str, rows: Sequence[tuple[str | None, ...]], moment_of: Callable[[str], _Moment | None]
) -> list[_Request]:
    """Requests in the order of the rows. Raises ValidationFailed with every bad row."""
    parsed = [_request(row, moment_of) for row in rows]
    zones = {one.zoned for one in parsed if one is not None}
    mixed = "has a time without an offset, other rows have one" if len(zones) > 1 else ""
    rule = f"{_RULE}, and a model" if rows and len(rows[0]) > len(COLUMNS) else _RULE
    bad = [
        _violation(name, number, ",".join(cell or "" for cell in row)[:200], rule if one is None else mixed)
        for number, (row, one) in enumerate(zip(rows, parsed, strict=True), start=1)
        if one is None or (mixed and not one.zoned)
    ]
    if bad:
        raise ValidationFailed(first_told(bad))
    return [one for one in parsed if one is not None]


def _request(row: tuple[str | None, ...], moment_of: Callable[[str], _Moment | None]) -> _Request | None:
    """One row; None if it is not well formed."""
    at, prompt, output, *named = row
    moment = moment_of(at or "")
    counts = [int(text) if text and _COUNT.fullmatch(text) else -1 for text in (prompt, output)]
    if moment is None or None in named or not all(0 <= count <= MAX_TOKENS for count in counts):
        return None
    return _Request(moment.at, counts[0], counts[1], moment.zoned, "".join(one or "" for one in named))


def _moment(text: str) -> _Moment | None:
    """The moment that a time of day states; None if it states none."""
    found = _TIME.fullmatch(text)
    try:
        moment = datetime.fromisoformat(found[0]) if found else None
    except ValueError:
        return None
    if found is None or moment is None or moment.year not in _YEARS:
        return None
    zoned = moment if found["zone"] else moment.replace(tzinfo=UTC)
    return _Moment(zoned.timestamp(), found["zone"] is not None)


def _seconds_after(start: datetime) -> Callable[[str], _Moment | None]:
    began = start.timestamp()
    return lambda text: _Moment(began + float(text), zoned=True) if _SECONDS.fullmatch(text) else None


def _violation(name: str, row: int, value: str, rule: str) -> Violation:
    return Violation(table=name, row=f"row {row}" if row else "", value=value, rule=rule)


def first_told(violations: Iterable[Violation]) -> list[Violation]:
    """The first ``MAX_TOLD``, and how many more there are."""
    found = list(violations)
    more = len(found) - MAX_TOLD
    rest = Violation(table=found[0].table, row="", value="", rule=f"and {more} more violations")
    return [*found[:MAX_TOLD], rest] if more > 0 else found
