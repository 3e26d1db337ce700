"""Old runs go, the newest and the one in force stay, and tidying up never fails a run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from coral_tasks.settings import Settings
from coral_tasks.tasks.retention import remove_old


def made(home: Path, name: str, at_s: float) -> Path:
    """A run folder last changed at a time."""
    folder = home / "runs" / name
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}", encoding="utf-8")
    os.utime(folder, (at_s, at_s))
    return folder


def test_the_newest_stay_and_so_does_the_one_in_force(tmp_path: Path) -> None:
    """By time of change: a backfill whose name lies in the past is as young as it is; what is in force never goes."""
    for number in range(6):
        made(tmp_path, f"scheduled__2026-11-29T10:0{number}:00", 1000.0 + number)
    made(tmp_path, "backfill__2026-01-01T00:00:00", 2000.0)
    (tmp_path / "current").mkdir()
    in_force = {"run": "scheduled__2026-11-29T10:01:00", "plan": "p"}
    (tmp_path / "current" / "run.json").write_text(json.dumps(in_force), encoding="utf-8")
    dispatch = tmp_path / "dispatch"
    dispatch.mkdir()
    for number in range(1, 6):
        (dispatch / f"{number}.json").write_text("{}", encoding="utf-8")
        os.utime(dispatch / f"{number}.json", (number, number))
    (dispatch / "progress.json").write_text("{}", encoding="utf-8")
    for number in range(5):
        log = tmp_path / "airflow" / "logs" / "dag_id=coral_allocation" / f"run_id=r{number}"
        log.mkdir(parents=True)
        os.utime(log, (number, number))
    gone = remove_old(Settings(home=tmp_path, keep_runs=3))
    assert sorted(one.name for one in (tmp_path / "runs").iterdir()) == [
        "backfill__2026-01-01T00:00:00",
        "scheduled__2026-11-29T10:01:00",
        "scheduled__2026-11-29T10:04:00",
        "scheduled__2026-11-29T10:05:00",
    ]
    assert sorted(one.name for one in dispatch.iterdir()) == ["3.json", "4.json", "5.json", "progress.json"]
    assert sorted(one.name for one in (tmp_path / "airflow/logs/dag_id=coral_allocation").iterdir()) == [
        "run_id=r2",
        "run_id=r3",
        "run_id=r4",
    ]
    assert len(gone) == 3 + 2 + 2


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_an_empty_or_broken_home_is_no_error(tmp_path: Path, content: str) -> None:
    """Nothing there, or a broken record of what is in force: the run that tidies up goes on."""
    assert remove_old(Settings(home=tmp_path, keep_runs=1)) == ()
    (tmp_path / "current").mkdir()
    (tmp_path / "current" / "run.json").write_text(content, encoding="utf-8")
    made(tmp_path, "a", 1.0)
    made(tmp_path, "b", 2.0)
    assert remove_old(Settings(home=tmp_path, keep_runs=1)) == ("runs/a/",)
