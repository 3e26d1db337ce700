"""Both DAGs on the scale-out stack: two workers that share nothing but S3, Redis and the database; one is killed.

The tests build on each other, in this order, on one stack.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import boto3
import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from scaleout import BUCKET, WORKERS, Stack, missing_packages, running_stack, start_components, wait_for

from coral_tasks.domain.plan import AllocationPlan
from coral_tasks.settings import Settings
from coral_tasks.tasks import demo, dispatching, local_fleet

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1500)]

LIBRARY, ALLOCATION = DAGS = "coral_template_library", "coral_allocation"
COPIES = r"SELECT table_name FROM information_schema.tables WHERE table_name LIKE '\_airflow\_deleted%'"
TABLES_WITH_RUNS = (
    "SELECT table_name FROM information_schema.columns WHERE table_schema = 'public' AND column_name = 'run_id'"
)
REMOVALS_WAITING = (
    "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'DELETE FROM dag_run%'"
)


@pytest.fixture(scope="module")
def stack(ports_in_a_row):
    """Servers, components, three local agents and two workers."""
    missing = missing_packages()
    if missing:
        pytest.fail(f"needs the Debian packages {' '.join(missing)}: run .ci/install-servers as root")
    root = Path(tempfile.mkdtemp(prefix="coral-distributed-"))
    with pytest.MonkeyPatch.context() as patch, running_stack(root) as made:
        for name, value in made.environment.items():
            patch.setenv(name, value)
        patch.setenv("CORAL_FIRST_AGENT_PORT", str(ports_in_a_row(1600)))
        demo.ensure_agents(Settings())
        try:
            start_components(made)
            for name in WORKERS:
                made.start_worker(name)
            yield made
        finally:
            local_fleet.stop_agents(made.home)
    shutil.rmtree(root)


def _object(name: str) -> bytes:
    """An object of the shared store."""
    return boto3.client("s3").get_object(Bucket=BUCKET, Key=f"coral/{name}")["Body"].read()


def _unpause(stack: Stack, dag: str) -> str:
    """Let a DAG run; the id of its first run."""
    stack.call("PATCH", f"/dags/{dag}", {"is_paused": False})
    runs = wait_for(f"a run of {dag}", lambda: stack.call("GET", f"/dags/{dag}/dagRuns")["dag_runs"], limit_s=60)
    return str(min(runs, key=lambda run: run["run_after"])["dag_run_id"])


def _launches(stack: Stack) -> dict[str, int]:
    """Engine processes ever started on each node, from the agents' journals; nodes that never had one are left out."""
    found = {}
    for journal in sorted(stack.home.glob("agents/*/state/journal.sqlite")):
        with sqlite3.connect(f"file:{journal}?mode=ro", uri=True) as database:
            slots = [json.loads(body) for (body,) in database.execute("SELECT body FROM slots")]
        database.close()
        found |= {slot["node"]: slot["num_launches"] for slot in slots if slot.get("num_launches")}
    return found


def _ends_of_engines(stack: Stack) -> str:
    """What the agents' logs say of engines that ended."""
    lines = [line for log in stack.home.glob("agents/*/agent.log") for line in log.read_text().splitlines()]
    return "\n".join(line for line in lines if "ended, " in line)[-4000:]


def _engines(stack: Stack) -> int:
    """Simulated engine processes that run now for this stack's agents."""
    agents = {int(path.read_text()) for path in stack.home.glob("agents/*/agent.pid")}
    count = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            count += parent in agents and b"simulated_engine" in (path / "cmdline").read_bytes()
        except OSError:
            continue
    return count


def test_the_nightly_dag_ends_right_on_two_workers(stack) -> None:
    """The library is published on S3; tasks ran on both workers, each with files of its own."""
    run = _unpause(stack, LIBRARY)
    assert stack.finish(LIBRARY, run, limit_s=800) == "success"
    pointer = json.loads(_object("library/CURRENT.json"))
    assert len(pointer["history"]) == 1
    if stack.separate_homes:
        assert not (stack.home / "runs").exists()
        assert [list((stack.root / name / "runs").glob("*/profiles/*")) != [] for name in WORKERS] == [True, True]


