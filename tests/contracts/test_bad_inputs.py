"""Bad batches: each kind is refused with its own message, or accepted with the right value; all violations at once."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_contracts.coerce import coerce
from data_contracts.contract import GateContext, GateLimits
from data_contracts.files import read_bytes
from data_contracts.gate import GateReport, Verdict, check_table
from data_contracts.registry import contract_of

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
AT = NOW.isoformat()
DEMAND = contract_of("demand")
PRICES = contract_of("prices")
AVAILABILITY = contract_of("availability")

DEMAND_HEADER = ",".join(DEMAND.column_names)
GOOD = {
    "model": "phi-4-14b",
    "requests_per_s": "10.0",
    "mean_prompt_tokens": "1154.7",
    "p95_prompt_tokens": "4083",
    "mean_output_tokens": "211.1",
    "p95_output_tokens": "451",
    "interval_start": AT,
    "interval_s": "300",
    "origin": "",
}


def demand_csv(*rows: Mapping[str, str], separator: str = ",") -> str:
    """CSV of the good row with each row's changes; origins make the keys differ."""
    lines = [separator.join(DEMAND.column_names)]
    lines += [separator.join({**GOOD, **row}.values()) for row in rows]
    return "\n".join(lines) + "\n"


def judge(data: str | bytes, table: str = "demand", **context: Any) -> GateReport:
    """Report on CSV text or Parquet bytes."""
    raw = read_bytes(data if isinstance(data, bytes) else data.encode(), "batch")
    return check_table(contract_of(table), raw, replace(GateContext(now=NOW), **context)).report


def parquet(table: pa.Table) -> bytes:
    """Parquet bytes of a table."""
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


CELLS: list[tuple[dict[str, str], str, str]] = [
    ({"requests_per_s": "NaN"}, "requests_per_s_present", "found NaN"),
    ({"requests_per_s": ""}, "requests_per_s_present", "found empty"),
    ({"requests_per_s": "inf"}, "requests_per_s_finite", "must be finite"),
    ({"requests_per_s": "-Infinity"}, "requests_per_s_finite", "must be finite"),
    ({"requests_per_s": "1e999"}, "requests_per_s_finite", "must be finite"),
    ({"requests_per_s": "-0.5"}, "requests_per_s_range", "must not be negative"),
    ({"requests_per_s": "1e9"}, "requests_per_s_range", "plausible"),
    ({"requests_per_s": "ten"}, "number", "is not a number"),
    ({"requests_per_s": "0x10"}, "number", "is not a number"),
    ({"requests_per_s": '"1,234"'}, "number", "no separator for thousands"),
    ({"requests_per_s": "1'234"}, "number", "no separator for thousands"),
    ({"requests_per_s": "1 234"}, "number", "no separator for thousands"),
    ({"requests_per_s": "1_234"}, "number", "no separator for thousands"),
    ({"requests_per_s": '"10,5"'}, "number", "a point for decimals"),
    ({"requests_per_s": "$10"}, "number", "is not a number"),
    ({"mean_prompt_tokens": "0"}, "mean_prompt_tokens_range", "at least one token"),
    ({"mean_output_tokens": "-1"}, "mean_output_tokens_range", "at least one token"),
    ({"p95_output_tokens": "inf"}, "p95_output_tokens_finite", "must be finite"),
    ({"interval_s": "0"}, "interval_s_range", "between a second and a day"),
    ({"interval_start": "2026-11-29T12:00:00"}, "time", "needs a time zone"),
    ({"interval_start": "2026-10-25T02:30:00"}, "time", "a local time is ambiguous"),
    ({"interval_start": "2026-11-29"}, "time", "needs a time zone"),
    ({"interval_start": "2026-02-30T12:00:00Z"}, "time", "is not an ISO 8601 time"),
    ({"interval_start": "1764417600"}, "time", "is not an ISO 8601 time"),
    ({"interval_start": "29.11.2026 12:00+00:00"}, "time", "is not an ISO 8601 time"),
    ({"interval_start": ""}, "interval_start_present", "must be present"),
    ({"interval_start": "2026-11-30T12:00:00Z"}, "interval_start_not_future", "beyond the planning horizon"),
    ({"interval_start": "9999-12-31T23:59:59Z"}, "interval_start_not_future", "beyond the planning horizon"),
    ({"model": "gpt-5"}, "model_known", "unknown model; known: phi-4-14b"),
    ({"model": ""}, "model_present", "must be present"),
    ({"model": '"phi-4\n-14b"'}, "model_is_name", "printable ASCII without blanks"),
    ({"mean_prompt_tokens": "16000", "p95_prompt_tokens": "16384"}, "fits_context", "longer than the model's context"),
]


