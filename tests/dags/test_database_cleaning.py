"""``docker/clean-database`` on Airflow's own database: what is older goes, and what anything still needs stays."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from coral_tasks.tasks.local_airflow import PROJECT, airflow_environment, migrate_database

pytestmark = [
    pytest.mark.airflow,
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

NOW = datetime.now(UTC).replace(microsecond=0)
SCRIPT = PROJECT / "docker" / "clean-database"


def insert(database: sqlite3.Connection, table: str, **values: object) -> None:
    """A row with these values; columns that must hold something and are not named get a date, 0 or a text."""
    for _, name, kind, needed, default, key in database.execute(f"PRAGMA table_info({table})"):
        if needed and default is None and name not in values and not (key and kind == "INTEGER"):
            is_date = kind.startswith(("DATE", "TIMESTAMP"))
            values[name] = day(0) if is_date else 0 if kind.startswith(("INT", "BOOL", "FLOAT")) else f"any {name}"
    names = ", ".join(f'"{name}"' for name in values)
    database.execute(f"INSERT INTO {table} ({names}) VALUES ({', '.join('?' * len(values))})", tuple(values.values()))


def day(age: int) -> str:
    """A moment so many days ago, as Airflow keeps it in SQLite."""
    return (NOW - timedelta(days=age)).strftime("%Y-%m-%d %H:%M:%S.%f")


def words(*arguments: str) -> list[str]:
    """The script with its arguments."""
    return [str(SCRIPT), *arguments]


def environment(home: Path) -> dict[str, str]:
    """As on a machine where the project's Airflow is the first in the path."""
    made = airflow_environment(home)
    return {**made, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def cleaned(tmp_path_factory: pytest.TempPathFactory) -> sqlite3.Connection:
    """A database that holds runs, events and logs of 40, 31, 29 and 0 days ago, cleaned with the default of 30."""
    home = tmp_path_factory.mktemp("clean")
    migrate_database(home)
    database = sqlite3.connect(home / "airflow" / "airflow.db")
    insert(database, "dag_bundle", name="b")
    for dag in ("busy", "resting", "by_hand"):
        # not parsed for long, and paused
        insert(database, "dag", dag_id=dag, bundle_name="b", is_paused=True, is_stale=False, last_parsed_time=day(90))
    insert(database, "asset", id=1, name="a", uri="coral://a", group="asset", extra="{}")
    for age in (40, 31, 29, 0):
        kinds = {"busy": "scheduled", "resting": "asset_triggered", "by_hand": "manual"}
        for dag, kind in kinds.items():
            if dag == "busy" or age > 30:
                ran = {"run_type": kind, "run_id": f"{dag} {age}", "state": "success", "start_date": day(age)}
                insert(database, "dag_run", dag_id=dag, run_after=day(age), conf="{}", **ran)
        insert(database, "asset_event", asset_id=1, timestamp=day(age), extra="{}")
        insert(database, "log", dttm=day(age), event=f"event {age}")
        insert(database, "job", latest_heartbeat=day(age), job_type="SchedulerJob", state="success")
    # which events wait for a run, and with which id
    insert(database, "asset_dag_run_queue", asset_id=1, target_dag_id="resting", created_at=day(40))
    # an asset that is watched since long ago
    insert(database, "trigger", id=1, classpath="a.Watcher", kwargs="{}", created_date=day(40))
    insert(database, "asset_watcher", name="w", asset_id=1, trigger_id=1)
    # a cleaning before this one was killed
    database.execute("CREATE TABLE _airflow_deleted__dag_run__20260101000000__b1 (id INTEGER)")
    database.commit()
    done = subprocess.run(words(), env=environment(home), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return database


def column(database: sqlite3.Connection, query: str) -> list[object]:
    """First column of a query's rows."""
    return [row[0] for row in database.execute(query)]


def test_what_is_older_goes_and_the_newest_run_of_each_dag_stays(cleaned: sqlite3.Connection) -> None:
    """Of a DAG that ran today the runs of 30 days stay, of one that last ran 31 days ago that run, by hand none."""
    runs = column(cleaned, "SELECT run_id FROM dag_run ORDER BY dag_id, run_after")
    assert runs == ["busy 29", "busy 0", "resting 31"]
    assert column(cleaned, "SELECT event FROM log WHERE event LIKE 'event %' ORDER BY dttm") == ["event 29", "event 0"]
    assert len(column(cleaned, "SELECT id FROM asset_event")) == 2
    assert len(column(cleaned, "SELECT id FROM job WHERE job_type = 'SchedulerJob'")) == 2


def test_what_a_later_run_needs_stays_however_old(cleaned: sqlite3.Connection) -> None:
    """DAGs with their pause, assets with their watchers, events that wait for a run, pools."""
    assert column(cleaned, "SELECT dag_id FROM dag WHERE is_paused ORDER BY dag_id") == ["busy", "by_hand", "resting"]
    assert column(cleaned, "SELECT target_dag_id FROM asset_dag_run_queue") == ["resting"]
    assert column(cleaned, "SELECT name FROM asset") == ["a"]
    assert column(cleaned, "SELECT trigger_id FROM asset_watcher") == [1]
    assert column(cleaned, "SELECT pool FROM slot_pool WHERE pool = 'default_pool'") == ["default_pool"]


def test_no_table_of_removed_rows_is_left(cleaned: sqlite3.Connection) -> None:
    """Neither of this cleaning nor of one before it that was killed."""
    assert column(cleaned, "SELECT name FROM sqlite_master WHERE name LIKE '\\_airflow\\_deleted%' ESCAPE '\\'") == []


@pytest.mark.parametrize(
    "arguments",
    [[days] for days in ("0", "-1", "1.5", "", "030", "10000", "99999999999", "30 days", "$(id)")]
    + [["30", tables] for tables in ("a;b", "a b", "DAG", "--yes")],
)
def test_arguments_that_are_none_are_refused(arguments: list[str]) -> None:
    """Nothing is removed for a number that is no whole number of days, or for what is no list of tables."""
    done = subprocess.run(words(*arguments), env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    wanted = "a whole number of days from 1 to 9999" if len(arguments) == 1 else "names of tables with commas"
    assert f"needs {wanted}" in done.stderr


def test_further_tables_are_cleaned_too(tmp_path: Path) -> None:
    """What is named beside the days is added to the tables of both commands, and nothing is when nothing is named."""
    program, told = tmp_path / "airflow", tmp_path / "told"
    program.write_text(f'#!/bin/sh\necho "$@" >> {told}\n', encoding="utf-8")
    program.chmod(0o755)
    for arguments in (["7"], ["7", "session,_other"]):
        subprocess.run(words(*arguments), env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True)
    tables = [line.split("--tables ")[1] for line in told.read_text(encoding="utf-8").splitlines()]
    assert tables == [tables[0], tables[0], f"{tables[0]},session,_other", f"{tables[0]},session,_other"]
    assert not {"dag", "trigger"} & set(tables[0].split(","))
