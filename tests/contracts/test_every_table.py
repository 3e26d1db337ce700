"""The kinds of bad input of the issue on every table, every column, in CSV and in Parquet.

A kind that cannot occur in a column is not listed for it. Refused means: a critical finding that names the row and the
column. Everything else has to come back with the value that was written.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_contracts.contract import Column, Contract, GateContext, Severity
from data_contracts.files import read_bytes
from data_contracts.gate import GateOutcome, Verdict, check_table
from data_contracts.registry import TABLES, contract_of
from data_contracts.rules import rules_of

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
KINDS = {
    "model": "model",
    "region": "region",
    "origin": "region",
    "configuration": "configuration",
    "nodes": "configuration",
}
BETWEEN_ROWS = {
    "key_unique",
    "names_alike",
    "one_plan",
    "instance_agrees",
    "stages_contiguous",
    "phases_paired",
    "not_rising_in_layers",
    "not_falling_in_share",
}
"""Rules that compare rows; left out where a batch holds many variants of one row."""

every_table = pytest.mark.parametrize("contract", [contract_of(table) for table in TABLES], ids=lambda one: one.name)


def context(contract: Contract, **changes: Any) -> GateContext:
    """Knows the models, regions and configurations of the example."""
    example, known = contract.example_table(NOW), dict[str, set[str]]()
    for name, kind in KINDS.items():
        if name in contract.column_names:
            cells = example.column(name).to_pylist()
            names = [one for cell in cells for one in (cell if isinstance(cell, list) else [cell]) if one is not None]
            known.setdefault(kind, set()).update(names)
    return GateContext(now=NOW, known={kind: frozenset(names) for kind, names in known.items()}, **changes)


def cell(value: Any) -> str:
    """A value as CSV text, written here and not by the code under test."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.isoformat()
    return json.dumps(value) if isinstance(value, list) else str(value)


def rows_of(contract: Contract) -> list[list[str]]:
    """Cells of the valid example."""
    return [[cell(value) for value in row.values()] for row in contract.example_table(NOW).to_pylist()]


