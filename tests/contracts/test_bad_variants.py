"""Variants of bad inputs that a first reading would miss: each is refused with its row, or keeps its meaning."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_contracts.coerce import coerce
from data_contracts.contract import GateContext
from data_contracts.files import read_bytes, read_file
from data_contracts.gate import GateReport, Verdict, check_table
from data_contracts.registry import contract_of
from data_contracts.rules import rules_of

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
DEMAND, PRICES, TEMPLATES = contract_of("demand"), contract_of("prices"), contract_of("templates")
ROWS = DEMAND.example_table(NOW)


def judged(table: pa.Table, name: str, context: GateContext, contract_name: str = "demand") -> GateReport:
    """Report of one rule alone."""
    contract = contract_of(contract_name)
    rules = [rule for rule in rules_of(contract) if rule.name == name]
    assert rules
    return check_table(contract, table, context, rules=rules).report


def changed(table: pa.Table, **columns: list[object]) -> pa.Table:
    """The table with some columns replaced."""
    for name, values in columns.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(name), pa.array(values, table.schema.field(name).type))
    return table


@pytest.mark.parametrize("cell", ["[1.5]", "[true]", "[null]", "[NaN]", "[40000]", '"0"', "0", "[[0]]", '["0"]', "[0"])
def test_a_list_cell_that_is_no_list_of_whole_numbers_is_refused_in_its_row(cell: str) -> None:
    """Nothing is rounded, cut or split into letters; the flaw names the row and not the column as a whole."""
    table = TEMPLATES.example_table(NOW)
    texts = table.column("stage_layers").to_pylist()
    raw = table.set_column(
        table.schema.get_field_index("stage_layers"), "stage_layers", pa.array([str(texts[0]), cell])
    )
    found = coerce(TEMPLATES, raw)
    assert [(flaw.row, flaw.column, flaw.rule) for flaw in found.flaws] == [(1, "stage_layers", "list")]
    assert "must be a list of whole numbers" in found.flaws[0].text
    assert found.table is not None
    assert found.table.column("stage_layers").to_pylist() == [texts[0], None]


@pytest.mark.parametrize("kind", [pa.decimal32(9, 5), pa.decimal128(30, 10), pa.decimal256(50, 12)], ids=str)
def test_a_decimal_is_the_number_that_its_digits_say(kind: pa.DataType) -> None:
    """To the last bit, as the same digits in CSV; a count with a fraction is no count."""
    texts = ["0.8048", "10.49264", "20.02809", "0.1", "1154.7"]
    exact = [Decimal(text) for text in texts]
    rows = PRICES.example_table(NOW)
    place = rows.schema.get_field_index("price_usd_per_hour")
    read = coerce(PRICES, rows.set_column(place, "price_usd_per_hour", pa.array(exact, kind)))
    assert read.flaws == ()
    assert read.table is not None
    assert read.table.column("price_usd_per_hour").to_pylist() == [0.8048, 10.49264, 20.02809, 0.1, 1154.7]
    nodes = contract_of("availability").example_table(NOW)
    place = nodes.schema.get_field_index("available_nodes")
    cells = pa.array([Decimal("7.00"), Decimal("1.5"), None], kind)
    found = coerce(contract_of("availability"), nodes.set_column(place, "available_nodes", cells))
    assert [(flaw.row, flaw.rule) for flaw in found.flaws] == [(1, "number")]
    assert found.table is not None
    assert found.table.column("available_nodes").to_pylist() == [7, None, None]


def test_lists_of_wider_types_keep_their_numbers() -> None:
    """64-bit, floating and large lists that hold the same whole numbers are the same lists."""
    table = TEMPLATES.example_table(NOW)
    place, lists = table.schema.get_field_index("stage_layers"), table.column("stage_layers").to_pylist()
    for kind in (pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.list_(pa.float64())):
        found = coerce(TEMPLATES, table.set_column(place, "stage_layers", pa.array(lists, kind)))
        assert found.flaws == ()
        assert found.table is not None
        assert found.table.column("stage_layers").to_pylist() == lists


def test_times_beyond_the_calendar_are_refused_and_never_wrap() -> None:
    """A count of milliseconds that overflows in microseconds is a flaw of its row, the row beside it keeps its time."""
    wraps = 2**64 // 1000 + 1_764_458_480_000
    table = PRICES.example_table(NOW).slice(0, 2)
    times = pa.array([1_764_458_480_000, wraps], pa.int64()).cast(pa.timestamp("ms", "UTC"))
    found = coerce(PRICES, table.set_column(table.schema.get_field_index("observed_at"), "observed_at", times))
    assert [(flaw.row, flaw.rule) for flaw in found.flaws] == [(1, "time")]
    assert found.table is not None
    assert found.table.column("observed_at").to_pylist() == [datetime(2025, 11, 29, 23, 21, 20, tzinfo=UTC), None]


def test_a_number_cut_off_at_the_end_of_the_file_is_refused() -> None:
    """10.4 may be the front of 10.49264: without a line end after it, it is not taken."""
    rows = "region,configuration,market,observed_at,price_usd_per_hour\naws/us-east-2,L4x1,on_demand,2026-11-29T12:00Z,"
    cut = check_table(PRICES, read_bytes(f"{rows}0.80".encode(), "f.csv"), GateContext(now=NOW), rules=[]).report
    assert [(one.row, one.value) for one in cut.findings] == [("row 1", "0.80")]
    assert "may be cut off, inside the number price_usd_per_hour" in cut.findings[0].text
    assert not cut.accepted
    whole = check_table(PRICES, read_bytes(f"{rows}0.80\n".encode(), "f.csv"), GateContext(now=NOW), rules=[])
    assert whole.report.findings == ()
    assert whole.table is not None
    assert whole.table.column("price_usd_per_hour").to_pylist() == [0.8]


def test_a_packed_file_is_named_as_such() -> None:
    """Gzip is not guessed at: the message says what the file is."""
    raw = read_bytes(gzip.compress(b"model,requests_per_s\n"), "demand.csv")
    assert raw.table is None
    assert "packed (gzip)" in raw.flaws[0].text


@pytest.mark.parametrize("mark", ["\u200b", "\u00a0", "\ufeff", "\u00ad", "\u202e"])
def test_names_that_only_look_alike_are_refused(mark: str) -> None:
    """An invisible character inside a name would make two keys of one."""
    report = judged(changed(ROWS, model=[f"phi-4{mark}-14b", "b", "c"]), "model_is_name", GateContext(now=NOW))
    assert [one.row.split(" (")[0] for one in report.findings] == ["row 1"]


def test_an_outage_in_the_newest_interval_is_seen_behind_earlier_intervals() -> None:
    """Demand in the history of the same batch does not hide that everything fell to zero at the end."""
    earlier = changed(ROWS, interval_start=[NOW - timedelta(minutes=5)] * 3)
    now = changed(ROWS, requests_per_s=[0.0] * 3)
    report = judged(pa.concat_tables([earlier, now]), "not_all_zero", GateContext(now=NOW))
    assert [one.row.split(" (")[0] for one in report.findings] == ["row 4", "row 5", "row 6"]
    assert judged(pa.concat_tables([now, earlier]), "not_all_zero", GateContext(now=NOW)).findings != ()
    one_left = changed(ROWS, requests_per_s=[0.0, 0.0, 1.0])
    assert judged(pa.concat_tables([earlier, one_left]), "not_all_zero", GateContext(now=NOW)).findings == ()


def test_per_minute_rates_are_caught_when_origins_are_new() -> None:
    """A split by origin has no predecessor of its own, so its sum is held against the model's rate before."""
    context = GateContext(now=NOW, reference=ROWS)
    halves = pa.concat_tables([changed(ROWS, origin=[name] * 3, requests_per_s=[5.0] * 3) for name in ("a", "b")])
    assert judged(halves, "new_series_jump", context).findings == ()
    wrong = changed(halves, requests_per_s=[300.0] * 6)
    assert len(judged(wrong, "new_series_jump", context).findings) == 6


