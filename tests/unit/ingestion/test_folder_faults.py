"""Drop folders and single files that vanish, change, are no files or cannot be read: a fault with the path, at once."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from coral_tasks.domain.errors import SourceFault
from coral_tasks.ingestion.files import FileSource, FolderSource
from data_contracts.contract import GateContext
from data_contracts.gate import check_table
from data_contracts.registry import contract_of

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
OLD = b"old,file\n1,2\n"


def newest(path: Path) -> Path:
    """The path, newer than anything made before it."""
    os.utime(path, (2_000_000_000, 2_000_000_000), follow_symlinks=False)
    return path


def folder(path: Path) -> None:
    """A folder in the file's place."""
    path.mkdir()


def loop(path: Path) -> None:
    """A link to itself."""
    path.symlink_to(path)


def broken(path: Path) -> None:
    """A link to a file that is gone."""
    path.symlink_to(path.with_name("gone"))


def pipe(path: Path) -> None:
    """A pipe that nobody writes to."""
    os.mkfifo(path)


def device(path: Path) -> None:
    """A link to a device without end."""
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    """A file that states a terabyte."""
    path.touch()
    os.truncate(path, 1 << 40)


KINDS: list[tuple[Callable[[Path], None], str]] = [
    (folder, "Is a directory"),
    (loop, "Too many levels of symbolic links"),
    (broken, "No such file"),
    (pipe, "is no plain file"),
    (device, "is no plain file"),
    (huge, "is larger than"),
]


@pytest.mark.parametrize(("make", "message"), [pytest.param(one, text, id=one.__name__) for one, text in KINDS])
def test_the_newest_that_is_no_file_is_a_fault_and_no_older_file_takes_its_place(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    """The message names the path and the reason; a file source says the same."""
    (tmp_path / "demand-1.csv").write_bytes(OLD)
    path = tmp_path / "demand-2.csv"
    make(path)
    newest(path)
    for source in (FolderSource(table="demand", folder=tmp_path), FileSource(table="demand", path=path)):
        with pytest.raises(SourceFault, match=f"demand: .*demand-2.csv .*{message}"):
            source(NOW)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_and_a_folder_that_may_not_be_read_are_faults(tmp_path: Path) -> None:
    """Permission is named with the path."""
    path = tmp_path / "demand.csv"
    path.write_bytes(OLD)
    path.chmod(0)
    with pytest.raises(SourceFault, match=r"demand\.csv cannot be read: Permission denied"):
        FolderSource(table="demand", folder=tmp_path)(NOW)
    tmp_path.chmod(0)
    try:
        with pytest.raises(SourceFault, match="cannot be read: Permission denied"):
            FolderSource(table="demand", folder=tmp_path)(NOW)
    finally:
        tmp_path.chmod(0o700)


def test_a_file_that_is_still_open_for_writing_is_not_read(tmp_path: Path) -> None:
    """A writer that pauses in the middle leaves a file that looks whole; it counts once the writer has closed it."""
    path = tmp_path / "demand.csv"
    with path.open("wb") as writer:
        writer.write(OLD)
        writer.flush()
        with pytest.raises(SourceFault, match=r"demand\.csv is being written: another program has it open"):
            FolderSource(table="demand", folder=tmp_path)(NOW)
    assert FolderSource(table="demand", folder=tmp_path)(NOW).data == OLD


def test_a_folder_in_which_files_come_and_go_gives_whole_files_or_a_fault(tmp_path: Path) -> None:
    """Files written in place, renamed and removed at full speed: what is read is one whole text."""
    texts = [bytes([97 + number]) * (50_000 + number) for number in range(4)]
    stop = threading.Event()

    def churn() -> None:
        for number in range(1_000_000):
            if stop.is_set():
                return
            path = tmp_path / f"demand-{number % 3}.csv"
            if number % 2:
                path.write_bytes(texts[number % 4])
            else:
                (tmp_path / ".new").write_bytes(texts[number % 4])
                (tmp_path / ".new").rename(path)
            if number % 3 == 0:
                path.unlink()

    writer = threading.Thread(target=churn)
    writer.start()
    read = set()
    try:
        for _ in range(400):
            with contextlib.suppress(SourceFault):
                read.add(FolderSource(table="demand", folder=tmp_path)(NOW).data)
    finally:
        stop.set()
        writer.join()
    assert read <= set(texts)


def test_ten_thousand_files_are_looked_through_for_the_newest(tmp_path: Path) -> None:
    """Only the newest one's content is read; names that are temporaries or another table's do not count."""
    for number in range(10_000):
        (tmp_path / f"demand-{number}.csv").touch()
    wanted = tmp_path / "demand-77.csv"
    wanted.write_bytes(OLD)
    newest(wanted)
    for name in (".demand-x.csv", "_demand-x.csv", "demand-x.csv.tmp", "demand-x.csv.part", "prices-x.csv", "demand"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (2_100_000_000, 2_100_000_000))
    batch = FolderSource(table="demand", folder=tmp_path)(NOW)
    assert (batch.data, batch.source) == (OLD, str(wanted))
    assert batch.observed_at == datetime.fromtimestamp(2_000_000_000, UTC)


@pytest.mark.parametrize(
    "name", ["demand\n.csv", "demand\udcff.csv", "demand \u202e.csv", "demand" + "x" * 240 + ".csv"]
)
def test_odd_names_of_files_are_names(tmp_path: Path, name: str) -> None:
    """Line ends, bytes that are no UTF-8, marks that turn text around, the longest name: read, and shown as text."""
    (tmp_path / name).write_bytes(OLD)
    batch = FolderSource(table="demand", folder=tmp_path)(NOW)
    assert batch.data == OLD
    report = check_table(contract_of("demand"), batch.raw(), GateContext(now=NOW)).report
    assert not report.accepted
    assert report.source.isprintable()
    report.source.encode()


def test_a_clock_far_off_in_the_file_system_is_the_batches_time(tmp_path: Path) -> None:
    """A file of 1970 or of next century keeps that as its age; the gate's freshness rules speak of its rows."""
    path = tmp_path / "demand.csv"
    path.write_bytes(OLD)
    for moment in (0, 4_000_000_000):
        os.utime(path, (moment, moment))
        batch = FolderSource(table="demand", folder=tmp_path)(NOW)
        assert batch.age_s(NOW) == NOW.timestamp() - moment
