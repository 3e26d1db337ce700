"""The nightly DAG run to its end by Airflow itself: a night without measurements still publishes a library."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from coral_tasks.tasks.local_airflow import migrate_database, run_dags

pytestmark = [pytest.mark.airflow, pytest.mark.integration, pytest.mark.timeout(600)]

DAG = "coral_template_library"


def states(home: Path, run: str) -> dict[str, set[str]]:
    """States of every task of a run, as Airflow's database has them."""
    with sqlite3.connect(home / "airflow" / "airflow.db") as database:
        found = database.execute("SELECT task_id, state FROM task_instance WHERE run_id = ?", (run,)).fetchall()
    return {task: {state for name, state in found if name == task} for task, _ in found}


@pytest.fixture(scope="module")
def airflow_home(tmp_path_factory) -> Path:
    """A home with Airflow's database, made once."""
    home = tmp_path_factory.mktemp("nightly")
    migrate_database(home)
    return home


def test_a_night_without_measurements_publishes(airflow_home: Path) -> None:
    """No agent is known, so nothing is measured: the mapped task is skipped, everything after it runs, and the run is
    green because a library was published, not because there was nothing to do.
    """
    (done,) = run_dags(airflow_home, [(DAG, "{}")])
    assert (done.state, done.failed) == ("success", ())
    seen = states(airflow_home, done.run)
    measuring = {task for task in seen if task == "plan_measurements" or task.startswith("measurements.")}
    assert len(measuring) == 1 + 2 * 11
    chunks = {task for task in seen if task.startswith("chunks.")}  # no core set is large enough
    assert len(chunks) == 4
    assert {state for task in measuring | chunks for state in seen.pop(task)} == {"skipped"}
    assert set(seen) == {
        "plan_profiling",
        "profile",
        "plan_templates",
        "build_templates",
        "publish",
    }
    assert all(state == {"success"} for state in seen.values()), seen
    assert json.loads((airflow_home / "library" / "CURRENT.json").read_text(encoding="utf-8"))


def test_every_xcom_of_the_night_is_small(airflow_home: Path) -> None:
    """Paths and ids travel between the nightly tasks, never tables."""
    with sqlite3.connect(airflow_home / "airflow" / "airflow.db") as database:
        found = database.execute("SELECT task_id, LENGTH(value) FROM xcom WHERE dag_id = ?", (DAG,)).fetchall()
    assert found
    assert max(size for _, size in found) < 10_000, sorted(found, key=lambda one: -one[1])[:3]


def test_a_corrupt_measurement_stops_the_night_before_it_publishes(airflow_home: Path) -> None:
    """A damaged file is a failed run that names it, never a green one, and the library in force stays."""
    before = (airflow_home / "library" / "CURRENT.json").read_bytes()
    bad = airflow_home / "measurements" / "L4x1-qwen3-32b.parquet"
    bad.parent.mkdir(exist_ok=True)
    bad.write_bytes(b"PAR1 and no more")
    try:
        (done,) = run_dags(airflow_home, [(DAG, "{}")])
    finally:
        shutil.rmtree(bad.parent)
    assert done.state == "failed"
    assert "publish" not in {task for task, state in states(airflow_home, done.run).items() if "success" in state}
    failures = (airflow_home / "runs" / done.run / "failures").glob("*.json")
    assert any(bad.name in one.read_text(encoding="utf-8") for one in failures)
    assert (airflow_home / "library" / "CURRENT.json").read_bytes() == before