def text_of(header: list[str], rows: list[list[str]], separator: str = ",", end: str = "\n") -> str:
    """CSV text."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=separator, lineterminator=end)
    writer.writerows([header, *rows])
    return out.getvalue()


def judge(contract: Contract, data: bytes, **changes: Any) -> GateOutcome:
    """All rules on the bytes of a file."""
    return check_table(contract, read_bytes(data, "batch"), context(contract, **changes))


def judge_plain(contract: Contract, data: bytes) -> GateOutcome:
    """What is read, without the rules."""
    return check_table(contract, read_bytes(data, "batch"), context(contract), rules=[])


def parquet(table: pa.Table) -> bytes:
    """Parquet bytes."""
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


NO_NUMBERS = (
    *("NaN", "nan", "inf", "-inf", "Infinity", "1e999", "-1e999", "ten", "0x10", "1,234", "1.234,5", "1 234", "1'234"),
    *(
        "1_234",
        "1\u202f234",
        "$10",
        "10 USD",
        "10%",
        "10ms",
        "true",
        "null",
        "N/A",
        "#N/A",
        "-",
        "１２",
        "٣",
        "1e",
        ".",
    ),
    *("1.2.3", "+-1", "2026-11-29", "[1]", '{"a": 1}', "=1+1", "1\n2", "-1", "-0.5", "-1e-320", "99999999999999999999"),
)
NO_WHOLE_NUMBERS = ("0.5", "1.0000001", "1e-320", "9007199254740993.5")
NO_NAMES = (
    *("two words", "tab\tinside", "new\nline", "null", "NULL", "None", "NaN", "nan", "N/A", "#N/A", "#REF!", "unknown"),
    *(
        "-",
        "?",
        "nil",
        "рhi-4-14b",
        "phi\u200b4",
        "phi\u00a04",
        "phi\u00ad4",
        "\ufeffphi",
        "ｐｈｉ",
        "région",
        "x" * 501,
    ),
)
NO_TIMES = (
    *(
        "2026-11-29T12:00:00",
        "2026-10-25T02:30:00",
        "2026-11-29",
        "12:00",
        "1764417600",
        "1764417600000",
        "1764417600.5",
    ),
    *("2026-02-30T12:00:00Z", "2026-11-29T25:00:00Z", "2026-11-29T12:00:60Z", "29.11.2026 12:00+00:00", "NaT", "now"),
    *("2026-11-29T12:00:00+24:00", "2026-11-29T12:00:00 Europe/Berlin", "Nov 29 2026 12:00 UTC", "20261129T120000Z"),
    *(
        "1970-01-01T00:00:00Z",
        "2019-12-31T23:59:59Z",
        "9999-12-31T23:59:59Z",
        "2026-12-01T12:00:00Z",
        "null",
        "0",
        "-1",
    ),
)
NO_LISTS = ("[", "5", "text", '"a"', "[1.5]", "[null]", "[[1]]", "{}", "null", "[true]", "[NaN]", "[-1]", "[99999]", "")
NO_CHOICES = ("neither", "two words", "null", "1", "on-demand", "Decode", "OK")

ZERO_IS_VALID = {
    ("demand", "requests_per_s"),
    ("availability", "available_nodes"),
    ("running", "stage_index"),
    ("plan", "num_kept"),
    ("plan", "cost_usd_per_hour"),
    ("commands", "epoch"),
    ("commands", "round"),
    ("routing", "epoch"),
    ("routing", "weight"),
    ("measurements", "spread_s"),
    ("measurements", "num_repeats"),
    ("profiles", "throughput"),
}


def has_choices(contract: Contract, column: Column) -> bool:
    """Whether the column holds one of fixed words."""
    return any(rule.name == f"{column.name}_choice" for rule in contract.rules)


def bad_cells(contract: Contract, column: Column) -> Iterator[str]:
    """Texts that are no value of the column."""
    if not (column.nullable or column.blank):
        yield from ("", "   ")
    if pa.types.is_floating(column.type) or pa.types.is_integer(column.type):
        yield from NO_NUMBERS
        yield from NO_WHOLE_NUMBERS if pa.types.is_integer(column.type) else ()
        yield from () if (contract.name, column.name) in ZERO_IS_VALID else ("0", "0.0", "-0")
    elif pa.types.is_timestamp(column.type) or column.name == "measured_at":
        yield from NO_TIMES
    elif pa.types.is_list(column.type):
        yield from NO_LISTS
    elif has_choices(contract, column):
        yield from NO_CHOICES
    elif not column.words:
        yield from NO_NAMES
        yield from ("no-such-name",) if column.name in KINDS else ()


@every_table
def test_every_bad_cell_of_every_column_is_refused_by_row_and_column(contract: Contract) -> None:
    """Each kind in each column, a variant of the first row each: none gets through, all are said at once."""
    header, first = list(contract.column_names), rows_of(contract)[0]
    variants = [(place, text) for place, one in enumerate(contract.columns) for text in bad_cells(contract, one)]
    rows = [[text if number == place else old for number, old in enumerate(first)] for place, text in variants]
    rules = [rule for rule in rules_of(contract) if rule.name not in BETWEEN_ROWS]
    raw = read_bytes(text_of(header, rows).encode(), "batch.csv")
    assert raw.table is not None, raw.flaws
    report = check_table(contract, raw, context(contract), rules=rules).report
    assert check_table(contract, raw, context(contract), rules=rules, direct=True).report == report
    said = {
        (int(one.row.split(" ")[1]), name)
        for one in report.findings
        if one.row and one.severity is Severity.CRITICAL and one.value
        for name in one.column.split(", ")
    }
    missed = [(header[p], t) for number, (p, t) in enumerate(variants, start=1) if (number, header[p]) not in said]
    assert missed == []
    assert not [one for one in report.findings if "could not be judged" in one.text]


def respelled(value: Any, column: Column, how: int) -> str:
    """The same value in another spelling."""
    text = cell(value)
    if isinstance(value, datetime):
        east = (value + timedelta(hours=5, minutes=30)).replace(tzinfo=None)
        north = (value + timedelta(hours=1)).replace(tzinfo=None)
        return (f"{east.isoformat()}+05:30", f"{north.isoformat(' ')}+0100", f"{text[:19]}Z")[how]
    if isinstance(value, float):
        return (f"{value:.17e}", f"+{value!r}", f"  {value!r}")[how]
    if isinstance(value, int):
        return (f"{value}.0", f"+{value}", f"{value}e0")[how]
    if isinstance(value, list):
        return (f" {text} ", text.replace(", ", ","), text.replace("[", "[ "))[how]
    return (f" {text} ", f"{text}\t", text)[how] if not column.words else text


@every_table
@pytest.mark.parametrize("how", range(3))
def test_the_same_values_in_another_spelling_are_the_same_batch(contract: Contract, how: int) -> None:
    """Zones, signs, exponents and blanks around change nothing; every rule still holds."""
    example = contract.example_table(NOW)
    rows = [
        [respelled(value, column, how) for value, column in zip(row.values(), contract.columns, strict=True)]
        for row in example.to_pylist()
    ]
    outcome = judge(contract, text_of(list(contract.column_names), rows).encode())
    assert outcome.report.verdict is Verdict.ACCEPTED, [str(one) for one in outcome.report.findings]
    assert outcome.table is not None
    assert outcome.table.equals(example)


@every_table
def test_free_text_is_kept_as_it_came(contract: Contract) -> None:
    """A remark may look like a number, a formula, a missing value or a page; it changes nothing else."""
    places = [place for place, column in enumerate(contract.columns) if column.words]
    rows = rows_of(contract)
    for text in ("NaN", "=1+1", "two words, and a comma", "<b>", 'a "quote"', "two\nlines", "né"):
        for place in places:
            rows[0][place] = text
        table = judge_plain(contract, text_of(list(contract.column_names), rows).encode()).table
        assert table is not None
        assert [table.column(place)[0].as_py() for place in places] == [text] * len(places)


# -- the file as a whole ---------------------------------------------------------------------------------------------


def dressed(contract: Contract) -> Iterator[tuple[str, bytes]]:
    """The valid example in other dress, by name."""
    header, rows = list(contract.column_names), rows_of(contract)
    text = text_of(header, rows)
    yield "BOM", b"\xef\xbb\xbf" + text.encode()
    yield "UTF-16", text.encode("utf-16")
    for name, separator in (("semicolons", ";"), ("tabs", "\t"), ("bars", "|")):
        yield name, text_of(header, rows, separator).encode()
    yield "Excel's first line", b"sep=;\r\n" + text_of(header, rows, ";", "\r\n").encode()
    yield "CRLF", text_of(header, rows, end="\r\n").encode()
    yield "CR", text_of(header, rows, end="\r").encode()
    yield "comments", b"# from here\n# and there\n" + text.encode()
    yield "comments and CR", text_of(header, rows, end="\r").join(["# from here\r", ""]).encode()
    yield "blank lines", text.replace("\n", "\n\n").encode()
    out = io.StringIO(newline="")
    csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows([header, *rows])
    yield "all quoted", out.getvalue().encode()
    order = list(reversed(range(len(header))))
    turned = [[row[place] for place in order] for row in [header, *rows]]
    yield "reordered", text_of(turned[0], turned[1:]).encode()
    example = contract.example_table(NOW)
    yield "Parquet", parquet(example)
    yield "Parquet without metadata", parquet(example.replace_schema_metadata(None))
    yield "Parquet reordered", parquet(example.select(list(reversed(header))))


@every_table
def test_other_dress_of_the_file_gives_the_same_table(contract: Contract) -> None:
    """Encodings, separators, line ends, quotes, order of columns and formats: every value comes back."""
    for name, data in dressed(contract):
        outcome = judge_plain(contract, data)
        assert outcome.report.findings == (), (name, outcome.report.findings)
        assert outcome.table is not None
        assert outcome.table.equals(contract.example_table(NOW)), name


@every_table
def test_columns_too_few_too_many_or_renamed_have_their_message(contract: Contract) -> None:
    """A missing column is named, with what was given in its place; an unknown one is a warning and changes nothing."""
    header, rows = list(contract.column_names), rows_of(contract)
    for place, column in enumerate(contract.columns):
        short = [line[:place] + line[place + 1 :] for line in [header, *rows]]
        outcome = judge_plain(contract, text_of(short[0], short[1:]).encode())
        words = [str(one) for one in outcome.report.findings]
        assert outcome.report.accepted == column.nullable, (column.name, words)
        assert column.nullable or any(f"column {column.name} is missing" in one for one in words)
        for given in (column.name.upper(), f" {column.name}s"):
            renamed = [*header[:place], given, *header[place + 1 :]]
            findings = judge_plain(contract, text_of(renamed, rows).encode()).report.findings
            texts = [one.text for one in findings]
            assert any(f"did you mean '{given.strip()}'" in one for one in texts) or column.nullable, texts
        twice = [[*line, line[place]] for line in [header, *rows]]
        found = judge_plain(contract, text_of(twice[0], twice[1:]).encode()).report
        assert not found.accepted
        assert any("named twice" in one.text and one.value == column.name for one in found.findings)
    more = judge_plain(contract, text_of([*header, "note"], [[*row, "x"] for row in rows]).encode())
    assert more.report.verdict is Verdict.ACCEPTED_WITH_WARNINGS
    assert more.table is not None
    assert more.table.equals(contract.example_table(NOW))


@every_table
def test_a_file_that_is_no_whole_batch_is_refused(contract: Contract) -> None:
    """Empty, cut, packed and foreign files never give a table, in either format."""
    text, whole = text_of(list(contract.column_names), rows_of(contract)), parquet(contract.example_table(NOW))
    other = contract_of("prices" if contract.name != "prices" else "demand").example_table(NOW)
    cases = {
        "empty": b"",
        "magic": b"PAR1",
        "another table": parquet(other),
        "JSON lines": json.dumps(dict.fromkeys(contract.column_names, "1")).encode() + b"\n",
        "JSON": json.dumps([dict.fromkeys(contract.column_names, "1")]).encode(),
        "a web page": b"<!doctype html>\n<html><body>502</body></html>\n",
        "Arrow": b"ARROW1\0\0" + whole,
        "open quote": text.encode() + b'"',
        "short row": text.encode() + b"a,b\n",
        **{f"Parquet cut at {share}": whole[: int(len(whole) * share)] for share in (0.1, 0.5, 0.9, 0.99)},
    }
    for name, data in cases.items():
        outcome = judge_plain(contract, data)
        assert not outcome.report.accepted, name
        assert outcome.table is None
        assert outcome.report.findings[0].text
    assert "JSON" in judge_plain(contract, cases["JSON lines"]).report.findings[0].text


@every_table
def test_a_header_without_rows_is_an_answer_only_where_nothing_is_one(contract: Contract) -> None:
    """Missing is not zero: only tables of which "none" is a state may be empty, in both formats."""
    for data in (text_of(list(contract.column_names), []).encode(), parquet(contract.example_table(NOW).slice(0, 0))):
        report = judge(contract, data).report
        assert report.accepted == contract.empty_ok, [str(one) for one in report.findings]
        assert contract.empty_ok or "missing is not zero" in report.findings[0].text


@every_table
def test_repeated_rows_and_ten_times_the_rows_are_refused(contract: Contract) -> None:
    """A row that is there twice is named twice; many more rows than before are said as a number.

    A table that may be empty (nothing runs yet) may also fill up: there the many rows are a warning.
    """
    rows = rows_of(contract)
    header = list(contract.column_names)
    found = judge(contract, text_of(header, [*rows, rows[0]]).encode()).report.findings
    twice = [one.row.split(" (")[0] for one in found if one.rule == "key_unique"]
    assert twice == ["row 1", f"row {len(rows) + 1}"]
    before = contract.example_table(NOW)
    rules = [rule for rule in rules_of(contract) if rule.name == "row_count_jump"]
    many = pa.concat_tables([before] * 200)
    report = check_table(contract, many, context(contract, previous=before), rules=rules).report
    assert [(one.rule, one.value) for one in report.findings] == [("row_count_jump", f"{many.num_rows} rows")]
    assert report.accepted == contract.empty_ok


@every_table
def test_keys_that_differ_in_capitals_only_are_refused(contract: Contract) -> None:
    """L4x1 and l4X1 are one name written twice, or two that nobody can tell apart."""
    rules = [rule for rule in rules_of(contract) if rule.name == "names_alike"]
    rows = contract.example_table(NOW).to_pylist()
    name = next(one.name for one in contract.columns if one.name in contract.key and pa.types.is_string(one.type))
    rows[1][name] = rows[0][name].swapcase()
    report = check_table(contract, contract.table(rows), context(contract), rules=rules).report
    assert {one.row.split(" (")[0] for one in report.findings} >= {"row 1", "row 2"}
    assert all("in capitals only" in one.text for one in report.findings)


# -- types of a Parquet column ---------------------------------------------------------------------------------------

Maker = Callable[[Column, pa.ChunkedArray], pa.Array | None]


def _cast(kind: pa.DataType) -> Maker:
    return lambda _, old: old.cast(kind)


def _const(value: Any, kind: pa.DataType | None = None) -> Maker:
    return lambda _, old: pa.array([value] * len(old), kind)


SAME_NUMBER: dict[str, Maker] = {
    "text": _cast(pa.string()),
    "large text": lambda _, old: old.cast(pa.string()).cast(pa.large_string()),
    "dictionary": lambda _, old: old.dictionary_encode(),
    "doubles": _cast(pa.float64()),
}
SAME_TEXT: dict[str, Maker] = {
    "large": _cast(pa.large_string()),
    "view": _cast(pa.string_view()),
    "dictionary": lambda _, old: old.dictionary_encode(),
}
SAME_TIME: dict[str, Maker] = {
    "nanoseconds": _cast(pa.timestamp("ns", "UTC")),
    "seconds": _cast(pa.timestamp("s", "UTC")),
    "Berlin": _cast(pa.timestamp("ms", "Europe/Berlin")),
    "offset": _cast(pa.timestamp("us", "+05:30")),
}
OTHER: dict[str, Maker] = {
    "truth values": _const(value=True),
    "bytes": _const(b"x"),
    "lists of lists": _const([["x"]]),
    "structs": _const({"a": 1}),
    "maps": _const([("a", 1)], pa.map_(pa.string(), pa.int64())),
    "durations": _const(timedelta(seconds=1)),
    "dates": _const(NOW.date()),
    "times of day": _const(NOW.time()),
    "nulls": _const(None),
}
OTHER_FOR_NUMBER: dict[str, Maker] = {"times": _const(NOW, pa.timestamp("us", "UTC"))}
OTHER_FOR_TIME: dict[str, Maker] = {
    "no zone": _cast(pa.timestamp("us")),
    "counts": _cast(pa.int64()),
    "floats": _const(1764417600.0),
}
OTHER_FOR_TEXT: dict[str, Maker] = {"numbers": _const(5), "floats": _const(0.5)}


def makers(column: Column) -> tuple[dict[str, Maker], dict[str, Maker]]:
    """Types that hold the same values, and types that do not."""
    if pa.types.is_timestamp(column.type):
        return SAME_TIME, OTHER | OTHER_FOR_TIME
    if pa.types.is_list(column.type):
        return {"large": _cast(pa.large_list(column.type.value_type))}, OTHER | OTHER_FOR_TEXT
    if pa.types.is_string(column.type):
        return SAME_TEXT, OTHER | OTHER_FOR_TEXT
    return SAME_NUMBER, OTHER | OTHER_FOR_NUMBER


@every_table
def test_every_column_in_every_other_type_keeps_its_values_or_is_refused(contract: Contract) -> None:
    """Types that hold the same values are read as such; any other is refused with the column's name."""
    example = contract.example_table(NOW)
    for place, column in enumerate(contract.columns):
        same, other = makers(column)
        for name, make in same.items():
            data = parquet(example.set_column(place, column.name, make(column, example.column(place))))
            table = judge_plain(contract, data).table
            assert table is not None, (column.name, name)
            assert table.equals(example), (column.name, name)
        for name, make in other.items():
            if name == "nulls":
                continue
            data = parquet(example.set_column(place, column.name, make(column, example.column(place))))
            found = judge_plain(contract, data).report
            assert not found.accepted, (column.name, name)
            assert {one.column for one in found.findings} == {column.name}, (column.name, name)


