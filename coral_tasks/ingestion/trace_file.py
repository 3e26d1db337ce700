"""Reads request traces: one row for each request, with its time and its tokens (the form of the Azure traces).

Owns what counts as a row. Every row that does not is named, and none is guessed at or left out. A time with an offset
is that moment; a time without one is UTC, as in the published traces; one file must not mix the two.
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.errors import StorageFault, ValidationFailed, Violation
from data_contracts.files import MAX_BYTES, NotReadable, read_bytes, read_plain, shown_path

COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MAX_TOKENS: Final = 10_000_000
"""Tokens of one request; more is a number of another kind."""

MAX_TOLD: Final = 1000
"""Violations that a message holds; it says how many more there are."""

_GZIP: Final = b"\x1f\x8b"
_TIME: Final = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,9})?(?P<zone>Z|[+-][0-9]{2}:?[0-9]{2})?"
)
_COUNT: Final = re.compile(r"[0-9]{1,12}")
_RULE: Final = f"needs a time and, in whole numbers from 0 to {MAX_TOKENS}, prompt and output tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """Requests in time order: seconds since the first, prompt and output tokens, each of shape (N,).

    ``started_at``: moment of the first request, if known.
    """

    name: str
    offset_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    started_at: datetime | None = None

    @property
    def duration_s(self) -> float:
        """Seconds from first to last request."""
        return float(self.offset_s[-1])


def is_trace(path: Path) -> bool:
    """Whether the file's first line names a trace's columns. Raises StorageFault if it cannot be read."""
    start = _data(path)[:1000]
    encoding = "utf-16" if start.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8"
    first = (start.decode(encoding, "replace").lstrip("\ufeff \r\n").splitlines() or [""])[0]
    return set(COLUMNS) <= {name.strip(' "') for name in re.split(r"[,;\t|]", first)}


def read_trace(path: Path) -> RequestTrace:
    """Read a trace (CSV, maybe gzip): TIMESTAMP, ContextTokens, GeneratedTokens; other columns are passed over.

    Raises StorageFault (not to be read, or packed data that is not whole) or ValidationFailed (every bad row).
    """
    name = shown_path(Path(path.name.removesuffix(".gz").removesuffix(".csv")))
    raw = read_bytes(_data(path), shown_path(path))
    columns = None if raw.table is None else [one for one in COLUMNS if one in raw.table.column_names]
    if raw.table is None:
        raise ValidationFailed(_told(_violation(name, flaw.row, flaw.value, flaw.text) for flaw in raw.flaws))
    if columns != list(COLUMNS):
        rule = f"the header must name {', '.join(COLUMNS)}"
        raise ValidationFailed([_violation(name, 0, ",".join(raw.table.column_names)[:200], rule)])
    cells = [raw.table.column(one).to_pylist() for one in COLUMNS]
    return _trace(name, list(zip(*cells, strict=True)))


def _data(path: Path) -> bytes:
    """The file's bytes, unpacked."""
    try:
        data = read_plain(path).data
        whole = _unpacked(data) if data.startswith(_GZIP) else data
    except NotReadable as error:
        message = f"{shown_path(path)} {error}"
        raise StorageFault(message) from error
    except (OSError, EOFError, zlib.error) as error:
        message = f"{shown_path(path)} cannot be read: {error}"
        raise StorageFault(message) from error
    if len(whole) > MAX_BYTES:
        message = f"{shown_path(path)} holds more than {MAX_BYTES} bytes once unpacked"
        raise StorageFault(message)
    return whole


def _unpacked(data: bytes) -> bytes:
    """At most one byte more than may be: a small file can hold terabytes."""
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
        return packed.read(MAX_BYTES + 1)


class _Request(NamedTuple):
    """``at``: seconds since 1970."""

    at: float
    prompt: int
    output: int
    zoned: bool


def _trace(name: str, rows: list[tuple[str | None, ...]]) -> RequestTrace:
    parsed = [_request(*row) for row in rows]
    zones = {one.zoned for one in parsed if one is not None}
    mixed = "has a time without an offset, other rows have one" if len(zones) > 1 else ""
    bad = [
        _violation(name, number, ",".join(cell or "" for cell in row)[:200], _RULE if one is None else mixed)
        for number, (row, one) in enumerate(zip(rows, parsed, strict=True), start=1)
        if one is None or (mixed and not one.zoned)
    ]
    requests = sorted(one for one in parsed if one is not None)
    if not bad and (len(requests) < 2 or requests[0].at == requests[-1].at):
        bad = [_violation(name, 0, str(len(requests)), "needs two requests at different times")]
    if bad:
        raise ValidationFailed(_told(iter(bad)))
    return RequestTrace(
        name=name,
        offset_s=np.array([one.at - requests[0].at for one in requests]),
        prompt_tokens=np.array([one.prompt for one in requests], dtype=np.int64),
        output_tokens=np.array([one.output for one in requests], dtype=np.int64),
        started_at=datetime.fromtimestamp(requests[0].at, UTC),
    )


def _request(at: str | None, prompt: str | None, output: str | None) -> _Request | None:
    """One row; None if it is not well formed."""
    found = _TIME.fullmatch(at or "")
    counts = [int(text) if text and _COUNT.fullmatch(text) else -1 for text in (prompt, output)]
    if found is None or not all(0 <= count <= MAX_TOKENS for count in counts):
        return None
    try:
        moment = datetime.fromisoformat(found[0])
    except ValueError:
        return None
    zoned = moment if found["zone"] else moment.replace(tzinfo=UTC)
    return _Request(zoned.timestamp(), counts[0], counts[1], found["zone"] is not None)


def _violation(name: str, row: int, value: str, rule: str) -> Violation:
    return Violation(table=name, row=f"row {row}" if row else "", value=value, rule=rule)


def _told(violations: Iterator[Violation]) -> list[Violation]:
    found = list(violations)
    more = len(found) - MAX_TOLD
    rest = Violation(table=found[0].table, row="", value="", rule=f"and {more} more violations")
    return [*found[:MAX_TOLD], rest] if more > 0 else found
