"""Demand from a request log: rates and lengths worked out by hand, and every way in which a log can be wrong."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from coral_tasks.domain.errors import SourceFault, ValidationFailed
from coral_tasks.domain.market import Demand
from coral_tasks.domain.names import ModelId
from coral_tasks.ingestion.batch import SourceBatch
from coral_tasks.ingestion.rows import demand_rows
from coral_tasks.ingestion.trace_source import TraceSource
from data_contracts.contract import GateContext
from data_contracts.gate import check_table
from data_contracts.registry import contract_of

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)
NOW = NOON + timedelta(minutes=12)
HEADER = "TIMESTAMP,model,ContextTokens,GeneratedTokens"
PLAIN = "TIMESTAMP,ContextTokens,GeneratedTokens"


def at(minutes: float) -> str:
    """A time of the log, minutes after noon."""
    return (NOON + timedelta(minutes=minutes)).isoformat()


def written(path: Path, *rows: str, header: str = HEADER, modified: datetime = NOW, end: str = "\n") -> Path:
    """A log of these rows, last changed at ``modified``."""
    path.write_bytes(("\n".join([header, *rows]) + end).encode())
    os.utime(path, (modified.timestamp(), modified.timestamp()))
    return path


def found(batch: SourceBatch) -> list[Demand]:
    """Rows of a batch, by model and time, without the gate's opinion of them."""
    table = batch.raw().table
    assert table is not None
    return list(demand_rows(table))


def shown(batch: SourceBatch) -> list[tuple[str, int, float]]:
    """Model, minutes after noon and requests of each row's interval."""
    rows = found(batch)
    return [
        (row.model, round((row.interval_start - NOON).total_seconds() / 60), row.requests_per_s * row.interval_s)
        for row in rows
    ]


def test_rates_and_lengths_are_those_of_the_last_whole_interval(tmp_path: Path) -> None:
    """Of 12:05 to 12:10, the start in it and the end not: three requests of a, one of b; lengths by hand."""
    path = written(
        tmp_path / "log.csv",
        f"{at(0)},a,1000,1000",
        f"{at(5)},a,10,4",
        f"{at(7)},b,7,3",
        f"{at(6)},a,20,5",
        f"{at(9.999)},a,30,9",
        f"{at(10)},a,5000,5000",
    )
    batch = TraceSource(path=path)(NOW)
    first, second = found(batch)
    assert (first.model, first.interval_start, first.interval_s) == ("a", NOON + timedelta(minutes=5), 300.0)
    assert first.requests_per_s == pytest.approx(3 / 300)
    # of 10, 20, 30 the 95th percentile lies 0.9 of the way from 20 to 30; of 4, 5, 9 from 5 to 9
    assert first.shape.mean_prompt_tokens == pytest.approx(20)
    assert first.shape.p95_prompt_tokens == pytest.approx(29)
    assert first.shape.mean_output_tokens == pytest.approx(6)
    assert first.shape.p95_output_tokens == pytest.approx(8.6)
    assert second.model == "b"
    assert second.requests_per_s == pytest.approx(1 / 300)
    assert second.shape.p95_prompt_tokens == 7
    assert batch.observed_at == NOON + timedelta(minutes=10)
    assert (batch.age_s(NOW), batch.completeness) == (120.0, 1.0)
    assert batch.source == f"request log {path}"
    assert batch.notes == (
        "nothing is known from 2026-11-29T12:10:00+00:00 on: the log's last request is of 2026-11-29T12:10:00+00:00",
    )


def test_an_interval_counts_only_when_the_log_lived_at_its_end(tmp_path: Path) -> None:
    """A request a second before 12:10 leaves 12:05 to 12:10 open though the clock is past it; any model's ends it."""
    rows = [f"{at(0)},a,9,9", f"{at(5)},a,9,9", f"{at(6)},a,9,9", f"{at(9.98)},a,9,9"]
    path = written(tmp_path / "log.csv", *rows)
    source = TraceSource(path=path)
    batch = source(NOW)
    assert shown(batch) == [("a", 0, 1.0)]
    assert "nothing is known from 2026-11-29T12:05:00+00:00 on" in batch.notes[-1]
    written(path, *rows, f"{at(10)},b,9,9")
    assert shown(source(NOW)) == [("a", 5, 3.0)]