def test_a_worker_killed_in_the_middle_of_a_dispatch_starts_nothing_twice(stack) -> None:
    """The other worker takes the run up and ends it: every engine of the plan runs once and was started once."""
    run = _unpause(stack, ALLOCATION)
    running = wait_for("the dispatch to run", lambda: _running(stack, run, "dispatch"), limit_s=600)
    victim = stack.worker_of(int(running["pid"]))
    wait_for("the first engines", lambda: _launches(stack), limit_s=120, every_s=0.02)
    stack.kill_worker(victim)
    killed_at, begun = time.monotonic(), sum(_launches(stack).values())

    assert stack.finish(ALLOCATION, run, limit_s=600) == "success"
    launches, num_engines = _launches(stack), _engines(stack)
    plan = msgspec.json.decode(_object(f"runs/{run}/plan/plan.json"), type=AllocationPlan)
    fleet = dispatching.observe(stack.home / "agents.toml", stack.home / "keys").fleet
    outcome = json.loads(_object(f"runs/{run}/dispatch.json"))
    print(
        f"killed {victim} after {begun} engine starts; the run ended {time.monotonic() - killed_at:.0f} s later, "
        f"its second try sent {outcome['num_commands']} commands"
    )
    planned = {(row.template, row.region): row.count for row in plan.instances}
    assert len(fleet.instances) == sum(planned.values())
    assert set(launches.values()) == {1}, _ends_of_engines(stack)
    assert len(launches) == sum(len(one.nodes) for one in fleet.instances)
    assert num_engines <= len(launches)
    tries = {task["task_id"]: task["try_number"] for task in stack.tasks(ALLOCATION, run)}
    assert tries["dispatch"] == 2
    assert json.loads(_object("epochs.json"))["epoch"] >= 2
    assert _object("current/plan.json") == _object(f"runs/{run}/plan/plan.json")


def _running(stack: Stack, run: str, task: str) -> dict | None:
    stack.require_running()
    found = [one for one in stack.tasks(ALLOCATION, run) if one["task_id"] == task]
    state = stack.run_state(ALLOCATION, run)
    if state in {"failed", "success"}:
        stack.tell_failures(ALLOCATION, run)
        pytest.fail(f"the run ended {state} before {task}")
    return found[0] if found and found[0]["state"] == "running" and found[0].get("pid") else None


def test_a_new_worker_takes_part_in_the_next_run(stack) -> None:
    """A machine that joins with nothing but its configuration runs tasks, and the fleet is the plan's again."""
    missing = sorted(set(WORKERS) - {name for name in stack.workers if stack.workers[name].poll() is None})
    assert len(missing) == 1
    shutil.rmtree(stack.root / missing[0])
    stack.start_worker(missing[0])
    stack.trigger(ALLOCATION, "manual__joined", reason="a worker joined")
    assert stack.finish(ALLOCATION, "manual__joined", limit_s=600) == "success"
    plan = msgspec.json.decode(_object("runs/manual__joined/plan/plan.json"), type=AllocationPlan)
    fleet = dispatching.observe(stack.home / "agents.toml", stack.home / "keys").fleet
    assert len(fleet.instances) == sum(row.count for row in plan.instances)


def test_no_secret_is_kept_or_told_anywhere(stack) -> None:
    """Not in XCom, rendered fields or any other table, not on S3, not in run folders, not in any log."""
    secrets = stack.secrets
    assert len(secrets) >= 7
    assert all(len(value) >= 30 for value in secrets.values())
    dump = stack.database_dump()
    assert "manual__joined" in dump, "the dump holds the runs"
    found = [f"{name} in the database" for name, value in secrets.items() if value in dump]
    pages = boto3.client("s3").get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    objects = [entry["Key"] for page in pages for entry in page["Contents"]]
    assert any(key.startswith("coral/runs/") for key in objects)
    for key in objects:
        data = _object(key.removeprefix("coral/"))
        found += [f"{name} in s3 {key}" for name, value in secrets.items() if value.encode() in data]
    # Redis holds its own password, and each machine the keys that were deployed to it
    allowed = {stack.root / "redis", stack.root / "postgres"}
    for path in stack.root.rglob("*"):
        if not path.is_file() or allowed & set(path.parents) or "keys" in path.parts:
            continue
        if path.name not in {"postgres-password", "jwt_secret"}:
            data = path.read_bytes()
            found += [f"{name} in {path}" for name, value in secrets.items() if value.encode() in data]
    assert found == []


def test_metrics_tell_of_the_shared_state(stack) -> None:
    """A machine that ran no task exports cost, good runs and agents from what workers shared."""
    done = subprocess.run(
        [sys.executable, "-m", "coral_tasks.cli", "metrics"],
        env=stack.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    plan = msgspec.json.decode(_object("current/plan.json"), type=AllocationPlan)
    lines = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines() if not line.startswith("#"))
    cost = float(lines["coral_plan_cost_usd_per_hour"])
    assert cost == pytest.approx(plan.certificate.cost_usd_per_hour)
    assert [value for name, value in lines.items() if name.startswith("coral_agent_up")] == ["1.0"] * 3
    assert float(lines['coral_run_timestamp_seconds{outcome="good"}']) > 0
    assert float(lines['coral_task_duration_seconds{task="solve"}']) > 0
    assert not [name for name in lines if name.startswith("coral_unreadable")]


