"""A request log in several files: what counts, in which order, and that nothing counts twice; values by hand."""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from coral_tasks.domain.errors import SourceFault, ValidationFailed
from coral_tasks.domain.names import ModelId
from coral_tasks.ingestion import trace_logs
from coral_tasks.ingestion.batch import SourceBatch
from coral_tasks.ingestion.rows import demand_rows
from coral_tasks.ingestion.trace_file import read_log
from coral_tasks.ingestion.trace_source import TraceSource

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)
NOW = NOON + timedelta(minutes=12)
HEADER = "TIMESTAMP,model,ContextTokens,GeneratedTokens"


def row(minutes: float, prompt: int = 9, model: str = "a") -> str:
    """One request, minutes after noon."""
    return f"{(NOON + timedelta(minutes=minutes)).isoformat()},{model},{prompt},9"


def text(*rows: str, end: str = "\n") -> bytes:
    """A log of these rows."""
    return ("\n".join([HEADER, *rows]) + end).encode()


def put(path: Path, content: bytes, changed: float = 12) -> Path:
    """A file, last changed at these minutes after noon."""
    path.write_bytes(content)
    at = (NOON + timedelta(minutes=changed)).timestamp()
    os.utime(path, (at, at))
    return path


def shown(batch: SourceBatch) -> list[tuple[str, int, float]]:
    """Model, minutes after noon and requests of each row's interval."""
    table = batch.raw().table
    assert table is not None
    return [
        (one.model, round((one.interval_start - NOON).total_seconds() / 60), one.requests_per_s * one.interval_s)
        for one in demand_rows(table)
    ]


# Noon to 12:05 has four requests of a; 12:05 to 12:10 three of a and one of b; the rotation was at 12:06:30.
OLD = [row(0, 1), row(1, 2), row(2, 3), row(4.9, 4), row(5, 5), row(6, 6)]
NEW = [row(7, 7, "b"), row(9.5, 8), row(10.1, 9)]
WHOLE = [("a", 0, 4.0), ("a", 5, 3.0), ("b", 5, 1.0)]


def parquet(*rows: str, types: Callable[[pa.Table], pa.Table] = lambda table: table) -> bytes:
    """The same rows as Parquet, with moments and whole numbers."""
    cells = [one.split(",") for one in rows]
    table = pa.table(
        {
            "TIMESTAMP": pa.array([datetime.fromisoformat(one[0]) for one in cells], pa.timestamp("us", "UTC")),
            "model": [one[1] for one in cells],
            "ContextTokens": [int(one[2]) for one in cells],
            "GeneratedTokens": [int(one[3]) for one in cells],
        }
    )
    sink = io.BytesIO()
    pq.write_table(types(table), sink)
    return sink.getvalue()


PAIRS: dict[str, tuple[str, bytes, str, bytes]] = {
    "numbered": ("requests.csv.1", text(*OLD), "requests.csv", text(*NEW)),
    "dated and packed": ("requests.csv-20261129.gz", gzip.compress(text(*OLD)), "requests.csv", text(*NEW)),
    "packed, own name": ("a.csv.gz", gzip.compress(text(*OLD)), "b.csv", text(*NEW)),
    "names in the other order": ("z.csv", text(*OLD), "a.csv", text(*NEW)),
    "Parquet and CSV": ("old.parquet", parquet(*OLD), "new.csv", text(*NEW)),
    "both Parquet": ("0.parquet", parquet(*OLD), "1.parquet", parquet(*NEW)),
    "capitals": ("REQUESTS.CSV.1", text(*OLD), "REQUESTS.CSV", text(*NEW)),
}


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("pattern", ["", "*", "[!_]*", "**/*"])
def test_an_interval_that_spans_two_files_has_the_requests_of_both(tmp_path: Path, kind: str, pattern: str) -> None:
    """A folder and patterns of its files: 12:05 to 12:10 counts two of the old file and two of the new one."""
    old, first, new, second = PAIRS[kind]
    logs = tmp_path / "logs"
    logs.mkdir()
    put(logs / old, first, 6.5)
    put(logs / new, second)
    batch = TraceSource(path=logs / pattern, num_intervals=2)(NOW)
    assert shown(batch) == WHOLE
    assert batch.source == f"request log {logs / pattern}"
    assert (batch.completeness, batch.observed_at) == (1.0, NOON + timedelta(minutes=10.1))
    assert [note for note in batch.notes if "nothing is known" not in note] == []


