"""Any mutation of any table's valid batch is read with equal meaning or refused with a message; nothing ever raises.

Equal meaning is judged by a reader of its own: Python's ``csv``, ``float`` and ``datetime`` on the text that was given.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_contracts.contract import Column, Contract, GateContext
from data_contracts.files import read_bytes
from data_contracts.gate import GateOutcome, check_table
from data_contracts.registry import TABLES, contract_of

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
CONTEXT = GateContext(now=NOW)
tables = st.sampled_from(TABLES)

ODD_TEXT = st.sampled_from(
    [
        *("", " ", "NaN", "inf", "-inf", "-1", "0", "null", "1,234", "1.5", "1e3", "two words", "\u200b", '"', "a\nb"),
        *("2026-11-29T12:00:00", "2026-11-29T13:00:00+01:00", "9999-12-31T23:59:59Z", "1764417600", "[]", "[1]"),
        *('["a"]', "x" * 600),
    ]
)
ODD_VALUE = st.one_of(st.none(), st.floats(), st.integers(-(2**40), 2**40), st.text(max_size=6), ODD_TEXT)


def cell(value: Any) -> str:
    """A value as CSV text."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.isoformat()
    return json.dumps(value) if isinstance(value, list) else str(value)


def rows_of(contract: Contract) -> list[list[str]]:
    """Header and cells of the valid example."""
    example_rows = contract.example_table(NOW).to_pylist()
    return [list(contract.column_names), *([cell(value) for value in row.values()] for row in example_rows)]


def text_of(rows: list[list[str]]) -> str:
    """CSV text."""
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def settled(outcome: GateOutcome) -> None:
    """Either there is a table, or there is a critical finding with a text."""
    assert (outcome.table is not None) == outcome.report.accepted
    if not outcome.report.accepted:
        assert all(finding.text for finding in outcome.report.findings)
    assert not [one for one in outcome.report.findings if "could not be judged" in one.text]
    json.dumps(outcome.report.as_json(), default=str)


def meant(column: Column, text: str) -> Any:
    """What a cell says, read without the code under test. Raises ValueError where it says nothing."""
    text = text.strip()
    if not text:
        return "" if column.blank else None
    if pa.types.is_string(column.type):
        return text
    if pa.types.is_timestamp(column.type):
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            raise ValueError
        return moment.astimezone(UTC)
    if pa.types.is_list(column.type):
        return json.loads(text)
    number = float(text)
    if pa.types.is_integer(column.type) and int(number) != number:
        raise ValueError
    return number


def same(column: Column, found: Any, text: str) -> bool:
    """Whether the value read is what the text says."""
    try:
        wanted = meant(column, text)
    except (ValueError, OverflowError):
        return False
    if isinstance(found, float) and isinstance(wanted, float) and math.isnan(found):
        return math.isnan(wanted)
    return bool(found == wanted)


@settings(max_examples=60)
@given(
    table=tables,
    changes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 19), ODD_TEXT | st.text(max_size=8)), max_size=3),
    order=st.randoms(use_true_random=False),
    repeat=st.booleans(),
)
def test_what_is_read_is_what_the_text_says(
    table: str, changes: list[tuple[int, int, str]], order: Any, repeat: bool
) -> None:
    """Cells changed to anything, columns in any order: every value of an accepted table is the text's own."""
    contract = contract_of(table)
    rows = rows_of(contract)
    for row, place, text in changes:
        rows[1 + row % (len(rows) - 1)][place % len(rows[0])] = text
    rows += [rows[1]] if repeat else []
    places = list(range(len(rows[0])))
    order.shuffle(places)
    data = text_of([[row[place] for place in places] for row in rows]).encode("utf-8", "surrogatepass")
    outcome = check_table(contract, read_bytes(data, "x.csv"), CONTEXT, rules=[])
    settled(outcome)
    if outcome.table is None:
        return
    assert outcome.table.num_rows in (len(rows) - 1, len([row for row in rows[1:] if any(one.strip() for one in row)]))
    for read, given_row in zip(outcome.table.to_pylist(), rows[1:], strict=False):
        for column, text in zip(contract.columns, given_row, strict=True):
            assert same(column, read[column.name], text), (column.name, text, read[column.name])