def test_each_bad_cell_has_its_own_message_and_all_are_reported_at_once() -> None:
    """Thirty-two broken rows in one file give each row's own rule, value and text; the good row is not touched."""
    rows = [{"origin": f"r{number}", **cells} for number, (cells, _, _) in enumerate(CELLS, start=1)]
    report = judge(
        demand_csv({"origin": "r0"}, *rows),
        known={"model": frozenset({"phi-4-14b"})},
        max_context_tokens={"phi-4-14b": 16384},
    )
    assert report.verdict is Verdict.QUARANTINED
    for number, (cells, rule, text) in enumerate(CELLS, start=2):
        mine = [finding for finding in report.findings if finding.row.split(" (")[0] == f"row {number}"]
        critical = [finding for finding in mine if finding.severity.value == "critical"]
        assert [finding.rule for finding in critical] == [rule], (cells, [str(finding) for finding in mine])
        assert text in str(critical[0]), str(critical[0])
    assert not [finding for finding in report.findings if finding.row.startswith("row 1 ")]


WHOLE: list[tuple[str, bytes, str]] = [
    ("empty", b"", "the file is empty"),
    ("blanks", b" \n\n", "the file is empty"),
    ("comments only", b"# nothing\n", "no header and no rows"),
    ("header only", f"{DEMAND_HEADER}\n".encode(), "the table must have rows: missing is not zero"),
    ("missing column", b"model,interval_s\na,1\n", "column requests_per_s is missing"),
    ("header in capitals", demand_csv({}).replace("interval_s,", "Interval_S,").encode(), "did you mean 'Interval_S'"),
    ("column twice", demand_csv({}).replace("origin", "model").encode(), "column is named twice"),
    ("short row", (demand_csv({}) + "a,b\n").encode(), "row has 2 fields, the header has 9"),
    ("cut in a row", demand_csv({}, {"origin": "x"}).encode()[:-40], "row has"),
    ("open quote", demand_csv({"model": '"phi'}).encode(), "open quote"),
    ("web page", b"<html><body>502 Bad Gateway</body></html>\n", "the file is a web page or XML"),
    ("json", b'{"status": "error"}\n', "the file is JSON: CSV or Parquet is needed"),
    ("bytes", bytes(range(256)), "neither Parquet nor UTF-8 text"),
    ("Latin-1", demand_csv({"origin": "région"}).encode("latin-1"), "neither Parquet nor UTF-8 text"),
    ("Parquet cut", parquet(DEMAND.example_table(NOW))[:-100], "not a whole Parquet file"),
    ("Parquet cut short", parquet(DEMAND.example_table(NOW))[:40], "not a whole Parquet file"),
    ("Parquet magic only", b"PAR1", "not a whole Parquet file"),
    ("another table", parquet(PRICES.example_table(NOW)), "the file says it is table prices"),
]


@pytest.mark.parametrize(("data", "text"), [pytest.param(data, text, id=name) for name, data, text in WHOLE])
def test_a_file_that_is_not_a_batch_is_quarantined_with_its_reason(data: bytes, text: str) -> None:
    """Nothing that is wrong with a file as a whole gets through, and nothing raises."""
    report = judge(data)
    assert report.verdict is Verdict.QUARANTINED
    assert any(text in str(finding) for finding in report.findings), [str(one) for one in report.findings]


