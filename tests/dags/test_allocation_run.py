"""The allocation DAG run by Airflow itself: a person's answer, the end of the time, small XComs, bursts of events."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from cloud_bench import POOLS, cloud

from coral_tasks.settings import Settings
from coral_tasks.tasks import demo, dispatching, local_fleet, nightly
from coral_tasks.tasks.local_airflow import DagOutcome, migrate_database, run_dags

pytestmark = [
    pytest.mark.airflow,
    pytest.mark.integration,
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*httpx.*"),
]

DAG = "coral_allocation"
MODELS = ("gpt-oss-20b", "phi-4-14b", "qwen3-32b")
MAX_XCOM_BYTES = 10_000


def conf(rate: float, **params: object) -> str:
    """Parameters of a run at a small demand."""
    demand = [{"model": model, "requests_per_s": rate} for model in MODELS]
    return json.dumps({"as_of": "2026-11-29T12:00:00+00:00", "demand": demand, **params})


@pytest.fixture(scope="module")
def home(dag_bag, ports_in_a_row):
    """The session's Airflow home with a library and agents."""
    del dag_bag
    folder = Path(os.environ["CORAL_HOME"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CORAL_FIRST_AGENT_PORT", str(ports_in_a_row(1600)))
        # Only the scheduler ends a wait, and it is asked to for one run below.
        patch.setenv("CORAL_APPROVAL_TIMEOUT_S", "1")
        migrate_database(folder)
        profiled = [nightly.profile(item) for item in nightly.plan_profiling("night", {})]
        nightly.publish([nightly.build_templates(item) for item in nightly.plan_templates(profiled)])
        demo.ensure_agents(Settings())
        try:
            yield folder
        finally:
            local_fleet.stop_agents(folder)


@pytest.fixture(scope="module")
def client(home):
    """Airflow's own server application on the same database, and a token of an administrator."""
    from airflow.api_fastapi.app import create_app, get_auth_manager
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
    from fastapi.testclient import TestClient

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS", "False")
        made = TestClient(create_app(apps="core"), base_url="http://127.0.0.1:8080", follow_redirects=False)
        token = get_auth_manager().generate_jwt(SimpleAuthManagerUser(username="ann", role="ADMIN"))
        made.headers["Authorization"] = f"Bearer {token}"
        yield made


def rows(home: Path, query: str, *values: object) -> list[tuple]:
    """Rows of Airflow's database."""
    with sqlite3.connect(home / "airflow" / "airflow.db", timeout=30.0) as database:
        return database.execute(query, values).fetchall()


def states(home: Path, run: str) -> dict[str, str]:
    """State of each task that is not mapped."""
    found = rows(home, "SELECT task_id, state FROM task_instance WHERE run_id = ? AND map_index = -1", run)
    return dict(found)


def waiting_run(home: Path, known: set[str], thread: threading.Thread) -> str:
    """The next run whose task decide waits for an answer."""
    query = "SELECT run_id FROM task_instance WHERE task_id = 'decide' AND state = 'awaiting_input'"
    deadline = time.monotonic() + 900
    while time.monotonic() < deadline and thread.is_alive():
        found = {str(run) for (run,) in rows(home, query)} - known
        if found:
            return found.pop()
        time.sleep(0.2)
    raise AssertionError("no run waited for an answer")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A run: how it ended, what was asked, what Airflow said to the answers, and what was in force when it ended."""

    outcome: DagOutcome
    question: dict
    statuses: tuple[int, ...]
    in_force_before: str
    starts_meanwhile: bool = False


@pytest.fixture(scope="module")
def seen(home, client) -> dict[str, Seen]:
    """Six runs in one process, four of which wait for an answer that each gets in its own way."""
    wanted = {
        "first": conf(1.5, reason="first"),
        "second": conf(1.5, reason="second"),
        "rejected": conf(6.0, mode="approve"),
        "approved": conf(6.0, mode="approve"),
        "unanswered": conf(1.5, mode="approve"),
        "marked": conf(1.5, mode="approve"),
    }
    done: list[DagOutcome] = []
    thread = threading.Thread(
        target=lambda: done.extend(run_dags(home, [(DAG, given) for given in wanted.values()])), daemon=True
    )
    thread.start()
    known: set[str] = set()
    asked: dict[str, tuple[dict, tuple[int, ...], str, bool]] = {}
    for name, act in (("rejected", reject), ("approved", approve), ("unanswered", let_pass), ("marked", mark)):
        run = waiting_run(home, known, thread)
        known.add(run)
        question, before = client.get(address(run)).json(), in_force(home)
        starts = price_burst(client) if name == "rejected" else False
        asked[name] = (question, act(home, client, run), before, starts)
    thread.join(timeout=600)
    assert len(done) == len(wanted), done
    return {
        name: Seen(
            outcome=one,
            question=found[0],
            statuses=found[1],
            in_force_before=found[2],
            starts_meanwhile=found[3],
        )
        for name, one in zip(wanted, done, strict=True)
        for found in [asked.get(name, ({}, (), "", False))]
    }


def price_burst(client) -> bool:
    """Five events of the price watch; whether Airflow's scheduler would start a run for them now."""
    found = client.get("/api/v2/assets", params={"name_pattern": "coral_price_change"}).json()
    asset = found["assets"][0]["id"]
    for number in range(5):
        extra = {"moved": [f"aws/us-east-2 L4x1 spot: 0.3 to 0.{number + 4} USD/h"]}
        answer = client.post("/api/v2/assets/events", json={"asset_id": asset, "extra": extra})
        assert answer.status_code == 200, answer.text
    return starts_for_events()


def starts_for_events() -> bool:
    """Whether the scheduler's own choice of DAGs that need a run has the allocation among them, for its events."""
    from airflow.models.dag import DagModel
    from airflow.utils.session import create_session

    with create_session() as session:
        return DAG in DagModel.dags_needing_dagruns(session)[1]


def reject(home: Path, client, run: str) -> tuple[int, ...]:
    """Say no."""
    return (client.patch(address(run), json={"chosen_options": ["Reject"], "params_input": {}}).status_code,)


def approve(home: Path, client, run: str) -> tuple[int, ...]:
    """Say yes, twice."""
    answer = {"chosen_options": ["Approve"], "params_input": {}}
    return tuple(client.patch(address(run), json=answer).status_code for _ in range(2))


def let_pass(home: Path, client, run: str) -> tuple[int, ...]:
    """Say nothing: the scheduler's own sweep ends the wait."""
    from airflow.jobs.job import Job
    from airflow.jobs.scheduler_job_runner import SchedulerJobRunner

    time.sleep(1.5)
    SchedulerJobRunner(job=Job()).check_awaiting_input_timeouts()
    return ()


def mark(home: Path, client, run: str) -> tuple[int, ...]:
    """Set the task's state by hand."""
    with sqlite3.connect(home / "airflow" / "airflow.db", timeout=30.0) as database:
        database.execute("UPDATE task_instance SET state = 'success' WHERE run_id = ? AND task_id = 'decide'", (run,))
    return ()


def address(run: str) -> str:
    """Of the question in Airflow's API."""
    return f"/api/v2/dags/{DAG}/dagRuns/{quote(run, safe='')}/taskInstances/decide/-1/hitlDetails"


def dispatched(home: Path, run: str) -> dict:
    """``dispatch.json`` of a run."""
    return json.loads((home / "runs" / run / "dispatch.json").read_text(encoding="utf-8"))


def in_force(home: Path) -> str:
    """The run whose plan is in force."""
    return json.loads((home / "current" / "run.json").read_text(encoding="utf-8"))["run"]


def test_mode_auto_runs_through_without_asking(home, seen) -> None:
    """Nobody is asked, every task ends well; the same inputs again send nothing."""
    for name in ("first", "second"):
        assert (seen[name].outcome.state, seen[name].outcome.failed) == ("success", ())
        ended = states(home, seen[name].outcome.run)
        assert {task for task, state in ended.items() if state != "success"} == {"plan_again"}
        assert ended["plan_again"] == "skipped"
    assert dispatched(home, seen["second"].outcome.run)["num_commands"] == 0
    assert seen["rejected"].in_force_before == seen["second"].outcome.run


def test_every_xcom_is_small(home, seen) -> None:
    """Paths, ids and counts travel between tasks, never tables; every whole run writes the same number."""
    found = rows(home, "SELECT run_id, task_id, LENGTH(value) FROM xcom WHERE dag_id = ?", DAG)
    assert max(size for _, _, size in found) < MAX_XCOM_BYTES, sorted(found, key=lambda one: -one[2])[:3]
    runs = [seen[name].outcome.run for name in ("first", "second")]
    counts = {sum(one[0] == run for one in found) for run in runs}
    assert len(counts) == 1
    assert counts.pop() >= 10


def test_pools_are_made_once_and_keep_what_a_person_set(home) -> None:
    """One pool for each GPU type is there; made ready again, a changed number of slots stays."""
    from coral_airflow.policy import GPU_TYPES, gpu_pool
    from coral_airflow.prepare import make_pools

    names = {gpu_pool(one) for one in GPU_TYPES}
    found = {name: slots for name, slots in rows(home, "SELECT pool, slots FROM slot_pool") if name in names}
    assert found == dict.fromkeys(names, 1)
    with sqlite3.connect(home / "airflow" / "airflow.db", timeout=30.0) as database:
        database.execute("UPDATE slot_pool SET slots = 7 WHERE pool = 'coral_gpu_L4'")
        database.execute("DELETE FROM slot_pool WHERE pool = 'coral_gpu_T4'")
    assert make_pools() == ["coral_gpu_T4"]
    assert rows(home, "SELECT slots FROM slot_pool WHERE pool = 'coral_gpu_L4'") == [(7,)]


def test_a_rejected_change_is_not_sent_and_the_run_ends_green(home, seen) -> None:
    """The person reads what would change, says no: dispatch is skipped, the run is whole, the plan in force stays."""
    found = seen["rejected"]
    assert found.question["options"] == ["Approve", "Reject"]
    assert "USD/h" in found.question["subject"]
    for text in ("Asked because", "Starts", "Steps:", "Why this plan", "/plugin/coral/coral/run?id="):
        assert text in found.question["body"]
    assert found.statuses == (200,)
    assert found.outcome.state == "success"
    ended = states(home, found.outcome.run)
    assert {ended[task] for task in ("dispatch", "wait_converged")} == {"skipped"}
    assert {ended[task] for task in ("decide", "publish")} == {"success"}
    assert dispatched(home, found.outcome.run) == {"skipped": "rejected by ann"}
    assert seen["approved"].in_force_before == seen["second"].outcome.run
    assert (home / "runs" / found.outcome.run / "manifest.json").is_file()


def test_an_approved_change_is_sent(home, seen) -> None:
    """A yes brings the fleet to the plan; a second answer is refused by Airflow."""
    found = seen["approved"]
    assert found.statuses == (200, 409)
    assert found.outcome.state == "success"
    assert dispatched(home, found.outcome.run)["converged"] is True
    assert seen["unanswered"].in_force_before == found.outcome.run


def test_no_answer_in_time_changes_nothing(home, seen) -> None:
    """The scheduler ends the wait with "Reject"; the run is green and says that nobody answered."""
    found = seen["unanswered"]
    assert found.outcome.state == "success"
    assert "no answer within 1 s" in dispatched(home, found.outcome.run)["skipped"]
    assert in_force(home) == seen["approved"].outcome.run


def test_marking_the_question_as_done_is_no_approval(home, seen) -> None:
    """Whoever sets the task's state by hand in the UI has not decided anything: dispatch refuses."""
    found = seen["marked"]
    assert (found.outcome.state, found.outcome.failed) == ("failed", ("dispatch",))
    assert not (home / "runs" / found.outcome.run / "dispatch.json").exists()
    assert in_force(home) == seen["approved"].outcome.run


def test_a_burst_of_price_events_makes_one_run_that_says_why(seen, client) -> None:
    """Airflow's own scheduler code on five events: one run, which holds the first event's moves as its reason.

    A burst before them came while a question was open: it started nothing then, and is not lost: the same one run
    answers both.
    """
    from airflow.jobs.job import Job
    from airflow.jobs.scheduler_job_runner import SchedulerJobRunner
    from airflow.models.dag import DagModel
    from airflow.models.dagrun import DagRun
    from airflow.utils.session import create_session
    from coral_airflow.policy import described_events

    from coral_tasks.tasks import opening
    from coral_tasks.tasks.run_parameters import AllocationParameters

    assert seen["rejected"].starts_meanwhile is False
    assert starts_for_events()
    assert price_burst(client)
    runner = SchedulerJobRunner(job=Job())
    for _ in range(2):
        with create_session() as session:
            runner._create_dag_runs_asset_triggered(dag_models=[session.get(DagModel, DAG)], session=session)
    assert not starts_for_events()
    with create_session() as session:
        made = session.query(DagRun).filter(DagRun.dag_id == DAG, DagRun.run_type == "asset_triggered").all()
        (run,) = made
        events = {event.asset: list(run.consumed_asset_events) for event in run.consumed_asset_events[:1]}
        told = opening.reason(run.run_id, AllocationParameters(), described_events(events))
        session.delete(run)
    assert told.startswith("price change: aws/us-east-2 L4x1 spot: 0.3 to 0.4 USD/h")


def test_nodes_that_cannot_be_had_end_the_run_and_ask_for_another(home, seen, monkeypatch) -> None:
    """EC2 gives none: dispatch fails once, nothing is published, and an event starts a run that names the shortage."""
    from airflow.models.asset import AssetEvent, AssetModel
    from airflow.utils.session import create_session

    del seen
    (home / "agents.toml").rename(home / "agents.toml.aside")
    dispatching.make_missing_keys(home / "keys", ["fleet"])
    before = in_force(home)
    try:
        with cloud(home, monkeypatch) as ec2:
            ec2.exhausted = {machine_type for _, machine_type in POOLS}
            ec2.write_files(home)
            (outcome,) = run_dags(home, [(DAG, conf(0.2))])
            assert ec2.machines() == {}
    finally:
        (home / "agents.toml.aside").rename(home / "agents.toml")
        (home / "provisioning.json").unlink()
    assert (outcome.state, outcome.failed) == ("failed", ("dispatch",))
    ended = states(home, outcome.run)
    assert {task: ended[task] for task in ("plan_again", "wait_converged", "publish")} == {
        "plan_again": "success",
        "wait_converged": "upstream_failed",
        "publish": "upstream_failed",
    }
    assert in_force(home) == before
    missing = dispatched(home, outcome.run)["shortage"]
    assert missing
    with create_session() as session:
        name = AssetModel.name == "coral_shortage"
        events = session.query(AssetEvent).join(AssetModel, AssetModel.id == AssetEvent.asset_id).filter(name).all()
        assert [event.extra for event in events] == [{"missing": missing}]
    assert starts_for_events()