def test_what_came_before_its_time_does_not_end_an_interval(tmp_path: Path) -> None:
    """A clock half a minute ahead (within tolerance), and rows written after the run's moment, count for no interval
    that has not ended at that moment."""
    path = written(tmp_path / "log.csv", f"{at(0)},a,9,9", f"{at(5)},a,9,9", f"{at(10.4)},a,9,9")
    batch = TraceSource(path=path)(NOON + timedelta(minutes=9.9))
    assert shown(batch) == [("a", 0, 1.0)]
    assert batch.age_s(NOON + timedelta(minutes=9.9)) == 0.0
    later = written(path, f"{at(0)},a,9,9", f"{at(5)},a,9,9", f"{at(10.4)},a,9,9", f"{at(90)},a,9,9")
    os.utime(later, ((NOON + timedelta(minutes=90)).timestamp(),) * 2)
    assert shown(TraceSource(path=later)(NOW)) == [("a", 5, 1.0)]


def test_a_log_written_as_requests_end_may_be_given_time_to_settle(tmp_path: Path) -> None:
    """With three minutes, 12:05 to 12:10 counts from the row of 12:13 on; rows may stand that far out of order."""
    rows = [f"{at(0)},a,9,9", f"{at(5)},a,9,9", f"{at(12.9)},a,9,9"]
    now = NOON + timedelta(minutes=14)
    path = written(tmp_path / "log.csv", *rows, modified=now)
    source = TraceSource(path=path, settle_s=180)
    assert shown(source(now)) == [("a", 0, 1.0)]
    written(path, *rows, f"{at(13)},a,9,9", f"{at(9)},a,9,9", modified=now)
    assert shown(source(now)) == [("a", 5, 2.0)]


def test_a_first_interval_that_the_log_covers_in_part_is_left_out(tmp_path: Path) -> None:
    """A log that begins at 12:00:01 has nothing to say of 12:00 to 12:05, and says how much came of what was asked."""
    path = written(tmp_path / "log.csv", f"{at(1 / 60)},a,9,9", f"{at(5)},a,9,9", f"{at(10)},a,9,9")
    batch = TraceSource(path=path, num_intervals=4)(NOW)
    assert shown(batch) == [("a", 5, 1.0)]
    assert (batch.received, batch.expected) == (1, 4)
    written(path, f"{at(0)},a,9,9", f"{at(5)},a,9,9", f"{at(10)},a,9,9")
    batch = TraceSource(path=path, num_intervals=4)(NOW)
    assert shown(batch) == [("a", 0, 1.0), ("a", 5, 1.0)]
    assert batch.completeness == 0.5


def test_a_quiet_model_is_at_zero_with_its_latest_lengths_and_a_strange_one_has_no_row(tmp_path: Path) -> None:
    """b was heard of 40 and 35 minutes before 12:05 and counts 0 of the latter's lengths; c never was before 12:10."""
    path = written(
        tmp_path / "log.csv",
        f"{at(-35)},b,100,50",
        f"{at(-30)},b,200,60",
        f"{at(-29)},b,300,80",
        f"{at(6)},a,9,9",
        f"{at(10)},c,9,9",
    )
    batch = TraceSource(path=path)(NOW)
    assert shown(batch) == [("a", 5, 1.0), ("b", 5, 0.0)]
    shape = found(batch)[1].shape
    assert (shape.mean_prompt_tokens, shape.p95_prompt_tokens) == pytest.approx((250.0, 295.0))
    assert (shape.mean_output_tokens, shape.p95_output_tokens) == pytest.approx((70.0, 79.0))
    assert batch.notes[0] == (
        "b: no request: 0 requests/s with the lengths of its latest interval with requests"
        " (newest such interval: 2026-11-29T12:05:00+00:00)"
    )


def test_a_model_that_was_quiet_for_too_long_is_unknown(tmp_path: Path) -> None:
    """b's last request lies 34 minutes before 12:05: zero within 2040 s, no row within 2039 s, and a note says so."""
    path = written(tmp_path / "log.csv", f"{at(-31)},b,9,9", f"{at(-29)},b,9,9", f"{at(6)},a,9,9", f"{at(10)},a,9,9")
    assert shown(TraceSource(path=path, quiet_after_s=2040)(NOW)) == [("a", 5, 1.0), ("b", 5, 0.0)]
    batch = TraceSource(path=path, quiet_after_s=2039)(NOW)
    assert shown(batch) == [("a", 5, 1.0)]
    assert batch.notes[0].startswith("b: no request for more than 2039 s: no row")


