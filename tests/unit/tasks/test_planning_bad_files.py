"""``coral plan`` on bad files: every kind in every column of its four inputs ends in a message with file and row."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime
from pathlib import Path

import pytest

from coral_tasks.domain.errors import ValidationFailed
from coral_tasks.tasks.gate import example_csv
from coral_tasks.tasks.planning import PlanRequest, problem_of

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
INPUTS = ("demand", "prices", "availability", "running")
KINDS = ("", "NaN", "inf", "-1", "ten", "1,5", "null", "two words", "2026-11-29T12:00:00", "[1]", "SPOT")
FREE = {("prices", "source"), ("availability", "source")}
MAY_BE_EMPTY = {("demand", "origin")}
PLAIN_NAMES = {"model", "region", "configuration", "node_id", "instance_id", "template_id", "origin"}


@pytest.fixture
def request_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlanRequest:
    """The valid examples as files, and a library that has nothing: the inputs are read before it matters."""
    from types import SimpleNamespace

    nothing = SimpleNamespace(manifest=SimpleNamespace(version="v"), sets=())
    monkeypatch.setattr("coral_tasks.storage.library.read_current", lambda _: nothing)
    for table in INPUTS:
        (tmp_path / f"{table}.csv").write_text(example_csv(table, NOW))
    paths = {table: str(tmp_path / f"{table}.csv") for table in INPUTS}
    return PlanRequest(library=str(tmp_path / "library"), supervised=False, **paths)


def is_refused(request: PlanRequest, table: str) -> bool:
    """Whether the table's file is refused, with its name; anything but a refusal passes through."""
    try:
        problem_of(request)
    except ValidationFailed as refusal:
        return any(one.table.startswith(f"{table} (") for one in refusal.violations)
    return False


BETWEEN_ROWS = ("must not be repeated", "in capitals only", "disagree on", "numbered from 0", "part and whole")


@pytest.mark.parametrize("table", INPUTS)
def test_no_bad_cell_is_planned_on(request_of: PlanRequest, table: str) -> None:
    """What is no value of its column is refused with file and row, all at once; nothing ends in a traceback."""
    path = Path(getattr(request_of, table))
    header, first, *_ = csv.reader(io.StringIO(path.read_text()))
    bad = [(place, kind) for place, column in enumerate(header) for kind in bad_kinds(table, column)]
    out = io.StringIO(newline="")
    csv.writer(out).writerows([header, *([*first[:place], kind, *first[place + 1 :]] for place, kind in bad)])
    path.write_text(out.getvalue())
    with pytest.raises(ValidationFailed) as caught:
        problem_of(request_of)
    named = {
        int(one.row.split(" ")[1])
        for one in caught.value.violations
        if one.row and one.table == f"{table} ({path})" and not any(text in one.rule for text in BETWEEN_ROWS)
    }
    assert [(header[place], kind) for number, (place, kind) in enumerate(bad, start=1) if number not in named] == []


def bad_kinds(table: str, column: str) -> list[str]:
    """The kinds that are no value of the column."""
    if (table, column) in FREE:
        return []
    empty_ok = (table, column) in MAY_BE_EMPTY
    names = {"", "NaN", "null", "two words"} if column in PLAIN_NAMES else set(KINDS)
    return [kind for kind in KINDS if kind in names and not (kind == "" and empty_ok)]


@pytest.mark.parametrize("table", INPUTS)
@pytest.mark.parametrize("data", [b"", b"PAR1", b"\x1f\x8b", b"{}", b"a;b\n1\n", b"\xff\xfe\xff"])
def test_no_foreign_file_is_planned_on(request_of: PlanRequest, table: str, data: bytes) -> None:
    """A file that is no table is refused by name; so is one that is not there."""
    path = Path(getattr(request_of, table))
    path.write_bytes(data)
    assert is_refused(request_of, table)
    path.unlink()
    assert is_refused(request_of, table)


def test_a_model_that_lacks_the_planned_interval_is_named(request_of: PlanRequest) -> None:
    """Rows of other intervals only are not a demand of zero in this one."""
    path = Path(request_of.demand)
    path.write_text(path.read_text().replace(NOW.isoformat(), "2026-11-29T11:55:00+00:00", 1))
    with pytest.raises(ValidationFailed, match=r"phi-4-14b: has no row for the interval of 2026-11-29T12:00"):
        problem_of(request_of)
