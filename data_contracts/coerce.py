"""Brings a raw table into a contract's schema, cell by cell and without guessing.

Owns what counts as equal meaning: order of columns, text for numbers, 32 for 64 bits, any zone for UTC. What it
cannot read for certain (separators for thousands, times without a zone, numbers as times) is a flaw of that cell.
"""

from __future__ import annotations

import difflib
import json
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data_contracts.contract import Column, Contract

NUMBER: Final = r"^[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?$"
NOT_FINITE: Final = r"(?i)^[+-]?(?:nan|inf|infinity)$"
SEPARATED: Final = r"^[+-]?[0-9]{1,3}(?:[,.'’   _][0-9]{3})*(?:[,.][0-9]+)?$"
TIME: Final = (
    r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,9})?)?"
    r"(?: ?(?:[Zz]|UTC|[+-][0-9]{2}(?::?[0-9]{2})?))$"
)
"""ISO 8601, and what PostgreSQL (+00) and BigQuery (UTC) write."""

ZONELESS: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[T ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]+)?)?)?$"
FLAT_LIST: Final = r"^[ \t\r\n]*\[[^\[\]]*\][ \t\r\n]*$"
_SAFE_INTEGER: Final = 2.0**53
_PER_SECOND: Final = {"ms": 10**3, "us": 10**6, "ns": 10**9}
_FIRST_S: Final = -62_135_596_800
_LAST_S: Final = 253_402_300_799
"""First second of the year 1 and last of the year 9999, from 1970."""


class CellFlaw(NamedTuple):
    """``row``: from 0; −1 for the whole column."""

    row: int
    column: str
    value: str
    text: str
    rule: str
    warning: bool = False


class Coerced(NamedTuple):
    """``table``: in the contract's schema, unreadable cells null; None if a needed column is missing."""

    table: pa.Table | None
    flaws: tuple[CellFlaw, ...]


def coerce(contract: Contract, raw: pa.Table) -> Coerced:
    """Read ``raw`` as ``contract``'s table. Never raises for what ``raw`` holds."""
    flaws = [*_version_flaws(contract, raw), *_column_flaws(contract, raw)]
    if any(not flaw.warning for flaw in flaws):
        return Coerced(table=None, flaws=tuple(flaws))
    arrays: list[pa.Array] = []
    for column in contract.columns:
        array, found = _coerce_column(column, raw)
        arrays.append(array)
        flaws += found
    if any(flaw.row < 0 and not flaw.warning for flaw in flaws):
        return Coerced(table=None, flaws=tuple(flaws))
    # nullability is a rule of the gate, which names the rows; Arrow would only raise
    table = pa.Table.from_arrays(arrays, names=list(contract.column_names))
    return Coerced(table=table, flaws=tuple(flaws))


def _version_flaws(contract: Contract, raw: pa.Table) -> list[CellFlaw]:
    metadata = raw.schema.metadata or {}
    name = metadata.get(b"coral.contract", contract.name.encode()).decode(errors="replace")
    version = metadata.get(b"coral.version", contract.version.encode()).decode(errors="replace")
    found = []
    if name != contract.name:
        found.append(CellFlaw(-1, "", name, f"the file says it is table {name}", "contract_name"))
    if version.partition(".")[0] != contract.version.partition(".")[0]:
        text = f"contract version {version}; this reader knows {contract.version}"
        found.append(CellFlaw(-1, "", version, text, "contract_version"))
    return found


def _column_flaws(contract: Contract, raw: pa.Table) -> list[CellFlaw]:
    found = []
    known, given = set(contract.column_names), raw.column_names
    for column in contract.columns:
        if given.count(column.name) > 1:
            found.append(CellFlaw(-1, column.name, "", f"column {column.name} is there twice", "columns_unique"))
        elif column.name not in given and not column.nullable:
            text = f"column {column.name} is missing{_hint(column.name, given)}"
            found.append(CellFlaw(-1, column.name, "", text, "columns_present"))
        elif column.name in given:
            found += _unit_flaws(column, raw.schema.field(column.name))
    extra = [name for name in dict.fromkeys(given) if name not in known]
    return found + [_extra(name) for name in extra]


def _extra(name: str) -> CellFlaw:
    text = f"column {name} is not in the contract; ignored"
    return CellFlaw(-1, name, "", text, "columns_known", warning=True)


def _hint(name: str, given: list[str]) -> str:
    """The column that was given in its place, if one looks like it: other case, blanks, marks, or a letter off."""
    bare = {_bare(other): other for other in reversed(given)}
    close = difflib.get_close_matches(_bare(name), bare, n=1, cutoff=0.8)
    return f"; did you mean {bare[close[0]]!r}?" if close else ""