def test_quiet_counts_from_each_interval_of_several(tmp_path: Path) -> None:
    """With a window of four minutes b is at zero in the interval after its last request and unknown in the next."""
    path = written(
        tmp_path / "log.csv", f"{at(-5)},a,9,9", f"{at(1)},b,9,9", f"{at(4)},a,9,9", f"{at(6)},a,9,9", f"{at(15)},a,9,9"
    )
    now = NOON + timedelta(minutes=16)
    batch = TraceSource(path=path, num_intervals=3, quiet_after_s=240)(now)
    assert shown(batch) == [("a", 0, 1.0), ("a", 5, 1.0), ("a", 10, 0.0), ("b", 0, 1.0), ("b", 5, 0.0)]


def test_lengths_of_under_a_token_are_those_of_an_earlier_interval(tmp_path: Path) -> None:
    """Requests that failed before their first token still arrived; a model that has nothing else has no row."""
    path = written(
        tmp_path / "log.csv", f"{at(0)},a,8,6", f"{at(6)},a,9,0", f"{at(7)},b,9,0", f"{at(8)},a,9,0", f"{at(10)},a,9,9"
    )
    batch = TraceSource(path=path)(NOW)
    assert shown(batch) == [("a", 5, 2.0)]
    assert found(batch)[0].shape.mean_output_tokens == 6
    assert [note.partition(" (")[0] for note in batch.notes[:2]] == [
        "a: lengths of under a token: those of an earlier interval",
        "b: lengths of under a token and no others known: no row",
    ]


def test_the_source_names_the_model_of_a_log_without_a_column(tmp_path: Path) -> None:
    """Other names of a model are its own; without a name, or with two, nobody knows whose the requests are."""
    rows = [f"{at(0)},9,9", f"{at(5)},9,9", f"{at(10)},9,9"]
    path = written(tmp_path / "log.csv", *rows, header=PLAIN)
    names = {"microsoft/phi-4": ModelId("phi-4-14b")}
    assert shown(TraceSource(path=path, model="microsoft/phi-4", model_names=names)(NOW)) == [("phi-4-14b", 5, 1.0)]
    with pytest.raises(ValidationFailed, match="no column `model` and the source names none"):
        TraceSource(path=path)(NOW)
    both = written(tmp_path / "both.csv", f"{at(0)},a,9,9", f"{at(10)},microsoft/phi-4,9,9")
    with pytest.raises(ValidationFailed, match="has a column `model` and the source names one too"):
        TraceSource(path=both, model="a")(NOW)
    two = written(tmp_path / "two.csv", f"{at(0)},9,9,a,b", header=f"{PLAIN},model,Model")
    with pytest.raises(ValidationFailed, match="two columns name the model"):
        TraceSource(path=two)(NOW)


def test_two_names_of_one_model_are_one_series(tmp_path: Path) -> None:
    """Requests under the hub's name and under the id count together; an unknown name is left to the gate."""
    path = written(
        tmp_path / "log.csv",
        f"{at(0)},phi,9,9",
        f"{at(5)},phi,9,9",
        f"{at(6)},hub/phi,9,9",
        f"{at(7)},x,9,9",
        f"{at(10)},phi,9,9",
        header=HEADER.replace("model", "MODEL"),
    )
    batch = TraceSource(path=path, model_names={"hub/phi": ModelId("phi")})(NOW)
    assert shown(batch) == [("phi", 5, 2.0), ("x", 5, 1.0)]
    outcome = check_table(contract_of("demand"), batch.raw(), GateContext(now=NOW, known={"model": frozenset({"phi"})}))
    assert [one.value for one in outcome.report.findings if one.severity.value == "critical"] == ["'x'"]