def test_prices_in_cents_are_caught_in_pools_that_the_last_batch_lacked() -> None:
    """A new pool is held against the catalogue, and spot prices alone against the on-demand price known before."""
    table = PRICES.example_table(NOW)
    context = GateContext(now=NOW, reference=table, previous=table.slice(0, 1))
    cents = changed(table.slice(2, 1), price_usd_per_hour=[1049.264])
    assert [one.rule for one in judged(cents, "price_usd_per_hour_jump", context, "prices").findings] == [
        "price_usd_per_hour_jump"
    ]
    spot = changed(table.slice(1, 1), price_usd_per_hour=[27.56])
    assert len(judged(spot, "spot_not_above_on_demand", context, "prices").findings) == 1
    assert judged(table.slice(1, 1), "spot_not_above_on_demand", context, "prices").findings == ()


def test_the_newest_interval_before_is_what_a_rate_is_held_against() -> None:
    """Rows of the batch before may lie in any order: 10 after 1000 counts, not 1000 after 10."""
    old = changed(ROWS, requests_per_s=[1000.0] * 3, interval_start=[NOW - timedelta(minutes=10)] * 3)
    new = changed(ROWS, interval_start=[NOW - timedelta(minutes=5)] * 3)
    context = GateContext(now=NOW, previous=pa.concat_tables([new, old]))
    assert judged(ROWS, "requests_per_s_jump", context).findings == ()