@every_table
def test_every_bad_value_of_a_typed_column_is_refused_by_row(contract: Contract) -> None:
    """NaN, infinities, negatives, nulls and wrong times in Parquet: each row and column is named."""
    rules = [rule for rule in rules_of(contract) if rule.name not in BETWEEN_ROWS]
    first = contract.example_table(NOW).to_pylist()[0]
    variants: list[tuple[str, Any]] = []
    for column in contract.columns:
        bad: list[Any] = [] if column.nullable or column.blank else [None]
        if pa.types.is_floating(column.type):
            bad += [float("nan"), float("inf"), float("-inf"), -1.0, -5e-324, -1e308]
        elif pa.types.is_integer(column.type):
            bad += [-1, -(2**31), 2**31 - 1 if column.type == pa.int32() else 2**63 - 1]
        elif pa.types.is_timestamp(column.type):
            bad += [datetime(1970, 1, 1, tzinfo=UTC), NOW + timedelta(days=2), datetime(9999, 1, 1, tzinfo=UTC)]
        elif pa.types.is_string(column.type) and not column.words:
            bad += ["", " ", "two words", "nan", " padded ", "phi\u200b"]
        variants += [(column.name, value) for value in bad]
    rows = [{**first, name: value} for name, value in variants]
    columns = {one.name: pa.array([row[one.name] for row in rows], one.type) for one in contract.columns}
    raw = read_bytes(parquet(pa.table(columns)), "batch.parquet")
    report = check_table(contract, raw, context(contract), rules=rules).report
    said = {
        (int(one.row.split(" ")[1]), name)
        for one in report.findings
        if one.row and one.severity is Severity.CRITICAL
        for name in one.column.split(", ")
    }
    assert [one for number, one in enumerate(variants, start=1) if (number, one[0]) not in said] == []
    assert not [one for one in report.findings if "could not be judged" in one.text]