def test_seconds_from_the_start_are_no_moments_unless_the_start_is_stated(tmp_path: Path) -> None:
    """Refused once, not row by row; with a start of 13:00 at +01:00 they are minutes after noon UTC."""
    path = written(tmp_path / "log.csv", "0,9,9", "299.999,9,9", "300,9,9", "600.5,9,9", header=PLAIN)
    with pytest.raises(ValidationFailed, match="times are numbers, such as seconds from the trace's start") as caught:
        TraceSource(path=path, model="a")(NOW)
    assert len(caught.value.violations) == 1
    start = datetime.fromisoformat("2026-11-29T13:00:00+01:00")
    assert shown(TraceSource(path=path, model="a", start=start, num_intervals=2)(NOW)) == [("a", 0, 2.0), ("a", 5, 1.0)]
    moments = written(tmp_path / "moments.csv", f"{at(0)},9,9", f"{at(10)},9,9", header=PLAIN)
    with pytest.raises(ValidationFailed, match="`start` belongs to a trace with seconds"):
        TraceSource(path=moments, model="a", start=start)(NOW)
    mixed = written(tmp_path / "mixed.csv", "0,9,9", f"{at(6)},9,9", "-3,9,9", "nan,9,9", header=PLAIN)
    for wanted, rows in ((start, ["row 2", "row 3", "row 4"]), (None, ["row 1", "row 3", "row 4"])):
        with pytest.raises(ValidationFailed, match="needs a time") as caught:
            TraceSource(path=mixed, model="a", start=wanted)(NOW)
        assert [one.row for one in caught.value.violations] == rows


SPELLINGS: dict[str, Callable[[str], bytes]] = {
    "gzip": lambda text: gzip.compress(text.encode()),
    "CRLF": lambda text: text.replace("\n", "\r\n").encode(),
    "UTF-16": lambda text: text.encode("utf-16"),
    "UTF-16, half a character": lambda text: text.encode("utf-16")[:-1],
    "UTF-8, half a character": lambda text: text.encode() + "é".encode()[:1],
    "BOM": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "Berlin": lambda text: text.replace("T12", "T13").replace("+00:00", "+01:00").encode(),
    "no offset": lambda text: text.replace("+00:00", "").encode(),
}


@pytest.mark.parametrize("kind", SPELLINGS)
def test_a_last_line_that_is_still_written_is_left_out_with_a_note(tmp_path: Path, kind: str) -> None:
    """A row of 12:10 that was cut off at "10 tokens" may be of 1000: it neither counts nor ends the interval."""
    text = f"{HEADER}\n{at(0)},a,9,9\n{at(5)},a,9,9\n{at(10)},a,9,10"
    path = tmp_path / "log.csv"
    for whole, rows in ((text, [("a", 0, 1.0)]), (f"{text}00\n{at(11)},a", [("a", 5, 1.0)])):
        path.write_bytes(SPELLINGS[kind](whole))
        batch = TraceSource(path=path)(NOW)
        assert shown(batch) == rows
        assert batch.notes[-1] == "the last line has no end yet: left out"


def test_a_log_may_be_open_for_writing(tmp_path: Path) -> None:
    """The gateway keeps it open all day; what stands in it counts."""
    path = written(tmp_path / "log.csv", f"{at(0)},a,9,9", f"{at(5)},a,9,9", f"{at(10)},a,9,9")
    with path.open("ab") as log:
        assert shown(TraceSource(path=path)(NOW)) == [("a", 5, 1.0)]
        log.write(f"{at(11)},a,9,9\n".encode())
        log.flush()
        assert TraceSource(path=path)(NOW).observed_at == NOON + timedelta(minutes=11)


def test_any_other_broken_row_is_refused_with_its_number(tmp_path: Path) -> None:
    """A cut row in the middle, no model, a time that is none, a count that is none: all named, nothing left out."""
    path = written(tmp_path / "log.csv", f"{at(0)},a,9,9", f"{at(5)},a", f"{at(10)},a,9,9")
    with pytest.raises(ValidationFailed, match="row 2: row has 2 fields"):
        TraceSource(path=path)(NOW)
    path = written(
        tmp_path / "log.csv", f"{at(0)},a,9,9", f"{at(5)},,9,9", "soon,a,9,9", f"{at(6)},a,-1,9", f"{at(10)},a,9,9"
    )
    with pytest.raises(ValidationFailed, match="and a model") as caught:
        TraceSource(path=path)(NOW)
    assert [one.row for one in caught.value.violations] == ["row 2", "row 3", "row 4"]


def test_years_that_no_request_can_be_of_are_refused(tmp_path: Path) -> None:
    """Times at the ends of the calendar, whose moment lies outside it in UTC, are named and raise nothing else."""
    rows = ["0001-01-01T00:00:00+14:00,a,9,9", "9999-12-31T23:59:59-14:00,a,9,9", "1969-12-31T23:59:59Z,a,9,9"]
    with pytest.raises(ValidationFailed, match="needs a time from 1970 on") as caught:
        TraceSource(path=written(tmp_path / "log.csv", *rows))(NOW)
    assert len(caught.value.violations) == 3


