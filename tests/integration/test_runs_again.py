"""Runs that are cleared, killed, paused, doubled, approved late or given values by hand, with real agents and engines.

One fleet for the whole file; every test brings it to where it needs it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from coral_tasks.domain.errors import ApprovalMissing, CoralError, StaleInput, Unavailable, ValidationFailed
from coral_tasks.settings import Settings
from coral_tasks.tasks import allocation, demo, dispatching, inputs, local_fleet, nightly, views
from coral_tasks.tasks.planning import read_plan

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

NOON = {"as_of": "2026-11-29T12:00:00+00:00", "reason": "test"}
MODELS = ("gpt-oss-20b", "phi-4-14b", "qwen3-32b")
PLANNING = (allocation.gate, allocation.solve, allocation.check, allocation.decide)
SENDING = (allocation.dispatch, allocation.wait_converged, allocation.publish)


def demand(rate: float) -> list[dict[str, object]]:
    """The same rate for every model, as a person gives it."""
    return [{"model": model, "requests_per_s": rate} for model in MODELS]


def plan(run_id: str, **params: object) -> None:
    """The tasks up to the decision."""
    allocation.open_run(run_id, NOON | params)
    for table in inputs.INPUT_TABLES:
        allocation.ingest(run_id, table)
    for step in PLANNING:
        step(run_id)


def whole(run_id: str, **params: object) -> dict:
    """All tasks of one run."""
    plan(run_id, **params)
    result = {}
    for step in SENDING:
        result = step(run_id)
    return result


@pytest.fixture(scope="module")
def home(tmp_path_factory, ports_in_a_row):
    """A home with library and agents, its fleet at a small demand."""
    folder = tmp_path_factory.mktemp("again")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CORAL_HOME", str(folder))
        patch.setenv("CORAL_FIRST_AGENT_PORT", str(ports_in_a_row(1600)))
        profiled = [nightly.profile(item) for item in nightly.plan_profiling("night", {})]
        nightly.publish([nightly.build_templates(item) for item in nightly.plan_templates(profiled)])
        demo.ensure_agents(Settings())
        try:
            whole("base", demand=demand(1.5))
            yield folder
        finally:
            local_fleet.stop_agents(folder)


def run_json(home: Path, run_id: str, name: str) -> dict:
    """One JSON file of a run."""
    return json.loads((home / "runs" / run_id / name).read_text(encoding="utf-8"))


def running(home: Path) -> Counter:
    """Instances by template and region, as agents report them."""
    fleet = dispatching.observe(home / "agents.toml", home / "keys").fleet
    return Counter((one.template, one.region) for one in fleet.instances)


def planned(home: Path, run_id: str) -> Counter:
    """Instances by template and region, as planned."""
    made = read_plan(home / "runs" / run_id / "plan" / "plan.json")
    return Counter({(row.template, row.region): row.count for row in made.instances})


def ids(home: Path) -> set[str]:
    """Ids of the running instances."""
    return {str(one.id) for one in dispatching.observe(home / "agents.toml", home / "keys").fleet.instances}


def in_force(home: Path) -> str:
    """The run whose plan is in force."""
    return json.loads((home / "current" / "run.json").read_text(encoding="utf-8"))["run"]


def task_process(home: Path, code: str, **environment: str) -> subprocess.Popen:
    """A task in a process of its own, as Airflow runs it."""
    head = "import os, signal, sys\nfrom coral_tasks.tasks import allocation\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + code],
        env={**os.environ, "CORAL_HOME": str(home), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_a_cleared_dispatch_sends_nothing_again(home) -> None:
    """The dispatch task of one run, run twice: the second finds the fleet as planned and sends no command."""
    whole("cleared", demand=demand(2.5))
    before = ids(home)
    assert running(home) == planned(home, "cleared")
    allocation.dispatch("cleared")
    assert run_json(home, "cleared", "dispatch.json")["num_commands"] == 0
    assert ids(home) == before


def test_the_same_run_triggered_twice_sends_once(home) -> None:
    """Another run on the same inputs plans the same and sends nothing; both are whole, the later one is in force."""
    whole("double-1", demand=demand(2.5))
    before = ids(home)
    assert whole("double-2", demand=demand(2.5))["num_commands"] == 0
    assert ids(home) == before
    assert in_force(home) == "double-2"


def test_an_older_run_cleared_after_a_newer_one_changes_nothing(home) -> None:
    """Yesterday's dispatch, cleared, is refused; yesterday's publish, cleared, leaves today's plan in force."""
    whole("yesterday", demand=demand(1.5))
    whole("today", demand=demand(2.5))
    before = ids(home)
    with pytest.raises(StaleInput, match="run today"):
        allocation.dispatch("yesterday")
    assert allocation.publish("yesterday")["in_force"] is False
    assert in_force(home) == "today"
    assert ids(home) == before