def test_an_interval_in_minutes_is_a_warning() -> None:
    """Five where there was 300 is said, and the batch is not kept out for it."""
    report = judged(changed(ROWS, interval_s=[5.0] * 3), "interval_s_jump", GateContext(now=NOW, reference=ROWS))
    assert len(report.findings) == 3
    assert report.accepted


def test_a_cell_of_a_megabyte_is_shown_by_its_beginning() -> None:
    """The finding says how long the value is; neither page nor log holds all of it."""
    report = judged(changed(ROWS, model=["x" * 100_000, "b", "c"]), "model_is_name", GateContext(now=NOW))
    (found,) = report.findings
    assert len(str(found)) < 1000
    assert "(100002 characters)" in found.value


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("0001-01-01T00:00:00Z", True),
        ("0000-01-01T00:00:00Z", False),
        ("0001-01-01T00:00:00+10:00", False),
        ("9999-12-31T23:59:59Z", True),
        ("9999-12-31T23:59:59-10:00", False),
        ("10000-01-01T00:00:00Z", False),
        ("2026-11-29T12:00:00+24:00", False),
        ("2026-11-29T12:00:60Z", False),
        ("2026-11-29T24:00:00Z", False),
        ("2026-W48-7T12:00Z", False),
        ("2026-333T12:00Z", False),
        ("20261129T120000Z", False),
        ("2026-11-29T12:00:00,5Z", False),
        ("2026-11-29T12:00:00 PST", False),
        ("Sun, 29 Nov 2026 12:00:00 GMT", False),
        ("29/11/2026 12:00Z", False),
        ("1796000000", False),
        ("\u0662\u0660\u0662\u0666-11-29T12:00:00Z", False),
    ],
)
def test_times_are_read_in_one_form_within_the_years_that_have_a_name(text: str, read: bool) -> None:
    """An offset that carries a time out of the years 1 to 9999, leap seconds, other calendars' forms: each refused."""
    header = ",".join(PRICES.column_names)
    row = f"aws/us-east-2,L4x1,on_demand,0.8,{text!s},x"
    data = f"{header}\n{row if ',' not in text else row.replace(text, f'{chr(34)}{text}{chr(34)}')}\n"
    report = check_table(PRICES, read_bytes(data.encode(), "f.csv"), GateContext(now=NOW)).report
    assert [one.rule for one in report.findings] != []
    assert ("time" in {one.rule for one in report.findings}) is not read