COPIES: dict[str, tuple[str, bytes]] = {
    "packed": ("requests.csv.1.gz", gzip.compress(text(*OLD))),
    "of another name": ("backup.csv", text(*OLD)),
    "as Parquet": ("old.parquet", parquet(*OLD)),
    "CRLF and BOM": ("b.csv", b"\xef\xbb\xbf" + text(*OLD).replace(b"\n", b"\r\n")),
    "its beginning, a copy that is still made": ("copy.csv", text(*OLD[:3], OLD[3][:9], end="")),
    "still being packed": ("requests.csv.1.gz", gzip.compress(text(*OLD), compresslevel=0)[:-30]),
    "packing has just begun": ("requests.csv.1.gz", gzip.compress(text(*OLD))[:10]),
    "its end": ("tail.csv", text(*OLD[2:])),
    "its middle": ("middle.csv", text(*OLD[2:5])),
    "of the new file": ("requests.csv.copy", text(*NEW)),
    "of the new file when it was shorter": ("requests.csv.copy", text(*NEW[:2])),
    "end of the old, beginning of the new": ("both.csv", text(*OLD[3:], *NEW[:2])),
    "both in one": ("both.csv", text(*OLD, *NEW)),
    "times in whole milliseconds": (
        "ms.parquet",
        parquet(
            *OLD, types=lambda t: t.set_column(0, "TIMESTAMP", t.column(0).cast(pa.timestamp("ms", "UTC"), safe=False))
        ),
    ),
}


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_of_a_file_or_of_a_part_of_it_counts_once(tmp_path: Path, kind: str) -> None:
    """Equal copies, beginnings, ends and files that overlap do not double demand; a note says so."""
    name, content = COPIES[kind]
    put(tmp_path / "requests.csv.1", text(*OLD), 6.5)
    put(tmp_path / "requests.csv", text(*NEW))
    put(tmp_path / name, content, 11)
    batch = TraceSource(path=tmp_path, num_intervals=2)(NOW)
    assert shown(batch) == WHOLE
    if kind != "packing has just begun":
        assert any("counted once" in note for note in batch.notes)


def test_a_copy_with_coarser_times_is_the_same_requests(tmp_path: Path) -> None:
    """Parquet in milliseconds or seconds beside CSV in microseconds: one of them counts."""
    rows = [row(0.0000123, 1), row(1.5000777, 2), row(5.25003, 3), row(6.1, 4), row(10, 5)]
    put(tmp_path / "a.csv", text(*rows))
    for unit in ("ms", "s"):

        def coarse(table: pa.Table, unit: str = unit) -> pa.Table:
            return table.set_column(
                0, "TIMESTAMP", table.column(0).cast(pa.timestamp("us")).cast(pa.timestamp(unit), safe=False)
            )

        put(tmp_path / "a.parquet", parquet(*rows, types=coarse))
        batch = TraceSource(path=tmp_path)(NOW)
        assert shown(batch) == [("a", 5, 2.0)]
        assert any("all of its 5 requests stand in" in note for note in batch.notes)


def test_requests_that_two_files_hold_in_another_arrangement_are_refused(tmp_path: Path) -> None:
    """Every one of them with file, row and value; equal requests in one file are two, and those too old to count go."""
    put(tmp_path / "requests.csv.1", text(*OLD, row(6, 6)), 6.5)
    shuffled = [row(6.4, 70), OLD[5], row(6.6, 71), OLD[4], *NEW]
    put(tmp_path / "requests.csv", text(*shuffled))
    with pytest.raises(ValidationFailed, match="a request that two files hold would count twice") as caught:
        TraceSource(path=tmp_path)(NOW)
    found = [(Path(one.table).name, one.row, one.value) for one in caught.value.violations]
    assert found == [("requests.csv", "row 4", "a"), ("requests.csv", "row 2", "a")]
    assert "requests.csv.1, row 7," in str(caught.value)
    put(tmp_path / "requests.csv.1", text(*OLD, row(6, 6)), 6.5)
    put(tmp_path / "requests.csv", text(row(6.4, 70), row(2.5, 33), OLD[1], row(6.6, 71), *NEW))
    assert shown(TraceSource(path=tmp_path)(NOW)) == [("a", 5, 6.0), ("b", 5, 1.0)]
    with pytest.raises(ValidationFailed, match="would count twice"):
        TraceSource(path=tmp_path, num_intervals=2)(NOW)


