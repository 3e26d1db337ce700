"""Metrics of a home and the frame around a task: values are those of the files, broken parts say so, times are kept."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).parents[2] / "browser"))
from made_home import COST_OF_INSTANCE, Size, gate_report, make_home

from coral_tasks.domain.errors import StorageFault, Unavailable, ValidationFailed
from coral_tasks.settings import Settings
from coral_tasks.tasks import failures, observing
from coral_tasks.tasks.sharing import shared


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home with two models, eight instances and three sealed runs; one model is short of 3 requests/s."""
    monkeypatch.setenv("CORAL_HOME", str(tmp_path))
    make_home(tmp_path, Size(models=2, instances=8, runs=3), short=True)
    return tmp_path


def _values() -> dict[str, dict[tuple[str, ...], float]]:
    """By metric: values by their labels' values, in the order of the labels' names."""
    families = text_string_to_metric_families(observing.text(Settings()))
    return {one.name: {tuple(s.labels.values()): s.value for s in one.samples} for one in families}


def _newest_run(home: Path) -> Path:
    return max((home / "runs").iterdir(), key=lambda path: path.name)


def _new_run(home: Path, name: str) -> Path:
    """A run that has begun and nothing more."""
    pinned = (_newest_run(home) / "run.json").read_bytes()
    folder = home / "runs" / name
    folder.mkdir()
    (folder / "run.json").write_bytes(pinned)
    return folder


def test_values_are_those_of_the_plan_in_force(home) -> None:
    """Cost, proof, instances by model and region, shortage, the last dispatch."""
    found = _values()
    assert found["coral_plan_cost_usd_per_hour"] == {(): pytest.approx(8 * COST_OF_INSTANCE)}
    assert found["coral_plan_gap_ratio"] == {(): 0.0}
    assert sum(found["coral_plan_instances"].values()) == 8
    assert found["coral_plan_instances"]["model-00", "decode", "aws/us-east-2"] == 1
    assert found["coral_shortage_requests_per_second"] == {("model-00",): 3.0, ("model-01",): 0.0}
    assert found["coral_served_requests_per_second"] == {("model-00",): 12.0, ("model-01",): 12.0}
    assert found["coral_dispatch_converged"] == {(): 1.0}
    assert found["coral_dispatch_epoch"] == {(): 7.0}
    assert found["coral_gate_outcome"] == {("prices", "accepted"): 1.0}
    assert found["coral_runs_failed_since_success"] == {("false",): 0.0, ("true",): 0.0}
    assert "coral_unreadable" not in found
    assert "coral_agent_up" not in found, "there is no inventory of agents here"


def test_an_empty_home_has_no_metrics(tmp_path, monkeypatch) -> None:
    """Unknown is absent: no plan, no cost, rather than a cost of 0."""
    monkeypatch.setenv("CORAL_HOME", str(tmp_path))
    assert _values() == {}


def test_failed_and_refused_runs_are_told_apart(home) -> None:
    """Refusals are a well-formed "no"; faults are counted apart; a run that goes on has no outcome yet."""
    for number, error in enumerate([ValidationFailed([]), StorageFault("disk"), StorageFault("disk")]):
        name = f"scheduled__2026-11-30T00:0{number}:00+00:00"
        _new_run(home, name)
        failures.record_failure(name, "gate", error)
    _new_run(home, "scheduled__2026-11-30T00:09:00+00:00")
    found = _values()
    assert found["coral_runs_failed_since_success"] == {("false",): 2.0, ("true",): 1.0}
    assert set(found["coral_run_timestamp_seconds"]) == {("good",), ("refused",), ("failed",)}
    assert max(found["coral_run_timestamp_seconds"].values()) == pytest.approx(time.time(), abs=300)


def test_verdicts_and_ages_come_from_the_newest_gated_run(home) -> None:
    """One quarantined table is seen with its findings, and how old each input was."""
    run = _new_run(home, "scheduled__2026-11-30T00:00:00+00:00")
    finding = {"row": "1", "value": "nan", "rule": "r", "text": "t", "severity": "critical"}
    for path, value in {
        "gate/demand.json": gate_report("demand", "quarantined", (finding, finding)),
        "inputs/demand/source.json": {"observed_at": "2026-11-30T00:00:00+00:00"},
    }.items():
        (run / path).parent.mkdir(parents=True)
        (run / path).write_text(json.dumps(value), encoding="utf-8")
    found = _values()
    assert found["coral_gate_outcome"] == {("demand", "quarantined"): 1.0}
    assert found["coral_gate_findings"]["critical", "demand"] == 2.0
    midnight = datetime(2026, 11, 30, tzinfo=UTC).timestamp()
    assert found["coral_input_observed_timestamp_seconds"] == {("demand",): midnight}