def test_a_run_that_was_paused_too_long_is_refused(home) -> None:
    """Between planning and sending the DAG was paused for hours: the plan is not sent any more."""
    plan("paused", demand=demand(4.0))
    basis = home / "runs" / "paused" / "basis.json"
    opened = {"opened_at": (datetime.now(UTC) - timedelta(hours=3)).isoformat()}
    basis.write_text(json.dumps(json.loads(basis.read_text(encoding="utf-8")) | opened), encoding="utf-8")
    before = ids(home)
    with pytest.raises(StaleInput, match="CORAL_PLAN_MAX_AGE_S"):
        allocation.dispatch("paused")
    assert ids(home) == before


def test_a_dispatch_killed_half_way_is_taken_up_and_starts_nothing_twice(home) -> None:
    """SIGKILL after the first steps; the retry finds what was started and starts only the rest."""
    whole("before-kill", demand=demand(1.5))
    plan("killed", demand=demand(5.0))
    child = task_process(home, "allocation.dispatch('killed')")
    progress, before = home / "dispatch" / "progress.json", ids(home)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and child.poll() is None:
        found = json.loads(progress.read_text(encoding="utf-8")) if progress.is_file() else {}
        if found.get("run") == "killed" and found["num_done"] >= 1:
            break
        time.sleep(0.02)
    assert child.poll() is None, child.communicate()[0].decode()
    child.kill()
    child.communicate()
    half = ids(home)
    assert half - before, "it was killed before it had started anything"
    assert in_force(home) == "before-kill"
    assert views.overview(Settings())["progress"]["run"] == "killed"
    allocation.dispatch("killed")
    after = ids(home)
    assert running(home) == planned(home, "killed")
    assert half & after == half - (before - after), "what the killed task had started was not kept"
    allocation.wait_converged("killed")
    assert allocation.publish("killed")["in_force"] is True
    assert views.overview(Settings())["progress"] is None


def test_two_dispatches_of_one_run_at_once_start_nothing_twice(home) -> None:
    """A task that Airflow believed dead and started again: one takes over from the other, engines start once."""
    whole("before-race", demand=demand(1.5))
    plan("race", demand=demand(4.0))
    pair = [task_process(home, "allocation.dispatch('race')") for _ in range(2)]
    told = [child.communicate(timeout=200)[0].decode() for child in pair]
    assert 0 in {child.returncode for child in pair}, told
    for child, text in zip(pair, told, strict=True):
        assert child.returncode == 0 or "newer controller" in text or "StaleInput" in text, text
    allocation.dispatch("race")
    assert run_json(home, "race", "dispatch.json")["num_commands"] == 0
    assert running(home) == planned(home, "race")


def test_a_publication_killed_at_any_write_never_mixes_two_runs(home) -> None:
    """SIGKILL at each write in turn: every file is whole, the page shows one run's plan; the retry ends the work."""
    whole("shown", demand=demand(2.0))
    plan("unpublished", demand=demand(3.0))
    allocation.dispatch("unpublished")
    kill = """
from coral_tasks.storage import runs
real, count = runs.write_whole, [0]
def write(path, data):
    if "current" in path.parts:
        count[0] += 1
        if count[0] == int(os.environ["KILL_AT"]):
            path.with_name(f".{path.name}.half").write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
    real(path, data)
runs.write_whole = write
allocation.publish("unpublished")
"""
    seen = []
    for number in range(1, 20):
        child = task_process(home, kill, KILL_AT=str(number))
        told = child.communicate(timeout=200)[0].decode()
        if child.returncode == 0:
            break
        assert child.returncode == -signal.SIGKILL, told
        page = views.overview(Settings())
        record = json.loads((home / "current" / "run.json").read_text(encoding="utf-8"))
        assert page["plan"]["id"] == record["plan"] == str(read_plan(home / f"runs/{record['run']}/plan/plan.json").id)
        read_plan(home / "current" / "plan.json")
        seen.append(record["run"])
    assert len(seen) >= 4
    assert set(seen) == {"shown"}, "the record is the last write"
    assert in_force(home) == "unpublished"
    assert views.overview(Settings())["plan"]["run"] == "unpublished"


def test_mode_approve_sends_nothing_without_a_yes(home) -> None:
    """A big change waits: dispatch refuses before an answer and after a no; the plan in force stays."""
    whole("agreed", demand=demand(1.5))
    before = ids(home)
    plan("asked", demand=demand(6.0), mode="approve")
    question = run_json(home, "asked", "approval.json")
    assert question["needed"] is True
    assert "USD/h" in question["subject"]
    assert "Starts" in question["body"]
    with pytest.raises(ApprovalMissing, match="nobody has decided"):
        allocation.dispatch("asked")
    said = allocation.record_answer("asked", approved=False, by="Ann", timed_out=False)
    assert said == "rejected by Ann"
    for step in SENDING:
        step("asked")
    assert run_json(home, "asked", "dispatch.json") == {"skipped": "rejected by Ann"}
    assert ids(home) == before
    assert in_force(home) == "agreed"