def test_other_names_of_a_model_do_not_hide_a_copy(tmp_path: Path) -> None:
    """The old file calls it by its hub name, the copy by its id."""
    names = {"hub/a": ModelId("a")}
    put(tmp_path / "1.csv", text(*[one.replace(",a,", ",hub/a,") for one in OLD]))
    put(tmp_path / "2.csv", text(*OLD))
    put(tmp_path / "3.csv", text(*NEW))
    assert shown(TraceSource(path=tmp_path, num_intervals=2, model_names=names)(NOW)) == WHOLE


@pytest.mark.parametrize(
    ("content", "notes"),
    [
        (b"", 0),
        (HEADER.encode(), 1),
        (text(), 0),
        (text(row(11), end="")[:-3], 1),
        (b"\xef\xbb\xbf", 1),
    ],
)
def test_a_new_file_that_holds_nothing_yet_changes_nothing(tmp_path: Path, content: bytes, notes: int) -> None:
    """Empty, half a header, a header, half a row: the rotated file decides, and a half line is noted with its file."""
    put(tmp_path / "requests.csv.1", text(*OLD, *NEW), 10.2)
    put(tmp_path / "requests.csv", content)
    batch = TraceSource(path=tmp_path, num_intervals=2)(NOW)
    assert shown(batch) == WHOLE
    said = [note for note in batch.notes if note.endswith("the last line has no end yet: left out")]
    assert len(said) == notes
    assert all(str(tmp_path / "requests.csv") in note for note in said)


def test_a_link_to_a_file_is_that_file(tmp_path: Path) -> None:
    """``current.csv`` that points to the newest file is no second one; a link to nothing is a fault."""
    put(tmp_path / "1.csv", text(*OLD))
    put(tmp_path / "2.csv", text(*NEW))
    (tmp_path / "current.csv").symlink_to(tmp_path / "2.csv")
    (tmp_path / "hard.csv").hardlink_to(tmp_path / "1.csv")
    batch = TraceSource(path=tmp_path, num_intervals=2)(NOW)
    assert shown(batch) == WHOLE
    assert not any("counted once" in note for note in batch.notes)
    (tmp_path / "lost.csv").symlink_to(tmp_path / "absent")
    with pytest.raises(SourceFault, match="No such file"):
        TraceSource(path=tmp_path)(NOW)


def test_what_is_no_log_by_its_name_is_passed_over(tmp_path: Path) -> None:
    """Temporaries, hidden files and other kinds of a folder; a pattern that names another kind means it."""
    put(tmp_path / "requests.csv", text(*OLD, *NEW))
    for name in (".requests.csv.swp", "_requests.csv", "requests.csv.tmp", "requests.csv.part", "r.csv~", "README"):
        put(tmp_path / name, b"no log\n")
    assert shown(TraceSource(path=tmp_path, num_intervals=2)(NOW)) == WHOLE
    with pytest.raises(ValidationFailed, match="README"):
        TraceSource(path=tmp_path / "*")(NOW)
    (tmp_path / "README").rename(tmp_path / "requests.csv.1.zst")
    put(tmp_path / "requests.csv.1.zst", b"\x28\xb5\x2f\xfdpacked")
    with pytest.raises(ValidationFailed, match="packed"):
        TraceSource(path=tmp_path)(NOW)


def test_nothing_there_is_unknown_and_not_zero(tmp_path: Path) -> None:
    """An empty folder, a pattern that fits nothing, only empty files, a folder of logs in a folder."""
    for path in (tmp_path, tmp_path / "*.csv", tmp_path / "absent" / "*.csv"):
        with pytest.raises(SourceFault, match=r"demand: .*no request log there; demand is unknown, not zero"):
            TraceSource(path=path)(NOW)
    put(tmp_path / "1.csv", b"")
    put(tmp_path / "2.csv", text())
    with pytest.raises(SourceFault, match="holds no request; demand is unknown"):
        TraceSource(path=tmp_path)(NOW)
    (tmp_path / "day.csv").mkdir()
    with pytest.raises(SourceFault, match=r"day\.csv cannot be read: Is a directory"):
        TraceSource(path=tmp_path)(NOW)


def test_a_name_with_marks_of_a_pattern_is_that_file(tmp_path: Path) -> None:
    """A file whose name holds brackets is read as it is named."""
    put(tmp_path / "log[1].csv", text(*OLD, *NEW))
    put(tmp_path / "log1.csv", b"not this one")
    assert shown(TraceSource(path=tmp_path / "log[1].csv", num_intervals=2)(NOW)) == WHOLE