NUMBERS = [
    *("1e", "+-1", "--1", "1.0.0", "0x10", "0b1", "0o7", "1_000", "1d", "1f", "1L", "true", "TRUE", "1,5", "1.234,5"),
    *(
        "1 000",
        "$1",
        "1%",
        "1/2",
        "=1+1",
        "NaN(1)",
        "\u00bd",
        "\u0661\u0662",
        "\uff11\uff12",
        "\u0663.\u0665",
        "[1]",
        '""',
    ),
]


def test_what_only_some_programs_call_a_number_is_none() -> None:
    """Other bases, suffixes, signs, fractions, digits of other scripts, truth values: each is refused in its row."""
    header = ",".join(DEMAND.column_names)
    rows = [
        f'phi-4-14b,"{text.replace(chr(34), chr(34) * 2)}",9,9,9,9,{NOW.isoformat()},300,r{n}'
        for n, text in enumerate(NUMBERS)
    ]
    data = "\n".join([header, *rows, f"phi-4-14b,5.,9,9,9,9,{NOW.isoformat()},300,good", ""])
    report = check_table(DEMAND, read_bytes(data.encode(), "f.csv"), GateContext(now=NOW)).report
    found = {one.row.split(" (")[0]: one.rule for one in report.findings}
    assert found == {f"row {n}": "number" for n in range(1, len(NUMBERS) + 1)}


@pytest.mark.parametrize("name", [r"\N", '""', "''", "-nan", "NaN", "#N/A", "#REF!", "."])
def test_a_stand_in_for_a_missing_name_is_no_name(name: str) -> None:
    """What databases, spreadsheets and programs leave where a name is missing."""
    report = judged(changed(ROWS, model=[name, "b", "c"]), "model_is_name", GateContext(now=NOW))
    assert [one.row.split(" (")[0] for one in report.findings] == ["row 1"]


def test_a_name_cut_off_at_the_end_of_the_file_is_refused() -> None:
    """L4x1 may be the front of L4x16, and an empty origin that of aws/us-east-2; free text and times may end so."""
    rows = "model,requests_per_s,mean_prompt_tokens,p95_prompt_tokens,mean_output_tokens,p95_output_tokens,"
    rows += f"interval_start,interval_s,origin\nphi-4-14b,1,9,9,9,9,{NOW.isoformat()},300,"
    for end, value in (("aws/us-east", "aws/us-east"), ("", "empty")):
        cut = check_table(DEMAND, read_bytes(f"{rows}{end}".encode(), "f.csv"), GateContext(now=NOW)).report
        assert [(one.row, one.value) for one in cut.findings] == [("row 1", value)]
        assert "may be cut off, inside the name origin" in cut.findings[0].text
    words = f"{','.join(PRICES.column_names)}\naws/us-east-2,L4x1,on_demand,0.8,{NOW.isoformat()},a price li"
    report = check_table(PRICES, read_bytes(words.encode(), "f.csv"), GateContext(now=NOW)).report
    assert report.verdict is Verdict.ACCEPTED_WITH_WARNINGS


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"a,b\n1,2\n\xe9,3\n", "byte 0xe9 in line 3"),
        (b"a,b\n1,2\0\n", "a NUL in line 2"),
        ("a,b\n1,2\n".encode("utf-16-le"), "a NUL in line 1"),
        ("a,b\n1,2\n".encode("utf-32"), "a NUL in line 1"),
        (b"a,b\n1,\x80\n", "byte 0x80 in line 2"),
    ],
)
def test_what_is_no_text_is_shown_where_it_stands(data: bytes, value: str) -> None:
    """Other encodings are not guessed; the first byte that is none of UTF-8 is named with its line."""
    raw = read_bytes(data, "f.csv")
    assert raw.table is None
    assert [(flaw.text, flaw.value) for flaw in raw.flaws] == [("neither Parquet nor UTF-8 text", value)]