def test_no_answer_in_time_changes_nothing_and_a_later_question_needs_its_own_answer(home) -> None:
    """The end of the time is a no; asked again, an old yes would not count, a new one does."""
    whole("quiet", demand=demand(1.5))
    before = ids(home)
    plan("late", demand=demand(6.0), mode="approve")
    allocation.record_answer("late", approved=False, by="", timed_out=True)
    allocation.dispatch("late")
    assert "no answer within 1,800 s" in run_json(home, "late", "dispatch.json")["skipped"]
    assert ids(home) == before
    allocation.record_answer("late", approved=True, by="Bob", timed_out=False)
    allocation.decide("late")
    with pytest.raises(ApprovalMissing):
        allocation.dispatch("late")
    allocation.record_answer("late", approved=True, by="Bob", timed_out=False)
    allocation.dispatch("late")
    assert running(home) == planned(home, "late")


def test_an_approval_does_not_outlive_what_it_was_given_for(home) -> None:
    """The fleet moved, or prices or demand drifted, between question and dispatch: the plan is refused as stale."""
    whole("calm", demand=demand(1.5))
    plan("moved", demand=demand(6.0), mode="approve")
    allocation.record_answer("moved", approved=True, by="Ann", timed_out=False)
    question = home / "runs" / "moved" / "approval.json"
    shown = json.loads(question.read_text(encoding="utf-8"))
    without_one = {**shown, "fleet": shown["fleet"][1:]}
    question.write_text(json.dumps(without_one), encoding="utf-8")
    before = ids(home)
    with pytest.raises(StaleInput, match="the fleet is not as it was shown"):
        allocation.dispatch("moved")
    question.write_text(json.dumps(shown), encoding="utf-8")
    prices = Path(home / "inputs" / "prices.csv")
    prices.parent.mkdir(exist_ok=True)
    prices.write_text(dearer(home, "moved", 1.3), encoding="utf-8")
    try:
        with pytest.raises(StaleInput, match=r"price of .* USD/h"):
            allocation.dispatch("moved")
        assert ids(home) == before
        prices.write_text(dearer(home, "moved", 1.02), encoding="utf-8")
        allocation.dispatch("moved")
    finally:
        prices.unlink()
    assert running(home) == planned(home, "moved")


def dearer(home: Path, run_id: str, factor: float) -> str:
    """The run's prices times a factor, as a CSV file."""
    rows = inputs.load_inputs(Settings(home=home), run_id).prices
    head = "region,configuration,market,price_usd_per_hour,observed_at\n"
    pools = [f"{row.region},{row.configuration},{row.market.value}" for row in rows]
    prices = [row.price_usd_per_hour * factor for row in rows]
    lines = [f"{pool},{price!r},2026-11-29T12:00:00Z\n" for pool, price in zip(pools, prices, strict=True)]
    return head + "".join(lines)


def test_a_small_change_in_mode_approve_goes_on_alone(home, monkeypatch) -> None:
    """Below both limits nobody is asked; the same change with tighter limits needs a person."""
    whole("start", demand=demand(6.0))
    monkeypatch.setenv("CORAL_APPROVAL_COST_CHANGE", "5")
    monkeypatch.setenv("CORAL_APPROVAL_FLEET_CHANGE", "5")
    assert whole("small", demand=demand(4.0), mode="approve")["in_force"] is True
    assert run_json(home, "small", "approval.json")["needed"] is False
    assert running(home) == planned(home, "small")
    monkeypatch.setenv("CORAL_APPROVAL_COST_CHANGE", "0.01")
    plan("tight", demand=demand(6.0), mode="approve")
    assert any("cost changes by" in why for why in run_json(home, "tight", "approval.json")["why"])