def test_files_that_are_too_old_to_matter_are_not_read(tmp_path: Path) -> None:
    """Broken rows of last week stop nobody; the newest of the old files is read, since it says that the log lived."""
    put(tmp_path / "requests.csv.3", b"broken\n", -20_000)
    put(tmp_path / "requests.csv.2", text(row(-9001), row(-9000)), -9000)
    put(tmp_path / "requests.csv.1", text(*OLD[3:]), 6.5)
    put(tmp_path / "requests.csv", text(*NEW))
    batch = TraceSource(path=tmp_path)(NOW)
    assert shown(batch) == [("a", 5, 3.0), ("b", 5, 1.0)]
    put(tmp_path / "requests.csv.2", b"broken\n", -9000)
    with pytest.raises(ValidationFailed, match=r"requests\.csv\.2"):
        TraceSource(path=tmp_path)(NOW)


def test_a_time_without_requests_between_two_files_is_unknown(tmp_path: Path) -> None:
    """A file of 12:06 to 12:16 is missing, or nobody asked: 12:05 to 12:20 has no rows, what lies around it has."""
    put(tmp_path / "requests.csv.2", text(row(0), row(4), row(6)), 6.5)
    put(tmp_path / "requests.csv", text(row(16), row(20), row(21), row(25)), 25)
    now = NOON + timedelta(minutes=26)
    batch = TraceSource(path=tmp_path, num_intervals=5)(now)
    assert shown(batch) == [("a", 0, 2.0), ("a", 20, 2.0)]
    assert (batch.received, batch.expected) == (2, 5)
    assert any("12:06:00+00:00, where" in note and "a file may be missing" in note for note in batch.notes)
    put(tmp_path / "requests.csv", text(row(16), row(20)), 20.5)
    with pytest.raises(SourceFault, match=r"covers no whole interval.*a file may be missing"):
        TraceSource(path=tmp_path)(NOON + timedelta(minutes=21))
    put(tmp_path / "requests.csv.1", text(row(7), row(11), row(15.5)), 15.6)
    assert shown(TraceSource(path=tmp_path)(NOON + timedelta(minutes=21))) == [("a", 15, 2.0)]


def test_logs_of_two_writers_are_refused(tmp_path: Path) -> None:
    """One of them could end unseen; files that overlap by less than requests take are one log, rotated."""
    every = [k / 2 for k in range(50)]
    put(tmp_path / "gateway-1.csv", text(*[row(k, 10) for k in every]), 25)
    put(tmp_path / "gateway-2.csv", text(*[row(k + 0.1, 11) for k in every]), 25)
    now = NOON + timedelta(minutes=25)
    with pytest.raises(ValidationFailed, match=r"gateway-2\.csv, row 1: lies long before the end of .*gateway-1\.csv"):
        TraceSource(path=tmp_path)(now)
    put(tmp_path / "gateway-2.csv", text(*[row(k + 0.1, 11) for k in range(14, 25)]), 25)
    assert shown(TraceSource(path=tmp_path)(now)) == [("a", 15, 15.0)]


def test_every_bad_row_of_every_file_is_told_with_its_file(tmp_path: Path) -> None:
    """Both files' rows at once; a model column in one file only is refused where it is."""
    put(tmp_path / "1.csv", text(*OLD[:2], "soon,a,9,9"))
    put(tmp_path / "2.csv", text("x,a,9,9", *NEW, row(11, -1)))
    with pytest.raises(ValidationFailed) as caught:
        TraceSource(path=tmp_path)(NOW)
    assert {(Path(one.table).name, one.row) for one in caught.value.violations} == {
        ("1.csv", "row 3"),
        ("2.csv", "row 1"),
        ("2.csv", "row 5"),
    }
    put(tmp_path / "1.csv", text(*OLD))
    put(tmp_path / "2.csv", b"TIMESTAMP,ContextTokens,GeneratedTokens\n2026-11-29T12:11:00Z,9,9\n")
    with pytest.raises(ValidationFailed, match=r"2\.csv.*no column `model` and the source names none"):
        TraceSource(path=tmp_path)(NOW)
    with pytest.raises(ValidationFailed, match=r"1\.csv.*has a column `model` and the source names one too"):
        TraceSource(path=tmp_path, model="a")(NOW)