def _bare(name: str) -> str:
    return "".join(mark for mark in name.casefold() if mark.isalnum())


def _unit_flaws(column: Column, field: pa.Field) -> list[CellFlaw]:
    unit = (field.metadata or {}).get(b"unit", column.unit.encode()).decode(errors="replace")
    if unit == column.unit:
        return []
    text = f"column {column.name} is declared in {unit!r}, the contract says {column.unit!r}"
    return [CellFlaw(-1, column.name, unit, text, "columns_unit")]


def _coerce_column(column: Column, raw: pa.Table) -> tuple[pa.Array, list[CellFlaw]]:
    if column.name not in raw.column_names:
        return pa.nulls(raw.num_rows, column.type), []
    array = _plain(raw.column(column.name))
    if pa.types.is_null(array.type):
        array = pa.nulls(len(array), column.type)
    if pa.types.is_timestamp(column.type):
        return _to_time(column, array)
    if pa.types.is_list(column.type):
        return _to_list(column, array)
    if pa.types.is_string(column.type):
        return _to_text(column, array)
    return _to_number(column, array)


def _plain(chunked: pa.ChunkedArray) -> pa.Array:
    """One array, dictionaries decoded, all text as ``string``."""
    array = chunked.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    is_text = pa.types.is_large_string(array.type) or pa.types.is_string_view(array.type)
    return array.cast(pa.string()) if is_text else array


def _wrong_type(column: Column, array: pa.Array) -> tuple[pa.Array, list[CellFlaw]]:
    text = f"column {column.name} has type {array.type}, the contract says {column.type}"
    return pa.nulls(len(array), column.type), [CellFlaw(-1, column.name, str(array.type), text, "column_type")]


def _to_text(column: Column, array: pa.Array) -> tuple[pa.Array, list[CellFlaw]]:
    if not pa.types.is_string(array.type):
        return _wrong_type(column, array)
    return (pc.fill_null(array, "") if column.blank else array), []


def _to_list(column: Column, array: pa.Array) -> tuple[pa.Array, list[CellFlaw]]:
    """Lists as they are, or as JSON text (that is how CSV holds them); a cell that is no such list is a flaw."""
    kind = array.type
    nested = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not nested and not pa.types.is_string(kind):
        return _wrong_type(column, array)
    if nested and kind.value_type == column.type.value_type and not array.flatten().null_count:
        return array.cast(column.type), []
    parse = _each if nested else _each_distinct
    lists, bad = parse(array, column.type.value_type)
    text = f"{column.name} must be a list of {_items(column.type.value_type)} (JSON in CSV)"
    flaws = [CellFlaw(row, column.name, str(array[row].as_py())[:200], text, "list") for row in bad]
    return lists.cast(column.type), flaws


def _each(array: pa.Array, kind: pa.DataType) -> tuple[pa.Array, list[int]]:
    """Lists of every cell, and the rows that hold none."""
    lists: list[list[Any] | None] = []
    bad: list[int] = []
    for row, cell in enumerate(array.to_pylist()):
        try:
            lists.append(_list_of(cell, kind))
        except (ValueError, TypeError, RecursionError):
            lists.append(None)
            bad.append(row)
    return pa.array(lists, pa.list_(kind)), bad


def _each_distinct(array: pa.Array, kind: pa.DataType) -> tuple[pa.Array, list[int]]:
    """As ``_each``, reading each text once: a library's lists repeat by the thousand."""
    encoded = array.dictionary_encode()
    bulk = _in_bulk(encoded.dictionary, kind)
    lists, bad = _each(encoded.dictionary, kind) if bulk is None else (bulk, [])
    rows = np.flatnonzero(np.isin(encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False), bad))
    return lists.take(encoded.indices), rows.tolist()


def _in_bulk(texts: pa.Array, kind: pa.DataType) -> pa.Array | None:
    """All lists in one reading; None unless every text is a flat list of ``kind`` beyond doubt.

    A text with one bracket at each end can only merge with its neighbours, which the count shows, and never split.
    """
    if not pc.all(pc.match_substring_regex(texts, FLAT_LIST)).as_py():
        return None
    try:
        lists = pa.array(json.loads(f"[{','.join(texts.to_pylist())}]"))
    except (ValueError, TypeError, pa.ArrowException, OverflowError):
        return None
    flat = len(lists) == len(texts) and pa.types.is_list(lists.type) and not lists.flatten().null_count
    if not flat or lists.type.value_type not in (pa.int64() if pa.types.is_integer(kind) else pa.string(), pa.null()):
        return None
    try:
        return lists.cast(pa.list_(kind))
    except pa.ArrowInvalid:
        return None


