"""A request log read by columns is what it is row by row: the same moments and counts, or the same rows refused."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coral_tasks.domain.errors import ValidationFailed, Violation
from coral_tasks.ingestion.trace_file import RequestLog, RequestTrace, read_log, read_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"

digits = st.integers(0, 99).map("{:02d}".format)
dates = st.one_of(
    st.dates().map(str),
    st.builds("{:04d}-{}-{}".format, st.sampled_from([1969, 1970, 2024, 2026, 2199, 2200, 2262, 9999]), digits, digits),
)
clocks = st.one_of(st.times().map(str), st.builds("{}:{}:{}.{}".format, digits, digits, digits, st.integers(0, 10**10)))
zones = st.one_of(
    st.sampled_from(["", "Z", "z", "+00:00", "-23:59", "+0530", "+24:00"]),
    st.builds("{}{}:{}".format, st.sampled_from("+-"), digits, digits),
)
times = st.builds("{}{}{}{}".format, dates, st.sampled_from(["T", " ", "t"]), clocks, zones)
counts = st.one_of(st.integers(-1, 10_000_001).map(str), st.sampled_from(["007", "1e3", "٣", "+1", "1 0", "9" * 12]))
near = st.datetimes(min_value=datetime(1970, 1, 2), max_value=datetime(2262, 6, 1))  # noqa: DTZ001
good = st.builds("{:%Y-%m-%dT%H:%M:%S.%f}{}".format, near, st.sampled_from(["Z", "+05:30"]))
rows = st.lists(st.builds("{},{},{}".format, times | good, counts, counts), min_size=1, max_size=4)
zoned = st.lists(st.builds("{},{},7".format, good, st.integers(0, 900)), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for all examples."""
    return tmp_path_factory.mktemp("log") / "log.csv"


def outcome[T](reader: Callable[[Path], T], path: Path) -> T | tuple[Violation, ...]:
    """What a reader makes of a file, or all that it finds wrong."""
    try:
        return reader(path)
    except ValidationFailed as refused:
        return tuple(refused.violations)


@given(rows | zoned)
@example(["2026-11-29T12:00:00.9999999Z,0,10000000", "2026-11-29 12:00:00.999999999+0100,007,1"])
@example(["2026-11-29T12:00:59.1234567,1,1", "2026-02-29T12:00:00,1,1"])
@example(["1970-01-01T00:00:00.1+14:00,1,1", "1970-01-01T00:00:00.9999999+14:00,1,1"])
@settings(deadline=None)
def test_a_log_read_by_columns_is_what_it_is_row_by_row(path: Path, lines: list[str]) -> None:
    """An anchor row before and after makes each list a trace; both readers see the same requests or the same faults."""
    zone = "Z" if any(line.partition(",")[0][19:].rstrip("0123456789.") for line in lines) else ""
    anchors = [f"2026-01-01T00:00:00{zone},1,1", f"2026-01-01T00:00:01{zone},1,1"]
    path.write_text("\n".join([HEADER, *anchors, *lines, ""]))
    expected, log = outcome(read_trace, path), outcome(read_log, path)
    if not isinstance(expected, RequestTrace) or not isinstance(log, RequestLog):
        assert log == expected
        return
    order = np.lexsort((log.output_tokens, log.prompt_tokens, log.at_s))
    assert expected.started_at is not None
    assert expected.started_at.tzinfo is UTC
    assert log.at_s[order][0] == expected.started_at.timestamp()
    np.testing.assert_array_equal(log.at_s[order] - log.at_s[order][0], expected.offset_s)
    np.testing.assert_array_equal(log.prompt_tokens[order], expected.prompt_tokens)
    np.testing.assert_array_equal(log.output_tokens[order], expected.output_tokens)