SAME: list[tuple[str, bytes]] = [
    ("BOM", b"\xef\xbb\xbf" + demand_csv({}).encode()),
    ("UTF-16", demand_csv({}).encode("utf-16")),
    ("semicolons", demand_csv({}, separator=";").encode()),
    ("tabs", demand_csv({}, separator="\t").encode()),
    ("CRLF", demand_csv({}).replace("\n", "\r\n").encode()),
    ("CR", demand_csv({}).replace("\n", "\r").encode()),
    ("comments first", b"# source: here\n# and there\n" + demand_csv({}).encode()),
    ("blanks around", demand_csv({"requests_per_s": " 10.0 "}).encode()),
    ("quoted cells", demand_csv({"requests_per_s": '"10.0"', "model": '"phi-4-14b"'}).encode()),
    ("exponent", demand_csv({"requests_per_s": "1e1"}).encode()),
    ("Central European time", demand_csv({"interval_start": "2026-11-29T13:00:00+01:00"}).encode()),
    ("Z", demand_csv({"interval_start": "2026-11-29 12:00:00Z"}).encode()),
    ("small letters", demand_csv({"interval_start": "2026-11-29t12:00:00z"}).encode()),
    ("BigQuery's time", demand_csv({"interval_start": "2026-11-29 12:00:00.000000 UTC"}).encode()),
    ("PostgreSQL's time", demand_csv({"interval_start": "2026-11-29 13:00:00+01"}).encode()),
    ("India", demand_csv({"interval_start": "2026-11-29 17:30:00 +0530"}).encode()),
    ("blank lines", demand_csv({}).encode() + b"\n\n"),
]


@pytest.mark.parametrize("data", [pytest.param(data, id=name) for name, data in SAME])
def test_other_spellings_of_the_same_batch_give_the_same_table(data: bytes) -> None:
    """Separators, line ends, encodings, quotes and zones do not change what is read."""
    plain = coerce(DEMAND, read_bytes(demand_csv({}).encode(), "a").table).table
    raw = read_bytes(data, "b")
    assert raw.table is not None, raw.flaws
    other = coerce(DEMAND, raw.table)
    assert other.flaws == ()
    assert other.table is not None
    assert other.table.equals(plain)


def _with(column: str, array: Any) -> pa.Table:
    table = DEMAND.example_table(NOW)
    return table.set_column(table.schema.get_field_index(column), column, array)


RATE = DEMAND.example_table(NOW).column("requests_per_s")
START = DEMAND.example_table(NOW).column("interval_start")
TYPES: list[tuple[str, pa.Table, str]] = [
    ("32 bits", _with("requests_per_s", RATE.cast(pa.float32())), ""),
    ("text", _with("requests_per_s", RATE.cast(pa.string())), ""),
    ("whole numbers", _with("requests_per_s", RATE.cast(pa.int16())), ""),
    ("decimal", _with("requests_per_s", pa.array([10, 10, 10]).cast(pa.decimal128(22, 2))), ""),
    ("dictionary", _with("model", DEMAND.example_table(NOW).column("model").dictionary_encode()), ""),
    ("large text", _with("model", DEMAND.example_table(NOW).column("model").cast(pa.large_string())), ""),
    ("Berlin", _with("interval_start", START.cast(pa.timestamp("ns", "Europe/Berlin"))), ""),
    ("Berlin, seconds", _with("interval_start", START.cast(pa.timestamp("s", "Europe/Berlin"))), ""),
    ("truth values", _with("requests_per_s", pa.array([True, True, False])), "has type bool"),
    ("lists", _with("model", pa.array([["a"], ["b"], ["c"]])), "has type list"),
    ("bytes", _with("model", pa.array([b"a", b"b", b"c"])), "has type binary"),
    ("no zone", _with("interval_start", START.cast(pa.timestamp("us"))), "times without a time zone"),
    ("dates", _with("interval_start", pa.array([NOW.date()] * 3)), "has type date32"),
    ("seconds since 1970", _with("interval_start", pa.array([1764417600] * 3)), "has type int64"),
    (
        "another unit",
        _with("requests_per_s", RATE).cast(
            pa.schema(
                [
                    field.with_metadata({"unit": "requests/min"}) if field.name == "requests_per_s" else field
                    for field in DEMAND.schema
                ]
            )
        ),
        "declared in 'requests/min'",
    ),
    ("column twice", DEMAND.example_table(NOW).append_column("model", pa.array(["a", "b", "c"])), "is there twice"),
]


@pytest.mark.parametrize(("table", "text"), [pytest.param(table, text, id=name) for name, table, text in TYPES])
def test_columns_of_another_type_keep_their_value_or_are_refused(table: pa.Table, text: str) -> None:
    """Types that hold the same values are read as such; others are named with both types."""
    outcome = check_table(DEMAND, table, GateContext(now=NOW), rules=[])
    if text:
        assert outcome.table is None
        assert any(text in finding.text for finding in outcome.report.findings), outcome.report.findings
    else:
        assert outcome.table is not None, outcome.report.findings
        assert outcome.table.equals(DEMAND.example_table(NOW))