def test_requests_of_the_future_are_refused(tmp_path: Path) -> None:
    """A minute after both clock and last change of the file is a wrong clock; each row is named with its distance."""
    path = written(tmp_path / "log.csv", f"{at(0)},a,9,9", f"{at(13)},a,9,9", f"{at(14)},a,9,9")
    with pytest.raises(ValidationFailed, match=r"row 3: .*lies in the future.*120 s ahead"):
        TraceSource(path=path)(NOW)
    with pytest.raises(ValidationFailed, match="2 violations"):
        TraceSource(path=path, tolerance_s=59)(NOW)


def test_a_clock_that_stepped_back_is_refused_while_its_requests_could_count(tmp_path: Path) -> None:
    """An hour back at row 4, once; small disorder is none; three hours later, outside all windows, it is forgotten."""
    rows = [f"{at(-70)},a,9,9", f"{at(-1)},a,9,9", f"{at(0)},a,9,9", f"{at(-60)},a,9,9", f"{at(-59)},a,9,9"]
    path = written(tmp_path / "log.csv", *rows)
    with pytest.raises(ValidationFailed, match=r"row 4: .*the clock stepped back.*3600 s back") as caught:
        TraceSource(path=path)(NOW)
    assert len(caught.value.violations) == 1
    written(path, f"{at(0)},a,9,9", f"{at(11)},a,9,9", f"{at(5)},a,9,9")
    assert shown(TraceSource(path=path)(NOW)) == [("a", 5, 1.0)]
    later = NOW + timedelta(hours=3)
    written(path, *rows, f"{at(185)},a,9,9", f"{at(190)},a,9,9", modified=later)
    assert shown(TraceSource(path=path)(later)) == [("a", 185, 1.0)]


def test_a_log_without_a_whole_interval_is_unknown_and_not_zero(tmp_path: Path) -> None:
    """Begun a moment ago (nothing, half a header, a header, one row), or quiet since: a fault that can be bridged."""
    path = tmp_path / "log.csv"
    for text, message in (
        ("", "holds no request"),
        ("TIMESTAMP,mod", "holds no request"),
        (f"{HEADER}\n", "holds no request"),
        (f"{HEADER}\n{at(0)},a,9,9", "holds no request"),
        (f"{HEADER}\n{at(0)},a,9,9\n", "covers no whole interval of 300 s"),
        (f"{HEADER}\n{at(1)},a,9,9\n{at(9)},a,9,9\n", "covers no whole interval of 300 s"),
    ):
        path.write_text(text)
        with pytest.raises(SourceFault, match=f"demand: .*{message}.*unknown, not zero"):
            TraceSource(path=path)(NOW)


def test_a_log_that_is_not_there_or_no_log_is_a_fault(tmp_path: Path) -> None:
    """Absent, a pipe, packed data that is not whole; another table is refused."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "half.csv.gz").write_bytes(gzip.compress(HEADER.encode() * 50)[:-9])
    for name, message in (
        ("absent.csv", "No such file"),
        ("pipe", "no plain file"),
        ("half.csv.gz", "cannot be read"),
    ):
        with pytest.raises(SourceFault, match=f"demand: .*{message}"):
            TraceSource(path=tmp_path / name)(NOW)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValidationFailed, match="the header must name TIMESTAMP"):
        TraceSource(path=tmp_path / "other.csv")(NOW)


def judged(batch: SourceBatch, now: datetime) -> Any:
    """The gate's critical findings."""
    outcome = check_table(contract_of("demand"), batch.raw(), GateContext(now=now))
    return [one.text for one in outcome.report.findings if one.severity.value == "critical"]


def test_a_log_that_does_not_grow_goes_stale(tmp_path: Path) -> None:
    """The same log is taken at 12:12 and refused by the gate's freshness at 12:36, 31 minutes after 12:05."""
    path = written(tmp_path / "log.csv", f"{at(0)},a,9,9", f"{at(5)},a,9,9", f"{at(10)},a,9,9")
    assert judged(TraceSource(path=path)(NOW), NOW) == []
    late = NOON + timedelta(minutes=36)
    batch = TraceSource(path=path)(late)
    assert batch.age_s(late) == 26 * 60
    assert judged(batch, late) == ["interval_start is stale: the newest row of its model is too old"]