@settings(max_examples=80)
@given(
    table=tables,
    where=st.floats(0, 1),
    removed=st.integers(0, 30),
    inserted=st.text(max_size=8) | ODD_TEXT,
)
def test_edits_anywhere_in_the_text_of_any_table_end_in_a_verdict(
    table: str, where: float, removed: int, inserted: str
) -> None:
    """Any cut and any insertion, header and line ends included."""
    contract = contract_of(table)
    text = text_of(rows_of(contract))
    position = int(where * len(text))
    data = (text[:position] + inserted + text[position + removed :]).encode("utf-8", "surrogatepass")
    settled(check_table(contract, read_bytes(data, "x.csv"), CONTEXT, rules=[]))


@settings(max_examples=60)
@given(table=tables, where=st.floats(0, 1), value=st.integers(0, 255), cut=st.floats(0, 0.999))
def test_damage_to_a_parquet_file_of_any_table_ends_in_a_verdict(
    table: str, where: float, value: int, cut: float
) -> None:
    """A changed byte and a cut; a cut file is never accepted."""
    contract = contract_of(table)
    sink = io.BytesIO()
    pq.write_table(contract.example_table(NOW), sink)
    whole = sink.getvalue()
    damaged = bytearray(whole)
    damaged[min(int(where * len(whole)), len(whole) - 1)] = value
    settled(check_table(contract, read_bytes(bytes(damaged), "x.parquet"), CONTEXT, rules=[]))
    assert not check_table(contract, read_bytes(whole[: int(cut * len(whole))], "x.parquet"), CONTEXT, rules=[]).table


MAKE_TYPES = st.sampled_from(
    [
        *(pa.string(), pa.large_string(), pa.float32(), pa.float64(), pa.int8(), pa.int64(), pa.uint64(), pa.bool_()),
        *(pa.binary(), pa.date32(), pa.timestamp("ms"), pa.timestamp("ns", "UTC"), pa.decimal128(30, 6)),
        *(pa.list_(pa.int64()), pa.list_(pa.string()), pa.dictionary(pa.int8(), pa.string()), pa.duration("s")),
        *(pa.float16(), pa.time64("us"), pa.null(), pa.struct([("a", pa.int8())])),
    ]
)


@settings(max_examples=80)
@given(table=tables, place=st.integers(0, 19), kind=MAKE_TYPES, values=st.lists(ODD_VALUE, min_size=4, max_size=4))
def test_a_column_of_any_type_and_values_ends_in_a_verdict(
    table: str, place: int, kind: pa.DataType, values: list[Any]
) -> None:
    """A column that another program typed as it liked is read or refused."""
    contract = contract_of(table)
    valid = contract.example_table(NOW)
    place %= len(contract.columns)
    cells = []
    for value in itertools.islice(itertools.cycle(values), valid.num_rows):
        try:
            cells.append(pa.array([value], kind)[0].as_py())
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            cells.append(None)
    changed = valid.set_column(place, contract.columns[place].name, pa.array(cells, kind))
    settled(check_table(contract, changed, CONTEXT, rules=[]))


@settings(max_examples=25)
@given(
    table=tables,
    row=st.integers(0, 3),
    place=st.integers(0, 19),
    value=ODD_VALUE,
    days=st.sampled_from([0, 0, 1, -1, 400]),
)
@example(table="templates", row=0, place=14, value=None, days=0)
@example(table="running", row=0, place=9, value=None, days=0)
def test_every_rule_has_an_answer_for_any_value(table: str, row: int, place: int, value: Any, days: int) -> None:
    """With all rules: a verdict for any value in any cell at any clock, and none that "could not be judged"."""
    contract = contract_of(table)
    before = contract.example_table(NOW)
    rows = before.to_pylist()
    column = contract.columns[place % len(contract.columns)]
    try:
        rows[row % len(rows)][column.name] = pa.array([value], column.type)[0].as_py()
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        rows[row % len(rows)][column.name] = None
    columns = {one.name: pa.array([one_row[one.name] for one_row in rows], one.type) for one in contract.columns}
    context = GateContext(now=NOW + timedelta(days=days), previous=before, reference=before)
    settled(check_table(contract, pa.table(columns), context))