def test_lists_that_repeat_are_read_as_each_would_be_alone() -> None:
    """Equal texts of lists, empty cells and bad ones at several rows: each row has its own list, null or flaw."""
    table = TEMPLATES.example_table(NOW)
    cells = ["[40]", None, "[1.5]", "[40]", "[10, 30]", "[1.5]", None, "[40]"]
    many = pa.concat_tables([table] * 4)
    found = coerce(
        TEMPLATES, many.set_column(many.schema.get_field_index("stage_layers"), "stage_layers", pa.array(cells))
    )
    assert [(flaw.row, flaw.value) for flaw in found.flaws] == [(2, "[1.5]"), (5, "[1.5]")]
    assert found.table is not None
    lists = [[40], None, None, [40], [10, 30], None, None, [40]]
    assert found.table.column("stage_layers").to_pylist() == lists


def test_files_that_state_more_than_a_table_holds_are_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small Parquet file can unpack to more than the memory; CSV has a limit of its own, which names Parquet."""
    sink = io.BytesIO()
    pq.write_table(pa.table({"a": ["x" * 1000] * 1000}), sink, use_dictionary=False, compression="zstd")
    monkeypatch.setattr("data_contracts.files.MAX_UNPACKED_BYTES", 100_000)
    assert len(sink.getvalue()) < 100_000
    assert "bytes unpacked" in read_bytes(sink.getvalue(), "f.parquet").flaws[0].text
    monkeypatch.setattr("data_contracts.files.MAX_CSV_BYTES", 100)
    assert "use Parquet" in read_bytes(b"a,b\n" * 100, "f.csv").flaws[0].text


REPEATED: dict[str, pa.Array] = {
    "text": pa.array(["x" * 1000] * 300),
    "large text": pa.array(["x" * 1000] * 300, pa.large_string()),
    "a text view": pa.array(["x" * 1000] * 300, pa.string_view()),
    "bytes": pa.array([b"x" * 1000] * 300),
    "a dictionary": pa.array(["x" * 1000] * 300).dictionary_encode(),
    "lists": pa.array([["x" * 1000, None], [], None] * 300),
    "lists of lists": pa.array([[["x" * 1000]], [[], None]] * 300),
    "structures": pa.array([{"a": "x" * 1000, "b": 1}] * 300),
    "a mapping's values": pa.array([[("k", "x" * 1000)]] * 300, pa.map_(pa.string(), pa.string())),
    "two texts": pa.array(["x" * 1000, "y" * 1000] * 150),
}


@pytest.mark.parametrize("kind", REPEATED)
def test_a_long_text_that_a_short_file_repeats_counts_for_every_row(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """300 rows of a thousand bytes are 300,000 bytes, at any depth and of any type of text: at the limit, and above."""
    data = io.BytesIO()
    pq.write_table(pa.table({"n": range(len(REPEATED[kind])), "a": REPEATED[kind]}), data, row_group_size=500)
    assert len(data.getvalue()) < 20_000
    # the mapping's key of one letter counts too
    exact = 300_300 if "mapping" in kind else 300_000
    monkeypatch.setattr("data_contracts.files.MAX_TEXT_BYTES", exact)
    whole = read_bytes(data.getvalue(), "f.parquet")
    assert whole.table is not None
    assert whole.table.column("a").to_pylist() == REPEATED[kind].to_pylist()
    monkeypatch.setattr("data_contracts.files.MAX_TEXT_BYTES", exact - 1)
    refused = read_bytes(data.getvalue(), "f.parquet")
    assert refused.table is None
    assert (refused.flaws[0].value, refused.flaws[0].text) == (
        str(exact),
        f"the file holds more than {exact - 1} bytes of text",
    )


def test_lists_of_texts_that_outgrew_their_dictionary_are_read_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dictionary for a row group's first texts and none for the rest, as writers make it, in several row groups."""
    lists = [[f"{k:04}{'x' * 96}"] for k in range(600)]
    data = io.BytesIO()
    pq.write_table(
        pa.table({"a": lists}), data, dictionary_pagesize_limit=1000, write_batch_size=50, row_group_size=250
    )
    monkeypatch.setattr("data_contracts.files.MAX_TEXT_BYTES", 70_000)
    whole = read_bytes(data.getvalue(), "f.parquet")
    assert whole.table is not None
    assert whole.table.column("a").to_pylist() == lists
    monkeypatch.setattr("data_contracts.files.MAX_TEXT_BYTES", 59_999)
    assert "bytes of text" in read_bytes(data.getvalue(), "f.parquet").flaws[0].text