def test_extra_and_reordered_columns_keep_the_values() -> None:
    """Order is free; a column that no contract knows is ignored with a warning."""
    table = DEMAND.example_table(NOW)
    changed = table.select(list(reversed(table.column_names))).append_column("note", pa.array(["a", "b", "c"]))
    outcome = check_table(DEMAND, changed, GateContext(now=NOW), rules=[])
    assert outcome.report.verdict is Verdict.ACCEPTED_WITH_WARNINGS
    assert outcome.table is not None
    assert outcome.table.equals(table)


def test_an_all_null_column_does_not_pass() -> None:
    """Great Expectations passes over nulls; a column of nothing but nulls is refused in every row."""
    report = check_table(DEMAND, _with("requests_per_s", pa.nulls(3)), GateContext(now=NOW)).report
    found = [finding.row[:5] for finding in report.findings if finding.rule == "requests_per_s_present"]
    assert found == ["row 1", "row 2", "row 3"]


def test_a_frame_is_judged_like_a_file() -> None:
    """Pandas frames are taken too; columns of mixed type are a finding, not an exception."""
    frame = DEMAND.example_table(NOW).to_pandas()
    assert check_table(DEMAND, frame, GateContext(now=NOW), rules=[]).report.accepted
    mixed = frame.astype({"requests_per_s": object})
    mixed.loc[0, "requests_per_s"] = "ten"
    report = check_table(DEMAND, mixed, GateContext(now=NOW), rules=[]).report
    assert "mixed or unknown type" in report.findings[0].text


@pytest.mark.parametrize("factor", [60.0, 1 / 60])
def test_requests_per_minute_as_per_second_are_caught_by_the_jump(factor: float) -> None:
    """Sixty times the rate before, or a sixtieth, is not planned on; a person may release it."""
    before = DEMAND.example_table(NOW)
    after = _with("requests_per_s", pa.array([600.0 * factor / 60 if factor > 1 else 0.1] * 3))
    before = before if factor > 1 else _with("requests_per_s", pa.array([60.0] * 3))
    report = check_table(DEMAND, after, GateContext(now=NOW, previous=before)).report
    assert {finding.rule for finding in report.findings} == {"requests_per_s_jump"}
    assert report.releasable


def test_cents_as_dollars_are_caught_by_jump_or_range() -> None:
    """A hundred times the price is above the range, or jumps against the catalogue's figure."""
    table = PRICES.example_table(NOW)
    index = table.schema.get_field_index("price_usd_per_hour")
    cents = pa.array([price * 100 for price in table.column(index).to_pylist()])
    context = GateContext(now=NOW, reference=table)
    report = check_table(PRICES, table.set_column(index, "price_usd_per_hour", cents), context).report
    by_row = {finding.row.split(" (")[0]: finding.rule for finding in report.findings}
    assert by_row == {
        "row 1": "price_usd_per_hour_jump",
        "row 2": "price_usd_per_hour_jump",
        "row 3": "price_usd_per_hour_range",
        "row 4": "price_usd_per_hour_range",
    }


def test_bad_prices_have_their_own_messages() -> None:
    """Zero without the reserved mark, spot above on-demand, an unknown market and a repeated pool, in one batch."""
    table = PRICES.example_table(NOW).to_pylist()
    rows = [
        {**table[0], "configuration": "A", "price_usd_per_hour": 0.0},
        {**table[0], "configuration": "B", "price_usd_per_hour": 1.0},
        {**table[0], "configuration": "B", "market": "spot", "price_usd_per_hour": 1.01},
        {**table[0], "configuration": "C", "market": "OnDemand"},
        {**table[0], "configuration": "D"},
        {**table[0], "configuration": "D"},
        {**table[0], "configuration": "E", "market": "reserved", "price_usd_per_hour": 0.0},
        {**table[0], "configuration": "F", "market": "spot", "price_usd_per_hour": 1.0},
        {**table[0], "configuration": "F", "price_usd_per_hour": 0.9999},
    ]
    report = check_table(PRICES, PRICES.table(rows), GateContext(now=NOW)).report
    found = sorted((finding.row.split(" (")[0], finding.rule) for finding in report.findings)
    assert found == [
        ("row 1", "zero_only_reserved"),
        ("row 3", "spot_not_above_on_demand"),
        ("row 4", "market_choice"),
        ("row 5", "key_unique"),
        ("row 6", "key_unique"),
    ]