def test_a_future_request_is_judged_by_the_change_of_its_own_file(tmp_path: Path) -> None:
    """A rotated file that was closed at 12:06 holds no request of 12:30, though the new one is of 12:40."""
    put(tmp_path / "requests.csv.1", text(*OLD, row(30)), 6.5)
    put(tmp_path / "requests.csv", text(*NEW, row(39)), 40)
    with pytest.raises(ValidationFailed, match=r"requests\.csv\.1, row 7: .*lies in the future"):
        TraceSource(path=tmp_path)(NOW)


def test_packed_data_without_an_end_that_stands_nowhere_else_is_a_fault(tmp_path: Path) -> None:
    """Half of a rotated file is lost: what it still holds is no reason to count half the demand."""
    put(tmp_path / "requests.csv", text(*NEW))
    put(tmp_path / "requests.csv.1.gz", gzip.compress(text(*OLD), compresslevel=0)[:-60], 6.5)
    with pytest.raises(SourceFault, match="it has no end, and what it holds stands in no other file"):
        TraceSource(path=tmp_path)(NOW)
    put(tmp_path / "requests.csv.1.gz", gzip.compress(text(*OLD))[:12], 6.5)
    with pytest.raises(SourceFault, match="it has no end"):
        TraceSource(path=tmp_path)(NOW)
    put(tmp_path / "requests.csv.1.gz", parquet(*OLD)[:-40], 6.5)
    with pytest.raises(SourceFault, match="no whole Parquet file: it may still be written"):
        TraceSource(path=tmp_path)(NOW)


def rotating(monkeypatch: pytest.MonkeyPatch, folder: Path, times: int) -> None:
    """Let the first ``times`` readings of a file fall on a rotation: the file that was read becomes the next number."""
    real, left = read_log, [times]

    def read(path: Path, **given: object) -> object:
        log = real(path, **given)  # type: ignore[arg-type]
        if left[0]:
            left[0] -= 1
            for number in range(98, 0, -1):
                if (folder / f"requests.csv.{number}").exists():
                    (folder / f"requests.csv.{number}").rename(folder / f"requests.csv.{number + 1}")
            (folder / "requests.csv").rename(folder / "requests.csv.1")
            put(folder / "requests.csv", b"", 12)
        return log

    monkeypatch.setattr("coral_tasks.ingestion.trace_logs.read_log", read)


def test_a_rotation_while_the_files_are_read_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names mean other files a moment later: all are read again; if that goes on, it is a fault."""
    put(tmp_path / "requests.csv.1", text(*OLD), 6.5)
    put(tmp_path / "requests.csv", text(*NEW))
    with monkeypatch.context() as patched:
        rotating(patched, tmp_path, 1)
        assert shown(TraceSource(path=tmp_path, num_intervals=2)(NOW)) == WHOLE
    rotating(monkeypatch, tmp_path, 99)
    with pytest.raises(SourceFault, match="files came, went or became shorter while they were read, 3 times"):
        TraceSource(path=tmp_path)(NOW)


def test_a_file_that_was_emptied_after_its_copy_was_read_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """copytruncate: the copy was half done when it was read, and the original is empty when its turn comes."""
    put(tmp_path / "requests.csv", text(*OLD, *NEW), 11)
    put(tmp_path / "requests.csv.1", text(*OLD))
    real = read_log
    done: list[str] = []

    def read(path: Path, **given: object) -> object:
        log = real(path, **given)  # type: ignore[arg-type]
        if not done:
            done.append(path.name)
            put(tmp_path / "requests.csv.1", text(*OLD, *NEW))
            put(tmp_path / "requests.csv", b"")
        return log

    monkeypatch.setattr("coral_tasks.ingestion.trace_logs.read_log", read)
    assert shown(TraceSource(path=tmp_path, num_intervals=2)(NOW)) == WHOLE
    assert done == ["requests.csv.1"]


def test_more_bytes_than_may_be_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files that are needed count together, unpacked; a file that is not needed does not count."""
    put(tmp_path / "requests.csv.1.gz", gzip.compress(text(*OLD)), 6.5)
    put(tmp_path / "requests.csv", text(*NEW))
    total = len(text(*OLD)) + len(text(*NEW))
    monkeypatch.setattr(trace_logs, "MAX_BYTES", total)
    assert shown(TraceSource(path=tmp_path, num_intervals=2)(NOW)) == WHOLE
    monkeypatch.setattr(trace_logs, "MAX_BYTES", total - 1)
    with pytest.raises(SourceFault, match=f"hold more than {total - 1} bytes together"):
        TraceSource(path=tmp_path)(NOW)