def test_values_given_by_hand_go_through_the_gate_and_are_not_remembered(home) -> None:
    """An override is planned on and kept with the run; an absurd one is refused; the next run compares with none."""
    whole("plain", demand=demand(1.5))
    remembered = (home / "current" / "inputs" / "prices.parquet").read_bytes()
    price = {"region": "aws/us-east-2", "configuration": "L4x1", "price_usd_per_hour": 0.77}
    plan("given", demand=demand(2.0), prices=[price], dry_run=True)
    used = {
        (str(row.region), str(row.configuration)): row.price_usd_per_hour
        for row in inputs.load_inputs(Settings(), "given").prices
    }
    assert used["aws/us-east-2", "L4x1"] == 0.77
    assert {row.requests_per_s for row in inputs.load_inputs(Settings(), "given").demand} == {2.0}
    assert (home / "current" / "inputs" / "prices.parquet").read_bytes() == remembered
    assert not (home / "current" / "inputs" / "demand.parquet").exists(), "every run of this file was given its demand"
    assert run_json(home, "given", "run.json")["given"]["prices"] == [price]
    with pytest.raises(ValidationFailed, match="prices"):
        plan("absurd", prices=[{**price, "price_usd_per_hour": 5000.0}])
    with pytest.raises(ValidationFailed, match=r"override of prices.*no such row"):
        plan("nowhere", prices=[{**price, "region": "aws/mars"}])
    assert not (home / "runs" / "absurd" / "plan").exists()


def test_a_dry_run_and_a_run_for_some_models_touch_nothing(home) -> None:
    """Both plan and explain; the fleet, the plan in force and what later runs compare with stay as they are."""
    whole("kept", demand=demand(2.0))
    before, current = ids(home), in_force(home)
    kept = {one.name: one.read_bytes() for one in (home / "current" / "inputs").iterdir()}
    assert whole("dry", demand=demand(5.0), dry_run=True)["in_force"] is False
    assert "advisory" in run_json(home, "dry", "dispatch.json")["skipped"]
    assert {one.name: one.read_bytes() for one in (home / "current" / "inputs").iterdir()} == kept
    whole("some", models=["phi-4-14b"])
    made = read_plan(home / "runs" / "some" / "plan" / "plan.json")
    assert {str(template.model) for template in made.templates} == {"phi-4-14b"}
    assert ids(home) == before
    assert in_force(home) == current


def test_a_run_tells_what_started_it_and_what_moved(home) -> None:
    """A price event: its moves are the reason, the run's own comparison shows every price that differs."""
    whole("cheap", demand=demand(1.5))
    moved = {"asset": "coral_price_change", "extra": {"moved": ["aws/us-east-2 L4x1 on_demand: 0.8 to 0.9 USD/h"]}}
    prices = home / "inputs" / "prices.csv"
    prices.parent.mkdir(exist_ok=True)
    prices.write_text(dearer(home, "cheap", 1.1), encoding="utf-8")
    try:
        allocation.open_run("asset_triggered__x", {"as_of": NOON["as_of"]}, [moved])
        for table in inputs.INPUT_TABLES:
            allocation.ingest("asset_triggered__x", table)
        for step in PLANNING:
            step("asset_triggered__x")
    finally:
        prices.unlink()
    assert run_json(home, "asset_triggered__x", "run.json")["reason"] == (
        "price change: aws/us-east-2 L4x1 on_demand: 0.8 to 0.9 USD/h"
    )
    listed = run_json(home, "asset_triggered__x", "change.json")["moved"]["prices"]
    assert len(listed) == len(inputs.load_inputs(Settings(), "cheap").prices)


def library_parts(run_id: str, params: dict) -> list[dict]:
    """The nightly tasks up to publication."""
    profiled = [nightly.profile(item) for item in nightly.plan_profiling(run_id, params)]
    return [nightly.build_templates(item) for item in nightly.plan_templates(profiled)]


def test_a_library_run_for_one_model_keeps_the_others_and_a_dry_run_publishes_nothing(home) -> None:
    """Nothing changed, so the version made of one model's new sets and the others' old ones is the one in force."""
    pointer = home / "library" / "CURRENT.json"
    before = pointer.read_bytes()
    params = {"models": ["phi-4-14b"], "dry_run": True}
    parts = library_parts("one-model", params)
    assert {part["model"] for part in parts} == {"phi-4-14b"}
    dry = nightly.publish(parts, params)
    assert (dry["published"], dry["changed"], dry["objections"]) == (False, False, [])
    assert pointer.read_bytes() == before
    kept = nightly.publish(parts, {"models": ["phi-4-14b"]})
    assert (kept["published"], kept["changed"]) == (True, False)
    assert kept["version"] == dry["version"]
    assert kept["num_templates"] == dry["num_templates"]


def test_old_run_folders_go_as_new_ones_come(home, monkeypatch) -> None:
    """With three to keep, a fourth run removes the oldest; the one in force never goes."""
    monkeypatch.setenv("CORAL_KEEP_RUNS", "3")
    whole("keep-me", demand=demand(1.5))
    for number in range(4):
        whole(f"advice-{number}", demand=demand(1.5), mode="advisory")
    left = {one.name for one in (home / "runs").iterdir()}
    assert left == {"keep-me", "advice-1", "advice-2", "advice-3"}
    with pytest.raises((CoralError, Unavailable)):
        allocation.dispatch("advice-0")
