"""Tasks on several machines: state is shared around each task's work, and no task of a DAG is left out."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from coral_tasks.domain.errors import StorageFault
from coral_tasks.settings import Settings
from coral_tasks.tasks import failures, sharing
from coral_tasks.tasks.local_airflow import PROJECT
from coral_tasks.tasks.nightly import library_address
from coral_tasks.tasks.sharing import shared


@pytest.fixture
def machines(tmp_path, monkeypatch):
    """Switch between machines, each with a home of its own and all with one shared store."""
    monkeypatch.setenv("CORAL_SHARED", str(tmp_path / "store"))

    def use(name: str) -> Path:
        monkeypatch.setenv("CORAL_HOME", str(tmp_path / name))
        return tmp_path / name

    return use


@shared("current")
def _note(run_id: str, text: str) -> str:
    home = Settings().home
    for path in (home / "runs" / run_id / "note.txt", home / "current" / "note.txt"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    if text == "bad":
        raise StorageFault("the work failed")
    return text


@shared("current")
def _read(item: dict[str, str]) -> list[str]:
    home = Settings().home
    paths = (home / "runs" / item["run"] / "note.txt", home / "current" / "note.txt")
    return [path.read_text(encoding="utf-8") for path in paths]


def test_work_goes_on_where_another_machine_left_it(machines) -> None:
    """A task finds the run's folder and the areas it names as the task before left them on another machine."""
    machines("one")
    assert _note("r", "first") == "first"
    machines("two")
    assert _read({"run": "r"}) == ["first", "first"]


def test_what_a_failed_task_wrote_is_handed_over_too(machines) -> None:
    """Gate reports and quarantined batches are what a person needs to see after a refusal."""
    machines("one")
    with pytest.raises(StorageFault, match="the work failed"):
        _note("r", "bad")
    machines("two")
    assert _read({"run": "r"}) == ["bad", "bad"]


@shared()
def _mapped(run_id: str, table: str) -> None:
    home = Settings().home
    (home / "runs" / run_id).mkdir(parents=True, exist_ok=True)
    (home / "runs" / run_id / f"{table}.txt").write_text(table, encoding="utf-8")


def test_parts_of_a_mapped_task_do_not_get_in_each_others_way(machines, tmp_path) -> None:
    """Each part keeps its own time; parts on two machines hand over without a conflict, in any order."""
    machines("one")
    _mapped("r", "demand")
    machines("two")
    _mapped("r", "prices")
    machines("one")
    _mapped("r", "demand")
    stored = sorted(path.name for path in (tmp_path / "store" / "runs" / "r").rglob("*") if path.is_file())
    assert len(stored) == 4
    assert [name for name in stored if name.startswith("_mapped.")] == stored[:2]


def test_failures_are_seen_on_every_machine(machines) -> None:
    """The message of a failed task is kept in the shared run."""
    machines("one")
    failures.record_failure("r", "solve", StorageFault("no room"))
    home = machines("two")
    assert sharing.pull_for_page(Settings()) == 1
    assert (home / "runs" / "r" / "failures" / "solve.json").is_file()


def test_keys_and_configuration_are_never_shared(machines, tmp_path) -> None:
    """Secrets and settings are deployed to each machine; no work copies them."""
    home = machines("one")
    for name in ("keys/controller.secret", "agents.toml", "sources.json", "airflow/jwt_secret"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("secret", encoding="utf-8")
    _note("r", "x")
    sharing.pull_for_page(Settings())
    stored = {path.relative_to(tmp_path / "store").as_posix() for path in (tmp_path / "store").rglob("*")}
    kept = {name for name in stored if "timing" not in name}
    assert kept == {".lock", "runs", "runs/r", "runs/r/note.txt", "current", "current/note.txt"}


def test_forgotten_runs_do_not_come_back(machines) -> None:
    """Retention deletes a run for every machine."""
    machines("one")
    _note("old", "x")
    _note("new", "y")
    sharing.forget(["runs/old/"])
    home = machines("two")
    assert sharing.pull_for_page(Settings()) == 1
    assert [path.name for path in (home / "runs").iterdir()] == ["new"]


def test_the_library_lies_beside_the_runs_unless_it_is_named(machines, monkeypatch) -> None:
    """Workers on several machines must not each publish a library of their own."""
    machines("one")
    monkeypatch.setenv("CORAL_SHARED", "s3://bucket/coral/")
    assert library_address(Settings()) == "s3://bucket/coral/library"
    monkeypatch.setenv("CORAL_LIBRARY", "s3://elsewhere/library")
    assert library_address(Settings()) == "s3://elsewhere/library"


def test_nothing_is_copied_on_one_machine(tmp_path, monkeypatch) -> None:
    """Without a shared store the decorator is not there."""
    monkeypatch.setenv("CORAL_HOME", str(tmp_path))
    _note("r", "x")
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "current"}
    assert sharing.pull_for_page(Settings()) == 0


WITHOUT_STATE = {
    ("nightly", "plan_templates"),  # reads and writes no file
    ("nightly", "plan_chunks"),  # as plan_templates
    ("nightly", "plan_large"),  # asks a function that shares for each item
    ("nightly", "publish"),  # the library, which has its own store
    ("nightly", "measurements_by_gpu_type"),  # only sorts what plan_measurements, which shares, found
}


def _called_by_dags() -> set[tuple[str, str]]:
    """Functions of ``coral_tasks.tasks`` that DAG files call."""
    found = set()
    for path in sorted((PROJECT / "dags").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                found.add((node.value.id, node.attr))
    return {one for one in found if one[0] in {"allocation", "nightly", "price_watching"}}


def test_every_task_of_every_dag_shares_its_state() -> None:
    """A task without the decorator would work on what this machine happens to have."""
    called = _called_by_dags()
    assert ("allocation", "solve") in called
    missing = [
        f"{module}.{name}"
        for module, name in sorted(called - WITHOUT_STATE)
        if not hasattr(getattr(importlib.import_module(f"coral_tasks.tasks.{module}"), name), "shared_areas")
    ]
    assert missing == []
