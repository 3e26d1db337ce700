"""Request traces: every fault of the file and of a row has its message; other spellings keep their meaning."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from coral_tasks.domain.errors import StorageFault, ValidationFailed
from coral_tasks.ingestion.trace_file import MAX_TOKENS, is_trace, read_log, read_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
FIRST, SECOND = "2023-11-16 18:17:03.9799600,10,2", "2023-11-16 18:17:05.5000000,20,3"


def write(path: Path, *rows: str, header: str = HEADER) -> Path:
    """A trace file with CRLF line ends and none after the last row, as the published ones."""
    path.write_bytes("\r\n".join([header, *rows]).encode())
    return path


def test_a_trace_is_read_in_time_order_with_seven_digits(tmp_path: Path) -> None:
    """Rows are sorted; offsets count from the first request; gzip and plain are the same."""
    plain = read_trace(write(tmp_path / "t.csv", SECOND, FIRST))
    np.testing.assert_allclose(plain.offset_s, [0.0, 1.52004])
    assert plain.prompt_tokens.tolist() == [10, 20]
    assert plain.started_at == datetime(2023, 11, 16, 18, 17, 3, 979960, tzinfo=UTC)
    packed = tmp_path / "t.csv.gz"
    packed.write_bytes(gzip.compress((tmp_path / "t.csv").read_bytes()))
    again = read_trace(packed)
    assert again.name == plain.name
    np.testing.assert_array_equal(again.offset_s, plain.offset_s)
    assert is_trace(packed)


SAME: dict[str, Callable[[str], bytes]] = {
    "BOM": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "UTF-16": lambda text: text.encode("utf-16"),
    "semicolons": lambda text: text.replace(",", ";").encode(),
    "CR": lambda text: text.replace("\n", "\r").encode(),
    "quoted": lambda text: text.replace("10,2", '"10","2"').encode(),
    "T and Z": lambda text: text.replace("16 18", "16T18").replace("0,10", "0Z,10").replace("0,20", "0Z,20").encode(),
    "Berlin": lambda text: (
        text.replace("16 18", "16 19").replace("600,10", "600+01:00,10").replace("000,20", "000+01:00,20").encode()
    ),
    "BigQuery's UTC": lambda text: text.replace("0,10", "0 UTC,10").replace("0,20", "0 UTC,20").encode(),
    "PostgreSQL's +00": lambda text: text.replace("0,10", "0+00,10").replace("0,20", "0+00,20").encode(),
    "a comment": lambda text: b"# from the gateway\n" + text.encode(),
    "another column": lambda text: text.replace("\n", ",note\n").encode(),
    "other order": lambda _: (
        b"ContextTokens,TIMESTAMP,GeneratedTokens\n10,2023-11-16 18:17:03.97996,2\n20,2023-11-16 18:17:05.5,3\n"
    ),
}


@pytest.mark.parametrize("kind", SAME)
def test_other_spellings_of_a_trace_are_the_same_requests(tmp_path: Path, kind: str) -> None:
    """Encodings, separators, line ends, zones and columns that stand elsewhere change nothing."""
    path = tmp_path / "t.csv"
    path.write_bytes(SAME[kind](f"{HEADER}\n{FIRST}\n{SECOND}\n"))
    found = read_trace(path)
    assert found.started_at == datetime(2023, 11, 16, 18, 17, 3, 979960, tzinfo=UTC)
    np.testing.assert_allclose(found.offset_s, [0.0, 1.52004])
    assert (found.prompt_tokens.tolist(), found.output_tokens.tolist()) == ([10, 20], [2, 3])


BAD_ROWS = [
    "yesterday,1,1",
    "2023-11-16,1,1",
    "2023-11-16 18:17,1,1",
    "2023-02-30 18:17:04,1,1",
    "2023-11-16 18:17:04+99:00,1,1",
    "20231116T181704,1,1",
    "1700158624,1,1",
    ",1,1",
    "2023-11-16 18:17:04,ten,1",
    "2023-11-16 18:17:04,-1,1",
    "2023-11-16 18:17:04,1.5,1",
    "2023-11-16 18:17:04,1e3,1",
    "2023-11-16 18:17:04,1_000,1",
    "2023-11-16 18:17:04,0x10,1",
    "2023-11-16 18:17:04,NaN,1",
    "2023-11-16 18:17:04,inf,1",
    "2023-11-16 18:17:04,,1",
    "2023-11-16 18:17:04,1,",
    "2023-11-16 18:17:04,true,1",
    "2023-11-16 18:17:04,\u0663,1",
    f"2023-11-16 18:17:04,{MAX_TOKENS + 1},1",
    f"2023-11-16 18:17:04,1,{'9' * 30}",
    f"2023-11-16 18:17:04,1,{'9' * 5000}",
]


def test_every_bad_row_of_a_trace_is_named(tmp_path: Path) -> None:
    """No time or count that is none is read as one; good rows beside them are not named."""
    path = write(tmp_path / "t.csv", FIRST, *BAD_ROWS, SECOND)
    with pytest.raises(ValidationFailed) as caught:
        read_trace(path)
    assert [one.row for one in caught.value.violations] == [f"row {2 + place}" for place in range(len(BAD_ROWS))]
    assert all(len(str(one)) < 400 for one in caught.value.violations)


def test_a_row_of_another_width_is_named(tmp_path: Path) -> None:
    """A row that was cut, and one with a field too many."""
    with pytest.raises(ValidationFailed, match=r"row 2: row has 2 fields(.|\n)*row 3: row has 4 fields"):
        read_trace(write(tmp_path / "t.csv", FIRST, SECOND[:-2], f"{SECOND},9"))


def test_local_times_beside_times_with_an_offset_are_refused(tmp_path: Path) -> None:
    """A file that mixes both would be hours apart in itself; each row without an offset is named."""
    path = write(tmp_path / "t.csv", FIRST, "2023-11-16 18:17:04Z,1,1", SECOND)
    with pytest.raises(ValidationFailed, match=r"2 violations\n.*row 1: .*without an offset(.|\n)*row 3"):
        read_trace(path)


def test_many_bad_rows_are_told_up_to_a_limit_with_their_number(tmp_path: Path) -> None:
    """A message of a thousand violations says how many more there are."""
    with pytest.raises(ValidationFailed, match="and 500 more violations") as caught:
        read_trace(write(tmp_path / "t.csv", *["x,1,1"] * 1500))
    assert len(caught.value.violations) == 1001


FOREIGN: dict[str, tuple[bytes, type[Exception], str]] = {
    "empty": (b"", ValidationFailed, "the file is empty"),
    "other columns": (b"a,b\n1,2\n", ValidationFailed, "the header must name TIMESTAMP"),
    "header only": (f"{HEADER}\n".encode(), ValidationFailed, "needs two requests"),
    "one request": (f"{HEADER}\n{FIRST}\n".encode(), ValidationFailed, "needs two requests"),
    "one time": (f"{HEADER}\n{FIRST}\n{FIRST}\n".encode(), ValidationFailed, "needs two requests at different times"),
    "a column twice": (f"{HEADER},TIMESTAMP\n{FIRST},x\n".encode(), ValidationFailed, "column is named twice"),
    "open quote": (f'{HEADER}\n"{FIRST}\n'.encode(), ValidationFailed, "open quote"),
    "zero byte": (f"{HEADER}\n\0{FIRST}\n".encode(), ValidationFailed, "neither Parquet nor UTF-8"),
    "no UTF-8": (b"\xff\xfe\xff", ValidationFailed, "neither Parquet nor UTF-8"),
    "web page": (b"<html>502</html>", ValidationFailed, "a web page"),
    "zip": (b"PK\x03\x04rest", ValidationFailed, "packed"),
    "half a gzip": (gzip.compress(b"x" * 1000)[:-20], StorageFault, "cannot be read"),
    "no gzip": (b"\x1f\x8bnonsense", StorageFault, "cannot be read"),
    "gzip of gzip": (gzip.compress(gzip.compress(FIRST.encode())), ValidationFailed, "packed"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, name: str) -> None:
    """Empty, foreign, truncated and undecodable files have their message."""
    content, kind, message = FOREIGN[name]
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(kind, match=message):
        read_trace(path)


def test_a_trace_that_cannot_be_read_is_a_fault(tmp_path: Path) -> None:
    """Absent, a folder, a loop of links, a pipe without a writer, a device, a file that is open for writing."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (tmp_path / "absent", "No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "loop", "symbolic links"),
        (tmp_path / "pipe", "no plain file"),
        (Path("/dev/zero"), "no plain file"),
    ):
        for use in (read_trace, is_trace):
            with pytest.raises(StorageFault, match=message):
                use(path)
    written = write(tmp_path / "t.csv", FIRST, SECOND)
    with written.open("ab"), pytest.raises(StorageFault, match="open for writing"):
        read_trace(written)