def test_a_text_in_parquet_is_no_longer_than_a_cell_of_csv_may_be() -> None:
    """A million bytes in either; a byte more is refused with the column."""
    for length, good in ((1_000_000, True), (1_000_001, False)):
        data = io.BytesIO()
        pq.write_table(pa.table({"a": ["x" * length, "y"]}), data)
        raw = read_bytes(data.getvalue(), "f.parquet")
        assert (raw.table is not None) == good
        assert raw.flaws == () or raw.flaws[0].text == "a text in column a is longer than 1000000 bytes"
        assert (read_bytes(f"a\n{'x' * length}\n".encode(), "f.csv").table is not None) == good


def test_numbers_that_a_short_file_repeats_count_for_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """One number for 10,000 rows, and for 10,000 places of one row's list, is 80,000 bytes in each column."""
    for column, count in ((pa.array([7] * 10_000), 10_000), (pa.array([[7] * 10_000]), 10_000)):
        data = io.BytesIO()
        pq.write_table(pa.table({"a": column, "b": column}), data)
        assert len(data.getvalue()) < 5_000
        for limit, good in ((16 * count, True), (16 * count - 1, False)):
            monkeypatch.setattr("data_contracts.files.MAX_UNPACKED_BYTES", limit)
            raw = read_bytes(data.getvalue(), "f.parquet")
            assert (raw.table is not None) == good
            assert good or raw.flaws[0].value == "160000"


def test_texts_that_are_packed_tightly_are_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Different texts without a dictionary, which the packing alone makes small."""
    data = io.BytesIO()
    texts = [f"{k}{'x' * 1000}" for k in range(300)]
    pq.write_table(pa.table({"a": texts}), data, use_dictionary=False, compression="zstd")
    assert len(data.getvalue()) < 20_000
    monkeypatch.setattr("data_contracts.files.MAX_TEXT_BYTES", 300_000)
    assert read_bytes(data.getvalue(), "f.parquet").flaws[0].text == "the file holds more than 300000 bytes of text"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_csv_of_many_short_cells_is_refused_before_it_is_cut_up(
    monkeypatch: pytest.MonkeyPatch, separator: str, end: str
) -> None:
    """Each cell costs far more than its byte: at most so many, with any separator and line end."""
    text = end.join([separator.join("ab")] + [separator.join("12")] * 50) + end
    monkeypatch.setattr("data_contracts.files.MAX_CSV_CELLS", 153)
    assert read_bytes(text.encode(), "f.csv").table is not None
    monkeypatch.setattr("data_contracts.files.MAX_CSV_CELLS", 50)
    assert read_bytes(text.encode(), "f.csv").flaws[0].text == "the CSV has more than 50 cells: use Parquet"


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop", "being written"])
def test_what_is_no_plain_file_is_a_finding(tmp_path: Path, kind: str) -> None:
    """A pipe without a writer, a device without end, a file that is being written: the reason at once, no waiting."""
    path = tmp_path / "demand.csv"
    message = {"folder": "Is a directory", "loop": "symbolic links", "being written": "open for writing"}
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    with path.open("w") if kind == "being written" else contextlib.nullcontext():
        raw = read_file(path)
    assert raw.table is None
    assert message.get(kind, "no plain file") in raw.flaws[0].text