def _items(kind: pa.DataType) -> str:
    return "names" if pa.types.is_string(kind) else "whole numbers"


def _list_of(cell: object, kind: pa.DataType) -> list[Any] | None:
    """Items of a cell, each of ``kind`` without loss; None for an empty cell. Raises ValueError or TypeError."""
    parsed = json.loads(cell) if isinstance(cell, str) else cell
    if parsed is None:
        return None
    if not isinstance(parsed, list):
        raise TypeError
    if pa.types.is_string(kind):
        if not all(isinstance(one, str) for one in parsed):
            raise TypeError
        return parsed
    limits = np.iinfo(kind.to_pandas_dtype())
    return [_whole_number(one, limits) for one in parsed]


def _whole_number(one: object, limits: np.iinfo[Any]) -> int:
    whole = isinstance(one, int | float) and not isinstance(one, bool) and float(one).is_integer()
    if not whole or not isinstance(one, int | float):
        raise TypeError
    if not limits.min <= one <= limits.max:
        raise ValueError
    return int(one)


def _to_number(column: Column, array: pa.Array) -> tuple[pa.Array, list[CellFlaw]]:
    numbers, flaws = _read_numbers(column, array)
    return _without_nan(column, numbers, flaws) if column.nullable else (numbers, flaws)


def _without_nan(column: Column, array: pa.Array, flaws: list[CellFlaw]) -> tuple[pa.Array, list[CellFlaw]]:
    """Where a cell may be empty, NaN is not another word for empty: it is what a failed computation leaves."""
    if not pa.types.is_floating(array.type):
        return array, flaws
    rows = np.flatnonzero(pc.fill_null(pc.is_nan(array), fill_value=False).to_numpy(zero_copy_only=False))
    text = f"{column.name} must be a number, or an empty cell where there is none"
    return array, [*flaws, *(CellFlaw(int(row), column.name, "NaN", text, "number") for row in rows)]


def _read_numbers(column: Column, array: pa.Array) -> tuple[pa.Array, list[CellFlaw]]:
    if pa.types.is_decimal(array.type):
        # Arrow's own cast is a last bit off for some values
        array = array.cast(pa.string())
    if pa.types.is_string(array.type):
        return _parse_numbers(column, array)
    numeric = pa.types.is_integer(array.type) or pa.types.is_floating(array.type)
    if not numeric:
        return _wrong_type(column, array)
    if pa.types.is_floating(column.type):
        return array.cast(pa.float64(), safe=False), []
    if pa.types.is_integer(array.type):
        return _narrow(column, array)
    return _whole(column, array.cast(pa.float64(), safe=False), array)


def _narrow(column: Column, array: pa.Array) -> tuple[pa.Array, list[CellFlaw]]:
    """Integers to 64 bits; unsigned values beyond are flaws."""
    try:
        return array.cast(column.type), []
    except pa.ArrowInvalid:
        return _whole(column, array.cast(pa.float64(), safe=False), array)


def _whole(column: Column, floats: pa.Array, shown: pa.Array) -> tuple[pa.Array, list[CellFlaw]]:
    """Floats to integers; what is no whole number is a flaw of its cell."""
    values = floats.to_numpy(zero_copy_only=False)
    null = floats.is_null().to_numpy(zero_copy_only=False)
    with np.errstate(invalid="ignore"):
        good = np.isfinite(values) & (np.abs(values) < _SAFE_INTEGER) & (np.floor(values) == values)
    flaws = [
        CellFlaw(int(row), column.name, str(shown[int(row)].as_py()), f"{column.name} must be a whole number", "number")
        for row in np.flatnonzero(~good & ~null)
    ]
    whole = np.where(good, values, 0.0).astype(np.int64)
    return pa.array(whole, type=column.type, mask=~good), flaws