def test_a_trace_is_told_by_the_names_in_its_first_line(tmp_path: Path) -> None:
    """In any order and separator; a demand file and a Parquet file are none."""
    path = tmp_path / "f"
    for text, answer in (
        (f"{HEADER}\n", True),
        ('"GeneratedTokens";"TIMESTAMP";"ContextTokens"\n', True),
        ("model,requests_per_s\n", False),
        ("PAR1\x00\xff", False),
    ):
        path.write_bytes(text.encode("latin-1"))
        assert is_trace(path) is answer


def test_a_packed_trace_is_unpacked_up_to_what_a_csv_may_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file can hold terabytes: at the limit it is read, a byte above it is refused, in several members too."""
    text = f"{HEADER}\n{FIRST}\n{SECOND}\n".encode()
    path = tmp_path / "t.csv.gz"
    for packed in (gzip.compress(text), gzip.compress(text[:50]) + gzip.compress(text[50:])):
        path.write_bytes(packed)
        for reader in (read_trace, read_log):
            monkeypatch.setattr("coral_tasks.ingestion.trace_file.MAX_CSV_BYTES", len(text))
            assert reader(path).prompt_tokens.tolist() == [10, 20]
            monkeypatch.setattr("coral_tasks.ingestion.trace_file.MAX_CSV_BYTES", len(text) - 1)
            with pytest.raises(StorageFault, match=f"holds more than {len(text) - 1} bytes once unpacked"):
                reader(path)