@pytest.mark.parametrize(
    ("broken", "part"),
    [
        ("current/plan.json", "plan"),
        ("dispatch/7.json", "dispatch"),
        ("gate", "gate"),
        ("agents.toml", "agents"),
    ],
)
def test_a_broken_part_is_named_and_the_rest_still_there(home, broken, part) -> None:
    """One file that cannot be read does not blind the rest."""
    path = _newest_run(home) / "gate" / "prices.json" if broken == "gate" else home / broken
    path.write_bytes(b"\xff{")
    found = _values()
    assert found["coral_unreadable"] == {(part,): 1.0}
    assert ("coral_plan_cost_usd_per_hour" in found) == (part != "plan")
    assert ("coral_gate_outcome" in found) == (part != "gate")


def test_metrics_are_served_and_nothing_else(home) -> None:
    """GET /metrics and /-/healthy on the given address only; a taken port is named."""
    server = observing.serve(Settings(), "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert b"coral_plan_cost_usd_per_hour" in answer.read()
        with urllib.request.urlopen(f"{address}/-/healthy", timeout=60) as answer:
            assert answer.read() == b"ok\n"
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            urllib.request.urlopen(f"{address}/../secrets", timeout=60)
        refused.value.close()
        with pytest.raises(
            Unavailable, match=rf"port {server.server_port} on 127\.0\.0\.1, for metrics, cannot be used"
        ):
            observing.serve(Settings(), "127.0.0.1", server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@shared()
def _work(run_id: str) -> None:
    logging.getLogger("coral.tasks").info("inside %s", run_id)


@shared()
def _bad_work(run_id: str) -> None:
    raise StorageFault(f"no room for {run_id}")


@pytest.fixture
def loggers():
    """The project's loggers, left as they were."""
    names = observing.logs.LOGGERS
    before = {name: (logging.getLogger(name).handlers[:], logging.getLogger(name).propagate) for name in names}
    yield
    for name, (handlers, propagate) in before.items():
        logging.getLogger(name).handlers, logging.getLogger(name).propagate = handlers, propagate


def test_as_text_lines_go_where_the_caller_sends_them(home, caplog) -> None:
    """Airflow, a test or a notebook decides; nothing is taken over."""
    with caplog.at_level(logging.INFO, logger="coral"):
        _work(_newest_run(home).name)
    assert [record.message.split()[0] for record in caplog.records] == ["begins", "inside", "done"]


def test_a_tasks_lines_carry_its_run_and_its_time_is_kept(home, monkeypatch, capsys, loggers) -> None:
    """With CORAL_LOG_FORMAT=json every line of a task is JSON with its run; the time stands in the run's folder."""
    monkeypatch.setenv("CORAL_LOG_FORMAT", "json")
    run = _new_run(home, "scheduled__2026-11-30T00:00:00+00:00")
    _work(run.name)
    with pytest.raises(StorageFault):
        _bad_work(run.name)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == [
        "begins",
        f"inside {run.name}",
        "done",
        "begins",
        f"ends with StorageFault: no room for {run.name}",
    ]
    assert {line["run"] for line in lines} == {run.name}
    assert {line["task"] for line in lines} == {"_work", "_bad_work"}
    assert lines[2]["seconds"] >= 0
    assert sorted(path.name for path in (run / "timing").iterdir()) == ["_work.json"]
    assert list(_values()["coral_task_duration_seconds"]) == [("_work",)]


UNDER_CELERY = """
import multiprocessing, sys
import billiard
from coral_tasks.tasks.sharing import shared

@shared()
def work(run_id):
    child = multiprocessing.get_context("spawn").Process(target=print, args=("child of", run_id), daemon=True)
    child.start()
    child.join()

if __name__ == "__main__":
    worker = billiard.Process(target=work, args=("r1",), daemon=True)  # as Celery's pool makes its workers
    worker.start()
    worker.join()
    sys.exit(worker.exitcode)
"""


def test_work_may_start_processes_under_celery(home) -> None:
    """The solver runs in a child under a hard limit; a worker of Celery's pool must be able to start it."""
    script = home / "under_celery.py"
    script.write_text(UNDER_CELERY, encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "child of r1\n"), done.stderr


def test_a_sealed_run_is_left_as_it_is(home) -> None:
    """Nothing is added to a run whose manifest is written: it would not verify any more."""
    run = _newest_run(home)
    _work(run.name)
    assert not (run / "timing").exists()