def column(name: str, change: Callable[[pa.ChunkedArray], pa.ChunkedArray]) -> Callable[[pa.Table], pa.Table]:
    """A table with one column changed."""
    return lambda table: table.set_column(table.column_names.index(name), name, change(table.column(name)))


TYPES: dict[str, Callable[[pa.Table], pa.Table]] = {
    "seconds": column("TIMESTAMP", lambda c: c.cast(pa.timestamp("s", "UTC"), safe=False)),
    "nanoseconds": column("TIMESTAMP", lambda c: c.cast(pa.timestamp("ns", "UTC"))),
    "Berlin": column("TIMESTAMP", lambda c: c.cast(pa.timestamp("us", "Europe/Berlin"))),
    "no zone": column("TIMESTAMP", lambda c: c.cast(pa.timestamp("ms"), safe=False)),
    "text": column("TIMESTAMP", lambda c: c.cast(pa.string())),
    "a dictionary": column("model", pc.dictionary_encode),
    "large text": column("model", lambda c: c.cast(pa.large_string())),
    "text view": column("model", lambda c: c.cast(pa.string_view())),
    "counts as floats": column("ContextTokens", lambda c: c.cast(pa.float32())),
    "counts as decimals": column("ContextTokens", lambda c: pa.chunked_array([[Decimal(x) for x in c.to_pylist()]])),
    "counts in 16 bits": column("GeneratedTokens", lambda c: c.cast(pa.int16())),
    "unsigned": column("GeneratedTokens", lambda c: c.cast(pa.uint64())),
    "counts as text": column("GeneratedTokens", lambda c: c.cast(pa.string())),
    "another column": lambda t: t.append_column("note", pa.array([[1]] * len(t))),
    "other order": lambda t: t.select(["GeneratedTokens", "model", "TIMESTAMP", "ContextTokens"]),
}


@pytest.mark.parametrize("kind", TYPES)
def test_a_parquet_log_has_the_values_of_its_types(tmp_path: Path, kind: str) -> None:
    """Times of every unit and zone, counts of every type of number: the same requests."""
    put(tmp_path / "log.parquet", parquet(*OLD, *NEW, types=TYPES[kind]))
    batch = TraceSource(path=tmp_path / "log.parquet", num_intervals=2)(NOW)
    assert shown(batch) == WHOLE
    table = batch.raw().table
    assert table is not None
    last = [one for one in demand_rows(table) if one.model == "a"][1]
    # of the prompts 5, 6 and 8
    assert last.shape.mean_prompt_tokens == pytest.approx(19 / 3)
    assert last.shape.mean_output_tokens == 9


BAD_TYPES: dict[str, tuple[Callable[[pa.Table], pa.Table], str]] = {
    "true": (column("ContextTokens", lambda c: pc.greater(c, 3)), "row 1: needs a time"),
    "half a token": (column("ContextTokens", lambda c: pc.add(c.cast(pa.float64()), 0.5)), "row 1: needs a time"),
    "NaN": (column("ContextTokens", lambda c: pa.chunked_array([[float("nan")] * len(c)])), "row 1: needs a time"),
    "nothing": (column("model", lambda c: pa.chunked_array([[None] * len(c)], pa.string())), "and a model"),
    "no name": (column("model", lambda c: pa.chunked_array([[" "] * len(c)], pa.string())), "and a model"),
    "days": (column("TIMESTAMP", lambda c: c.cast(pa.date32(), safe=False)), "needs a time"),
    "numbers": (column("TIMESTAMP", lambda c: c.cast(pa.int64())), "needs a time"),
    "lists": (column("ContextTokens", lambda c: pa.chunked_array([[[1]] * len(c)])), "column ContextTokens has type"),
    "bytes": (column("model", lambda c: pa.chunked_array([[b"\xff"] * len(c)])), "column model has type binary"),
}


@pytest.mark.parametrize("kind", BAD_TYPES)
def test_a_parquet_column_that_is_no_time_count_or_name_is_refused(tmp_path: Path, kind: str) -> None:
    """By its rows or as a whole, with a message and nothing else."""
    change, message = BAD_TYPES[kind]
    put(tmp_path / "log.parquet", parquet(*OLD, *NEW, types=change))
    with pytest.raises(ValidationFailed, match=message):
        TraceSource(path=tmp_path)(NOW)