def _parse_numbers(column: Column, array: pa.Array) -> tuple[pa.Array, list[CellFlaw]]:
    trimmed = pc.utf8_trim_whitespace(array)
    trimmed = pc.if_else(pc.equal(trimmed, ""), pa.scalar(None, pa.string()), trimmed)
    plain = pc.match_substring_regex(trimmed, NUMBER)
    odd = pc.match_substring_regex(trimmed, NOT_FINITE)
    readable = pc.fill_null(pc.or_(plain, odd), fill_value=True)
    flaws = [
        CellFlaw(row, column.name, array[row].as_py(), _number_text(column.name, trimmed[row].as_py()), "number")
        for row in np.flatnonzero(~readable.to_numpy(zero_copy_only=False)).tolist()
    ]
    kept = pc.if_else(readable, trimmed, pa.scalar(None, pa.string()))
    # Python's float rounds exactly; pandas' parser is a last bit off for some texts
    floats = pa.array([None if text is None else float(text) for text in kept.to_pylist()], pa.float64())
    if pa.types.is_floating(column.type):
        return floats, flaws
    whole, found = _whole(column, floats, array)
    return whole, [*flaws, *found]


def _null_mask(array: pa.Array) -> NDArray[np.bool_]:
    return np.asarray(array.is_null().to_numpy(zero_copy_only=False))


def _number_text(name: str, value: str) -> str:
    if pc.match_substring_regex(pa.array([value]), SEPARATED)[0].as_py():
        return f"{name} must be a plain number: no separator for thousands, and a point for decimals"
    return f"{name} is not a number"


def _to_time(column: Column, array: pa.Array) -> tuple[pa.Array, list[CellFlaw]]:
    if pa.types.is_string(array.type):
        return _parse_times(column, array)
    if not pa.types.is_timestamp(array.type):
        return _wrong_type(column, array)
    if array.type.tz is None:
        text = f"column {column.name} has times without a time zone"
        return pa.nulls(len(array), column.type), [CellFlaw(-1, column.name, str(array.type), text, "time_zone")]
    return _in_range(column, array)


def _in_range(column: Column, array: pa.Array) -> tuple[pa.Array, list[CellFlaw]]:
    """Times of the years 1 to 9999 in microseconds; a cast would wrap what lies beyond into some other time."""
    unit = array.type.unit
    counts = array.cast(pa.int64())
    # before scaling: int64 cannot hold the bounds in nanoseconds, and has no such times either
    whole = counts if unit == "s" else pc.divide(counts, _PER_SECOND[unit])
    good = pc.fill_null(pc.and_(pc.greater(whole, _FIRST_S), pc.less(whole, _LAST_S)), fill_value=True)
    flaws = [
        CellFlaw(row, column.name, f"{counts[row].as_py()} {unit} since 1970", f"{column.name} is out of range", "time")
        for row in np.flatnonzero(~good.to_numpy(zero_copy_only=False)).tolist()
    ]
    kept = pc.if_else(good, array, pa.scalar(None, array.type))
    return kept.cast(column.type, safe=False), flaws


def _parse_times(column: Column, array: pa.Array) -> tuple[pa.Array, list[CellFlaw]]:
    trimmed = pc.utf8_trim_whitespace(array)
    trimmed = pc.if_else(pc.equal(trimmed, ""), pa.scalar(None, pa.string()), trimmed)
    readable = pc.fill_null(pc.match_substring_regex(trimmed, TIME), fill_value=True)
    kept = pc.if_else(readable, trimmed, pa.scalar(None, pa.string()))
    times = pd.to_datetime(_as_iso(kept).to_pandas(), utc=True, format="ISO8601", errors="coerce")
    flaws = [
        CellFlaw(row, column.name, array[row].as_py(), _time_text(column.name, trimmed[row].as_py()), "time")
        for row in np.flatnonzero(times.isna().to_numpy() & ~_null_mask(trimmed)).tolist()
    ]
    micros = times.dt.tz_localize(None).to_numpy(dtype="datetime64[us]")
    counts = micros.astype(np.int64) // _PER_SECOND["us"]
    # an offset can carry a time out of the years that have a name
    beyond = ~np.isnat(micros) & ((counts < _FIRST_S) | (counts > _LAST_S))
    flaws += [
        CellFlaw(row, column.name, array[row].as_py(), f"{column.name} is out of range", "time")
        for row in np.flatnonzero(beyond).tolist()
    ]
    return pa.array(micros, type=pa.timestamp("us"), mask=np.isnat(micros) | beyond).cast(column.type), flaws


def _as_iso(texts: pa.Array) -> pa.Array:
    """Times as pandas reads them: with a large T and Z."""
    upper = pc.utf8_upper(texts)
    return pc.replace_substring_regex(upper, " ?(?:UTC|Z)$", "Z")


def _time_text(name: str, value: str) -> str:
    if pc.match_substring_regex(pa.array([value]), ZONELESS)[0].as_py():
        return f"{name} needs a time zone (Z or +hh:mm): a local time is ambiguous"
    return f"{name} is not an ISO 8601 time with a zone, such as 2026-11-29T08:00:00Z"