def test_a_cleaning_that_is_killed_takes_no_run_away(stack) -> None:
    """Killed between its copy and its removal of runs: they stay, and so does the copy, for the next call to drop."""
    _dry_run(stack, "manual__old")
    assert stack.finish(ALLOCATION, "manual__old", limit_s=600) == "success"
    _make_old(stack, ["manual__old"])
    with contextlib.closing(stack.connect()) as holder, holder.cursor() as cursor:
        cursor.execute("SELECT 1 FROM dag_run WHERE run_id = 'manual__old' FOR UPDATE")
        cleaning = stack.clean_database(30)
        wait_for("the removal of runs", lambda: stack.sql(REMOVALS_WAITING), limit_s=120)
        os.killpg(cleaning.pid, signal.SIGKILL)
        cleaning.communicate()
    wait_for("its end in the database", lambda: not stack.sql(REMOVALS_WAITING), limit_s=60)
    assert stack.sql("SELECT state FROM dag_run WHERE run_id = 'manual__old'") == [("success",)]
    assert [name.startswith("_airflow_deleted__dag_run") for (name,) in stack.sql(COPIES)] == [True]


def test_old_rows_go_while_a_run_is_under_way(stack) -> None:
    """After the kill: of runs 40 days old nothing stays but the newest that no person started; the plan in force's run
    stays whole, the run under way ends right, and a second cleaning finds nothing.
    """
    in_force = json.loads(_object("current/run.json"))["run"]
    _dry_run(stack, "manual__during")
    wait_for("the run", lambda: stack.run_state(ALLOCATION, "manual__during") == "running", limit_s=300)
    of_force = stack.sql("SELECT count(*) FROM task_instance WHERE run_id = %s", in_force)
    ended = {run for (run,) in stack.sql("SELECT run_id FROM dag_run WHERE state IN ('success', 'failed')")}
    old = ended - {in_force, "manual__during"}
    _make_old(stack, sorted(old - {"manual__old"}))
    begun = stack.sql("SELECT dag_id, run_id, run_type, start_date FROM dag_run WHERE start_date IS NOT NULL")

    for number in range(2):
        done = stack.clean_database(30)
        told = done.communicate()[0]
        assert done.returncode == 0, told
        found = [int(line.split()[1]) for line in told.splitlines() if line.startswith("Found ")]
        assert (sum(found) > 0) == (number == 0), told
    newest = {max((at, run) for dag, run, kind, at in begun if dag == one and kind != "manual")[1] for one in DAGS}
    gone = sorted(old - newest)
    assert "manual__old" in gone
    assert {run for (run,) in stack.sql("SELECT run_id FROM dag_run")} >= {run for _, run, *_ in begun} - set(gone)
    for table in [name for (name,) in stack.sql(TABLES_WITH_RUNS)]:
        assert stack.sql(f"SELECT run_id FROM {table} WHERE run_id = ANY(%s)", gone) == [], table
    assert stack.sql("SELECT count(*) FROM task_instance WHERE run_id = %s", in_force) == of_force > [(0,)]
    assert {dag for (dag,) in stack.sql("SELECT dag_id FROM dag WHERE NOT is_paused")} == set(DAGS)
    assert stack.sql(COPIES) == []
    assert stack.finish(ALLOCATION, "manual__during", limit_s=600) == "success"


def _dry_run(stack: Stack, run: str) -> None:
    """A run by hand that leaves nothing behind but its folder and its rows."""
    stack.trigger(ALLOCATION, run, reason="rows", dry_run=True)


def _make_old(stack: Stack, runs: list[str]) -> None:
    """Let runs, and everything that the database holds of them, be 40 days older."""
    of_tasks = "(SELECT {} FROM task_instance WHERE run_id = ANY(%s))"
    for table, moment, which in (
        ("task_reschedule", "start_date", f"ti_id IN {of_tasks.format('id')}"),
        ("celery_taskmeta", "date_done", f"task_id IN {of_tasks.format('external_executor_id')}"),
        ("asset_event", "timestamp", "source_run_id = ANY(%s)"),
        ("log", "dttm", "run_id = ANY(%s)"),
        ("xcom", "timestamp", "run_id = ANY(%s)"),
        ("task_instance_history", "start_date", "run_id = ANY(%s)"),
        ("task_instance", "start_date", "run_id = ANY(%s)"),
        ("dag_run", "start_date", "run_id = ANY(%s)"),
    ):
        stack.sql(f"UPDATE {table} SET {moment} = {moment} - INTERVAL '40 days' WHERE {which}", runs)


def test_every_server_listens_on_loopback_only(stack) -> None:
    """No component of the stack can be reached from another machine."""
    pids = {str(child.pid) for child in stack.children.running().values()}
    pids |= {str(pid) for child in stack.children.running().values() for pid in stack.descendants(child.pid)}
    inodes = {link for pid in pids for link in _sockets(pid)}
    listening = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    ]
    mine = {(row[1].split(":")[0], row[9]) for row in listening if row[9] in inodes}
    assert len(mine) >= 4, "PostgreSQL, Redis, S3 and the API server listen"
    loopback = {"0100007F", "00000000000000000000000001000000"}
    assert {address for address, _ in mine} <= loopback


def _sockets(pid: str) -> set[str]:
    found = set()
    try:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            target = str(path.readlink())
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:
        return found
    return found