def test_outage_is_told_from_zero_demand() -> None:
    """One model at zero is a warning, all at once after demand is an outage, and zero after zero is fine."""
    before = DEMAND.example_table(NOW)
    calm = GateContext(now=NOW, previous=before, limits=GateLimits(jump_floor_requests_per_s=50.0))
    one = check_table(DEMAND, _with("requests_per_s", pa.array([0.0, 10.0, 10.0])), calm).report
    assert one.verdict is Verdict.ACCEPTED_WITH_WARNINGS
    zero = _with("requests_per_s", pa.array([0.0, 0.0, 0.0]))
    every = check_table(DEMAND, zero, calm).report
    assert every.verdict is Verdict.QUARANTINED
    assert {finding.rule for finding in every.findings} == {"not_all_zero"}
    assert check_table(DEMAND, zero, replace(calm, previous=zero)).report.verdict is Verdict.ACCEPTED


def test_stale_and_backward_times_are_refused_and_ten_times_the_rows_too() -> None:
    """Old newest rows, a source whose clock stepped back, and a batch ten times as long have each their message."""
    old = DEMAND.example_table(NOW - timedelta(days=1))
    assert {one.rule for one in check_table(DEMAND, old, GateContext(now=NOW)).report.findings} == {
        "interval_start_fresh"
    }
    ahead = DEMAND.example_table(NOW + timedelta(minutes=5))
    back = check_table(DEMAND, DEMAND.example_table(NOW), GateContext(now=NOW, previous=ahead)).report
    assert {one.rule for one in back.findings} == {"interval_start_advances"}
    assert "stepped back" in back.findings[0].text
    rows = [
        {**row, "interval_start": NOW - timedelta(minutes=5 * step)}
        for step in range(40)
        for row in DEMAND.example(NOW)
    ]
    many = check_table(DEMAND, DEMAND.table(rows), GateContext(now=NOW, previous=DEMAND.example_table(NOW))).report
    assert [(one.rule, one.value) for one in many.findings] == [("row_count_jump", "120 rows")]


def test_a_day_of_25_hours_has_every_interval_once() -> None:
    """Local times with their offsets across the change of clocks are different moments, not repeated keys."""
    hours = pd.date_range("2026-10-25 00:00", periods=25, freq="h", tz="Europe/Berlin")
    texts = [moment.isoformat() for moment in hours]
    assert len({text[11:16] for text in texts}) == 24
    data = demand_csv(*({"interval_start": text, "interval_s": "3600"} for text in texts))
    report = judge(data, now=datetime(2026, 10, 25, 22, 10, tzinfo=UTC))
    assert report.verdict is Verdict.ACCEPTED
    assert report.num_rows == 25


def test_counts_of_nodes_are_whole_and_unknown_is_no_number() -> None:
    """64.0 is 64; a fraction, a word, a negative or an endless count is refused."""
    header = ",".join(AVAILABILITY.column_names)
    values = ["64.0", "64.5", "unknown", "-1", "inf", "9" * 30, ""]
    lines = [f"r{number},c,spot,{value},{AT},x" for number, value in enumerate(values)]
    report = judge("\n".join([header, *lines]) + "\n", "availability")
    found = [(finding.row.split(" (")[0], finding.rule) for finding in report.findings]
    assert sorted(found) == [
        ("row 2", "number"),
        ("row 3", "number"),
        ("row 4", "available_nodes_range"),
        ("row 5", "number"),
        ("row 6", "number"),
        ("row 7", "available_nodes_present"),
    ]


def test_limits_are_checked_by_name_and_value() -> None:
    """A limit that does not exist, or is no number, is refused with the known names."""
    assert GateLimits.from_mapping({"max_jump": 3}).max_jump == 3
    with pytest.raises(ValueError, match=r"unknown gate limits: max_jmp; known: .*max_jump"):
        GateLimits.from_mapping({"max_jmp": 3})
    for bad in (-1, float("nan"), float("inf"), "3", True):
        with pytest.raises(ValueError, match="max_jump"):
            GateLimits.from_mapping({"max_jump": bad})
